//! Starts the parts of a controller in the order in which they need each other, and stops them in
//! the reverse order.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millrace_gateway::auth::{Anyone, Authenticate, LoopbackOnly};
use millrace_gateway::config::FrontDoorConfig;
use millrace_gateway::serve::{self, FrontDoor};
use millrace_proto::admin::admin_server::AdminServer;
use millrace_proto::worker::worker_control_server::WorkerControlServer;
use millrace_types::ClusterId;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::admin::{AdminService, Faults};
use crate::artifacts::{Artifacts, Store};
use crate::config::{ControllerConfig, KEEP_ALIVE};
use crate::connector::Connector;
use crate::fleet::control::Control;
use crate::fleet::{Fleet, desired};
use crate::raft::bootstrap::{self, Started};
use crate::raft::{Replica, service};
use crate::serving::Serving;
use crate::{RaftError, StartError, meters};

/// How long the workers' streams may take to end when the controller goes down.
const STREAMS_END_TIMEOUT: Duration = Duration::from_secs(2);

/// A running controller. Dropping it stops everything at once; [`Controller::shutdown`] lets
/// requests finish. Either way nothing that was acknowledged is lost.
pub struct Controller {
    client_addr: SocketAddr,
    internal_addr: SocketAddr,
    cluster_id: ClusterId,
    /// Gone once it was drained.
    front: Option<serve::Serving>,
    internal: JoinHandle<()>,
    background: JoinSet<()>,
    replica: Replica,
    /// Ends the workers' streams and the background work, also when this is dropped.
    stop: DropGuard,
}

/// Starts a controller: when this returns, it leads its cluster and serves.
///
/// # Errors
/// [`StartError`] says what is in the way and what to do about it. Nothing is left running.
pub async fn start(
    config: ControllerConfig,
    connector: Arc<dyn Connector>,
) -> Result<Controller, StartError> {
    let exposed =
        [config.client_listen, config.internal_listen].into_iter().find(|it| !it.ip().is_loopback());
    if let Some(address) = exposed.filter(|_| !config.insecure) {
        return Err(StartError::Exposed { address });
    }
    let opened = bootstrap::open(config.data_dir.clone(), config.clock.now(), config.seed).await?;
    let holder = opened.identity.controller;
    let cluster_id = opened.identity.cluster.clone();
    let (internal_listener, internal_addr) = listen(config.internal_listen).await?;
    let (client_listener, client_addr) = listen(config.client_listen).await?;
    let store = open_artifacts(&config.data_dir).await?;
    let started = bootstrap::start(opened, internal_addr.to_string(), config.clock.clone()).await?;

    let Started { raft, replica } = started;
    let fleet = Fleet::new();
    let (desired, desired_now) = watch::channel(None);
    let stop = CancellationToken::new();
    let artifacts =
        Arc::new(Artifacts::new(store, replica.clone(), holder, config.clock.clone(), config.limits.clone()));
    let mut background = JoinSet::new();
    background.spawn(desired::publish_until(stop.clone(), replica.clone(), desired));
    background.spawn({
        let (artifacts, stop) = (artifacts.clone(), stop.clone());
        async move { artifacts.collect_until(stop).await }
    });
    let control = Control {
        cluster_id: cluster_id.clone(),
        replica: replica.clone(),
        fleet: fleet.clone(),
        artifacts: artifacts.clone(),
        connector,
        desired: desired_now,
        limits: config.limits.clone(),
        stop: stop.clone(),
    };
    let raft_service = service::Service::server(raft, cluster_id.clone());
    let internal = tokio::spawn(serve_internal(internal_listener, control, raft_service));
    let faults = if config.allow_faults { Faults::Allowed } else { Faults::Refused };
    let admin = AdminService { replica: replica.clone(), fleet: fleet.clone(), artifacts, faults };
    let front = open_front_door(&config, client_listener, admin, replica.clone(), fleet);
    let front = front.map_err(|source| StartError::Listen { address: client_addr, source })?;
    tracing::info!(%client_addr, %internal_addr, cluster = %cluster_id, "controller is up");
    let stop = stop.drop_guard();
    let front = Some(front);
    Ok(Controller { client_addr, internal_addr, cluster_id, front, internal, background, replica, stop })
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let bind = async {
        let listener = TcpListener::bind(address).await?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    bind.await.map_err(|source| StartError::Listen { address, source })
}

async fn open_artifacts(data_dir: &Path) -> Result<Store, StartError> {
    let dir = data_dir.to_owned();
    let opened =
        tokio::task::spawn_blocking(move || Store::open(&dir)).await.map_err(RaftError::Interrupted)?;
    opened.map_err(|error| StartError::Artifacts { data_dir: data_dir.to_owned(), reason: error.to_string() })
}

async fn serve_internal(
    listener: TcpListener,
    control: Control,
    raft: millrace_proto::raft::raft_server::RaftServer<service::Service>,
) {
    let stop = control.stop.clone();
    let served = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .add_service(WorkerControlServer::new(control))
        .add_service(raft)
        .serve_with_incoming_shutdown(
            TcpIncoming::from(listener).with_nodelay(Some(true)),
            stop.cancelled_owned(),
        );
    if let Err(error) = served.await {
        tracing::error!(%error, "the internal port is not served any more");
    }
}

fn open_front_door(
    config: &ControllerConfig,
    listener: TcpListener,
    admin: AdminService,
    replica: Replica,
    fleet: Fleet,
) -> std::io::Result<serve::Serving> {
    let clock = config.clock.clone();
    let authenticate: Arc<dyn Authenticate> =
        if config.insecure { Arc::new(Anyone::default()) } else { Arc::new(LoopbackOnly::default()) };
    let front = FrontDoorConfig {
        authenticate,
        ..FrontDoorConfig::new(Arc::new(move || Duration::from_millis(clock.now().0)), config.seed)
    };
    let metrics = meters::registry(replica.clone(), fleet.clone());
    let door = FrontDoor::new(front, Arc::new(Serving::new(replica, fleet)));
    let opened = door.service(AdminServer::new(admin)).metrics(metrics).serve(listener);
    opened.map_err(std::io::Error::other)
}

impl Controller {
    /// Where clients connect.
    #[must_use]
    pub fn client_addr(&self) -> SocketAddr {
        self.client_addr
    }

    /// Where workers and other controllers connect.
    #[must_use]
    pub fn internal_addr(&self) -> SocketAddr {
        self.internal_addr
    }

    /// The cluster's name.
    #[must_use]
    pub fn cluster_id(&self) -> &ClusterId {
        &self.cluster_id
    }

    /// Stops taking requests and waits up to `grace` for those under way; workers stay attached.
    /// Returns how many connections were cut short.
    pub async fn drain(&mut self, grace: Duration) -> usize {
        match self.front.take() {
            Some(front) => front.close(grace).await,
            None => 0,
        }
    }

    /// Drains, unless that was done, then lets the workers go and leaves Raft. Returns how many
    /// connections were cut short.
    pub async fn shutdown(mut self, grace: Duration) -> usize {
        let cut = self.drain(grace).await;
        let Self { mut internal, mut background, replica, stop, .. } = self;
        stop.disarm().cancel();
        if tokio::time::timeout(STREAMS_END_TIMEOUT, &mut internal).await.is_err() {
            tracing::warn!("a worker's stream did not end in time");
            internal.abort();
        }
        while background.join_next().await.is_some() {}
        replica.shutdown().await;
        cut
    }
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller")
            .field("client_addr", &self.client_addr)
            .field("internal_addr", &self.internal_addr)
            .field("cluster_id", &self.cluster_id)
            .finish_non_exhaustive()
    }
}
