//! Logs and traces: the exported spans, and a collector that is gone, which must not delay a verb.

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use http::HeaderMap;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::fake::Fake;
use crate::support::Sandbox;

const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// Starts a collector that forwards the messages that it receives.
async fn collector() -> (SocketAddr, mpsc::UnboundedReceiver<Bytes>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let sender = sender.clone();
            let service = service_fn(move |request| export(request, sender.clone()));
            let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service);
            tokio::spawn(async move { connection.await.ok() });
        }
    });
    (address, receiver)
}

async fn export(
    request: Request<Incoming>,
    sender: mpsc::UnboundedSender<Bytes>,
) -> Result<Response<impl hyper::body::Body<Data = Bytes, Error = Infallible>>, Infallible> {
    assert_eq!(request.uri().path(), EXPORT);
    sender.send(request.into_body().collect().await.unwrap().to_bytes()).unwrap();
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    // An empty message: the collector rejected no span.
    let body = Full::new(Bytes::from_static(&[0; 5])).with_trailers(async { Some(Ok(trailers)) });
    let mut response = Response::new(body);
    response.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
    Ok(response)
}

fn contains(message: &[u8], text: &str) -> bool {
    message.windows(text.len()).any(|window| window == text.as_bytes())
}

#[tokio::test]
async fn a_verb_exports_its_trace_to_the_given_collector() {
    let server = Fake::start().await;
    let (address, mut messages) = collector().await;
    let sandbox = Sandbox::of(&server.address);
    let run = sandbox.run(&format!("invoke echo --json [1,2] --otlp-endpoint http://{address}")).await;
    assert_eq!(run.code, 0, "{run:?}");
    // The message was sent before the process ended.
    let message = messages.try_recv().unwrap();
    assert!(contains(&message, "invoke") && contains(&message, "service.name"));
    let traced = server.traceparents();
    assert!(!traced.is_empty() && traced.iter().all(|parent| parent.starts_with("00-")), "{traced:?}");
}

#[tokio::test]
async fn no_trace_is_sent_without_a_collector() {
    let server = Fake::start().await;
    let run = Sandbox::of(&server.address).run("invoke echo --json [1,2]").await;
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(server.traceparents(), Vec::<String>::new());
}

#[tokio::test]
async fn an_unreachable_collector_does_not_fail_a_verb() {
    let server = Fake::start().await;
    let run =
        Sandbox::of(&server.address).run("invoke echo --json [1,2] --otlp-endpoint http://127.0.0.1:1").await;
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("echo  request "), "{}", run.stdout);
}

#[tokio::test]
async fn logs_are_written_to_stderr_as_json_on_request() {
    let server = Fake::start().await;
    let run = Sandbox::of(&server.address).run("ps --log trace --log-format json -o json").await;
    assert_eq!(run.code, 0, "{run:?}");
    assert!(serde_json::from_str::<serde_json::Value>(&run.stdout).is_ok(), "{}", run.stdout);
    let line = run.stderr.lines().next().expect("a line is logged at trace level");
    assert!(serde_json::from_str::<serde_json::Value>(line).unwrap()["level"].is_string(), "{line}");
}
