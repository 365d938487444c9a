//! Tests bounds on bytes: large messages, the budget, the minimum rate, and decompression.

use std::convert::Infallible;
use std::io::Write as _;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use futures::stream;
use http::{Method, Request};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use millrace_gateway::GatewayLimits;
use millrace_proto::inference::{ModelInferRequest, RepositoryModelLoadRequest, ServerReadyRequest};
use millrace_types::{Bytes as Size, Reason};
use prost::Message as _;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tonic::Code;
use tonic::codec::CompressionEncoding;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

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
async fn messages_of_more_than_64_mib_are_served() {
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
async fn a_message_over_the_size_limit_is_refused() {
    let server = Server::with(GatewayLimits { message_max: Size::mib(1), ..GatewayLimits::default() }).await;
    let status = server.grpc().await.model_infer(large(2)).await.unwrap_err();
    refuses(&status, Code::ResourceExhausted, Reason::ByteBudgetExceeded, "1.0 MiB");
    assert!(!millrace_proto::status::from_status(&status).retryable);

    let path = "/v2/models/echo-fp32/infer";
    let announced = server.post(path, vec![b' '; 2 << 20]).await;
    announced.refuses(413, Reason::ByteBudgetExceeded, "1.0 MiB");
    // Longer than any socket's buffers: even a client that first sends the whole body receives the refusal.
    let mut client = TcpStream::connect(server.addr).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", 100 << 20);
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
        .header("host", "localhost")
        .body(StreamBody::new(stream::iter(pieces)))
        .unwrap();
    server.exchange(unannounced).await.refuses(413, Reason::ByteBudgetExceeded, "1.0 MiB");
}

#[tokio::test]
async fn requests_in_flight_share_a_budget_and_release_it() {
    let full = Size(3 * row("held").encoded_len() as u64);
    let server =
        Server::with(GatewayLimits { message_max: full, in_flight_max: full, ..GatewayLimits::default() })
            .await;
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
async fn grpc_messages_may_be_compressed_in_both_directions() {
    let server = Server::start().await;
    for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        let mut client = server.grpc().await.send_compressed(encoding).accept_compressed(encoding);
        let response = client.model_infer(large(1)).await.unwrap();
        assert_eq!(response.metadata().get("grpc-encoding").unwrap(), &encoding.to_string());
        assert_eq!(response.into_inner().raw_output_contents[0].len(), 1 << 20);
    }
    // A client that only accepts compressed responses gets uncompressed responses.
    let mut client = server.grpc().await.accept_compressed(CompressionEncoding::Gzip);
    let response = client.model_infer(row("mlp")).await.unwrap();
    assert!(response.metadata().get("grpc-encoding").is_none());
}

#[tokio::test]
async fn an_unsupported_encoding_is_refused_by_name() {
    let server = Server::start().await;
    let headers = [("content-type", "application/grpc"), ("grpc-encoding", "br")];
    let reply = server.post_with("/inference.GRPCInferenceService/ModelInfer", &headers, "").await;
    assert_eq!(reply.header("grpc-status"), "12", "{reply:?}");
    assert!(reply.header("grpc-message").contains("br"), "{reply:?}");
}

#[tokio::test]
async fn a_grpc_decompression_bomb_is_refused() {
    let server = Server::with(GatewayLimits { message_max: Size::mib(1), ..GatewayLimits::default() }).await;
    for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
        let mut client: Client = server.grpc().await.send_compressed(encoding);
        let status = client.model_infer(large(64)).await.unwrap_err();
        refuses(&status, Code::ResourceExhausted, Reason::ByteBudgetExceeded, "decompressed");
    }
    assert_eq!(bytes_in_flight(&server).await, "0");
    assert_eq!(server.echo.calls(), 0);
}

