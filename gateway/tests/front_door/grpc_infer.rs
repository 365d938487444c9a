//! Tests a single inference over gRPC.

use std::num::NonZeroU64;
use std::time::Duration;

use bytes::Bytes;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::inference::model_infer_request::InferRequestedOutputTensor;
use millrace_proto::inference::{InferTensorContents, ModelInferRequest};
use millrace_types::{DataType, InSequence, Reason, SequenceId};
use tonic::{Code, Request};

use crate::harness::{Server, fp32, input, parameter, refuses, row, wait};

fn output(name: &str) -> InferRequestedOutputTensor {
    InferRequestedOutputTensor { name: name.into(), ..InferRequestedOutputTensor::default() }
}

#[tokio::test]
async fn raw_contents_of_every_datatype_are_echoed() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    for datatype in DataType::ALL.into_iter().filter(|datatype| *datatype != DataType::Bytes) {
        let size = datatype.size().unwrap() * 6;
        let raw: Bytes =
            (0..size).map(|i| if datatype == DataType::Bool { i % 2 } else { i } as u8).collect();
        let request = ModelInferRequest {
            model_name: format!("echo-{}", datatype.as_str().to_lowercase()),
            inputs: vec![input("x", datatype.as_str(), &[2, 3])],
            raw_input_contents: vec![raw.clone()],
            ..ModelInferRequest::default()
        };
        let response = client.model_infer(request).await.unwrap().into_inner();
        let [output] = response.outputs.as_slice() else { panic!("{response:?}") };
        assert_eq!((output.name.as_str(), output.datatype.as_str()), ("x_out", datatype.as_str()));
        assert_eq!(output.shape, [2, 3]);
        assert!(output.contents.is_none());
        assert_eq!(response.raw_output_contents, [raw]);
    }
}

#[tokio::test]
async fn typed_contents_are_returned_raw() {
    let server = Server::start().await;
    let contents = InferTensorContents { fp32_contents: vec![1.0, 2.0], ..InferTensorContents::default() };
    let request = ModelInferRequest {
        model_name: "echo-fp32".into(),
        inputs: vec![millrace_proto::inference::model_infer_request::InferInputTensor {
            contents: Some(contents),
            ..input("x", "FP32", &[1, 2])
        }],
        ..ModelInferRequest::default()
    };
    let response = server.grpc().await.model_infer(request).await.unwrap().into_inner();
    assert_eq!(response.raw_output_contents, [fp32(&[1.0, 2.0])]);
}

#[tokio::test]
async fn a_scalar_has_no_dimensions() {
    let server = Server::start().await;
    let request = ModelInferRequest {
        model_name: "scalar".into(),
        inputs: vec![input("x", "FP32", &[])],
        raw_input_contents: vec![fp32(&[4.0])],
        ..ModelInferRequest::default()
    };
    let response = server.grpc().await.model_infer(request).await.unwrap().into_inner();
    assert!(response.outputs[0].shape.is_empty());
    assert_eq!(response.raw_output_contents, [fp32(&[4.0])]);
}

#[tokio::test]
async fn requested_outputs_are_returned_in_the_requested_order() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let b = Bytes::copy_from_slice(&7i64.to_le_bytes());
    let request = |outputs: &[&str]| ModelInferRequest {
        model_name: "pair".into(),
        inputs: vec![input("b", "INT64", &[1]), input("a", "FP32", &[1, 4])],
        raw_input_contents: vec![b.clone(), fp32(&[1.0; 4])],
        outputs: outputs.iter().map(|name| output(name)).collect(),
        ..ModelInferRequest::default()
    };
    for (named, given) in [
        (vec![], vec!["a_out", "b_out"]),
        (vec!["b_out"], vec!["b_out"]),
        (vec!["b_out", "a_out"], vec!["b_out", "a_out"]),
    ] {
        let response = client.model_infer(request(&named)).await.unwrap().into_inner();
        let names: Vec<_> = response.outputs.iter().map(|output| output.name.as_str()).collect();
        assert_eq!(names, given);
        assert_eq!(response.raw_output_contents.len(), given.len());
    }
}

