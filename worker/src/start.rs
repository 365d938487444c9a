//! Starts and stops a worker: data directory, actor thread, host tier, controller streams and gRPC
//! service.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

mod config;
mod forwarding;
mod hello;
mod server;
mod thread;

pub use millrace_gpu::isolation::{ExecutorIsolation, ISOLATIONS};

pub use crate::process_port::{ENGINES, ExecutorDevice, ExecutorEngine};
pub use millrace_memory::elastic::MigrationPolicy;
pub use millrace_memory::eviction::{EVICTIONS, Eviction};
pub use millrace_nodes::index::LookupOrder;
use millrace_proto::metrics::MetricsPage;
pub use millrace_scheduling::dispatch::{POLICIES, PolicyConfig};
pub use millrace_scheduling::preset::SchedulingPolicy;
pub use millrace_transfers::paths::{HOST_LINKS, HostLinks};
use millrace_transport::SharedResult;
use millrace_workflow::hints::Prewarm;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::activity::WorkerIdentity;
use crate::clock::{Clock, MonotonicClock};
use crate::control::{self, ControlPlaneClient, telemetry};
use crate::data_dir::DataDir;
use crate::desired_state::DesiredState;
use crate::handle::NodeHandle;
use crate::host_tier::fetch::ControllerSource;
use crate::host_tier::gate::HostMemoryGate;
use crate::host_tier::{self, HostTierSnapshot};
use crate::meters::MetricsHandler;
pub use crate::node::DataConfig;
pub use crate::objects::OBJECT_MEMORY;
use crate::objects::{DirectoryClient, ObjectStore};
use crate::prewarming::HintFollower;
use crate::profile_store::ProfileStore;
pub use crate::programs::ProgramLauncher;
use crate::programs::ProgramStore;
use crate::service::WorkerService;
pub use crate::start::config::{StartError, WorkerConfig};
use crate::start::server::{HealthStatus, Server};
use crate::start::thread::ActorThread;
use millrace_storage::FileStore;

/// The reason why a running worker cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The worker belongs to another cluster or speaks another protocol.
    #[error(transparent)]
    Refused(#[from] control::WorkerRefusal),
    /// The actor thread ended.
    #[error("the node's actors ended: see the worker's log")]
    Actors,
}

/// A running worker. [`RunningWorker::drain`] and [`RunningWorker::shutdown`] end the worker in order. A dropped
/// worker ends at once, with its executors and processes of functions.
#[derive(Debug)]
pub struct RunningWorker {
    addr: SocketAddr,
    node: NodeHandle,
    service: WorkerService,
    view: HostTierSnapshot,
    control: ControlPlaneClient,
    server: Option<Server>,
    health: HealthStatus,
    programs: Option<ProgramStore>,
    learned: ProfileStore,
    actors: ActorThread,
    // Host tier, telemetry and scores: a dropped task ends.
    tasks: Vec<JoinSet<()>>,
}

