//! Starts the parts of a controller in order of dependencies, and stops all parts in reverse order.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::ControllerId;
use millrace_gateway::activity::Activity;
use millrace_gateway::authentication::{AllowAll, Authenticate, LoopbackOnly};
use millrace_gateway::config::GatewayConfig;
use millrace_gateway::serve::{self, GatewayBuilder};
use millrace_proto::admin::admin_server::AdminServer;
use millrace_proto::browser::host;
use millrace_proto::fault::fault_server::FaultServer;
use millrace_proto::parts::{MESSAGE_BYTES_MAX, control_server};
use millrace_proto::status::of_code;
use millrace_raft_store::mark_diverged;
use millrace_transport::PortLimits;
use millrace_types::ClusterId;
use millrace_types::limits::ANSWER_BYTES_MAX;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;

use crate::admin::{AdminService, FaultPermission, ORDER_SEARCHES_MAX};
use crate::artifacts::{ArtifactService, Bucket};
use crate::clock::MovedClock;
use crate::config::{ControllerConfig, ObjectStoreUrl, internal_server};
use crate::connector::Connector;
use crate::events::{ClusterEventLog, EventRecorder};
use crate::faults::FaultService;
use crate::fleet::{WorkerControlService, WorkerFleet};
use crate::halt_error::HaltError;
use crate::leader::Duties;
use crate::meters;
use crate::passed::TrafficMatrix;
use crate::peers::{Activities, GatewayActivity, PeerFanout, PeerService, ReadableParts, Traces};
use crate::raft::bootstrap::{self, OpenOptions};
use crate::raft::runtime::RaftSpawner;
use crate::raft::world::{HostEnvironment, SnapshotSchedule};
use crate::raft::{
    self, Replica, disks, divergence, elections, founding, unfinished_change, unheard, versions,
};
use crate::serving::ServingBackend;
use crate::start_error::StartError;
use millrace_storage::FileStore;

/// The longest wait for the workers' streams to end when the controller shuts down.
const STREAMS_END_TIMEOUT: Duration = Duration::from_secs(2);

/// A running controller. Dropping the controller stops everything at once; [`RunningController::shutdown`]
/// lets requests finish. No acknowledged write is lost in either case.
pub struct RunningController {
    client_addr: SocketAddr,
    internal_addr: SocketAddr,
    cluster_id: ClusterId,
    /// The client port; `None` once it is closed.
    front: Option<serve::OpenGateway>,
    /// Ends admin calls that wait for news.
    waiting: CancellationToken,
    internal: JoinHandle<()>,
    background: JoinSet<()>,
    replica: Replica,
    data_dir: PathBuf,
    /// Ends the workers' streams and the background work, also when the controller is dropped.
    stop: DropGuard,
}

