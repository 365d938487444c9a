//! The supervisor: starts the actors, and restarts an actor that panicked. The supervisor of actix does not
//! restart an actor after a panic. Here each actor has a factory, starts with fresh state, and gets a new
//! address that is published with the next epoch.
//!
//! After a panic every request is still answered:
//!
//! | panicked actor | loss | handling |
//! |---|---|---|
//! | Function | its requests | answered with `INTERNAL`, because their senders are dropped; withdrawn from the Node or the process pool |
//! | Gpu | its requests and memory map | run again elsewhere, as after an executor's death; the executor is replaced |
//! | Executor | its process | as after the executor's death |
//! | process pool | the processes of its program | as after their death; its requests are answered with `INTERNAL` |
//! | Link | outstanding grants | granted again if no end is reported |
//! | Node | every request on a GPU or in the queue | answered with `INTERNAL`; links, GPUs and executors are restarted, installed functions stay |

mod accounts;
mod functions;
mod panics;
mod policy;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use millrace_core::Core as _;
use millrace_core::ids::FunctionIndex;
use millrace_core::trace::CoreId;
use millrace_gpu::lifecycle::Lifecycle;
use millrace_gpu::{Event as GpuEvent, GpuCore};
use millrace_memory::MemoryMap;
use millrace_scheduling::batching::Batcher;
use millrace_scheduling::dispatch;
use millrace_scheduling::residence::IdleResidenceMeter;
use millrace_transfers::fabric::{self, LinkScheduler, link::LinkLedger as LinkCore};
use millrace_transfers::paths::PathPlanner;
use millrace_types::topology::LinkId;
use millrace_types::{Digest, GpuIndex, Incarnation, ModelId, Reason};
use millrace_workflow::hints::Prewarm;

use crate::actor_runtime::{self, ActorBehaviour, AddressSlot, Mailbox};
use crate::actors::driven::{SharedTrace, TracedCore};
use crate::actors::executor::{self, ExecutorActor};
use crate::actors::function::{self, SloCountReports, slo_counts};
use crate::actors::gpu::{self, GpuActor};
use crate::actors::link::{self, LinkActor};
use crate::actors::node::{self, NodeActor};
use crate::clock::{Clock, Sleeper};
use crate::handle::{ActorDirectory, NodeHandle};
use crate::install::Profile;
use crate::node::{NodeConfig, NodeContext};
use crate::policy::{DesiredPolicy, EffectivePolicy};
use crate::port::{PortFactory, PortSink};
use crate::programs::pool;
use crate::registry::Registry;
use crate::tenants::TenantCaps;

pub(crate) use crate::registry::Removed;

/// The identity of an actor.
#[derive(Debug, Clone, Copy)]
enum ActorId {
    Node,
    Function(FunctionIndex),
    ProcessPool(FunctionIndex),
    Gpu(GpuIndex),
    Executor(GpuIndex),
    Link(LinkId),
}

/// The actors of a node, and the state from which each actor can be restarted. Lives on the actor thread.
pub(crate) struct Supervisor {
    config: NodeConfig,
    clock: Arc<dyn Clock>,
    seed: u64,
    trace: Option<SharedTrace>,
    spawner: RefCell<Box<dyn PortFactory>>,
    directory: Arc<ActorDirectory>,
    node: AddressSlot<node::Message>,
    gpus: Vec<AddressSlot<gpu::Message>>,
    executors: Rc<[AddressSlot<executor::Message>]>,
    links: BTreeMap<LinkId, AddressSlot<link::Message>>,
    /// The installed functions and models, which survive a restart of the Node actor.
    registry: RefCell<Registry>,
    /// The idle residence of functions, which is billed across restarts of the Node actor.
    residence: RefCell<IdleResidenceMeter>,
    /// The caps of tenants, which hold across restarts of the Node actor.
    tenants: RefCell<TenantCaps>,
    /// The scheduling policy in force, which survives restarts of all actors.
    in_force: Cell<EffectivePolicy>,
    /// Whether Function actors report SLO counts, because the policy depends on the counts.
    told: Rc<Cell<SloCountReports>>,
    /// The NVLink routes between GPUs. `None` on a machine that is larger than
    /// the planner's bounds.
    routes: Option<PathPlanner>,
    /// The next incarnation of each GPU's executor. An incarnation is never used twice.
    incarnations: Rc<[Cell<Incarnation>]>,
}