#[tokio::test]
async fn a_response_has_the_model_the_version_and_the_latency_breakdown() {
    let server = Server::start().await;
    let mut request = Request::new(ModelInferRequest { id: "mine".into(), ..row("versioned") });
    request.metadata_mut().insert("x-request-id", "trace-me".parse().unwrap());
    let response = server.grpc().await.model_infer(request).await.unwrap();
    assert_eq!(response.metadata().get("x-request-id").unwrap(), "trace-me");
    assert_eq!(server.echo.last().request_id.as_str(), "trace-me");
    assert_eq!(server.echo.last().caller.as_str(), "anonymous");
    let timing = response.metadata().get("server-timing").unwrap().to_str().unwrap();
    assert!(timing.starts_with("queue;dur=0.100, swap;dur=0.200, run;dur=0.300, total;dur="), "{timing}");
    assert_eq!(response.metadata().get("millrace-served-by").unwrap(), "worker-1/0 V100");
    let response = response.into_inner();
    assert_eq!((response.model_name.as_str(), response.model_version.as_str()), ("versioned", "3"));
    assert_eq!(response.id, "mine");
}

#[tokio::test]
async fn a_request_can_select_a_version() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    for (version, expected) in [("", "3"), ("2", "2"), ("1", "1")] {
        let request = ModelInferRequest { model_version: version.into(), ..row("versioned") };
        assert_eq!(client.model_infer(request).await.unwrap().into_inner().model_version, expected);
    }
    let request = |version: &str| ModelInferRequest { model_version: version.into(), ..row("versioned") };
    let status = client.model_infer(request("4")).await.unwrap_err();
    refuses(&status, Code::NotFound, Reason::RevisionNotFound, "");
    for bad in ["0", "latest", "-1", "+2", "99999999999999999999"] {
        let status = client.model_infer(request(bad)).await.unwrap_err();
        refuses(&status, Code::InvalidArgument, Reason::MalformedRequest, bad);
    }
}

#[tokio::test]
async fn a_tenant_sees_only_its_own_models() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let status = client.model_infer(row("private")).await.unwrap_err();
    refuses(&status, Code::NotFound, Reason::FunctionNotFound, "private");
    let as_tenant = |tenant: &str| {
        let mut request = Request::new(row("private"));
        request.metadata_mut().insert("millrace-tenant", tenant.parse().unwrap());
        request
    };
    client.model_infer(as_tenant("acme")).await.unwrap();
    let status = client.model_infer(as_tenant("No Such")).await.unwrap_err();
    refuses(&status, Code::InvalidArgument, Reason::InvalidSpec, "tenant");
}