/// Starts a controller, and returns when the controller serves. A single controller then leads the
/// cluster, and a controller that joined has the requested role. A reopened member serves the stored
/// state even while the group has no leader.
///
/// # Errors
/// [`StartError`] names the fault and the next step. Nothing keeps running.
pub async fn start(
    mut config: ControllerConfig,
    connector: Arc<dyn Connector>,
) -> Result<RunningController, StartError> {
    let exposed =
        [config.client_listen, config.internal_listen].into_iter().find(|it| !it.ip().is_loopback());
    if let Some(address) = exposed.filter(|_| !config.insecure) {
        return Err(StartError::Exposed { address });
    }
    let moved = config.fault_injection.then(|| Arc::new(MovedClock::new(config.clock.clone())));
    if let Some(moved) = &moved {
        config.clock = moved.clone();
    }
    let spawner = RaftSpawner::new(config.raft_runtime.clone());
    let empty = founding::say_empty(config.internal_listen, config.id, &config.start);
    let opened = bootstrap::open(opening(&config), empty).await?;
    let cluster_id = opened.identity.cluster.clone();
    let (internal_listener, internal_addr) = {
        let _raft_runtime = spawner.enter();
        listen(config.internal_listen)?
    };
    let (client_listener, client_addr) = listen(config.client_listen)?;
    let advertised =
        |said: &Option<String>, bound: SocketAddr| said.clone().unwrap_or_else(|| bound.to_string());
    let internal_address = advertised(&config.internal_advertise, internal_addr);
    let client_address = advertised(&config.client_advertise, client_addr);
    let store = open_artifacts(&config.data_dir).await?;
    let shared = config.artifacts.as_ref().map(|place| open_shared(place, &cluster_id)).transpose()?;
    let replica = bootstrap::replica(opened, client_address, config.clock.clone(), spawner.clone()).await?;

    let stop = CancellationToken::new();
    let guard = stop.clone().drop_guard();
    let fleet = WorkerFleet::new();
    let artifacts = Arc::new(ArtifactService::new(
        store,
        shared,
        replica.clone(),
        config.limits.clone(),
        config.inspection.clone(),
    ));
    let passed = TrafficMatrix::default();
    let leading = Duties::new(replica.clone(), fleet.clone(), config.limits.lease, passed.clone());
    let outlook = leading.outlook();
    let control = WorkerControlService {
        cluster_id: cluster_id.clone(),
        replica: replica.clone(),
        fleet: fleet.clone(),
        artifacts: artifacts.clone(),
        connector,
        requests: Handle::current(),
        outlook: outlook.clone(),
        stop: stop.clone(),
    };
    let doors = GatewayActivity {
        counts: Activity::default(),
        process: format!("controller/{}/{:016x}", config.id.0, config.seed),
    };
    let shown = ReadableParts { kept: config.kept.clone(), doors, passed: passed.clone() };
    let peer_service = PeerService::new(replica.clone(), artifacts.clone()).showing(shown.clone());
    let faults = moved.map(|clock| FaultService { clock, disk: replica.disk.clone() });
    if faults.is_some() {
        tracing::warn!(
            %internal_addr,
            "fault injection is on: any client of this address can move this controller's clock and stall its disk: use it in tests only"
        );
    }
    // Serve before entering the group: the other controllers call this port to send the log.
    let internal = serve_internal(internal_listener, config.limits.internal, control, peer_service, faults);
    let internal = spawner.spawn(internal);
    let mut background = JoinSet::new();
    let raft = spawner.handle();
    background.spawn_on(elections::run_until(stop.clone(), replica.clone(), config.seed), raft);
    background.spawn_on(unfinished_change::run_until(stop.clone(), replica.clone()), raft);
    background.spawn_on(disks::run_until(stop.clone(), replica.clone()), raft);
    background.spawn_on(unheard::run_until(stop.clone(), replica.clone()), raft);
    background.spawn(versions::run_until(stop.clone(), replica.clone()));
    background.spawn(divergence::run_until(stop.clone(), replica.clone()));
    if let Err(error) = bootstrap::enter(&replica, &config.start, &internal_address, &stop).await {
        drop(guard);
        end(internal, background, &replica).await;
        return Err(error.into());
    }
    if let Some(preset) = config.preset {
        crate::preset::set_first(&replica, preset).await;
    }
    background.spawn(fleet.clone().follow_until(stop.clone(), replica.clone(), config.limits.lease.lease));
    background.spawn(leading.run_until(stop.clone()));
    let events = ClusterEventLog::new(config.seed);
    let watch = EventRecorder {
        events: events.clone(),
        replica: replica.clone(),
        fleet: fleet.clone(),
        outlook: outlook.clone(),
        clock: config.clock.clone(),
    };
    background.spawn(watch.run_until(stop.clone()));
    for work in [Keep::Collect, Keep::Fetch] {
        background.spawn(keep(work, artifacts.clone(), stop.clone()));
    }
    let faults = if config.allow_faults { FaultPermission::Allowed } else { FaultPermission::Refused };
    let waiting = CancellationToken::new();
    let everyone = PeerFanout { replica: replica.clone(), fleet: fleet.clone() };
    let admin = AdminService {
        replica: replica.clone(),
        fleet: fleet.clone(),
        outlook: outlook.clone(),
        artifacts,
        events: events.clone(),
        stop: waiting.clone(),
        traces: Traces { own: shown.kept, everyone: everyone.clone() },
        activities: Activities { own: shown.doors, everyone },
        passed: passed.clone(),
        faults,
        order_searches: Arc::new(Semaphore::new(ORDER_SEARCHES_MAX)),
    };
    let serving = ServingBackend::new(replica.clone(), fleet, outlook, passed);
    let front = open_front_door(&config, client_listener, admin, serving);
    let front = match front {
        Ok(front) => Some(front),
        Err(source) => {
            drop(guard);
            end(internal, background, &replica).await;
            return Err(StartError::Listen { address: client_addr, source });
        }
    };
    tracing::info!(id = replica.id().0, %client_addr, %internal_addr, cluster = %cluster_id, "controller is up");
    Ok(RunningController {
        client_addr,
        internal_addr,
        cluster_id,
        front,
        waiting,
        internal,
        background,
        replica,
        data_dir: config.data_dir,
        stop: guard,
    })
}