impl Supervisor {
    /// Starts a node's actors on this thread.
    pub(crate) fn start(config: NodeConfig, context: NodeContext) -> NodeHandle {
        let NodeContext { clock, seed, spawner, trace } = context;
        let directory = ActorDirectory::new();
        let handle = NodeHandle::new(Arc::clone(&directory), config.requests_max, Arc::clone(&clock));
        let gpus = config.topology.gpus.len();
        let of_host = config.topology.gpus.iter().flat_map(|gpu| gpu.host_path.iter().copied());
        let nvlinks = config.topology.gpus.iter().flat_map(|gpu| config.topology.nvlinks_of(gpu.index));
        let crossed = of_host.chain(nvlinks.map(|(link, _)| link));
        let in_force = EffectivePolicy::of(&config.policy(), &DesiredPolicy::default());
        let routes = fabric::object_route_planner(&config.topology).inspect_err(|why| {
            tracing::info!(
                %why,
                "the GPUs of a machine of this size cannot forward for each other: 'host_links: all' has no effect"
            );
        });
        let supervisor = Rc::new(Self {
            node: AddressSlot::empty(),
            gpus: (0..gpus).map(|_| AddressSlot::empty()).collect(),
            executors: (0..gpus).map(|_| AddressSlot::empty()).collect(),
            links: crossed.map(|link| (link, AddressSlot::empty())).collect(),
            registry: RefCell::new(Registry::default()),
            residence: RefCell::default(),
            tenants: RefCell::default(),
            in_force: Cell::new(in_force),
            told: Rc::new(Cell::new(policy::slo_reports(&in_force))),
            routes: routes.ok(),
            // Each GPU counts in steps of the number of GPUs, so that no two GPUs share an incarnation.
            // GPU 0 starts with 1, GPU 1 with 2, and so on.
            incarnations: (1..=gpus as u64).map(|gpu| Cell::new(Incarnation(gpu))).collect(),
            spawner: RefCell::new(spawner),
            config,
            clock,
            seed,
            trace,
            directory,
        });
        supervisor.start_all();
        handle
    }

    fn start_all(self: &Rc<Self>) {
        self.start_node();
        self.links.keys().for_each(|&link| self.start_link(link));
        for gpu in self.gpu_indices() {
            self.start_gpu(gpu);
            self.start_executor(gpu);
        }
    }

    pub(crate) fn gpu_indices(&self) -> impl Iterator<Item = GpuIndex> + use<> {
        (0..self.gpus.len() as u32).map(GpuIndex)
    }

    /// Returns the directory of the addresses of the node's actors.
    pub(crate) fn directory(&self) -> &Arc<ActorDirectory> {
        &self.directory
    }

    /// Returns whether the node prewarms models.
    pub(crate) fn prewarm(&self) -> Prewarm {
        self.config.prewarm
    }

    pub(crate) fn gpu(&self, gpu: GpuIndex) -> &AddressSlot<gpu::Message> {
        &self.gpus[gpu.0 as usize]
    }

    pub(crate) fn executor(&self, gpu: GpuIndex) -> &AddressSlot<executor::Message> {
        &self.executors[gpu.0 as usize]
    }

    pub(crate) fn link(&self, link: LinkId) -> &AddressSlot<link::Message> {
        &self.links[&link]
    }

    /// Returns the links over which models are copied to a GPU: the links of its path from the host, then
    /// its NVLinks.
    pub(crate) fn links_to(&self, gpu: GpuIndex) -> impl Iterator<Item = &AddressSlot<link::Message>> {
        let host_path = self.config.topology.gpus[gpu.0 as usize].host_path.iter().copied();
        let nvlinks = self.config.topology.nvlinks_of(gpu).map(|(link, _)| link);
        host_path.chain(nvlinks).map(|link| self.link(link))
    }

    /// Returns the GPUs that NVLinks join with a GPU, directly or over routes through other GPUs.
    fn neighbours_of(&self, gpu: GpuIndex) -> BTreeSet<GpuIndex> {
        let beside = self.config.topology.nvlinks_of(gpu).map(|(_, other)| other);
        let leads =
            |other: &GpuIndex| self.routes.as_ref().is_some_and(|routes| routes.is_reachable(*other, gpu));
        beside.chain(self.gpu_indices().filter(leads)).collect()
    }

