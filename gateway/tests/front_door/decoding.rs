//! For any shapes and fields that a client writes, the response is a refusal or correct, and the next
//! request is served.

use bytes::Bytes;
use millrace_gateway::GatewayLimits;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::inference::{InferTensorContents, ModelInferRequest};
use millrace_types::{Bytes as Size, Reason};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use prost::Message as _;
use serde_json::json;
use tonic::Code;

use crate::harness::{Reply, Server, fp32, input, parameter, refuses, row};

const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const REST: &str = "/v2/models/echo-fp32/infer";

/// Makes a gRPC call with exactly this message. Returns the status and its message.
async fn call(server: &Server, message: &[u8]) -> (String, String) {
    let len = u32::try_from(message.len()).unwrap().to_be_bytes();
    let body = [&[0], &len[..], message].concat();
    let reply = server.post_with(INFER, &[("content-type", "application/grpc")], body).await;
    (reply.header("grpc-status").to_owned(), reply.header("grpc-message").to_owned())
}

async fn assert_serves(server: &Server) {
    server.grpc().await.model_infer(row("mlp")).await.unwrap();
    assert_eq!(server.get("/v2/health/ready").await.status, 200);
}

#[tokio::test]
async fn a_message_of_a_million_empty_tensors_is_refused_before_it_is_decoded() {
    let server = Server::start().await;
    let (status, message) = call(&server, &[0x2a, 0].repeat(1 << 20)).await;
    assert_eq!(status, "3", "{message}");
    assert!(message.contains("4096"), "{message}");
    // 10 MiB of zeros as empty entries of a tensor's parameters, and bytes that are not a message.
    let entries = [&[0x2a, 0x80, 0x80, 0x80, 0x05][..], &[0x22, 0].repeat(5 << 20)].concat();
    for message in [&entries[..], &[0xff; 100], &[0x2a, 99]] {
        let (status, message) = call(&server, message).await;
        assert!(["3", "8"].contains(&status.as_str()), "{status}: {message}");
    }
    assert_eq!(server.echo.calls(), 0);
    assert_serves(&server).await;
}

#[tokio::test]
async fn typed_contents_that_grow_when_decoded_are_refused() {
    let server = Server::start().await;
    let request = |count: usize| {
        let mut tensor = input("x", "INT64", &[1, count as i64]);
        tensor.contents = Some(InferTensorContents { int64_contents: vec![1; count], ..Default::default() });
        ModelInferRequest { model_name: "echo-int64".into(), inputs: vec![tensor], ..Default::default() }
    };
    let mut client = server.grpc().await;
    // A bulk thread converts this request.
    let answered = client.model_infer(request(1 << 19)).await.unwrap().into_inner();
    assert_eq!(answered.raw_output_contents[0].len(), 8 << 19);
    let status = client.model_infer(request(4 << 20)).await.unwrap_err();
    refuses(&status, Code::ResourceExhausted, Reason::ByteBudgetExceeded, "as raw bytes");
    assert_serves(&server).await;
}

#[tokio::test]
async fn decoded_structures_are_charged_while_a_request_is_served() {
    let server = Server::start().await;
    let mut request = row("held");
    for at in 0..2_000 {
        let value = parameter(ParameterChoice::StringParam(String::new()));
        request.parameters.insert(format!("p{at}"), value);
    }
    let len = request.encoded_len();
    let mut client = server.grpc().await;
    let held = tokio::spawn(async move { client.model_infer(request).await });
    server.echo.running(1).await;
    let metrics = String::from_utf8(server.get("/metrics").await.body.to_vec()).unwrap();
    let in_flight = metrics.lines().find_map(|line| line.strip_prefix("millrace_request_in_flight_bytes "));
    assert!(in_flight.unwrap().parse::<usize>().unwrap() > 5 * len, "{in_flight:?} for {len}");
    server.echo.release();
    held.await.unwrap().unwrap();
}

