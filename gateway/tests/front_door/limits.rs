//! Bytes: large messages, the budget, what compressed ones expand to.

use std::convert::Infallible;
use std::io::Write as _;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use futures::stream;
use http::{Method, Request};
use http_body::Frame;
use http_body_util::StreamBody;
use millrace_gateway::Limits;
use millrace_proto::inference::ModelInferRequest;
use millrace_types::{Bytes as Size, Reason};
use prost::Message as _;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;
use tonic::codec::CompressionEncoding;

use crate::harness::{Client, Server, fp32, input, refuses, row};

fn large(mib: usize) -> ModelInferRequest {
    let elements = (mib << 20) / 4;
    ModelInferRequest {
        model_name: "echo-fp32".into(),
        inputs: vec![input("x", "FP32", &[1, elements as i64])],
        raw_input_contents: vec![Bytes::from(vec![0; mib << 20])],
        ..ModelInferRequest::default()
    }
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn zlib(plain: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

async fn bytes_in_flight(server: &Server) -> String {
    let text = String::from_utf8(server.get("/metrics").await.body.to_vec()).unwrap();
    let line = text.lines().find(|line| line.starts_with("millrace_request_in_flight_bytes ")).unwrap();
    line.rsplit(' ').next().unwrap().to_owned()
}

#[tokio::test]
async fn serves_messages_of_more_than_64_mib() {
    let server = Server::start().await;
    let request = large(70);
    let response = server.grpc().await.model_infer(request.clone()).await.unwrap().into_inner();
    assert_eq!(response.raw_output_contents, request.raw_input_contents);

    let raw = request.raw_input_contents[0].clone();
    let json = json!({
        "inputs": [{
            "name": "x",
            "datatype": "FP32",
            "shape": [1, raw.len() / 4],
            "parameters": { "binary_data_size": raw.len() },
        }],
        "parameters": { "binary_data_output": true },
    })
    .to_string();
    let length = json.len().to_string();
    let body = [json.as_bytes(), &raw].concat();
    let headers = [("inference-header-content-length", length.as_str())];
    let reply = server.post_with("/v2/models/echo-fp32/infer", &headers, body).await;
    let json_len: usize = reply.header("inference-header-content-length").parse().unwrap();
    assert_eq!(reply.body.slice(json_len..), raw);
    assert_eq!(bytes_in_flight(&server).await, "0");
}

#[tokio::test]
async fn refuses_a_message_over_its_limit() {
    let server = Server::with(Limits { message_max: Size::mib(1), ..Limits::default() }).await;
    let status = server.grpc().await.model_infer(large(2)).await.unwrap_err();
    refuses(&status, Code::ResourceExhausted, Reason::ByteBudgetExceeded, "1.0 MiB");
    assert!(!millrace_proto::status::from_status(&status).retryable);

    let path = "/v2/models/echo-fp32/infer";
    let announced = server.post(path, vec![b' '; 2 << 20]).await;
    announced.refuses(413, Reason::ByteBudgetExceeded, "1.0 MiB");
    // Longer than any socket's buffers: a client that sends all of it first hears the refusal too.
    let mut client = TcpStream::connect(server.addr).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n", 100 << 20);
    client.write_all(head.as_bytes()).await.unwrap();
    for _ in 0..100 {
        client.write_all(&vec![b' '; 1 << 20]).await.unwrap();
    }
    let mut answer = [0; 12];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
    let pieces = (0..40).map(|_| Ok::<_, Infallible>(Frame::data(Bytes::from(vec![b' '; 64 << 10]))));
    let unannounced = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header("host", "test")
        .body(StreamBody::new(stream::iter(pieces)))
        .unwrap();
    server.exchange(unannounced).await.refuses(413, Reason::ByteBudgetExceeded, "1.0 MiB");
}

#[tokio::test]
async fn requests_in_flight_share_a_budget_and_give_it_back() {
    let full = Size(3 * row("held").encoded_len() as u64);
    let server = Server::with(Limits { message_max: full, in_flight_max: full, ..Limits::default() }).await;
    let mut client = server.grpc().await;
    let held: Vec<_> = (0..3)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { client.model_infer(row("held")).await })
        })
        .collect();
    server.echo.running(3).await;
    assert_eq!(bytes_in_flight(&server).await, full.get().to_string());
    let status = client.model_infer(row("mlp")).await.unwrap_err();
    refuses(&status, Code::ResourceExhausted, Reason::ByteBudgetExceeded, "try again");
    assert!(millrace_proto::status::from_status(&status).retryable);
    let reply = server.post("/v2/models/mlp/infer", vec![b' '; 100]).await;
    reply.refuses(429, Reason::ByteBudgetExceeded, "try again");
    assert_eq!(reply.header("retry-after"), "1");
    server.echo.release();
    for call in held {
        call.await.unwrap().unwrap();
    }
    client.model_infer(row("mlp")).await.unwrap();
    assert_eq!(bytes_in_flight(&server).await, "0");
}

