//! The load generator against small servers in this process.
#![allow(clippy::unwrap_used)]

#[path = "../../client/tests/fake/mod.rs"]
mod fake;
mod support;

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use fake::{Fake, STALL};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use support::Sandbox;
use tokio::net::TcpListener;

async fn report(sandbox: &Sandbox, line: &str) -> Value {
    let run = sandbox.run(&format!("load --warm-up 0s -o json {line}")).await;
    assert_eq!(run.code, 0, "{line}: {run:?}");
    serde_json::from_str(&run.stdout).unwrap()
}

#[tokio::test]
async fn a_closed_loop_sends_as_many_as_asked() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    let report = report(&sandbox, "echo --requests 200 --concurrency 8 --input-shape x=3x2").await;
    assert_eq!((&report["answered"], &report["failed"]), (&200.into(), &0.into()));
    assert_eq!((&report["loop"], &report["concurrency"]), (&"closed".into(), &8.into()));
    assert_eq!(report["inputs"]["x"], serde_json::json!([3, 2]));
    let latency = |key: &str| report["latency_us"][key].as_f64().unwrap();
    assert!(latency("min") > 0.0 && latency("p50") <= latency("p99.9") && latency("p99.9") <= latency("max"));
    // The server says where its time went; the run is as the fake tells it.
    assert!((report["server_us"]["run"]["p50"].as_f64().unwrap() - 1500.0).abs() < 2.0);
}

#[tokio::test]
async fn requests_go_to_every_endpoint_and_one_that_is_gone_is_passed_over() {
    let (one, two) = (Fake::start().await, Fake::start().await);
    let gone = fake::dead_address().await;
    let sandbox = Sandbox::of(&format!("{},{},{gone}", one.address, two.address));
    let report = report(&sandbox, "echo --requests 90 --concurrency 3").await;
    assert_eq!(
        (&report["answered"], &report["failed"], &report["connections"]),
        (&90.into(), &0.into(), &3.into())
    );
    // How many each gets is a matter of who is faster; the first of each connection is certain.
    assert!(!one.ids().is_empty() && !two.ids().is_empty(), "{} and {}", one.ids().len(), two.ids().len());
}

#[tokio::test]
async fn a_rate_charges_a_stall_to_every_request_it_held_up() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    let report = report(&sandbox, "stalls --requests 100 --rate 200 --arrival uniform").await;
    assert_eq!(report["answered"], 100);
    let latency = |key: &str| report["latency_us"][key].as_f64().unwrap();
    let stall = STALL.as_secs_f64() * 1e6;
    assert!(latency("max") >= stall, "{report}");
    // Of 100 requests 5 ms apart, those of the stall's first 100 ms waited 200 ms or more: 20. A
    // generator that waited for answers would have seen one.
    assert!(latency("p90") >= stall * 2.0 / 3.0, "{report}");
}

#[tokio::test]
async fn failures_are_counted_by_reason_and_an_empty_run_fails() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    let run = sandbox.run("load full --requests 3 --warm-up 0s -o json").await;
    assert_eq!(run.code, 1);
    let report: Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(report["errors"]["ResourceExhausted (QUEUE_FULL)"]["count"], 3);
    assert!(run.stderr.contains("no request was answered"), "{}", run.stderr);
    assert!(run.stderr.contains("the queue is full: 4 of 4 requests wait"), "{}", run.stderr);
}

#[tokio::test]
async fn a_full_house_at_a_rate_is_told() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    let line = "load stalls --requests 60 --rate 2000 --max-in-flight 1 --warm-up 0s -o json";
    let report: Value = serde_json::from_str(&sandbox.run(line).await.stdout).unwrap();
    let (answered, failed) = (report["answered"].as_u64().unwrap(), report["failed"].as_u64().unwrap());
    assert_eq!(answered + failed, 60);
    if failed > 0 {
        assert_eq!(report["errors"]["not sent"]["count"], failed);
    }
}

#[tokio::test]
async fn a_report_for_people_is_a_table() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    let run = sandbox.run("load echo --requests 20 --warm-up 0s").await;
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.starts_with(&format!("echo at grpc://{}, 1 at a time, x [1, 2]\n", server.address)));
    for text in ["20 answered in ", "p99.9", "latency", "added to the run", "processors busy"] {
        assert!(run.stdout.contains(text), "{text}: {}", run.stdout);
    }
}

/// A server of the protocol over HTTP: model `echo` answers its own body, others are refused.
async fn http_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let connection = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service_fn(answer));
            tokio::spawn(async move { connection.await.ok() });
        }
    });
    address
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    const METADATA: &str =
        r#"{"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]}"#;
    let reply = |status, body: Bytes| {
        let mut response = Response::new(Full::new(body));
        *response.status_mut() = status;
        response.headers_mut().insert("server-timing", "run;dur=1, total;dur=2".parse().unwrap());
        Ok(response)
    };
    if request.method() == Method::GET {
        return reply(StatusCode::OK, METADATA.into());
    }
    let path = request.uri().path().to_owned();
    let json_bytes = request.headers().get("inference-header-content-length").cloned();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let json_end = json_bytes.map_or(body.len(), |length| length.to_str().unwrap().parse().unwrap());
    let json: Value = serde_json::from_slice(&body[..json_end]).unwrap();
    let binary = json["inputs"][0]["parameters"]["binary_data_size"].as_u64();
    let whole =
        binary.map_or_else(|| json["inputs"][0]["data"].as_array().unwrap().len() * 4, |size| size as usize);
    match path.as_str() {
        "/v2/models/echo/infer" if whole == 8 && (binary.is_none() || body.len() - json_end == 8) => {
            reply(StatusCode::OK, body)
        }
        _ => reply(StatusCode::TOO_MANY_REQUESTS, r#"{"error": "full", "reason": "QUEUE_FULL"}"#.into()),
    }
}

#[tokio::test]
async fn http_is_loaded_in_binary_and_in_json() {
    let (address, sandbox) = (http_server().await, Sandbox::new());
    for flags in ["", "--http-json", "--rate 500"] {
        let report = report(&sandbox, &format!("http://{address} --model echo --requests 50 {flags}")).await;
        assert_eq!((&report["answered"], &report["protocol"]), (&50.into(), &"http".into()), "{flags}");
        assert!((report["server_us"]["run"]["p50"].as_f64().unwrap() - 1000.0).abs() < 2.0);
    }
    let run = sandbox.run(&format!("load http://{address} --model other --requests 2 --warm-up 0s")).await;
    assert_eq!(run.code, 1);
    assert!(run.stdout.contains("2 failed, HTTP 429 (QUEUE_FULL): full"), "{}", run.stdout);
}
