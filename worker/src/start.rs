//! Puts a worker together and takes it apart again: data directory, actor thread, host tier,
//! controller streams and the gRPC service.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

mod hello;
mod passing;
mod server;
mod thread;

pub use millrace_policy::dispatch::{POLICIES, PolicyConfig};
pub use millrace_policy::elastic::MigrationPolicy;
pub use millrace_policy::gpu::eviction::{EVICTIONS, Eviction};
pub use millrace_policy::gpu::isolation::{ISOLATIONS, Isolation};
pub use millrace_policy::index::LookupOrder;
pub use millrace_policy::paths::{HOST_LINKS, HostLinks};
pub use millrace_policy::preset::SchedulingPolicy;
use millrace_policy::prewarm::Prewarm;
use millrace_proto::metrics::MetricsPage;
use millrace_proto::trace::Kept;
use millrace_transport::SharedResult;
use millrace_types::topology::Topology;
use millrace_types::{Bytes, NodeName};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::activity::Place;
use crate::clock::{Clock, MonotonicClock};
use crate::control::desired::Desired;
use crate::control::{self, Control, telemetry};
use crate::data_dir::{self, DataDir};
use crate::handle::NodeHandle;
use crate::hints::Hints;
use crate::host_tier::fetch::Controllers;
use crate::host_tier::gate::Gate;
use crate::host_tier::store::{self, Store};
use crate::host_tier::{self, View};
use crate::learned::Learned;
use crate::meters::Shown;
pub use crate::node::DataConfig;
pub use crate::objects::OBJECT_MEMORY;
use crate::objects::{Objects, Whereabouts};
use crate::process_port::ExecutorCommand;
pub use crate::programs::Launcher;
use crate::programs::Programs;
use crate::service::{Faults, Limits, WorkerService};
use crate::start::server::{Health, Server};
use crate::start::thread::ActorThread;

/// What a worker is.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Its name, unique in the cluster.
    pub node: NodeName,
    /// Where artifacts and its identity are kept. Its alone.
    pub data_dir: PathBuf,
    /// Where its service listens; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where gateways reach that service; `None`: where it listens.
    pub advertise: Option<String>,
    /// Every controller, as `host:port`.
    pub controllers: Vec<String>,
    /// Its GPUs and links.
    pub topology: Topology,
    /// The most host memory that models may take.
    pub host_memory: Bytes,
    /// The most memory that objects, the intermediate data of workflows, may take, on GPUs and the host.
    pub object_memory: Bytes,
    /// How much of models it takes on, at least as much: what does not fit host memory at one time
    /// waits on its disk.
    pub model_storage: Bytes,
    /// How they keep intermediate data.
    pub gpu_data: DataConfig,
    /// The program that is an executor.
    pub executor: ExecutorCommand,
    /// What becomes a user's program; `None`: programs are refused.
    pub programs: Option<Launcher>,
    /// The scheduling policy until a controller reports the one that operators set.
    pub policy: SchedulingPolicy,
    /// Which models share an executor process.
    pub isolation: Isolation,
    /// The first to be asked for the place of data that a program names and this worker does not have.
    pub lookup: LookupOrder,
    /// Threads that one executor's launches may use.
    pub executor_threads: u32,
    /// Whether faults may be injected.
    pub faults: Faults,
    /// Spreads retries and reconnections, and makes them repeatable.
    pub seed: u64,
    /// What it takes at most.
    pub limits: Limits,
    /// Where this process keeps its spans, if it does.
    pub kept: Option<Kept>,
}

