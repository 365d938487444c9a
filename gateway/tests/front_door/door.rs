//! Tests the middleware for every service: identity, ids, health, reflection, metrics, closing.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use millrace_gateway::authentication::{Authenticate, LoopbackOnly};
use millrace_gateway::{Caller, GatewayConfig, GatewayLimits};
use millrace_proto::inference::ServerLiveRequest;
use millrace_transport::{PortLimits, ServerConfig};
use millrace_types::{Failure, Reason};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_stream::StreamExt as _;
use tonic::server::NamedService;
use tonic::{Code, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::harness::{Server, config, refuses, row};

/// Accepts only callers with the right token.
struct Word;

impl Authenticate for Word {
    fn authenticate(&self, _peer: SocketAddr, headers: &HeaderMap) -> Result<Caller, Failure> {
        match headers.get("authorization").map(|value| value.as_bytes()) {
            Some(b"Bearer word") => Ok(Caller::new("alice")),
            _ => Err(Failure::new(Reason::Unauthenticated, "say the word")),
        }
    }
}

/// A service that records its callers.
#[derive(Clone, Default)]
struct Probe(Arc<Mutex<Vec<String>>>);

impl NamedService for Probe {
    const NAME: &'static str = "test.Probe";
}

impl tower::Service<Request<tonic::body::Body>> for Probe {
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let caller = request.extensions().get::<Caller>().unwrap().to_string();
        self.0.lock().unwrap().push(caller);
        ready(Ok(Status::ok("").into_http()))
    }
}

#[tokio::test]
async fn every_service_has_the_same_authentication() {
    let config = GatewayConfig { authenticate: Arc::new(Word), ..config(GatewayLimits::default()) };
    let probe = Probe::default();
    let server = Server::of(config, |door| door.service(probe.clone())).await;
    let mut client = server.grpc().await;
    let status = client.server_live(ServerLiveRequest {}).await.unwrap_err();
    refuses(&status, Code::Unauthenticated, Reason::Unauthenticated, "word");
    server.get("/v2/health/live").await.refuses(401, Reason::Unauthenticated, "word");
    server.get("/metrics").await.refuses(401, Reason::Unauthenticated, "word");

    let mut request = tonic::Request::new(row("mlp"));
    request.metadata_mut().insert("authorization", "Bearer word".parse().unwrap());
    client.model_infer(request).await.unwrap();
    assert_eq!(server.echo.last().caller, Caller::new("alice"));

    let headers = [("content-type", "application/grpc"), ("authorization", "Bearer word")];
    let reply = server.post_with("/test.Probe/Any", &headers, "").await;
    assert_eq!(reply.header("grpc-status"), "0", "{reply:?}");
    assert_eq!(*probe.0.lock().unwrap(), ["alice"]);
}

#[tokio::test]
async fn callers_of_this_machine_are_anonymous_by_default() {
    let server = Server::start().await;
    server.grpc().await.model_infer(row("mlp")).await.unwrap();
    assert_eq!(server.echo.last().caller, Caller::anonymous());
    let stranger = "192.0.2.7:9".parse().unwrap();
    assert!(LoopbackOnly::default().authenticate(stranger, &HeaderMap::new()).is_err());
}

#[tokio::test]
async fn every_response_has_a_request_id() {
    let server = Server::start().await;
    let mut seen = Vec::new();
    for path in ["/v2", "/nowhere", "/v2/models/nowhere", "/metrics"] {
        let reply = server.get(path).await;
        assert_eq!(reply.header("x-request-id").len(), 26, "{path}");
        seen.push(reply.header("x-request-id").to_owned());
    }
    seen.dedup();
    assert_eq!(seen.len(), 4);
    let status = server.grpc().await.model_infer(row("nowhere")).await.unwrap_err();
    assert_eq!(status.metadata().get("x-request-id").unwrap().len(), 26);
}

#[tokio::test]
async fn an_unknown_method_is_unimplemented() {
    let server = Server::start().await;
    for path in ["/inference.GRPCInferenceService/Dance", "/other.Service/Call"] {
        let reply = server.post_with(path, &[("content-type", "application/grpc")], "").await;
        assert_eq!(reply.header("grpc-status"), "12", "{path}: {reply:?}");
    }
}

