//! Tests a single inference over REST.

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use millrace_types::{InSequence, Reason, SequenceId};
use serde_json::{Value as Json, json};
use tokio::net::TcpStream;

use crate::harness::{Reply, Server, fp32};

/// Sends JSON, followed by binary tensors, with the header that gives their position.
async fn post_binary(server: &Server, path: &str, json: &Json, binary: &[Bytes]) -> Reply {
    let json = json.to_string();
    let body = [&[Bytes::from(json.clone())], binary].concat().concat();
    let length = json.len().to_string();
    server.post_with(path, &[("inference-header-content-length", &length)], body).await
}

/// Splits a response into the JSON and the binary outputs.
fn split(reply: &Reply) -> (Json, Bytes) {
    assert_eq!(reply.header("content-type"), "application/octet-stream", "{reply:?}");
    let length: usize = reply.header("inference-header-content-length").parse().unwrap();
    (serde_json::from_slice(&reply.body[..length]).unwrap(), reply.body.slice(length..))
}

fn row() -> Json {
    json!({ "inputs": [{ "name": "x", "datatype": "FP32", "shape": [1, 64], "data": vec![0.5; 64] }] })
}

#[tokio::test]
async fn nested_and_flat_json_are_answered_in_flat_json() {
    let server = Server::start().await;
    for data in [json!([[1.5, 2.0, -3.0], [4.0, 5.0, 6.25]]), json!([1.5, 2, -3, 4, 5, 6.25])] {
        let body = json!({
            "id": "mine",
            "inputs": [{ "name": "x", "datatype": "FP32", "shape": [2, 3], "data": data }],
        });
        let reply = server.post("/v2/models/echo-fp32/infer", body.to_string()).await;
        let expected = json!({
            "model_name": "echo-fp32",
            "model_version": "1",
            "id": "mine",
            "outputs": [{
                "name": "x_out",
                "datatype": "FP32",
                "shape": [2, 3],
                "data": [1.5, 2.0, -3.0, 4.0, 5.0, 6.25],
            }],
        });
        assert_eq!(reply.json(), expected);
    }
}

/// The shape claims 2^48 bytes but the data has one element: memory for the claim is not allocated.
#[tokio::test]
async fn a_shape_beyond_the_body_is_refused_with_400() {
    let server = Server::start().await;
    for shape in [json!([1_u64 << 40, 64]), json!([1_u64 << 61, 4]), json!([i64::MAX, i64::MAX])] {
        let tensor = json!({ "name": "x", "datatype": "FP32", "shape": shape, "data": [0] });
        let body = json!({ "inputs": [tensor] }).to_string();
        let reply = server.post("/v2/models/echo-fp32/infer", body).await;
        reply.refuses(400, Reason::InvalidInput, "shape");
    }
    // This shape is within the message limit, but beyond the body.
    let tensor = json!({ "name": "x", "datatype": "FP32", "shape": [1 << 10, 1 << 10], "data": [0] });
    let reply = server.post("/v2/models/echo-fp32/infer", json!({ "inputs": [tensor] }).to_string()).await;
    reply.refuses(400, Reason::InvalidInput, "shape");
    assert_eq!(server.echo.calls(), 0);
    assert_eq!(server.post("/v2/models/mlp/infer", row().to_string()).await.status, 200);
}

#[tokio::test]
async fn a_request_has_the_sequence_of_its_parameters() {
    let server = Server::start().await;
    let mut body = row();
    body["parameters"] = json!({ "sequence_id": "talk", "sequence_start": false, "sequence_end": true });
    assert_eq!(server.post("/v2/models/mlp/infer", body.to_string()).await.status, 200);
    let place = InSequence { id: SequenceId::Name("talk".into()), start: false, end: true };
    assert_eq!(server.echo.last().contents.parameters.sequence, Some(place));
    // The check also applies to a model without state.
    for (name, wrong) in [
        ("sequence_id", json!(-4)),
        ("sequence_id", json!(true)),
        ("sequence_start", json!(1)),
        ("sequence_end", json!("true")),
    ] {
        body["parameters"] = json!({ name: wrong });
        let reply = server.post("/v2/models/mlp/infer", body.to_string()).await;
        reply.refuses(400, Reason::MalformedRequest, name);
    }
    body["parameters"] = json!({ "sequence_id": 0 });
    assert_eq!(server.post("/v2/models/mlp/infer", body.to_string()).await.status, 200);
    assert_eq!(server.echo.last().contents.parameters.sequence, None);
}

