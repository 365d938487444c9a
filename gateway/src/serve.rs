//! The listening socket, the connections, and the shutdown.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use http::Request;
use millrace_proto::DESCRIPTORS;
use millrace_proto::browser::AllowedHosts;
use millrace_proto::inference::grpc_inference_service_server::GrpcInferenceServiceServer;
use millrace_transport::ServerConfig;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tonic::codec::CompressionEncoding;
use tonic::server::NamedService;
use tonic::service::{Routes, RoutesBuilder};
use tonic_health::pb::health_server::HealthServer;

use crate::backend::Backend;
use crate::budget::ByteBudget;
use crate::bulk::BulkThreads;
use crate::closing::ShutdownSignal;
use crate::config::{ADMIN_IN_FLIGHT_MAX, GatewayConfig, LABELLED_FUNCTIONS_MAX, message_len};
use crate::grpc::health::FrontHealth;
use crate::grpc::{InferenceService, stream};
use crate::handler::InferenceHandler;
use crate::metrics::RequestMetrics;
use crate::middleware::{self, RequestLayer};
use crate::request_id::RequestIds;
use crate::rest;

/// A gateway that is not open yet. A single port serves everything: inference over gRPC and REST,
/// added services, health, reflection, and `/metrics`.
pub struct GatewayBuilder {
    config: GatewayConfig,
    backend: Arc<dyn Backend>,
    registry: Registry,
    services: BTreeSet<&'static str>,
    routes: RoutesBuilder,
}

/// An open gateway. Dropping the value closes the gateway at once; [`OpenGateway::close`] lets requests finish.
pub struct OpenGateway {
    local_addr: SocketAddr,
    closing: watch::Sender<bool>,
    port: millrace_transport::ServedPort,
}

/// Reason why the gateway cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The listener's own address is unknown.
    #[error("cannot read the bound address: {0}")]
    Address(std::io::Error),
    /// The operating system cannot start threads.
    #[error("cannot start threads for large messages: {0}: raise the limit of processes")]
    Threads(std::io::Error),
}

impl GatewayBuilder {
    /// Creates a gateway for `backend`.
    #[must_use]
    pub fn new(config: GatewayConfig, backend: Arc<dyn Backend>) -> Self {
        Self {
            config,
            backend,
            registry: Registry::default(),
            services: BTreeSet::new(),
            routes: Routes::builder(),
        }
    }

    /// Adds a gRPC service. The extensions of each of its requests contain a
    /// [`Caller`](crate::authentication::Caller), and its messages are decompressed and within the limits.
    #[must_use]
    pub fn service<S>(mut self, service: S) -> Self
    where
        S: tower::Service<Request<tonic::body::Body>, Error = std::convert::Infallible>
            + NamedService
            + Clone
            + Send
            + Sync
            + 'static,
        S::Response: axum::response::IntoResponse,
        S::Future: Send + 'static,
    {
        self.services.insert(S::NAME);
        self.routes.add_service(service);
        self
    }

    /// Adds metrics that `/metrics` serves too.
    #[must_use]
    pub fn metrics(mut self, registry: Registry) -> Self {
        self.registry = registry;
        self
    }

    /// Opens the gateway. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// Returns an [`Error`] if the listener's address is unknown, or threads cannot be started.
    pub fn serve(self, listener: TcpListener) -> Result<OpenGateway, Error> {
        let local_addr = listener.local_addr().map_err(Error::Address)?;
        let bulk = BulkThreads::start().map_err(Error::Threads)?;
        let (closing, closed) = ShutdownSignal::new();
        let limits = &self.config.limits;
        let server = ServerConfig { minimum_rate: Some(limits.minimum_rate), ..limits.server.clone() };
        let door = self.door(local_addr.ip(), closed, bulk);
        let port = millrace_transport::serve(listener, server, move |peer| {
            let door = door.for_connection();
            let open = OpenConnection::new(&door);
            move |request| {
                // Moved in, because the connection is open as long as this handler lives.
                let _open = &open;
                let door = door.clone();
                async move { door.admit(peer.address, request).await }
            }
        });
        Ok(OpenGateway { local_addr, closing, port })
    }