    fn drive<C: millrace_core::Core>(&self, core: C, id: CoreId) -> TracedCore<C> {
        TracedCore::new(core, id, self.trace.clone())
    }

    fn spawn<B: ActorBehaviour>(
        self: &Rc<Self>,
        behaviour: B,
        who: ActorId,
        sleeper: Sleeper,
    ) -> Mailbox<B::Message> {
        let supervisor = Rc::clone(self);
        let panicked = move |message: String| supervisor.panicked(who, &message);
        actor_runtime::spawn(behaviour, Arc::clone(&self.clock), sleeper, panicked)
    }

    fn start_node(self: &Rc<Self>) {
        let topology = &self.config.topology;
        let config = dispatch::Config::of(topology, self.config.requests_max)
            .with_peers(topology)
            .with_ways(topology)
            .with_eviction(self.policy().eviction)
            .with_policy(self.policy().dispatch, self.seed);
        let mut dispatch = Batcher::new(&config);
        let registry = self.registry.borrow();
        // The new core has no requests, so the events that replay the installation cause no actions.
        let mut tell = |event: dispatch::Event| {
            dispatch.on_event(self.clock.now(), event.into(), &mut Vec::new());
        };
        for (model, memory, prepared) in registry.models() {
            let weights = prepared.weights_bytes;
            tell(dispatch::Event::Install { model, memory, weights });
        }
        for (_, hosted) in registry.indexed() {
            let learned = hosted.config.profiles.iter().filter_map(|it| self.learned(hosted.model, it));
            learned.for_each(|learned| tell(dispatch::Event::ProfileLoaded(learned)));
        }
        for (model, residency) in registry.residencies() {
            tell(dispatch::Event::WarmCopiesRequired { model, copies: residency.min_warm });
        }
        if self.wants_scores() {
            for (function, hosted) in registry.indexed() {
                let objective = self.objective(&hosted.config);
                tell(dispatch::Event::Objective { function, objective });
                tell(dispatch::Event::SloCountsChanged { function, counts: slo_counts(&hosted.score.get()) });
            }
        }
        for event in self.tenants.borrow().again(registry.owners()) {
            dispatch.on_event(self.clock.now(), event.into(), &mut Vec::new());
        }
        for (function, hosted) in registry.indexed() {
            if let Some(limits) = self.limits(function, &hosted.config) {
                dispatch.on_event(self.clock.now(), limits, &mut Vec::new());
            }
        }
        drop(registry);
        let policy = self.policy();
        let fabric = LinkScheduler::with_sharing(topology, policy.sharing).with_host_links(policy.host_links);
        let node = NodeActor::new(
            self.drive(dispatch, CoreId::Dispatch),
            self.drive(fabric, CoreId::Fabric),
            Rc::clone(self),
        );
        let mailbox = self.spawn(node, ActorId::Node, Sleeper::NODE);
        self.node.publish(mailbox.clone());
        self.directory.publish_node(Some(mailbox));
    }

    fn start_link(self: &Rc<Self>, id: LinkId) {
        let wire = self.config.topology.links[id.0 as usize].clone();
        let core = self.drive(LinkCore::default(), CoreId::Link(id));
        let link = LinkActor::new(id, wire, core, self.node.clone(), Rc::clone(&self.executors));
        let sleeper = Sleeper::core(CoreId::Link(id));
        self.link(id).publish(self.spawn(link, ActorId::Link(id), sleeper));
    }