#[tokio::test]
async fn every_datatype_with_a_json_form_survives_json() {
    let server = Server::start().await;
    for (datatype, data) in [
        ("BOOL", json!([true, false])),
        ("UINT8", json!([0, 255])),
        ("UINT16", json!([0, 65535])),
        ("UINT32", json!([0, u32::MAX])),
        ("UINT64", json!([0, u64::MAX])),
        ("INT8", json!([-128, 127])),
        ("INT16", json!([i16::MIN, i16::MAX])),
        ("INT32", json!([i32::MIN, i32::MAX])),
        ("INT64", json!([i64::MIN, i64::MAX])),
        ("FP32", json!([0.1, 3.4028235e38])),
        ("FP64", json!([0.1, f64::MIN_POSITIVE])),
    ] {
        let path = format!("/v2/models/echo-{}/infer", datatype.to_lowercase());
        let body =
            json!({ "inputs": [{ "name": "x", "datatype": datatype, "shape": [1, 2], "data": data }] });
        let reply = server.post(&path, body.to_string()).await.json();
        assert_eq!(reply["outputs"][0]["data"], data, "{datatype}");
        assert!(reply.get("id").is_none());
    }
}

#[tokio::test]
async fn binary_tensors_are_sent_in_both_directions_without_named_outputs() {
    let server = Server::start().await;
    let a = fp32(&[1.0, 2.0, 3.0, 4.0]);
    let b = Bytes::copy_from_slice(&9i64.to_le_bytes());
    let inputs = json!([
        { "name": "b", "datatype": "INT64", "shape": [1], "parameters": { "binary_data_size": 8 } },
        { "name": "a", "datatype": "FP32", "shape": [1, 4], "parameters": { "binary_data_size": 16 } },
    ]);
    let body = json!({ "inputs": inputs, "parameters": { "binary_data_output": true } });
    let reply = post_binary(&server, "/v2/models/pair/infer", &body, &[b.clone(), a.clone()]).await;
    let (json, binary) = split(&reply);
    assert_eq!(json["outputs"][0]["name"], "a_out");
    assert_eq!(json["outputs"][0]["parameters"], json!({ "binary_data_size": 16 }));
    assert!(json["outputs"][0].get("data").is_none());
    assert_eq!(binary, [a.clone(), b.clone()].concat());
    assert_eq!(reply.header("content-length"), reply.body.len().to_string());

    // Without the parameter, the response is JSON.
    let body = json!({ "inputs": inputs });
    let reply = post_binary(&server, "/v2/models/pair/infer", &body, &[b, a]).await.json();
    assert_eq!(reply["outputs"][1]["data"], json!([9]));
}

#[tokio::test]
async fn each_output_may_have_its_own_form() {
    let server = Server::start().await;
    let body = json!({
        "inputs": [
            { "name": "a", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4] },
            { "name": "b", "datatype": "INT64", "shape": [1], "parameters": { "binary_data_size": 8 } },
        ],
        "outputs": [
            { "name": "b_out", "parameters": { "binary_data": true } },
            { "name": "a_out", "parameters": { "binary_data": false } },
        ],
        "parameters": { "binary_data_output": true },
    });
    let b = Bytes::copy_from_slice(&9i64.to_le_bytes());
    let (json, binary) =
        split(&post_binary(&server, "/v2/models/pair/infer", &body, std::slice::from_ref(&b)).await);
    assert_eq!(json["outputs"][0]["name"], "b_out");
    assert_eq!(json["outputs"][1]["data"], json!([1.0, 2.0, 3.0, 4.0]));
    assert_eq!(binary, b);
}