#[tokio::test]
async fn health_follows_readiness() {
    let server = Server::start().await;
    let mut client = HealthClient::new(server.channel().await);
    let of = |service: &str| HealthCheckRequest { service: service.into() };
    for service in ["", "inference.GRPCInferenceService", "grpc.health.v1.Health"] {
        let status = client.check(of(service)).await.unwrap().into_inner().status();
        assert_eq!(status, ServingStatus::Serving, "{service}");
    }
    assert_eq!(client.check(of("other.Service")).await.unwrap_err().code(), Code::NotFound);
    let mut watched = client.watch(of("")).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    server.echo.set_ready(false);
    assert_eq!(watched.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    let mut unknown = client.watch(of("other.Service")).await.unwrap().into_inner();
    assert_eq!(unknown.message().await.unwrap().unwrap().status(), ServingStatus::ServiceUnknown);
}

#[tokio::test]
async fn reflection_lists_exactly_the_served_services() {
    let server = Server::of(config(GatewayLimits::default()), |door| door.service(Probe::default())).await;
    macro_rules! list {
        ($version:ident) => {{
            use tonic_reflection::pb::$version::ServerReflectionRequest;
            use tonic_reflection::pb::$version::server_reflection_client::ServerReflectionClient;
            use tonic_reflection::pb::$version::server_reflection_request::MessageRequest;
            use tonic_reflection::pb::$version::server_reflection_response::MessageResponse;
            let ask = |ask| ServerReflectionRequest { host: String::new(), message_request: Some(ask) };
            let symbol = "inference.GRPCInferenceService".to_owned();
            let requests = [
                ask(MessageRequest::ListServices(String::new())),
                ask(MessageRequest::FileContainingSymbol(symbol)),
            ];
            let mut client = ServerReflectionClient::new(server.channel().await);
            let answers = client.server_reflection_info(tokio_stream::iter(requests)).await.unwrap();
            let answers: Vec<_> =
                answers.into_inner().map(|answer| answer.unwrap().message_response).collect().await;
            let [
                Some(MessageResponse::ListServicesResponse(list)),
                Some(MessageResponse::FileDescriptorResponse(_)),
            ] = answers.as_slice()
            else {
                panic!("unexpected responses: {answers:?}")
            };
            list.service.iter().map(|service| service.name.clone()).collect::<Vec<_>>()
        }};
    }
    for mut names in [list!(v1), list!(v1alpha)] {
        names.retain(|name| !name.starts_with("grpc.reflection"));
        names.sort();
        assert_eq!(names, ["grpc.health.v1.Health", "inference.GRPCInferenceService", "test.Probe"]);
    }
}

#[tokio::test]
async fn metrics_page_has_own_and_added_metrics() {
    let mut registry = Registry::default();
    let counter: Counter = Counter::default();
    registry.register("millrace_elections", "Elections seen", counter.clone());
    counter.inc();
    let server = Server::of(config(GatewayLimits::default()), |door| door.metrics(registry)).await;
    let mut client = server.grpc().await;
    client.model_infer(row("mlp")).await.unwrap();
    client.model_infer(row("nowhere")).await.unwrap_err();
    let accept = [("accept", "application/openmetrics-text; version=1.0.0")];
    let reply = server.send(Method::GET, "/metrics", &accept, Bytes::new()).await;
    assert!(reply.header("content-type").starts_with("application/openmetrics-text"));
    assert!(reply.body.ends_with(b"# EOF\n"));
    let reply = server.get("/metrics").await;
    assert!(reply.header("content-type").starts_with("text/plain"));
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    for line in [
        "millrace_elections_total 1",
        r#"millrace_requests_total{tenant="default",function="mlp",reason="OK"} 1"#,
        r#"millrace_requests_total{tenant="",function="",reason="FUNCTION_NOT_FOUND"} 1"#,
        r#"millrace_request_run_seconds_count{tenant="default",function="mlp"} 1"#,
        "millrace_requests_in_flight 0",
        "millrace_request_in_flight_max_bytes 1073741824",
    ] {
        assert!(text.lines().any(|found| found == line), "no {line} in\n{text}");
    }
}

#[tokio::test]
async fn closing_answers_requests_in_progress_and_refuses_new_ones() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let under_way = tokio::spawn({
        let mut client = client.clone();
        async move { client.model_infer(row("held")).await }
    });
    server.echo.running(1).await;
    let addr = server.addr;
    let echo = Arc::clone(&server.echo);
    let closing = tokio::spawn(server.serving.close(Duration::from_secs(60)));
    while TcpStream::connect(addr).await.is_ok() {
        tokio::task::yield_now().await;
    }
    echo.release();
    under_way.await.unwrap().unwrap();
    assert!(client.model_infer(row("mlp")).await.is_err());
    drop(client);
    assert_eq!(closing.await.unwrap(), 0);
}

#[tokio::test]
async fn closing_waits_at_most_the_grace() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let stuck = tokio::spawn(async move { client.model_infer(row("held")).await });
    server.echo.running(1).await;
    assert_eq!(server.serving.close(Duration::from_millis(20)).await, 1);
    server.echo.cancelled(1).await;
    assert!(stuck.await.unwrap().is_err());
}

#[tokio::test]
async fn idle_connections_do_not_delay_closing() {
    let server = Server::start().await;
    let mut silent = TcpStream::connect(server.addr).await.unwrap();
    let mut kept = TcpStream::connect(server.addr).await.unwrap();
    kept.write_all(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut first = [0; 12];
    kept.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    assert_eq!(server.serving.close(Duration::from_secs(60)).await, 0);
    for connection in [&mut silent, &mut kept] {
        connection.read_to_end(&mut Vec::new()).await.unwrap();
    }
}

#[tokio::test]
async fn an_idle_connection_is_displaced_by_another_client() {
    let server = ServerConfig { port: PortLimits::new(1), ..ServerConfig::default() };
    let server = Server::with(GatewayLimits { server, ..GatewayLimits::default() }).await;
    let mut first = server.grpc().await;
    first.model_infer(row("mlp")).await.unwrap();
    assert_eq!(server.get("/v2/health/live").await.status, 200);
    // The first client reconnects with its next request.
    first.model_infer(row("mlp")).await.unwrap();
}