#[tokio::test]
async fn json_beyond_the_bounds_is_refused() {
    let server = Server::start().await;
    let zeros = "0,".repeat(1 << 20);
    let long = "x".repeat(1 << 20);
    let tensor = |name: &str| format!(r#"{{"name":"{name}","datatype":"FP32","shape":[1,1],"data":[1]}}"#);
    for (body, says) in [
        (format!(r#"{{"inputs":[],"parameters":{{"p":[{zeros}0]}}}}"#), "65536"),
        (format!(r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[{zeros}0]}}]}}"#), "64"),
        (format!(r#"{{"inputs":[{}]}}"#, vec![tensor("x"); 5_000].join(",")), "4096"),
        (format!(r#"{{"inputs":[{}]}}"#, tensor(&"x".repeat(300))), "256"),
        (format!(r#"{{"inputs":[{}]}}"#, tensor(&long)), "text"),
        (format!(r#"{{"inputs":"{long}"}}"#), "text"),
        (format!(r#""{long}""#), "text"),
        (format!(r#"{{"inputs":{}}}"#, "[".repeat(1 << 20)), ""),
        (
            format!(
                r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,1],"data":{}1{}}}]}}"#,
                "[".repeat(1 << 20),
                "]".repeat(1 << 20)
            ),
            "",
        ),
        (
            format!(
                r#"{{"inputs":[{{"name":"x","datatype":"FP32","shape":[1,1],"data":[{}]}}]}}"#,
                "1".repeat(1 << 20)
            ),
            "1111",
        ),
    ] {
        let reply = server.post(REST, body).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.json()["error"].as_str().unwrap().contains(says), "{reply:?}");
        assert!(reply.body.len() < 1 << 10, "{} bytes", reply.body.len());
    }
    // Calls of the repository.
    let parameters = format!(r#"{{"parameters":{{"config":[{zeros}0]}}}}"#);
    let reply = server.post("/v2/repository/models/echo-fp32/load", parameters).await;
    reply.refuses(501, Reason::Unimplemented, "config");
    let reply = server.post("/v2/repository/index", format!(r#"{{"ready":"{long}"}}"#)).await;
    reply.refuses(400, Reason::MalformedRequest, "text");
    assert_eq!(server.echo.calls(), 0);
    assert_serves(&server).await;
}

#[tokio::test]
async fn large_json_is_converted_in_both_directions_on_bulk_threads() {
    let server = Server::start().await;
    let data: Vec<f32> = (0..300_000_u32).map(|n| n as f32 + 0.5).collect();
    let body =
        json!({ "inputs": [{ "name": "x", "datatype": "FP32", "shape": [1, data.len()], "data": data }] });
    let body = body.to_string();
    assert!(body.len() > 1 << 20);
    let replies = futures::future::join_all((0..8).map(|_| server.post(REST, body.clone()))).await;
    for reply in replies {
        assert!(reply.json()["outputs"][0]["data"] == json!(data));
    }
}

#[tokio::test]
async fn a_json_tensor_over_the_message_limit_is_refused() {
    let server = Server::with(GatewayLimits { message_max: Size::mib(1), ..GatewayLimits::default() }).await;
    let data = vec![1; 200_000];
    let body =
        json!({ "inputs": [{ "name": "x", "datatype": "FP64", "shape": [1, data.len()], "data": data }] });
    let reply = server.post("/v2/models/echo-fp64/infer", body.to_string()).await;
    reply.refuses(400, Reason::InvalidInput, "1048576");
}

/// Returns dimensions of all sizes; small ones sometimes fit the sent data.
fn shape() -> impl Strategy<Value = Vec<i64>> {
    let dimension = prop_oneof![4 => 1i64..5, 1 => any::<i64>(), 1 => Just(1 << 40), 1 => Just(i64::MAX), 1 => Just(1 << 61)];
    prop_oneof![4 => proptest::collection::vec(dimension.clone(), 2), 1 => proptest::collection::vec(dimension, 0..9)]
}

#[derive(Debug, Clone, Copy)]
enum Form {
    Json,
    Binary,
    GrpcRaw,
    GrpcTyped,
}

/// Sends `elements` numbers as a tensor of this shape. Returns the number of elements in the
/// response, if there is one.
async fn exchange(server: &Server, form: Form, shape: &[i64], elements: usize) -> Option<usize> {
    let numbers = vec![1.0f32; elements];
    let rest = |reply: Reply| match reply.status.as_u16() {
        200 => Some(reply.json()["outputs"][0]["data"].as_array().unwrap().len()),
        status => {
            assert!((400..500).contains(&status), "{reply:?}");
            None
        }
    };
    let tensor = |with: serde_json::Value| {
        let mut tensor = json!({ "name": "x", "datatype": "FP32", "shape": shape });
        tensor.as_object_mut().unwrap().extend(with.as_object().unwrap().clone());
        json!({ "inputs": [tensor] }).to_string()
    };
    let mut request = ModelInferRequest {
        model_name: "echo-fp32".into(),
        inputs: vec![input("x", "FP32", shape)],
        ..ModelInferRequest::default()
    };
    match form {
        Form::Json => rest(server.post(REST, tensor(json!({ "data": numbers }))).await),
        Form::Binary => {
            let json = tensor(json!({ "parameters": { "binary_data_size": 4 * elements } }));
            let length = json.len().to_string();
            let body = [Bytes::from(json), fp32(&numbers)].concat();
            rest(server.post_with(REST, &[("inference-header-content-length", &length)], body).await)
        }
        Form::GrpcRaw | Form::GrpcTyped => {
            if matches!(form, Form::GrpcRaw) {
                request.raw_input_contents = vec![fp32(&numbers)];
            } else {
                let contents = InferTensorContents { fp32_contents: numbers, ..Default::default() };
                request.inputs[0].contents = Some(contents);
            }
            match server.grpc().await.model_infer(request).await {
                Ok(answer) => Some(answer.into_inner().raw_output_contents[0].len() / 4),
                Err(status) => {
                    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
                    None
                }
            }
        }
    }
}

/// A request with any dimensions gets a correct response, or is refused as the client's mistake.
#[test]
fn requests_of_any_shape_are_answered_or_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = runtime.block_on(Server::start());
    let mut runner = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    let form = prop_oneof![Just(Form::Json), Just(Form::Binary), Just(Form::GrpcRaw), Just(Form::GrpcTyped)];
    runner
        .run(&(form, shape(), 1usize..10), |(form, shape, elements)| {
            let answered = runtime.block_on(exchange(&server, form, &shape, elements));
            let product = shape.iter().try_fold(1i64, |product, dim| product.checked_mul(*dim));
            let fits =
                shape.len() == 2 && shape.iter().all(|&dim| dim > 0) && product == Some(elements as i64);
            prop_assert_eq!(answered, fits.then_some(elements));
            Ok(())
        })
        .unwrap();
}