#[tokio::test]
async fn a_body_without_json_has_the_bytes_of_the_single_input() {
    let server = Server::start().await;
    let raw = fp32(&[0.25; 128]);
    let header = [("inference-header-content-length", "0")];
    let (json, binary) = split(&server.post_with("/v2/models/mlp/infer", &header, raw.clone()).await);
    assert_eq!(json["outputs"][0]["shape"], json!([2, 64]));
    assert_eq!(binary, raw);
    let reply = server.post_with("/v2/models/mlp/infer", &header, raw.slice(..100)).await;
    reply.refuses(400, Reason::InvalidInput, "100 bytes");
    let reply = server.post_with("/v2/models/echo-fp32/infer", &header, raw.clone()).await;
    reply.refuses(400, Reason::InvalidInput, "send JSON");
    let reply = server.post_with("/v2/models/pair/infer", &header, raw).await;
    reply.refuses(400, Reason::InvalidInput, "2 inputs");
}

#[tokio::test]
async fn versions_ids_and_timing_are_the_same_as_over_grpc() {
    let server = Server::start().await;
    for (path, version) in
        [("/v2/models/versioned/infer", "3"), ("/v2/models/versioned/versions/2/infer", "2")]
    {
        let reply = server.post_with(path, &[("x-request-id", "r-1")], row().to_string()).await;
        assert_eq!(reply.json()["model_version"], version);
        assert_eq!(reply.header("x-request-id"), "r-1");
        let timing = reply.header("server-timing");
        assert!(timing.starts_with("queue;dur=0.100, swap;dur=0.200, run;dur=0.300, total;dur="), "{timing}");
        assert_eq!(reply.header("millrace-served-by"), "worker-1/0 V100");
    }
    let reply =
        server.post_with("/v2/models/private/infer", &[("millrace-tenant", "acme")], row().to_string());
    assert_eq!(reply.await.status, 200);
    assert_eq!(server.post("/v2/models/private/infer", row().to_string()).await.status, 404);
}

