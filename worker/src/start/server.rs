//! The worker's port, with its service, health probes and metrics.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use millrace_proto::parts::objects_server;
use millrace_proto::status::of_code;
use millrace_proto::worker::worker_server::WorkerServer;
use millrace_transport::{ServedPort, ServerConfig, serve_service};
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::meters::MetricsHandler;
use crate::service::{ServiceLimits, WorkerService};

/// Flow-control window of one request, in bytes. With a smaller window, large inputs would wait for
/// round trips to the gateway.
const STREAM_WINDOW: u32 = 4 << 20;
/// Flow-control window of one connection, in bytes.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Maximum number of concurrent calls of one gateway: all its requests to this worker share a
/// connection.
const STREAMS_MAX: u32 = 16_384;
/// Interval between keep-alive pings to an idle gateway, and the time that it has to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Time that open connections have to end when the server stops. Gateways keep theirs open
/// otherwise.
const SERVER_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Server(ServedPort);

/// The health status of `grpc.health.v1`: serving, until [`HealthStatus::refuse`].
#[derive(Debug)]
pub(super) struct HealthStatus(HealthReporter);

impl HealthStatus {
    /// Reports from now on that the worker does not serve.
    pub(super) async fn refuse(&self) {
        self.0.set_service_status("", ServingStatus::NotServing).await;
    }
}

impl Server {
    pub(super) async fn stop(self) {
        self.0.close(SERVER_GRACE).await;
    }
}

/// Serves until the server is stopped or dropped.
pub(super) fn serve(
    service: &WorkerService,
    limits: ServiceLimits,
    shown: MetricsHandler,
    listener: TcpListener,
) -> (Server, HealthStatus) {
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
    (Server(serve_service(listener, config, Routes::from(routes).prepare(), of_code)), HealthStatus(reporter))
}