/// Each change turns a valid request to "mlp" into a request that is refused before any model runs.
#[tokio::test]
async fn invalid_grpc_requests_are_refused_before_they_run() {
    type Change = fn(&mut ModelInferRequest);
    let refusals: &[(Code, Reason, &str, Change)] = &[
        (Code::NotFound, Reason::FunctionNotFound, "nowhere", |r| r.model_name = "nowhere".into()),
        (Code::NotFound, Reason::FunctionNotFound, "Not A Name", |r| r.model_name = "Not A Name".into()),
        (Code::NotFound, Reason::FunctionNotFound, "", |r| r.model_name.clear()),
        (Code::InvalidArgument, Reason::InvalidInput, "\"y\"", |r| r.inputs[0].name = "y".into()),
        (Code::InvalidArgument, Reason::InvalidInput, "INT32", |r| r.inputs[0].datatype = "INT32".into()),
        (Code::InvalidArgument, Reason::InvalidInput, "BYTES", |r| r.inputs[0].datatype = "BYTES".into()),
        (Code::InvalidArgument, Reason::InvalidInput, "FLOAT", |r| r.inputs[0].datatype = "FLOAT".into()),
        (Code::InvalidArgument, Reason::InvalidInput, "[1, 63]", |r| r.inputs[0].shape = vec![1, 63]),
        (Code::InvalidArgument, Reason::InvalidInput, "[64]", |r| r.inputs[0].shape = vec![64]),
        (Code::InvalidArgument, Reason::InvalidInput, "[-1, 64]", |r| r.inputs[0].shape = vec![-1, 64]),
        (Code::InvalidArgument, Reason::InvalidInput, "[0, 64]", |r| r.inputs[0].shape = vec![0, 64]),
        (Code::InvalidArgument, Reason::InvalidInput, "memory", |r| r.inputs[0].shape = vec![i64::MAX, 64]),
        (Code::InvalidArgument, Reason::InvalidInput, "256", |r| r.inputs[0].shape = vec![2, 64]),
        (Code::InvalidArgument, Reason::InvalidInput, "missing", |r| {
            r.inputs.clear();
            r.raw_input_contents.clear();
        }),
        (Code::InvalidArgument, Reason::InvalidInput, "twice", |r| {
            r.inputs.push(r.inputs[0].clone());
            r.raw_input_contents.push(fp32(&[0.5; 64]));
        }),
        (Code::InvalidArgument, Reason::InvalidInput, "255", |r| r.raw_input_contents[0].truncate(255)),
        (Code::InvalidArgument, Reason::InvalidInput, "no contents", |r| r.raw_input_contents.clear()),
        (Code::InvalidArgument, Reason::MalformedRequest, "2 raw_input_contents", |r| {
            r.raw_input_contents.push(Bytes::new());
        }),
        (Code::InvalidArgument, Reason::InvalidInput, "one kind", |r| {
            r.inputs[0].contents = Some(InferTensorContents::default());
        }),
        (Code::InvalidArgument, Reason::InvalidInput, "1 elements", |r| {
            r.raw_input_contents.clear();
            let fp32_contents = vec![1.0];
            r.inputs[0].contents = Some(InferTensorContents { fp32_contents, ..Default::default() });
        }),
        (Code::InvalidArgument, Reason::InvalidInput, "int_contents", |r| {
            r.raw_input_contents.clear();
            let int_contents = vec![1; 64];
            r.inputs[0].contents = Some(InferTensorContents { int_contents, ..Default::default() });
        }),
        (Code::InvalidArgument, Reason::InvalidOutput, "\"z\"", |r| r.outputs = vec![output("z")]),
        (Code::InvalidArgument, Reason::InvalidOutput, "twice", |r| {
            r.outputs = vec![output("x_out"), output("x_out")];
        }),
        (Code::Unavailable, Reason::FunctionDisabled, "load", |r| r.model_name = "unloaded".into()),
        (Code::Unavailable, Reason::FunctionNotReady, "prepared", |r| {
            r.model_name = "preparing".into();
            r.parameters.insert("timeout".into(), parameter(ParameterChoice::Int64Param(1_000)));
        }),
        (Code::Unavailable, Reason::FunctionNotReady, "gone", |r| r.model_name = "broken".into()),
        (Code::Unimplemented, Reason::Unimplemented, "classification", |r| {
            let classes = parameter(ParameterChoice::Int64Param(3));
            r.outputs = vec![output("x_out")];
            r.outputs[0].parameters.insert("classification".into(), classes);
        }),
        (Code::Unimplemented, Reason::Unimplemented, "shared memory", |r| {
            let region = parameter(ParameterChoice::StringParam("region".into()));
            r.inputs[0].parameters.insert("shared_memory_region".into(), region);
        }),
        (Code::InvalidArgument, Reason::MalformedRequest, "priority", |r| {
            r.parameters.insert("priority".into(), parameter(ParameterChoice::StringParam("high".into())));
        }),
        (Code::InvalidArgument, Reason::MalformedRequest, "timeout", |r| {
            r.parameters.insert("timeout".into(), parameter(ParameterChoice::Int64Param(-5)));
        }),
    ];
    let server = Server::start().await;
    let mut client = server.grpc().await;
    client.model_infer(row("mlp")).await.unwrap();
    for (code, reason, says, change) in refusals {
        let mut request = row("mlp");
        change(&mut request);
        let status = client.model_infer(request.clone()).await.expect_err(says);
        refuses(&status, *code, *reason, says);
        assert_eq!(server.echo.calls(), 1, "{request:?} ran");
    }
}

