//! The load generator against small servers in this process.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;

use crate::fake::{Fake, STALL};
use crate::support::Sandbox;

async fn report(sandbox: &Sandbox, line: &str) -> Value {
    let run = sandbox.run(&format!("load --warm-up 0s -o json {line}")).await;
    assert_eq!(run.code, 0, "{line}: {run:?}");
    serde_json::from_str(&run.stdout).unwrap()
}

#[tokio::test]
async fn a_closed_loop_sends_the_requested_number_of_requests() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    let report = report(&sandbox, "echo --requests 200 --concurrency 8 --input-shape x=3x2").await;
    assert_eq!((&report["answered"], &report["failed"]), (&200.into(), &0.into()));
    assert_eq!((&report["loop"], &report["concurrency"]), (&"closed".into(), &8.into()));
    assert_eq!(report["inputs"]["x"], serde_json::json!([3, 2]));
    let latency = |key: &str| report["latency_us"][key].as_f64().unwrap();
    assert!(latency("min") > 0.0 && latency("p50") <= latency("p99.9") && latency("p99.9") <= latency("max"));
    // The server reports its latency breakdown; the run takes the fake's fixed time.
    assert!((report["server_us"]["run"]["p50"].as_f64().unwrap() - 1500.0).abs() < 2.0);
}

#[tokio::test]
async fn requests_are_spread_over_the_endpoints_that_can_be_reached() {
    let one = Fake::start().await;
    let two = Fake::start().await;
    let gone = crate::fake::dead_address().await;
    let sandbox = Sandbox::of(&format!("{},{},{gone}", one.address, two.address));
    let report = report(&sandbox, "echo --requests 90 --concurrency 3").await;
    assert_eq!(
        (&report["answered"], &report["failed"], &report["connections"]),
        (&90.into(), &0.into(), &3.into())
    );
    // The faster server gets more requests. Only the first request of each connection is certain.
    assert!(!one.ids().is_empty() && !two.ids().is_empty(), "{} and {}", one.ids().len(), two.ids().len());
}

#[tokio::test]
async fn an_open_loop_charges_a_stall_to_every_delayed_request() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    let report = report(&sandbox, "stalls --requests 100 --rate 200 --arrival uniform").await;
    assert_eq!(report["answered"], 100);
    let latency = |key: &str| report["latency_us"][key].as_f64().unwrap();
    let stall = STALL.as_secs_f64() * 1e6;
    assert!(latency("max") >= stall, "{report}");
    // Of 100 requests 5 ms apart, the 20 requests of the stall's first 100 ms waited 200 ms or
    // more. A generator that waits for responses would have seen only one slow request.
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
async fn load_reports_requests_over_max_in_flight_as_not_sent() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    let line = "load stalls --requests 60 --rate 2000 --max-in-flight 1 --warm-up 0s -o json";
    let report: Value = serde_json::from_str(&sandbox.run(line).await.stdout).unwrap();
    let answered = report["answered"].as_u64().unwrap();
    let failed = report["failed"].as_u64().unwrap();
    assert_eq!(answered + failed, 60);
    if failed > 0 {
        assert_eq!(report["errors"]["not sent"]["count"], failed);
    }
}

#[tokio::test]
async fn the_default_report_is_a_table() {
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
async fn each_client_sends_one_sequence_after_another_and_leaves_none_open() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    // The last sequence of each client is open when the requests are used up.
    let report = report(&sandbox, "counts --sequence-length 4 --requests 30 --concurrency 3").await;
    assert_eq!((&report["answered"], &report["failed"]), (&30.into(), &0.into()), "{report}");
    let mut clients: BTreeMap<i64, Vec<(bool, bool)>> = BTreeMap::new();
    for (id, start, end) in server.sequences_asked() {
        clients.entry(id).or_default().push((start, end));
    }
    assert_eq!(clients.len(), 3);
    let mut whole = 0;
    let mut cut = 0;
    for asked in clients.values() {
        for sequence in asked.split_inclusive(|&(_, end)| end) {
            let (&(_, ended), before) = sequence.split_last().unwrap();
            assert!(ended && before.iter().all(|&(_, end)| !end), "{asked:?}");
            // A sequence that was cut has one more request than measured: the request that ended
            // it.
            assert!(sequence[0].0 && sequence[1..].iter().all(|&(start, _)| !start), "{asked:?}");
            assert!(sequence.len() <= 4, "{asked:?}");
        }
        let lengths: Vec<usize> = asked.split_inclusive(|&(_, end)| end).map(<[_]>::len).collect();
        assert!(lengths.iter().rev().skip(1).all(|&length| length == 4), "{lengths:?}");
        cut += asked.len();
        whole += lengths.iter().filter(|&&length| length == 4).count();
    }
    // The requests beyond the 30 ended open sequences, one each.
    let cut = cut - 30;
    let told = report["sequences"]["whole"].as_u64().unwrap() as usize;
    assert!(cut <= 3 && (whole - cut..=whole).contains(&told), "{cut} cut, {whole} of 4: {report}");
    assert_eq!((&report["sequences"]["length"], &report["sequences"]["broken"]), (&4.into(), &0.into()));
    assert_eq!(server.sequences(), 0);
}

#[tokio::test]
async fn a_failed_request_breaks_its_sequence_and_another_begins() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    // Of requests 1 to 20, the 7th and the 14th find their sequences lost: (1 2 3 4 5) (6 7!) (8 9
    // 10 11 12) (13 14!) (15 16 17 18 19) (20.
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
    assert!(
        run.stderr.contains("MALFORMED_REQUEST"),
        "without the option, requests have no sequence: {run:?}"
    );
}

/// Starts a server of the protocol over HTTP. Model `echo` returns its body; other models are
/// refused.
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
async fn load_sends_binary_and_json_tensors_over_http() {
    let address = http_server().await;
    let sandbox = Sandbox::new();
    for flags in ["", "--http-json", "--rate 500", "--sequence-length 3", "--http-json --sequence-length 3"] {
        let report = report(&sandbox, &format!("http://{address} --model echo --requests 50 {flags}")).await;
        assert_eq!((&report["answered"], &report["protocol"]), (&50.into(), &"http".into()), "{flags}");
        assert!((report["server_us"]["run"]["p50"].as_f64().unwrap() - 1000.0).abs() < 2.0);
    }
    let run = sandbox.run(&format!("load http://{address} --model other --requests 2 --warm-up 0s")).await;
    assert_eq!(run.code, 1);
    assert!(run.stdout.contains("2 failed, HTTP 429 (QUEUE_FULL): full"), "{}", run.stdout);
}
