//! Tests the bidirectional stream.

use std::time::Duration;

use millrace_gateway::GatewayLimits;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::inference::{ModelInferRequest, ModelStreamInferResponse};
use millrace_types::{Bytes, Reason};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::harness::{Server, fp32, input, parameter, refuses, row, wait};

type Answers = Streaming<ModelStreamInferResponse>;

async fn open(server: &Server) -> (mpsc::Sender<ModelInferRequest>, Answers) {
    let (sender, requests) = mpsc::channel(64);
    let answers = server.grpc().await.model_stream_infer(ReceiverStream::new(requests)).await.unwrap();
    (sender, answers.into_inner())
}

fn with_id(id: &str, request: ModelInferRequest) -> ModelInferRequest {
    ModelInferRequest { id: id.into(), ..request }
}

async fn next_id(answers: &mut Answers) -> (String, String) {
    let answer = answers.message().await.unwrap().unwrap();
    (answer.infer_response.unwrap().id, answer.error_message)
}

#[tokio::test]
async fn responses_have_the_order_of_the_requests() {
    let server = Server::start().await;
    let (requests, mut answers) = open(&server).await;
    requests.send(with_id("held", row("held"))).await.unwrap();
    for id in ["1", "2", "3"] {
        requests.send(with_id(id, wait(0))).await.unwrap();
    }
    // The later requests have run; their responses wait for the first one.
    while server.echo.calls() < 4 {
        tokio::task::yield_now().await;
    }
    server.echo.release();
    drop(requests);
    for id in ["held", "1", "2", "3"] {
        assert_eq!(next_id(&mut answers).await, (id.to_owned(), String::new()));
    }
    assert!(answers.message().await.unwrap().is_none());
}

#[tokio::test]
async fn a_stream_continues_after_failed_requests() {
    let server = Server::start().await;
    let (requests, mut answers) = open(&server).await;
    let mut wrong_shape = with_id("shape", row("mlp"));
    wrong_shape.inputs[0].shape = vec![3];
    let mut expired = with_id("late", row("held"));
    expired.parameters.insert("timeout".into(), parameter(ParameterChoice::Int64Param(10_000)));
    for request in [
        with_id("unknown", row("nowhere")),
        with_id("good", row("mlp")),
        wrong_shape,
        with_id("failing", row("failing")),
        expired,
        with_id("good again", row("mlp")),
    ] {
        requests.send(request).await.unwrap();
    }
    for (id, says) in [
        ("unknown", "nowhere"),
        ("good", ""),
        ("shape", "[3]"),
        ("failing", "told to fail"),
        ("late", "request's timeout"),
        ("good again", ""),
    ] {
        let (answered, error) = next_id(&mut answers).await;
        assert_eq!(answered, id);
        assert_eq!(error.is_empty(), says.is_empty(), "{id}: {error}");
        assert!(error.contains(says), "{id}: {error}");
    }
    drop(requests);
    assert!(answers.message().await.unwrap().is_none());
}

#[tokio::test]
async fn each_response_has_its_id_timing_and_reason() {
    let server = Server::start().await;
    let (requests, mut answers) = open(&server).await;
    requests.send(row("mlp")).await.unwrap();
    requests.send(row("full")).await.unwrap();
    let text = |answer: &ModelStreamInferResponse, name: &str| {
        let parameters = &answer.infer_response.as_ref().unwrap().parameters;
        match parameters.get(name).and_then(|value| value.parameter_choice.clone()) {
            Some(ParameterChoice::StringParam(text)) => text,
            Some(ParameterChoice::BoolParam(flag)) => flag.to_string(),
            other => panic!("{name}: {other:?}"),
        }
    };
    let good = answers.message().await.unwrap().unwrap();
    assert!(text(&good, "server-timing").contains("run;dur=0.300"));
    assert_eq!(text(&good, "millrace-served-by"), "worker-1/0 V100");
    assert_eq!(text(&good, "triton_final_response"), "true");
    let failed = answers.message().await.unwrap().unwrap();
    assert_eq!(text(&failed, "reason"), "QUEUE_FULL");
    assert_eq!(text(&failed, "retryable"), "true");
    assert_eq!(failed.infer_response.as_ref().unwrap().model_name, "full");
    assert_ne!(text(&good, "x-request-id"), text(&failed, "x-request-id"));
}