#[tokio::test]
async fn a_models_own_failure_keeps_its_reason() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    for (model, code, reason) in [
        ("failing", Code::Internal, Reason::ModelFailed),
        ("full", Code::ResourceExhausted, Reason::QueueFull),
        ("liar", Code::Internal, Reason::Internal),
    ] {
        let status = client.model_infer(row(model)).await.unwrap_err();
        refuses(&status, code, reason, "");
        assert!(millrace_proto::status::from_status(&status).may_have_executed);
    }
}

#[tokio::test]
async fn unknown_parameters_are_ignored_and_known_ones_reach_the_backend() {
    let server = Server::start().await;
    let mut request = row("mlp");
    request.parameters = [
        ("priority", ParameterChoice::Uint64Param(2)),
        ("timeout", ParameterChoice::Int64Param(5_000_000)),
        ("sequence_id", ParameterChoice::Int64Param(9)),
        ("sequence_start", ParameterChoice::BoolParam(true)),
        ("colour", ParameterChoice::StringParam("blue".into())),
    ]
    .map(|(name, choice)| (name.to_owned(), parameter(choice)))
    .into();
    server.grpc().await.model_infer(request).await.unwrap();
    let seen = server.echo.last();
    assert_eq!(seen.contents.parameters.priority, 2);
    let id = SequenceId::Number(NonZeroU64::new(9).unwrap());
    assert_eq!(seen.contents.parameters.sequence, Some(InSequence { id, start: true, end: false }));
    assert!(
        seen.timeout <= Duration::from_secs(5) && seen.timeout > Duration::from_secs(1),
        "{:?}",
        seen.timeout
    );
}

#[tokio::test]
async fn known_parameters_of_a_wrong_type_are_refused_for_stateless_models_too() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    for (name, wrong) in [
        ("sequence_id", ParameterChoice::BoolParam(true)),
        ("sequence_start", ParameterChoice::Int64Param(1)),
        ("sequence_end", ParameterChoice::StringParam("true".into())),
    ] {
        let mut request = row("mlp");
        request.parameters.insert(name.into(), parameter(wrong));
        let status = client.model_infer(request).await.unwrap_err();
        refuses(&status, Code::InvalidArgument, Reason::MalformedRequest, name);
    }
    assert_eq!(server.echo.calls(), 0);
}

#[tokio::test]
async fn a_timeout_that_expires_cancels_the_request() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let mut request = row("held");
    request.parameters.insert("timeout".into(), parameter(ParameterChoice::Int64Param(20_000)));
    let status = client.model_infer(request).await.unwrap_err();
    refuses(&status, Code::DeadlineExceeded, Reason::TimedOut, "request's timeout");
    server.echo.running(0).await;
    // The call's own timeout is sent as grpc-timeout, so the client's library may report it first.
    let mut request = Request::new(row("held"));
    request.set_timeout(Duration::from_millis(20));
    let status = client.model_infer(request).await.unwrap_err();
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status:?}");
    server.echo.running(0).await;
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_its_request() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let call = tokio::spawn(async move { client.model_infer(row("held")).await });
    server.echo.running(1).await;
    call.abort();
    server.echo.cancelled(1).await;
    let metrics = server.get("/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    assert!(text.contains(r#"function="held",reason="CANCELLED"} 1"#), "{text}");
    assert!(text.contains("millrace_requests_in_flight 0"), "{text}");
}

#[tokio::test]
async fn requests_run_concurrently() {
    let server = Server::start().await;
    let client = server.grpc().await;
    let calls: Vec<_> = (0..20)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.model_infer(row("held")).await })
        })
        .collect();
    server.echo.running(20).await;
    server.grpc().await.model_infer(wait(0)).await.unwrap();
    server.echo.release();
    for call in calls {
        call.await.unwrap().unwrap();
    }
}