fn opening(config: &ControllerConfig) -> OpenOptions {
    OpenOptions {
        data_dir: config.data_dir.clone(),
        id: config.id,
        start: config.start.clone(),
        now: config.clock.now(),
        seed: config.seed,
        snapshots: SnapshotSchedule::every(config.snapshot_every),
        world: Arc::new(HostEnvironment),
    }
}

/// A background task for the model files.
#[derive(Debug, Clone, Copy)]
enum Keep {
    Collect,
    Fetch,
}

async fn keep(work: Keep, artifacts: Arc<ArtifactService>, stop: CancellationToken) {
    match work {
        Keep::Collect => artifacts.collect_until(stop).await,
        Keep::Fetch => artifacts.fetch_until(stop).await,
    }
}

/// Ends the workers' streams and shuts Raft down. The caller has cancelled all tasks already.
async fn end(mut internal: JoinHandle<()>, mut background: JoinSet<()>, replica: &Replica) {
    // A finished task was already polled to completion by `failed`: polling the handle again panics.
    if !internal.is_finished() && tokio::time::timeout(STREAMS_END_TIMEOUT, &mut internal).await.is_err() {
        tracing::warn!("cannot end the workers' streams in time: aborting them");
        internal.abort();
    }
    while background.join_next().await.is_some() {}
    replica.shutdown().await;
}

fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    millrace_transport::listen(address).map_err(|source| StartError::Listen { address, source })
}

async fn open_artifacts(data_dir: &Path) -> Result<FileStore, StartError> {
    let dir = data_dir.join("artifacts");
    let opened =
        tokio::task::spawn_blocking(move || FileStore::open(&dir)).await.map_err(raft::Error::Interrupted)?;
    opened.map_err(|error| StartError::Artifacts { data_dir: data_dir.to_owned(), reason: error.to_string() })
}

fn open_shared(place: &ObjectStoreUrl, cluster: &ClusterId) -> Result<Bucket, StartError> {
    Bucket::open(place, cluster)
        .map_err(|error| StartError::ObjectStore { place: place.clone(), reason: error.to_string() })
}

async fn serve_internal(
    listener: TcpListener,
    port: PortLimits,
    control: WorkerControlService,
    peers: PeerService,
    faults: Option<FaultService>,
) {
    let stop = control.stop.clone();
    let mut routes = Routes::builder();
    routes.add_service(control_server(control)).add_service(peers.server());
    if let Some(faults) = faults {
        routes.add_service(FaultServer::new(faults).max_decoding_message_size(MESSAGE_BYTES_MAX));
    }
    let serving = millrace_transport::serve_service(
        listener,
        internal_server(port),
        routes.routes().prepare(),
        of_code,
    );
    stop.cancelled_owned().await;
    serving.close(STREAMS_END_TIMEOUT).await;
}