#[tokio::test]
async fn invalid_rest_requests_are_refused_before_they_run() {
    let server = Server::start().await;
    let with = |pointer: &str, value: Json| {
        let mut body = row();
        *body.pointer_mut(pointer).unwrap() = value;
        body.to_string()
    };
    let infer = "/v2/models/mlp/infer";
    let input = "/inputs/0";
    let bare = json!({ "name": "x", "datatype": "FP32", "shape": [1, 64] });
    let announced = |size: Json| {
        let mut input = bare.clone();
        input["parameters"] = json!({ "binary_data_size": size });
        json!({ "inputs": [input] }).to_string()
    };
    let extra = |name: &str, value: Json| {
        let mut body = row();
        body[name] = value;
        body.to_string()
    };
    for (path, body, status, reason, says) in [
        ("/v2/models/nowhere/infer", row().to_string(), 404, Reason::FunctionNotFound, "nowhere"),
        ("/v2/models/mlp/versions/9/infer", row().to_string(), 404, Reason::RevisionNotFound, ""),
        ("/v2/models/mlp/versions/x/infer", row().to_string(), 400, Reason::MalformedRequest, "version"),
        ("/v2/models/unloaded/infer", row().to_string(), 503, Reason::FunctionDisabled, "load"),
        (
            "/v2/models/preparing/infer",
            extra("parameters", json!({ "timeout": 1_000 })),
            503,
            Reason::FunctionNotReady,
            "prepared",
        ),
        (infer, "{".to_owned(), 400, Reason::MalformedRequest, "EOF"),
        (infer, String::new(), 400, Reason::MalformedRequest, "EOF"),
        (infer, "[]".to_owned(), 400, Reason::MalformedRequest, ""),
        (infer, "{}".to_owned(), 400, Reason::MalformedRequest, "inputs"),
        (infer, json!({ "inputs": [] }).to_string(), 400, Reason::InvalidInput, "missing"),
        (infer, with("/inputs/0/name", json!("y")), 400, Reason::InvalidInput, "\"y\""),
        (infer, with("/inputs/0/datatype", json!("FP64")), 400, Reason::InvalidInput, "FP64"),
        (infer, with("/inputs/0/datatype", json!("BYTES")), 400, Reason::InvalidInput, "BYTES"),
        (infer, with("/inputs/0/datatype", json!("FLOAT")), 400, Reason::InvalidInput, "FLOAT"),
        (infer, with("/inputs/0/shape", json!([64])), 400, Reason::InvalidInput, "[64]"),
        (infer, with("/inputs/0/shape", json!([1, 65])), 400, Reason::InvalidInput, "[1, 65]"),
        (infer, with("/inputs/0/shape", json!([1, "64"])), 400, Reason::MalformedRequest, ""),
        (infer, with("/inputs/0/data", json!([1, 2, 3])), 400, Reason::InvalidInput, "3 elements"),
        (infer, with("/inputs/0/data", json!(vec!["a"; 64])), 400, Reason::InvalidInput, "FP32"),
        (infer, with(input, bare.clone()), 400, Reason::InvalidInput, "neither"),
        (infer, extra("outputs", json!([{ "name": "z" }])), 400, Reason::InvalidOutput, "\"z\""),
        (
            infer,
            extra("outputs", json!([{ "name": "x_out", "parameters": { "classification": 2 } }])),
            501,
            Reason::Unimplemented,
            "classification",
        ),
        (infer, extra("parameters", json!({ "timeout": "soon" })), 400, Reason::MalformedRequest, "timeout"),
        (infer, announced(json!(256)), 400, Reason::MalformedRequest, "Inference-Header-Content-Length"),
    ] {
        server.post(path, body).await.refuses(status, reason, says);
    }
    // Binary data must have the announced length, the right size, and nothing after it.
    let body: Json = serde_json::from_str(&announced(json!(256))).unwrap();
    for (body, binary, reason, says) in [
        (&body, vec![fp32(&[0.5; 63])], Reason::MalformedRequest, "252 are left"),
        (&body, vec![fp32(&[0.5; 65])], Reason::MalformedRequest, "4 bytes after"),
        (
            &serde_json::from_str(&announced(json!(252))).unwrap(),
            vec![fp32(&[0.5; 63])],
            Reason::InvalidInput,
            "252",
        ),
        (
            &serde_json::from_str(&announced(json!(-1))).unwrap(),
            vec![],
            Reason::MalformedRequest,
            "binary_data_size",
        ),
        (&row(), vec![Bytes::from_static(b"!")], Reason::MalformedRequest, "1 bytes after"),
    ] {
        post_binary(&server, infer, body, &binary).await.refuses(400, reason, says);
    }
    for (length, says) in [("9999", "9999"), ("many", "many"), ("", "not a length"), ("10", "protocol")] {
        let reply =
            server.post_with(infer, &[("inference-header-content-length", length)], row().to_string()).await;
        reply.refuses(400, Reason::MalformedRequest, says);
    }
    assert_eq!(server.echo.calls(), 0);
}

#[tokio::test]
async fn an_input_with_both_data_and_binary_size_is_refused() {
    let server = Server::start().await;
    let mut body = row();
    body["inputs"][0]["parameters"] = json!({ "binary_data_size": 256 });
    let reply = post_binary(&server, "/v2/models/mlp/infer", &body, &[fp32(&[0.5; 64])]).await;
    reply.refuses(400, Reason::InvalidInput, "both");
}

#[tokio::test]
async fn a_models_own_failure_has_its_status() {
    let server = Server::start().await;
    for (model, status, reason) in [
        ("failing", 500, Reason::ModelFailed),
        ("full", 429, Reason::QueueFull),
        ("liar", 500, Reason::Internal),
    ] {
        let reply = server.post(&format!("/v2/models/{model}/infer"), row().to_string()).await;
        reply.refuses(status, reason, "");
        assert_eq!(reply.json()["may_have_executed"], true);
        assert_eq!(reply.header("retry-after"), if status == 429 { "1" } else { "" });
    }
}