#[tokio::test]
async fn grpc_messages_may_be_compressed_either_way() {
    let server = Server::start().await;
    for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        let mut client = server.grpc().await.send_compressed(encoding).accept_compressed(encoding);
        let response = client.model_infer(large(1)).await.unwrap();
        assert_eq!(response.metadata().get("grpc-encoding").unwrap(), &encoding.to_string());
        assert_eq!(response.into_inner().raw_output_contents[0].len(), 1 << 20);
    }
    // A client that only says it could take compressed answers is not sent any.
    let mut client = server.grpc().await.accept_compressed(CompressionEncoding::Gzip);
    let response = client.model_infer(row("mlp")).await.unwrap();
    assert!(response.metadata().get("grpc-encoding").is_none());
}

#[tokio::test]
async fn an_encoding_that_is_not_served_is_named() {
    let server = Server::start().await;
    let headers = [("content-type", "application/grpc"), ("grpc-encoding", "br")];
    let reply = server.post_with("/inference.GRPCInferenceService/ModelInfer", &headers, "").await;
    assert_eq!(reply.header("grpc-status"), "12", "{reply:?}");
    assert!(reply.header("grpc-message").contains("br"), "{reply:?}");
}

#[tokio::test]
async fn a_grpc_bomb_is_refused() {
    let server = Server::with(Limits { message_max: Size::mib(1), ..Limits::default() }).await;
    for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        let mut client: Client = server.grpc().await.send_compressed(encoding);
        let status = client.model_infer(large(64)).await.unwrap_err();
        refuses(&status, Code::ResourceExhausted, Reason::ByteBudgetExceeded, "expands");
    }
    assert_eq!(bytes_in_flight(&server).await, "0");
    assert_eq!(server.echo.calls(), 0);
}

#[tokio::test]
async fn a_rest_body_may_be_compressed_and_a_bomb_is_refused() {
    let server = Server::with(Limits { message_max: Size::mib(1), ..Limits::default() }).await;
    let row =
        json!({ "inputs": [{ "name": "x", "datatype": "FP32", "shape": [1, 64], "data": vec![0.5; 64] }] });
    let bomb = vec![b' '; 64 << 20];
    type Compress = fn(&[u8]) -> Vec<u8>;
    for (name, compress) in [("gzip", gzip as Compress), ("deflate", zlib)] {
        let headers = [("content-encoding", name)];
        let reply =
            server.post_with("/v2/models/mlp/infer", &headers, compress(row.to_string().as_bytes())).await;
        assert_eq!(reply.json()["outputs"][0]["data"][63], 0.5);
        let reply = server.post_with("/v2/models/mlp/infer", &headers, compress(&bomb)).await;
        reply.refuses(413, Reason::ByteBudgetExceeded, "expands");
        let reply = server.post_with("/v2/models/mlp/infer", &headers, "not compressed").await;
        reply.refuses(400, Reason::MalformedRequest, name);
        let mut cut = compress(row.to_string().as_bytes());
        cut.truncate(cut.len() / 2);
        let reply = server.post_with("/v2/models/mlp/infer", &headers, cut).await;
        reply.refuses(400, Reason::MalformedRequest, name);
    }
    let reply = server.post_with("/v2/models/mlp/infer", &[("content-encoding", "br")], "x").await;
    reply.refuses(415, Reason::MalformedRequest, "br");
    assert_eq!(bytes_in_flight(&server).await, "0");
}

#[tokio::test]
async fn a_binary_body_may_be_compressed_both_ways() {
    let server = Server::start().await;
    // Long enough to be compressed on a thread of its own, too.
    for elements in [1024, 64 << 10] {
        let raw = fp32(&vec![0.5; elements]);
        let json = json!({
            "inputs": [{
                "name": "x",
                "datatype": "FP32",
                "shape": [1, elements],
                "parameters": { "binary_data_size": raw.len() },
            }],
            "parameters": { "binary_data_output": true },
        })
        .to_string();
        // The length is that of the plain JSON.
        let length = json.len().to_string();
        let plain = [json.as_bytes(), &raw].concat();
        for (name, body) in [("gzip", gzip(&plain)), ("deflate", zlib(&plain))] {
            let headers = [
                ("content-encoding", name),
                ("accept-encoding", name),
                ("inference-header-content-length", &length),
            ];
            let reply = server.post_with("/v2/models/echo-fp32/infer", &headers, body).await;
            assert_eq!(reply.header("content-encoding"), name);
            let mut plain = Vec::new();
            match name {
                "gzip" => flate2::write::GzDecoder::new(&mut plain).write_all(&reply.body).unwrap(),
                _ => flate2::write::ZlibDecoder::new(&mut plain).write_all(&reply.body).unwrap(),
            }
            let json_len: usize = reply.header("inference-header-content-length").parse().unwrap();
            assert_eq!(plain[json_len..], raw);
        }
    }
}