#[tokio::test]
async fn a_rest_body_may_be_compressed_and_a_decompression_bomb_is_refused() {
    let server = Server::with(GatewayLimits { message_max: Size::mib(1), ..GatewayLimits::default() }).await;
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
        reply.refuses(413, Reason::ByteBudgetExceeded, "decompressed");
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
async fn a_binary_body_may_be_compressed_in_both_directions() {
    let server = Server::start().await;
    // The second length is large enough for a bulk thread.
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
        // The length is that of the uncompressed JSON.
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

/// Opens a connection and begins to send an inference of `length` bytes: over REST, or over gRPC,
/// which the gateway also accepts over HTTP/1.1. Only a byte of the message is sent.
async fn announce(server: &Server, grpc: bool, length: u32) -> TcpStream {
    let mut client = TcpStream::connect(server.addr).await.unwrap();
    let head = "host: localhost\r\n";
    if grpc {
        let path = "/inference.GRPCInferenceService/ModelInfer";
        let more = "content-type: application/grpc\r\ntransfer-encoding: chunked\r\n\r\n6\r\n\0";
        client.write_all(format!("POST {path} HTTP/1.1\r\n{head}{more}").as_bytes()).await.unwrap();
        client.write_all(&length.to_be_bytes()).await.unwrap();
        client.write_all(b"\n\r\n").await.unwrap();
    } else {
        let path = "/v2/models/mlp/infer";
        let more = format!("content-length: {length}\r\n\r\n ");
        client.write_all(format!("POST {path} HTTP/1.1\r\n{head}{more}").as_bytes()).await.unwrap();
    }
    client
}

/// Waits until this number of bytes is in flight, according to the metrics.
async fn reaches(server: &Server, bytes: u64) {
    let expected = bytes.to_string();
    let seen = async { while bytes_in_flight(server).await != expected {} };
    tokio::time::timeout(Duration::from_secs(60), seen).await.unwrap();
}

#[tokio::test]
async fn bytes_that_did_not_arrive_are_not_charged() {
    for grpc in [false, true] {
        let server = Server::start().await;
        let mut announcers = Vec::new();
        for _ in 0..4 {
            announcers.push(announce(&server, grpc, 256 << 20).await);
        }
        // Four clients have announced 256 MiB each, which is the whole budget, but each has sent only a byte.
        reaches(&server, 4).await;
        assert_eq!(server.grpc().await.model_infer(row("mlp")).await.unwrap().into_inner().model_name, "mlp");
        assert_eq!(server.get("/v2/health/ready").await.status, 200);
        drop(announcers);
        reaches(&server, 0).await;
    }
}

/// Sends `piece` once a second, in virtual time, until the server responds or closes. Returns the
/// elapsed time, without the real time since the body began, and the response.
async fn drip(client: &mut TcpStream, piece: &[u8]) -> (Duration, String) {
    tokio::time::pause();
    let began = Instant::now();
    let mut answer = vec![0; 4096];
    let len = loop {
        match tokio::time::timeout(Duration::from_secs(1), client.read(&mut answer)).await {
            Ok(read) => break read.unwrap(),
            Err(_) => client.write_all(piece).await.unwrap(),
        }
    };
    tokio::time::resume();
    (began.elapsed(), String::from_utf8_lossy(&answer[..len]).into_owned())
}

#[tokio::test]
async fn a_body_below_the_minimum_rate_ends_the_request() {
    let server = Server::start().await;
    let grace = GatewayLimits::default().minimum_rate.grace;
    let mut rest = announce(&server, false, 1 << 20).await;
    reaches(&server, 1).await;
    let (took, answer) = drip(&mut rest, b" ").await;
    assert!(answer.starts_with("HTTP/1.1 504") && answer.contains("TIMED_OUT"), "{answer}");
    assert!(took <= grace + Duration::from_secs(1), "{took:?}");

    let mut grpc = announce(&server, true, 1 << 20).await;
    reaches(&server, 1).await;
    let (took, answer) = drip(&mut grpc, b"1\r\n\n\r\n").await;
    assert!(answer.contains("grpc-status: 4") && answer.contains("slower%20than%2064.0%20KiB"), "{answer}");
    assert!(took <= grace + Duration::from_secs(1), "{took:?}");
    reaches(&server, 0).await;
}

#[tokio::test]
async fn a_body_at_the_minimum_rate_is_served() {
    let server = Server::start().await;
    let row =
        json!({ "inputs": [{ "name": "x", "datatype": "FP32", "shape": [1, 64], "data": vec![0; 64] }] });
    let row = row.to_string();
    let pieces = 12;
    let piece = vec![b' '; GatewayLimits::default().minimum_rate.bytes_per_sec as usize];
    let length = 1 + pieces * piece.len() + row.len();
    let mut client = announce(&server, false, length as u32).await;
    reaches(&server, 1).await;
    tokio::time::pause();
    for _ in 0..pieces {
        tokio::time::sleep(Duration::from_secs(1)).await;
        client.write_all(&piece).await.unwrap();
    }
    client.write_all(row.as_bytes()).await.unwrap();
    tokio::time::resume();
    let mut answer = [0; 12];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
}

/// Returns HTTP/2 requests for an inference of 1 MiB with a response of the same size.
fn unread_calls() -> [(&'static str, &'static str, Vec<u8>); 3] {
    let request = large(1);
    let message = request.encode_to_vec();
    let framed = [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes(), &message].concat();
    let raw = &request.raw_input_contents[0];
    let shape = [1, raw.len() / 4];
    let input = json!({
        "name": "x", "datatype": "FP32", "shape": shape, "parameters": { "binary_data_size": raw.len() },
    });
    let json = json!({ "inputs": [input], "parameters": { "binary_data_output": true } });
    let rest = [json.to_string().as_bytes(), raw].concat();
    [
        ("/inference.GRPCInferenceService/ModelInfer", "application/grpc", framed.clone()),
        ("/inference.GRPCInferenceService/ModelStreamInfer", "application/grpc", framed),
        ("/v2/models/echo-fp32/infer", "application/octet-stream", rest),
    ]
}

#[tokio::test]
async fn an_unread_response_stays_charged_until_its_stream_is_reset() {
    for window in [0u32, 1000] {
        for (path, kind, body) in unread_calls() {
            let server = Server::start().await;
            let stream = TcpStream::connect(server.addr).await.unwrap();
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.initial_stream_window_size(window);
            let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            let json_len = (body.len() - (1 << 20)).to_string();
            let request = Request::post(format!("http://{}{path}", server.addr))
                .header("content-type", kind)
                .header("inference-header-content-length", json_len)
                .body(Full::new(Bytes::from(body)))
                .unwrap();
            let mut unread = sender.send_request(request).await.unwrap().into_body();
            // A stream sends its response headers before its message has arrived.
            let held = async {
                loop {
                    let held: u64 = bytes_in_flight(&server).await.parse().unwrap();
                    if held >= 1 << 20 {
                        return held;
                    }
                }
            };
            let held = tokio::time::timeout(Duration::from_secs(60), held).await.unwrap();
            assert!(held < (1 << 20) + 1000, "{path}: {held}");
            tokio::time::pause();
            let began = Instant::now();
            let ended = async {
                while bytes_in_flight(&server).await != "0" {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            };
            ended.await;
            let took = began.elapsed();
            tokio::time::resume();
            assert!(
                took > GatewayLimits::default().minimum_rate.grace && took < Duration::from_secs(20),
                "{took:?}"
            );
            let read = async {
                while let Some(frame) = unread.frame().await {
                    drop(frame?)
                }
                Ok::<_, hyper::Error>(())
            };
            assert!(read.await.is_err(), "{path}: the stream was reset");
            assert!(!sender.is_closed(), "{path}: its connection continues");
        }
    }
}

#[tokio::test]
async fn an_http1_client_that_does_not_read_its_response_is_cut() {
    let server = Server::start().await;
    let mib = 32;
    let raw = vec![0; mib << 20];
    let input = json!({
        "name": "x", "datatype": "FP32", "shape": [1, raw.len() / 4], "parameters": { "binary_data_size": raw.len() },
    });
    let json = json!({ "inputs": [input], "parameters": { "binary_data_output": true } }).to_string();
    let head = format!(
        "POST /v2/models/echo-fp32/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\
         inference-header-content-length: {}\r\n\r\n",
        json.len() + raw.len(),
        json.len(),
    );
    let mut client = TcpStream::connect(server.addr).await.unwrap();
    for part in [head.as_bytes(), json.as_bytes(), &raw] {
        client.write_all(part).await.unwrap();
    }
    let mut first = [0; 12];
    client.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    let held: u64 = bytes_in_flight(&server).await.parse().unwrap();
    assert!(held >= raw.len() as u64, "{held}");
    tokio::time::pause();
    let began = Instant::now();
    while bytes_in_flight(&server).await != "0" {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    tokio::time::resume();
}

#[tokio::test]
async fn a_response_over_the_budget_fails_as_possibly_executed() {
    // The numbers are longer as text than as the received bytes.
    let elements = 50_000;
    let raw = fp32(&vec![0.123_456_7; elements]);
    let room = Size(raw.len() as u64 + 1000);
    let server =
        Server::with(GatewayLimits { message_max: room, in_flight_max: room, ..GatewayLimits::default() })
            .await;
    let input = json!({
        "name": "x", "datatype": "FP32", "shape": [1, elements], "parameters": { "binary_data_size": raw.len() },
    });
    let json = json!({ "inputs": [input] }).to_string();
    let length = json.len().to_string();
    let headers = [("inference-header-content-length", length.as_str())];
    let body = [json.as_bytes(), &raw].concat();
    let reply = server.post_with("/v2/models/echo-fp32/infer", &headers, body).await;
    reply.refuses(429, Reason::ByteBudgetExceeded, "try again");
    assert_eq!(reply.json()["may_have_executed"], true);
    assert_eq!(bytes_in_flight(&server).await, "0");
}

#[tokio::test]
async fn a_full_budget_still_serves_the_operator_but_is_not_ready() {
    let full = Size(3 * row("held").encoded_len() as u64);
    let server =
        Server::with(GatewayLimits { message_max: full, in_flight_max: full, ..GatewayLimits::default() })
            .await;
    let held: Vec<_> = (0..3)
        .map(|_| {
            let client = server.grpc();
            async { client.await.model_infer(row("held")).await }
        })
        .collect();
    let mut held = std::pin::pin!(futures::future::join_all(held));
    let mut client = server.grpc().await;
    let mut health = HealthClient::new(server.channel().await);
    let mut ready = async || {
        let rest = server.get("/v2/health/ready").await.status == 200;
        let grpc = client.server_ready(ServerReadyRequest {}).await.unwrap().into_inner().ready;
        let health = health.check(HealthCheckRequest::default()).await.unwrap().into_inner().status();
        assert_eq!((grpc, health == ServingStatus::Serving), (rest, rest));
        rest
    };
    tokio::select! {
        _ = held.as_mut() => unreachable!(),
        () = server.echo.running(3) => {}
    }
    server.post("/v2/models/mlp/infer", vec![b' '; 100]).await.refuses(
        429,
        Reason::ByteBudgetExceeded,
        "try again",
    );
    assert!(ready().await);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(5)).await;
    tokio::time::resume();
    assert!(!ready().await, "inference has been locked out for 5 s");

    // Calls without inference have a separate budget.
    let unload = server.post("/v2/repository/models/mlp/unload", r#"{"parameters":{}}"#).await;
    assert_eq!(unload.status, 200);
    let mut operator = server.grpc().await;
    let model_name = "mlp".to_owned();
    operator
        .repository_model_load(RepositoryModelLoadRequest {
            model_name,
            ..RepositoryModelLoadRequest::default()
        })
        .await
        .unwrap();

    server.echo.release();
    assert!(held.await.iter().all(Result::is_ok));
    assert!(ready().await);
}