#[tokio::test]
async fn a_stream_runs_a_bounded_number_of_requests_at_a_time() {
    let server = Server::with(GatewayLimits { stream_concurrency: 2, ..GatewayLimits::default() }).await;
    let (requests, mut answers) = open(&server).await;
    for _ in 0..5 {
        requests.send(row("held")).await.unwrap();
    }
    server.echo.running(2).await;
    // A request of another connection is served in the meantime.
    server.grpc().await.model_infer(row("mlp")).await.unwrap();
    assert_eq!(server.echo.calls(), 3);
    server.echo.release();
    drop(requests);
    let mut answered = 0;
    while answers.message().await.unwrap().is_some() {
        answered += 1;
    }
    assert_eq!(answered, 5);
}

#[tokio::test]
async fn requests_of_a_sequence_run_in_order_if_the_model_keeps_state() {
    let server = Server::start().await;
    server.echo.add_keeping("talk");
    let (requests, mut answers) = open(&server).await;
    // Each request has its number as its priority, by which the backend identifies it.
    for (number, model, sequence) in
        [(1, "talk", 7), (2, "talk", 7), (3, "talk", 8), (4, "held", 7), (5, "held", 7)]
    {
        let mut request = row(model);
        for (name, value) in [("priority", number), ("sequence_id", sequence)] {
            request.parameters.insert(name.into(), parameter(ParameterChoice::Int64Param(value)));
        }
        requests.send(request).await.unwrap();
    }
    drop(requests);
    // A stream begins its requests in order, as far as each can begin. Once the last request has
    // begun, only requests that wait for another one have not.
    let begun = server.echo.begun(|invocation| invocation.contents.parameters.priority == 5);
    let mut begun = tokio::time::timeout(Duration::from_secs(30), begun).await.unwrap();
    begun.sort_unstable();
    assert_eq!(begun, [1, 3, 4, 5]);
    server.echo.release();
    for _ in 0..5 {
        assert_eq!(next_id(&mut answers).await.1, "");
    }
    assert_eq!(server.echo.last().contents.parameters.priority, 2);
    assert_eq!(server.echo.calls(), 5);
}

#[tokio::test]
async fn messages_of_a_stream_wait_for_capacity_of_the_budget() {
    let limits = GatewayLimits {
        message_max: Bytes::mib(1),
        in_flight_max: Bytes::mib(1),
        ..GatewayLimits::default()
    };
    let server = Server::with(limits).await;
    let (requests, mut answers) = open(&server).await;
    let elements = 200_000;
    for _ in 0..6 {
        let request = ModelInferRequest {
            model_name: "echo-fp32".into(),
            inputs: vec![input("x", "FP32", &[1, elements])],
            raw_input_contents: vec![fp32(&vec![1.0; elements as usize])],
            ..ModelInferRequest::default()
        };
        requests.send(request).await.unwrap();
    }
    drop(requests);
    for _ in 0..6 {
        assert_eq!(next_id(&mut answers).await.1, "");
    }
    assert!(answers.message().await.unwrap().is_none());
}

#[tokio::test]
async fn dropping_a_stream_cancels_its_requests() {
    let server = Server::start().await;
    let (requests, answers) = open(&server).await;
    for _ in 0..3 {
        requests.send(row("held")).await.unwrap();
    }
    server.echo.running(3).await;
    drop((requests, answers));
    server.echo.cancelled(3).await;
}

#[tokio::test]
async fn a_server_that_shuts_down_answers_open_requests_and_ends_the_stream() {
    let server = Server::start().await;
    let (requests, mut answers) = open(&server).await;
    requests.send(with_id("last", row("held"))).await.unwrap();
    server.echo.running(1).await;
    let closing = tokio::spawn(server.serving.close(Duration::from_secs(60)));
    server.echo.release();
    assert_eq!(next_id(&mut answers).await, ("last".to_owned(), String::new()));
    let status: Status = answers.message().await.unwrap_err();
    refuses(&status, Code::Unavailable, Reason::ShuttingDown, "shutting down");
    drop((requests, answers));
    assert_eq!(closing.await.unwrap(), 0);
}