/// Why a worker did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its data directory cannot be used.
    #[error("data directory: {0}")]
    DataDir(#[from] data_dir::Error),
    /// Its artifacts cannot be opened.
    #[error("artifacts: {0}")]
    Store(#[from] store::Error),
    /// Its programs have no place.
    #[error("the folder of programs: {0}")]
    Programs(std::io::Error),
    /// Its address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another address, or port 0 for a free port")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A controller's address is none.
    #[error("controller {address:?} is no address ({source}): write host:port")]
    Controller {
        /// The address.
        address: String,
        /// What is wrong with it.
        source: tonic::transport::Error,
    },
    /// The operating system gives no thread.
    #[error("the actor thread: {0}")]
    Thread(std::io::Error),
    /// The actor thread ended as it began.
    #[error("the node's actors did not start: the log says why")]
    Actors,
}

/// Why a running worker cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// It belongs to another cluster, or speaks another protocol.
    #[error(transparent)]
    Refused(#[from] control::Refused),
    /// The actor thread ended.
    #[error("the node's actors ended: the log says why")]
    Actors,
}

/// A running worker. [`Worker::drain`] and [`Worker::shutdown`] end it in order; dropped, it ends at
/// once, executors and processes of functions included.
#[derive(Debug)]
pub struct Worker {
    addr: SocketAddr,
    node: NodeHandle,
    service: WorkerService,
    view: View,
    control: Control,
    server: Option<Server>,
    health: Health,
    programs: Option<Programs>,
    learned: Learned,
    actors: ActorThread,
    // Host tier, telemetry and scores: they end when these are dropped.
    tasks: Vec<JoinSet<()>>,
}

/// Starts a worker on the runtime it is called from. It serves as soon as a controller tells it
/// what; executors start at once.
///
/// # Errors
/// [`StartError`]; nothing is left running then.
pub async fn start(config: WorkerConfig) -> Result<Worker, StartError> {
    let data_dir = DataDir::open(&config.data_dir, &config.node)?;
    let store = Store::open(&data_dir.path().join("artifacts"))?;
    let learned = Learned::open(data_dir.path());
    let programs_dir = data_dir.path().join("programs");
    let (listener, addr) = millrace_transport::listen(config.listen)
        .map_err(|source| StartError::Listen { address: config.listen, source })?;
    let control_channels = channels(&config.controllers)?;
    // Artifacts have connections of their own, so that telemetry never waits behind a model.
    let artifact_channels = channels(&config.controllers)?;
    let (actors, node) = ActorThread::start(&config).await?;

    let desired = watch::Sender::new(Desired::default());
    let clock: Arc<dyn Clock> = Arc::new(MonotonicClock);
    let (gate, hints_clock) = (Gate::new(clock.clone()), clock.clone());
    let attached = watch::Sender::default();
    let source = Arc::new(Controllers::new(artifact_channels, attached.subscribe(), config.seed));
    let whereabouts = Whereabouts::new(control_channels.clone(), attached.subscribe());
    let (showing, desired_there) = (host_tier::Showing::default(), desired.subscribe());
    let view = showing.view();
    let (telemetry_now, desired_now) = (watch::Sender::default(), desired.subscribe());
    let (quotas_now, desired_shown) = (desired.subscribe(), desired.subscribe());
    let hello = hello::hello(&config, addr);
    let place = Place {
        node: config.node.clone(),
        instance: hello.instance.clone(),
        topology: Arc::new(config.topology.clone()),
    };
    let control = Control::start(
        control::Config {
            name: config.node.clone(),
            hello,
            controllers: control_channels,
            attached,
            data_dir,
            node: node.clone(),
            clock: clock.clone(),
            seed: config.seed,
        },
        control::Channels {
            desired,
            statuses: view.statuses.clone(),
            models: view.models.clone(),
            telemetry: telemetry_now.subscribe(),
        },
    );
    let mut telemetry_task = JoinSet::new();
    let host = telemetry::Host {
        budget: config.host_memory,
        models: view.models.clone(),
        counts: view.counts.clone(),
    };
    let objects =
        Objects::new(config.object_memory, control.index(), whereabouts, config.lookup, clock.clone());
    let open = |launcher| Programs::open(&programs_dir, launcher, objects.clone(), config.limits.message);
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
            programs: programs.clone(),
        },
        showing,
        desired_there,
    );
    let mut sweep = JoinSet::new();
    sweep.spawn(objects.clone().sweep());
    let hints = Hints::new(Prewarm::On, view.signatures.clone(), gate.clone(), hints_clock);
    let models = (view.signatures.clone(), gate);
    let service =
        WorkerService::new(node.clone(), place, models, objects.clone(), config.limits, config.faults);
    let service = service.showing(config.kept).following(hints.clone());
    sweep.spawn(service.sequences().clone().sweep());
    let shown = Shown {
        node: node.clone(),
        host: host.clone(),
        objects,
        sequences: service.sequences().clone(),
        desired: desired_shown,
        hints,
        programs: programs.clone(),
        page: SharedResult::every(MetricsPage::EVERY),
    };
    telemetry_task.spawn(telemetry::publish(node.clone(), host, desired_now, telemetry_now));
    let passing = passing::start(control.scores(), quotas_now, &node);
    // Serving from now on, until it is told to stop.
    let (server, health) = server::serve(&service, config.limits, shown, listener);
    tracing::info!(node = %config.node, %addr, gpus = config.topology.gpus.len(), dispatch = %config.policy.dispatch, eviction = %config.policy.eviction, isolation = %config.isolation, "worker started");
    Ok(Worker {
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

impl Worker {
    /// Where its service listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its service, for a gateway in the same process: called as it is, its tensors are handed over
    /// and not encoded.
    #[must_use]
    pub fn service(&self) -> WorkerService {
        self.service.clone()
    }

    /// The way into its actors.
    #[must_use]
    pub fn node(&self) -> &NodeHandle {
        &self.node
    }

    /// How far its functions are, and which models it has.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Its streams to the controllers.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Waits for an error after which this worker cannot go on. Shut it down then.
    pub async fn failed(&mut self) -> WorkerError {
        tokio::select! {
            refused = self.control.failed() => refused.into(),
            () = self.actors.ended() => WorkerError::Actors,
        }
    }

    /// Takes no more requests, gives those there are up to `grace` to be answered, tells the
    /// controllers what they came to and goodbye, then stops every executor. Returns when no
    /// executor is left.
    pub async fn drain(&self, grace: Duration) {
        self.service.refuse();
        self.health.refuse().await;
        let began = MonotonicClock.now();
        self.node.quiesce(grace).await;
        // What others have yet to fetch would have to be made again.
        let left = grace.saturating_sub(MonotonicClock.now().since(began));
        if tokio::time::timeout(left, self.service.emptied()).await.is_err() {
            tracing::info!("objects were left at the end of the grace: what needs them makes them again");
        }
        self.control.leave().await;
        self.learned.keep(&self.node).await;
        self.node.stop().await;
        if let Some(programs) = &self.programs {
            programs.stop().await;
        }
    }

    /// Ends everything and returns when nothing is left: the data directory is free then. Without a
    /// drain before, requests in flight are answered with an error.
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
