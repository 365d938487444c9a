//! The worker's port: its service, its health for whoever probes it, its metrics for whoever scrapes.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use millrace_proto::parts::objects_server;
use millrace_proto::status::of_code;
use millrace_proto::worker::worker_server::WorkerServer;
use millrace_transport::{ServerConfig, Serving, serve_service};
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::meters::Shown;
use crate::service::{Limits, WorkerService};

/// Bytes of one request that may be on the wire unread: large inputs would wait for the gateway's
/// round trips otherwise.
const STREAM_WINDOW: u32 = 4 << 20;
/// The same for one connection.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Calls of one gateway that are served at a time: all its requests to this worker share a connection.
const STREAMS_MAX: u32 = 16_384;
/// Interval between the questions to a quiet gateway whether it is there, and the time that it has to
/// answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How long open connections may take to end when the server stops. Gateways hold theirs for ever.
const SERVER_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Server(Serving);

/// What `grpc.health.v1` answers: serving, until it is told otherwise.
#[derive(Debug)]
pub(super) struct Health(HealthReporter);

impl Health {
    /// Says from now on that nothing is served here.
    pub(super) async fn refuse(&self) {
        self.0.set_service_status("", ServingStatus::NotServing).await;
    }
}

impl Server {
    pub(super) async fn stop(self) {
        self.0.close(SERVER_GRACE).await;
    }
}

/// Serves until it is stopped, or dropped.
pub(super) fn serve(
    service: &WorkerService,
    limits: Limits,
    shown: Shown,
    listener: TcpListener,
) -> (Server, Health) {
    let bytes = usize::try_from(limits.message.get()).unwrap_or(usize::MAX);
    let worker =
        WorkerServer::new(service.clone()).max_decoding_message_size(bytes).max_encoding_message_size(bytes);
    let objects = objects_server(service.clone());
    let (reporter, health) = tonic_health::server::health_reporter();
    let shown = Arc::new(shown);
    let metrics = axum::routing::get(move |headers: HeaderMap| {
        let shown = shown.clone();
        async move { shown.answer(&headers).await }
    });
    let routes = Routes::new(worker)
        .add_service(objects)
        .add_service(health)
        .into_axum_router()
        .route("/metrics", metrics);
    let config = ServerConfig {
        port: limits.port,
        streams_max: STREAMS_MAX,
        stream_window: STREAM_WINDOW,
        connection_window: CONNECTION_WINDOW,
        keep_alive_every: KEEP_ALIVE,
        keep_alive_max: KEEP_ALIVE,
        arriving_max: limits.in_flight.get(),
        ..ServerConfig::default()
    };
    (Server(serve_service(listener, config, Routes::from(routes).prepare(), of_code)), Health(reporter))
}