fn open_front_door(
    config: &ControllerConfig,
    listener: TcpListener,
    admin: AdminService,
    serving: ServingBackend,
) -> std::io::Result<serve::OpenGateway> {
    let clock = config.clock.clone();
    let authenticate: Arc<dyn Authenticate> =
        if config.insecure { Arc::new(AllowAll::default()) } else { Arc::new(LoopbackOnly::default()) };
    let mut limits = millrace_gateway::config::GatewayLimits::default();
    limits.server.port = config.limits.client;
    let advertised = config.client_advertise.as_deref().and_then(host);
    let front = GatewayConfig {
        limits,
        authenticate,
        host_names: config
            .host_names
            .iter()
            .map(String::as_str)
            .chain(advertised)
            .map(str::to_owned)
            .collect(),
        activity: admin.activities.own.counts.clone(),
        ..GatewayConfig::new(Arc::new(move || Duration::from_millis(clock.now().0)), config.seed)
    };
    let mut metrics = meters::registry(admin.replica.clone(), admin.fleet.clone(), admin.outlook.clone());
    let serving = Arc::new(serving);
    serving.show_steps(&mut metrics);
    let door = GatewayBuilder::new(front, serving);
    let opened = door
        .service(AdminServer::new(admin).max_encoding_message_size(ANSWER_BYTES_MAX))
        .metrics(metrics)
        .serve(listener);
    opened.map_err(std::io::Error::other)
}

impl RunningController {
    #[must_use]
    pub fn id(&self) -> ControllerId {
        self.replica.id()
    }

    #[must_use]
    pub fn client_addr(&self) -> SocketAddr {
        self.client_addr
    }

    #[must_use]
    pub fn internal_addr(&self) -> SocketAddr {
        self.internal_addr
    }

    #[must_use]
    pub fn cluster_id(&self) -> &ClusterId {
        &self.cluster_id
    }

    /// Returns this controller's copy of the replicated state, for tests of a group.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn state(&self) -> millrace_cluster_state::State {
        self.replica.state()
    }

    /// Waits for an error after which this controller cannot continue, such as a halted log. Deployed
    /// functions are still served. The caller then shuts the controller down and starts another process
    /// on the same directory.
    pub async fn failed(&mut self) -> HaltError {
        let error = tokio::select! {
            error = self.replica.halted() => error,
            // The task ends without cancellation only after a failure.
            _ended = &mut self.internal => HaltError::Internal { address: self.internal_addr },
        };
        if let HaltError::Diverged { index, .. } = error {
            let data_dir = self.data_dir.clone();
            let marked = tokio::task::spawn_blocking(move || mark_diverged(&data_dir, index)).await;
            if let Ok(Err(error)) = marked {
                tracing::error!(%error, "cannot mark the state as diverged: a restart of this controller would use that state again");
            }
        }
        error
    }

    /// Stops accepting requests and waits up to `grace` for running requests. Workers stay attached.
    /// Returns the number of connections cut short.
    pub async fn close_client_port(&mut self, grace: Duration) -> usize {
        let Some(front) = self.front.take() else { return 0 };
        // An admin call that waits for news would hold the port open until the timeout.
        self.waiting.cancel();
        front.close(grace).await
    }

    /// Closes the client port unless it is closed already. Then hands leadership over, ends the workers'
    /// streams and leaves Raft. Returns the number of connections cut short.
    pub async fn shutdown(mut self, grace: Duration) -> usize {
        let cut = self.close_client_port(grace).await;
        let Self { internal, background, replica, stop, .. } = self;
        replica.give_up_leadership().await;
        stop.disarm().cancel();
        end(internal, background, &replica).await;
        cut
    }
}

impl std::fmt::Debug for RunningController {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningController")
            .field("client_addr", &self.client_addr)
            .field("internal_addr", &self.internal_addr)
            .field("cluster_id", &self.cluster_id)
            .finish_non_exhaustive()
    }
}