#[tokio::test]
async fn an_expired_timeout_is_a_gateway_timeout() {
    let server = Server::start().await;
    let mut body = row();
    body["parameters"] = json!({ "timeout": 20_000 });
    let reply = server.post("/v2/models/held/infer", body.to_string()).await;
    reply.refuses(504, Reason::TimedOut, "request's timeout");
    server.echo.running(0).await;
}

#[tokio::test]
async fn values_without_a_json_form_are_refused_in_json_and_sent_in_binary() {
    let server = Server::start().await;
    let reply = server.post("/v2/models/nan/infer", row().to_string()).await;
    reply.refuses(400, Reason::InvalidOutput, "NaN");
    let mut body = row();
    body["parameters"] = json!({ "binary_data_output": true });
    let (_, binary) = split(&server.post("/v2/models/nan/infer", body.to_string()).await);
    assert_eq!(binary[..4], f32::NAN.to_le_bytes());

    let before = server.echo.calls();
    let half = json!({ "inputs": [
        { "name": "x", "datatype": "FP16", "shape": [1, 1], "parameters": { "binary_data_size": 2 } },
    ] });
    let two = Bytes::from_static(&[1, 2]);
    let reply = post_binary(&server, "/v2/models/echo-fp16/infer", &half, std::slice::from_ref(&two)).await;
    reply.refuses(400, Reason::InvalidOutput, "FP16");
    assert_eq!(server.echo.calls(), before, "refused before it ran");
    let mut half = half;
    half["parameters"] = json!({ "binary_data_output": true });
    let (_, binary) =
        split(&post_binary(&server, "/v2/models/echo-fp16/infer", &half, std::slice::from_ref(&two)).await);
    assert_eq!(binary, two);
    half["inputs"][0] = json!({ "name": "x", "datatype": "FP16", "shape": [1, 1], "data": [1.0] });
    let reply = server.post("/v2/models/echo-fp16/infer", half.to_string()).await;
    reply.refuses(400, Reason::InvalidInput, "FP16");
}

#[tokio::test]
async fn a_rest_client_that_disconnects_cancels_its_request() {
    let server = Server::start().await;
    let stream = TcpStream::connect(server.addr).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    let driver = tokio::spawn(connection);
    let body = Full::new(Bytes::from(row().to_string()));
    let request =
        Request::builder().method(Method::POST).uri("/v2/models/held/infer").header("host", "localhost");
    let call = tokio::spawn(async move { sender.send_request(request.body(body).unwrap()).await });
    server.echo.running(1).await;
    call.abort();
    driver.abort();
    server.echo.cancelled(1).await;
}

#[tokio::test]
async fn rest_is_also_served_over_http2() {
    let server = Server::start().await;
    let stream = TcpStream::connect(server.addr).await.unwrap();
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let uri = format!("http://{}/v2/models/mlp/infer", server.addr);
    let request = Request::post(uri).body(Full::new(Bytes::from(row().to_string()))).unwrap();
    let reply = sender.send_request(request).await.unwrap();
    assert_eq!(reply.status(), 200);
    let body = reply.into_body().collect().await.unwrap().to_bytes();
    let json: Json = serde_json::from_slice(&body).unwrap();
    assert_eq!(json["outputs"][0]["shape"], json!([1, 64]));
}

#[tokio::test]
async fn one_connection_serves_many_requests() {
    let server = Server::start().await;
    let stream = TcpStream::connect(server.addr).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    // A refusal does not close the connection.
    for (model, status) in [("mlp", 200), ("nowhere", 404), ("failing", 500), ("mlp", 200)] {
        let body = Full::new(Bytes::from(row().to_string()));
        let path = format!("/v2/models/{model}/infer");
        let request = Request::builder().method(Method::POST).uri(path).header("host", "localhost");
        let reply = sender.send_request(request.body(body).unwrap()).await.unwrap();
        assert_eq!(reply.status(), status);
        reply.into_body().collect().await.unwrap();
    }
}
