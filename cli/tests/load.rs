//! The load generator against small servers in this process.
#![allow(clippy::unwrap_used)]

#[path = "../../client/tests/fake/mod.rs"]
mod fake;
mod support;

use std::collections::BTreeMap;
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

#[tokio::test]
async fn each_client_sends_one_sequence_after_the_other_and_leaves_none_open() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    // Each client's last sequence is under way as the requests are over.
    let report = report(&sandbox, "counts --sequence-length 4 --requests 30 --concurrency 3").await;
    assert_eq!((&report["answered"], &report["failed"]), (&30.into(), &0.into()), "{report}");
    let mut clients: BTreeMap<i64, Vec<(bool, bool)>> = BTreeMap::new();
    for (id, start, end) in server.sequences_asked() {
        clients.entry(id).or_default().push((start, end));
    }
    assert_eq!(clients.len(), 3);
    let (mut whole, mut cut) = (0, 0);
    for asked in clients.values() {
        for sequence in asked.split_inclusive(|&(_, end)| end) {
            let (&(_, ended), before) = sequence.split_last().unwrap();
            assert!(ended && before.iter().all(|&(_, end)| !end), "{asked:?}");
            // One that was cut has one request more than were asked for: the one that ended it.
            assert!(sequence[0].0 && sequence[1..].iter().all(|&(start, _)| !start), "{asked:?}");
            assert!(sequence.len() <= 4, "{asked:?}");
        }
        let lengths: Vec<usize> = asked.split_inclusive(|&(_, end)| end).map(<[_]>::len).collect();
        assert!(lengths.iter().rev().skip(1).all(|&length| length == 4), "{lengths:?}");
        cut += asked.len();
        whole += lengths.iter().filter(|&&length| length == 4).count();
    }
    // What was asked beyond the 30 ended sequences that were under way, one each.
    let (cut, told) = (cut - 30, report["sequences"]["whole"].as_u64().unwrap() as usize);
    assert!(cut <= 3 && (whole - cut..=whole).contains(&told), "{cut} cut, {whole} of 4: {report}");
    assert_eq!((&report["sequences"]["length"], &report["sequences"]["broken"]), (&4.into(), &0.into()));
    assert_eq!(server.sequences(), 0);
}

#[tokio::test]
async fn a_sequence_whose_request_fails_is_broken_and_another_begins() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    // Of requests 1 to 20, the 7th and 14th find their sequences lost: (1 2 3 4 5) (6 7!) (8 9 10 11 12)
    // (13 14!) (15 16 17 18 19) (20.
    let report = report(&sandbox, "forgets --sequence-length 5 --requests 20").await;
    assert_eq!((&report["answered"], &report["failed"]), (&18.into(), &2.into()), "{report}");
    assert_eq!(report["sequences"], serde_json::json!({ "length": 5, "whole": 3, "broken": 2 }));
    assert_eq!(report["errors"]["NotFound (SEQUENCE_NOT_FOUND)"]["count"], 2, "{report}");
    let begun = server.sequences_asked().iter().filter(|(_, start, _)| *start).count();
    assert_eq!((begun, server.sequences()), (6, 0));

    let run = sandbox.run("load counts --sequence-length 2 --requests 6 --warm-up 0s").await;
    assert!(run.stdout.contains("3 sequences of 2 whole, 0 broken"), "{run:?}");
    let run = sandbox.run("load counts --requests 2 --warm-up 0s").await;
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("MALFORMED_REQUEST"), "without the option there is no sequence: {run:?}");
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
    for flags in ["", "--http-json", "--rate 500", "--sequence-length 3", "--http-json --sequence-length 3"] {
        let report = report(&sandbox, &format!("http://{address} --model echo --requests 50 {flags}")).await;
        assert_eq!((&report["answered"], &report["protocol"]), (&50.into(), &"http".into()), "{flags}");
        assert!((report["server_us"]["run"]["p50"].as_f64().unwrap() - 1000.0).abs() < 2.0);
    }
    let run = sandbox.run(&format!("load http://{address} --model other --requests 2 --warm-up 0s")).await;
    assert_eq!(run.code, 1);
    assert!(run.stdout.contains("2 failed, HTTP 429 (QUEUE_FULL): full"), "{}", run.stdout);
}