/// Starts a worker on the runtime of the caller. Executors start at once; serving starts when a
/// controller sends the functions to serve.
///
/// # Errors
/// [`StartError`]; nothing is left running then.
pub async fn start(config: WorkerConfig) -> Result<RunningWorker, StartError> {
    let data_dir = DataDir::open(&config.data_dir, &config.node)?;
    let store = FileStore::open(&data_dir.path().join("artifacts"))?;
    let learned = ProfileStore::open(data_dir.path());
    let programs_dir = data_dir.path().join("programs");
    let (listener, addr) = millrace_transport::listen(config.listen)
        .map_err(|source| StartError::Listen { address: config.listen, source })?;
    let control_channels = channels(&config.controllers)?;
    // Artifacts have separate connections, so that telemetry never waits behind a model's file.
    let artifact_channels = channels(&config.controllers)?;
    let (actors, node) = ActorThread::start(&config).await?;

    let desired = watch::Sender::new(DesiredState::default());
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock);
    let gate = HostMemoryGate::new(clock.clone());
    let hints_clock = clock.clone();
    let attached = watch::Sender::default();
    let source = Arc::new(ControllerSource::new(artifact_channels, attached.subscribe(), config.seed));
    let whereabouts = DirectoryClient::new(control_channels.clone(), attached.subscribe());
    let showing = host_tier::HostTierPublisher::default();
    let desired_there = desired.subscribe();
    let view = showing.view();
    let telemetry_now = watch::Sender::default();
    let desired_now = desired.subscribe();
    let quotas_now = desired.subscribe();
    let desired_shown = desired.subscribe();
    let hello = hello::hello(&config, addr);
    let place = WorkerIdentity {
        node: config.node.clone(),
        instance: hello.instance.clone(),
        topology: Arc::new(config.topology.clone()),
    };
    let control = ControlPlaneClient::start(
        control::ControlConfig {
            name: config.node.clone(),
            hello,
            controllers: control_channels,
            attached,
            data_dir,
            node: node.clone(),
            clock: clock.clone(),
            seed: config.seed,
        },
        control::ControlChannels {
            desired,
            statuses: view.statuses.clone(),
            models: view.models.clone(),
            telemetry: telemetry_now.subscribe(),
        },
    );
    let mut telemetry_task = JoinSet::new();
    let host = telemetry::HostTierTelemetry {
        budget: config.host_memory,
        models: view.models.clone(),
        counts: view.counts.clone(),
    };
    let objects =
        ObjectStore::new(config.object_memory, control.index(), whereabouts, config.lookup, clock.clone());
    let open = |launcher| ProgramStore::open(&programs_dir, launcher, objects.clone(), config.limits.message);
    let programs = config.programs.map(open).transpose().map_err(StartError::Programs)?;
    let host_tier = host_tier::start(
        host_tier::Config {
            budget: config.host_memory,
            store,
            learned: learned.clone(),
            source,
            node: node.clone(),
            clock,
            gate: gate.clone(),
            seed: config.seed,
            launches_max: config.device.launches_max(),
            programs: programs.clone(),
        },
        showing,
        desired_there,
    );
    let mut sweep = JoinSet::new();
    sweep.spawn(objects.clone().sweep());
    let hints = HintFollower::new(Prewarm::On, view.signatures.clone(), gate.clone(), hints_clock);
    let service = WorkerService::new(
        node.clone(),
        place,
        view.signatures.clone(),
        gate,
        objects.clone(),
        config.limits,
        config.faults,
    );
    let service = service.showing(config.kept).following(hints.clone());
    sweep.spawn(service.sequences().clone().sweep());
    let shown = MetricsHandler {
        node: node.clone(),
        host: host.clone(),
        objects,
        sequences: service.sequences().clone(),
        desired: desired_shown,
        scores: control.scores(),
        hints,
        programs: programs.clone(),
        page: SharedResult::every(MetricsPage::EVERY),
    };
    telemetry_task.spawn(telemetry::publish(node.clone(), host, desired_now, telemetry_now));
    let passing = forwarding::start(control.scores(), quotas_now, &node);
    // Requests are served from here until the worker is stopped.
    let (server, health) = server::serve(&service, config.limits, shown, listener);
    tracing::info!(node = %config.node, %addr, gpus = config.topology.gpus.len(), device = %config.device, dispatch = %config.policy.dispatch, eviction = %config.policy.eviction, isolation = %config.isolation, engine = %config.engine, "worker started");
    Ok(RunningWorker {
        addr,
        node: node.clone(),
        service,
        view,
        control,
        server: Some(server),
        health,
        programs,
        actors,
        tasks: vec![host_tier, telemetry_task, passing, sweep, learned.clone().follow(node)],
        learned,
    })
}

impl RunningWorker {
    /// Returns the address on which the service listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the service, for a gateway in the same process. Direct calls pass tensors on without
    /// encoding them.
    #[must_use]
    pub fn service(&self) -> WorkerService {
        self.service.clone()
    }

    /// Returns the handle to the node's actors.
    #[must_use]
    pub fn node(&self) -> &NodeHandle {
        &self.node
    }

    /// Returns the states of the node's functions and its models in host memory.
    #[must_use]
    pub fn view(&self) -> &HostTierSnapshot {
        &self.view
    }

    /// Returns the streams to the controllers.
    #[must_use]
    pub fn control(&self) -> &ControlPlaneClient {
        &self.control
    }

    /// Waits for an error after which the worker cannot continue. The caller should then shut the
    /// worker down.
    pub async fn failed(&mut self) -> WorkerError {
        tokio::select! {
            refused = self.control.failed() => refused.into(),
            () = self.actors.ended() => WorkerError::Actors,
        }
    }

    /// Refuses new requests and gives the admitted ones up to `grace` to be answered. Then reports
    /// the final state to the controllers, says goodbye, and stops every executor. Returns when no
    /// executor is left.
    pub async fn drain(&self, grace: Duration) {
        self.service.refuse();
        self.health.refuse().await;
        let began = MonotonicClock.now();
        self.node.quiesce(grace).await;
        // Wait for other workers to fetch objects, because lost objects would have to be computed
        // again.
        let left = grace.saturating_sub(MonotonicClock.now().since(began));
        if tokio::time::timeout(left, self.service.emptied()).await.is_err() {
            tracing::info!(
                "objects are left after the grace period: their consumers have them computed again"
            );
        }
        self.control.leave().await;
        self.learned.keep(&self.node).await;
        self.node.stop().await;
        if let Some(programs) = &self.programs {
            programs.stop().await;
        }
    }

    /// Ends everything and returns when nothing is left; the data directory is free then. Without
    /// an earlier drain, requests in flight are answered with an error.
    pub async fn shutdown(mut self) {
        self.drain(Duration::ZERO).await;
        if let Some(server) = self.server.take() {
            server.stop().await;
        }
        self.control.stop().await;
        for task in &mut self.tasks {
            task.shutdown().await;
        }
        self.actors.stop().await;
    }
}

fn channels(controllers: &[String]) -> Result<Vec<(String, tonic::transport::Channel)>, StartError> {
    let channel = |address: &String| match control::channel(address) {
        Ok(channel) => Ok((address.clone(), channel)),
        Err(source) => Err(StartError::Controller { address: address.clone(), source }),
    };
    controllers.iter().map(channel).collect()
}