    fn door(self, listens: IpAddr, closing: ShutdownSignal, bulk: BulkThreads) -> RequestLayer {
        let Self { config, backend, mut registry, mut services, mut routes } = self;
        let GatewayConfig { limits, authenticate, wall_clock, host_names, seed, activity } = config;
        let budget = ByteBudget::new(limits.in_flight_max, limits.message_max);
        let admin_budget = ByteBudget::new(ADMIN_IN_FLIGHT_MAX, limits.admin_message_max());
        let meters =
            RequestMetrics::new(&mut registry, activity.0, LABELLED_FUNCTIONS_MAX, budget.capacity());
        let ids = RequestIds::new(Arc::clone(&wall_clock), seed);
        let message_len_max = message_len(limits.message_max);
        let waiting = Semaphore::new(limits.waiting_max);
        let front = Arc::new(InferenceHandler {
            backend,
            meters,
            ids,
            budget,
            admin_budget,
            waiting,
            bulk,
            limits,
            wall_clock,
            closing,
        });

        let inference = GrpcInferenceServiceServer::new(InferenceService(Arc::clone(&front)))
            .send_compressed(CompressionEncoding::Gzip)
            .send_compressed(CompressionEncoding::Deflate)
            .max_decoding_message_size(message_len_max);
        services.insert(GrpcInferenceServiceServer::<InferenceService>::NAME);
        services.insert(HealthServer::<FrontHealth>::NAME);
        let services = Arc::new(services);
        let health = FrontHealth { front: Arc::clone(&front), services: Arc::clone(&services) };
        routes.add_service(inference).add_service(HealthServer::new(health));
        add_reflection(&mut routes, &services);
        let streams_route = {
            let front = Arc::clone(&front);
            axum::routing::post(move |request| stream::serve(Arc::clone(&front), request))
        };
        let grpc: Router = routes.routes().prepare().into_axum_router();
        let grpc = grpc.route(middleware::STREAM, streams_route).fallback(middleware::unknown_method);
        let rest = rest::router(Arc::clone(&front), registry);
        let own_names = AllowedHosts::new(listens, host_names);
        let streams = Arc::new(client_streams());
        RequestLayer { shares: front.shares(), front, own_names, streams, authenticate, grpc, rest }
    }
}

/// Returns the paths of all methods with client streaming, of all services that could be added.
fn client_streams() -> BTreeSet<String> {
    let reflection =
        [tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET, tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET];
    [DESCRIPTORS].into_iter().chain(reflection).flat_map(millrace_proto::client_streaming_methods).collect()
}

/// Adds reflection of the served services, and of no other services in the descriptors.
fn add_reflection(routes: &mut RoutesBuilder, services: &BTreeSet<&'static str>) {
    let mut v1 = tonic_reflection::server::Builder::configure();
    let mut v1alpha = tonic_reflection::server::Builder::configure();
    for descriptors in [DESCRIPTORS, tonic_health::pb::FILE_DESCRIPTOR_SET] {
        v1 = v1.register_encoded_file_descriptor_set(descriptors);
        v1alpha = v1alpha.register_encoded_file_descriptor_set(descriptors);
    }
    for &service in services {
        v1 = v1.with_service_name(service);
        v1alpha = v1alpha.with_service_name(service);
    }
    match (v1.build_v1(), v1alpha.build_v1alpha()) {
        (Ok(v1), Ok(v1alpha)) => {
            routes.add_service(v1).add_service(v1alpha);
        }
        // The build made the descriptors, and a test checks that the descriptors are valid.
        (Err(error), _) | (_, Err(error)) => tracing::error!(%error, "cannot serve reflection"),
    }
}

impl OpenGateway {
    /// Returns the bound address, with the actual port if port 0 was requested.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Stops accepting connections and requests, waits up to `grace` for the requests in progress,
    /// and then drops the rest. Returns the number of connections that were cut.
    pub async fn close(self, grace: Duration) -> usize {
        self.closing.send_replace(true);
        self.port.close(grace).await
    }
}

/// Counts an open connection until the value is dropped.
struct OpenConnection(prometheus_client::metrics::gauge::Gauge);

impl OpenConnection {
    fn new(door: &RequestLayer) -> Self {
        let gauge = door.front.meters.connections.clone();
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}