    fn start_gpu(self: &Rc<Self>, index: GpuIndex) {
        let hardware = self.config.topology.gpus[index.0 as usize].clone();
        let peers = gpu::GpuPeers {
            node: self.node.clone(),
            executor: self.executor(index).clone(),
            own: self.gpu(index).clone(),
            directory: Arc::clone(&self.directory),
            joined: self.neighbours_of(index).into_iter().collect(),
        };
        let core = GpuCore::new(index, MemoryMap::new(hardware.memory))
            .with_eviction(self.policy().eviction)
            .with_isolation(self.config.isolation)
            .with_data(self.config.data.store_config(hardware.memory));
        let core = self.drive(core, CoreId::Gpu(index));
        let actor = GpuActor::new(hardware, core, peers);
        let sleeper = Sleeper::core(CoreId::Gpu(index));
        self.gpu(index).publish(self.spawn(actor, ActorId::Gpu(index), sleeper));
        for (model, memory, prepared) in self.registry.borrow().models() {
            let prepared = Arc::clone(prepared);
            self.gpu(index).post(gpu::Message::Install { model, memory, prepared });
        }
        for (model, residency) in self.registry.borrow().residencies() {
            self.gpu(index).post(gpu::Message::Event(GpuEvent::Residency { model, residency }));
        }
    }

    fn start_executor(self: &Rc<Self>, index: GpuIndex) {
        let first = self.incarnations[index.0 as usize].get();
        let stride = self.gpus.len() as u64;
        let life = Lifecycle::new(index, first, stride, self.seed);
        let incarnations = Rc::clone(&self.incarnations);
        let started = Box::new(move |Incarnation(started)| {
            incarnations[index.0 as usize].set(Incarnation(started + stride));
        });
        let topology = &self.config.topology;
        let first_link = topology.gpus[index.0 as usize].host_path[0];
        let issuers = std::iter::once(first_link).chain(topology.nvlinks_of(index).map(|(link, _)| link));
        let neighbours = self.neighbours_of(index).into_iter();
        let neighbours = neighbours.map(|gpu| (gpu, self.executor(gpu).clone()));
        let peers = executor::ExecutorPeers {
            gpu: self.gpu(index).clone(),
            links: issuers.map(|link| (link, self.link(link).clone())).collect(),
            neighbours: neighbours.collect(),
            node: self.node.clone(),
            directory: Arc::clone(&self.directory),
        };
        // The actor owns the port, so the port's sink exists before the actor has an address. No event is
        // lost: the port starts a process only after the `Start` below.
        let heard: Arc<std::sync::OnceLock<Mailbox<executor::Message>>> = Arc::default();
        let sink = PortSink::new({
            let heard = Arc::clone(&heard);
            move |event| {
                if let Some(mailbox) = heard.get() {
                    mailbox.post(executor::Message::Port(event));
                }
            }
        });
        let port = self.spawner.borrow_mut().port(index, sink);
        let core = self.drive(life, CoreId::Executor(index));
        let actor = ExecutorActor::new(index, core, port, started, peers);
        let sleeper = Sleeper::core(CoreId::Executor(index));
        let mailbox = self.spawn(actor, ActorId::Executor(index), sleeper);
        heard.get_or_init(|| mailbox.clone());
        self.executor(index).publish(mailbox);
        self.executor(index).post(executor::Message::Start);
    }

    /// Converts a model's profile for dispatch. Returns `None` if the node has no GPU of the profile's
    /// type.
    pub(crate) fn learned(&self, model: ModelId, profile: &Profile) -> Option<dispatch::ModelProfile> {
        let &Profile { ref gpu_type, load, swap, run } = profile;
        let kind = dispatch::kind_of(&self.config.topology, gpu_type)?;
        Some(dispatch::ModelProfile { model, kind, load, swap, run })
    }

    /// Returns the types of the node's GPUs. The position of a type is its kind in dispatch.
    pub(crate) fn gpu_types(&self) -> Vec<String> {
        dispatch::gpu_types(&self.config.topology).into_iter().map(str::to_owned).collect()
    }

    /// Returns the digest of a model's artifact.
    pub(crate) fn digest_of(&self, model: ModelId) -> Option<Digest> {
        self.registry.borrow().digest_of(model)
    }

    /// Ends the node: removes its actors from the directory, and answers all remaining requests with
    /// `SHUTTING_DOWN`.
    pub(crate) fn end(&self) {
        self.directory.publish_node(None);
        for hosted in self.registry.borrow().functions() {
            self.directory.withdraw_function(&hosted.config.key);
            hosted.slot.post(function::Message::NodeLost(Reason::ShuttingDown));
            if let Some(hosting) = &hosted.program {
                hosting.crew.post(pool::Message::Stop);
            }
        }
    }
}
