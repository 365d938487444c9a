//! The worker's port: its service, its health for whoever probes it, its metrics for whoever scrapes.

use std::time::Duration;

use millrace_proto::worker::worker_objects_server::WorkerObjectsServer;
use millrace_proto::worker::worker_server::WorkerServer;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::meters::Shown;
use crate::service::{Limits, WorkerService};

/// Bytes of one request that may be on the wire unread: large inputs would wait for the gateway's
/// round trips otherwise.
const STREAM_WINDOW: u32 = 4 << 20;
/// The same for one connection.
const CONNECTION_WINDOW: u32 = 16 << 20;
/// How long open connections may take to end when the server stops. Gateways hold theirs for ever.
const SERVER_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Server {
    pub(super) task: JoinSet<Result<(), tonic::transport::Error>>,
    stop: oneshot::Sender<()>,
}

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
    pub(super) async fn stop(mut self) {
        // A server that ended by itself does not listen any more.
        let _gone = self.stop.send(());
        if tokio::time::timeout(SERVER_GRACE, self.task.join_next()).await.is_err() {
            self.task.shutdown().await;
        }
    }
}

/// Serves until it is stopped, or dropped.
pub(super) fn serve(
    service: &WorkerService,
    limits: Limits,
    shown: Shown,
    incoming: TcpIncoming,
) -> (Server, Health) {
    let bytes = usize::try_from(limits.message.get()).unwrap_or(usize::MAX);
    let worker =
        WorkerServer::new(service.clone()).max_decoding_message_size(bytes).max_encoding_message_size(bytes);
    // Chunks are small: the default limits do.
    let objects = WorkerObjectsServer::new(service.clone());
    let (reporter, health) = tonic_health::server::health_reporter();
    let (stop, stopped) = oneshot::channel::<()>();
    let mut task = JoinSet::new();
    let metrics = axum::routing::get(move |headers| shown.clone().answer(headers));
    let routes = Routes::new(worker)
        .add_service(objects)
        .add_service(health)
        .into_axum_router()
        .route("/metrics", metrics);
    let router = tonic::transport::Server::builder()
        // What scrapes metrics speaks no HTTP/2.
        .accept_http1(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .add_routes(Routes::from(routes));
    // Told to stop, or its worker dropped: both end it.
    task.spawn(router.serve_with_incoming_shutdown(incoming, async { drop(stopped.await) }));
    (Server { task, stop }, Health(reporter))
}
