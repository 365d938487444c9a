//! Starts the actors and starts them again. Our own, because actix's supervisor does not restart
//! after a panic: a factory per actor, fresh state, a new address published with the next epoch.
//!
//! What a panic costs is an answer, never silence:
//!
//! | who panicked | what is lost | what happens to it |
//! |---|---|---|
//! | Function | its requests | answered `INTERNAL`: their senders are dropped with it; withdrawn from the Node or the Crew |
//! | Gpu | its requests and map | run again elsewhere, as after an executor's death; the executor is replaced |
//! | Executor | its process | as after the executor's death |
//! | Crew | the processes of its program | as after their death; its requests are answered `INTERNAL` |
//! | Link | grants on their way | granted again when nobody reports them |
//! | Node | every request | answered `INTERNAL`; everything below starts anew, what is installed stays |

mod accounts;
mod functions;
mod panics;
mod policy;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use millrace_policy::batching::Batcher;
use millrace_policy::core::Core as _;
use millrace_policy::dispatch;
use millrace_policy::fabric::{self, Fabric, link::Link as LinkCore};
use millrace_policy::gpu::{Event as GpuEvent, Gpu as GpuCore};
use millrace_policy::ids::FunctionIndex;
use millrace_policy::lifecycle::Lifecycle;
use millrace_policy::memory::MemoryMap;
use millrace_policy::paths::Paths;
use millrace_policy::prewarm::Prewarm;
use millrace_policy::residence::Residence;
use millrace_policy::trace::CoreId;
use millrace_types::topology::LinkId;
use millrace_types::{Digest, GpuIndex, Incarnation, ModelId, Reason};

use crate::actors::driven::{Driven, SharedTrace};
use crate::actors::executor::{self, Executor};
use crate::actors::function::{self, ScoresTold, counts};
use crate::actors::gpu::{self, Gpu};
use crate::actors::link::{self, Link};
use crate::actors::node::{self, Node};
use crate::clock::{Clock, Sleeper};
use crate::handle::{Directory, NodeHandle};
use crate::install::Profile;
use crate::node::{NodeConfig, NodeContext};
use crate::policy::{InForce, Wanted};
use crate::port::{PortSink, Spawner};
use crate::programs::crew;
use crate::registry::Registry;
use crate::seams::{self, Behaviour, Mailbox, Slot};
use crate::tenants::Tenants;

pub(crate) use crate::registry::Removed;

/// Which actor.
#[derive(Debug, Clone, Copy)]
enum Who {
    Node,
    Function(FunctionIndex),
    Crew(FunctionIndex),
    Gpu(GpuIndex),
    Executor(GpuIndex),
    Link(LinkId),
}

/// The actors of a node, and what is needed to start each again. Lives on the actor thread.
pub(crate) struct Supervisor {
    config: NodeConfig,
    clock: Arc<dyn Clock>,
    seed: u64,
    trace: Option<SharedTrace>,
    spawner: RefCell<Box<dyn Spawner>>,
    directory: Arc<Directory>,
    node: Slot<node::Message>,
    gpus: Vec<Slot<gpu::Message>>,
    executors: Rc<[Slot<executor::Message>]>,
    links: BTreeMap<LinkId, Slot<link::Message>>,
    /// Outlives a Node actor: what is installed stays.
    registry: RefCell<Registry>,
    /// What was idle is billed, whichever Node actor saw it.
    residence: RefCell<Residence>,
    /// Caps hold, whichever Node actor keeps to them.
    tenants: RefCell<Tenants>,
    /// How the node schedules, whichever actors carry it out; and whether that goes by scores.
    in_force: Cell<InForce>,
    told: Rc<Cell<ScoresTold>>,
    /// Which GPUs' objects can come to which without the host; `None` where they never do.
    routes: Option<Paths>,
    /// The next incarnation of each GPU's executor: numbers are not used twice.
    incarnations: Rc<[Cell<Incarnation>]>,
}

impl Supervisor {
    /// Starts a node's actors on this thread.
    pub(crate) fn start(config: NodeConfig, context: NodeContext) -> NodeHandle {
        let NodeContext { clock, seed, spawner, trace } = context;
        let directory = Directory::new();
        let handle = NodeHandle::new(Arc::clone(&directory), config.requests_max, Arc::clone(&clock));
        let gpus = config.topology.gpus.len();
        let of_host = config.topology.gpus.iter().flat_map(|gpu| gpu.host_path.iter().copied());
        let nvlinks = config.topology.gpus.iter().flat_map(|gpu| config.topology.nvlinks_of(gpu.index));
        let crossed = of_host.chain(nvlinks.map(|(link, _)| link));
        let in_force = InForce::of(&config, &Wanted::default());
        let routes = fabric::routes_of(&config.topology).inspect_err(|why| {
            tracing::info!(%why, "GPUs of a machine of this size do not forward for each other: host_links all has no effect");
        });
        let supervisor = Rc::new(Self {
            node: Slot::empty(),
            gpus: (0..gpus).map(|_| Slot::empty()).collect(),
            executors: (0..gpus).map(|_| Slot::empty()).collect(),
            links: crossed.map(|link| (link, Slot::empty())).collect(),
            registry: RefCell::new(Registry::default()),
            residence: RefCell::default(),
            tenants: RefCell::default(),
            in_force: Cell::new(in_force),
            told: Rc::new(Cell::new(policy::told(&in_force))),
            routes: routes.ok(),
            // Each GPU counts in steps of the number of GPUs, from its own number: 1, 2, 3, …
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

    /// Where the node's actors are found.
    pub(crate) fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// Whether models come before they are asked for.
    pub(crate) fn prewarm(&self) -> Prewarm {
        self.config.prewarm
    }

    pub(crate) fn gpu(&self, gpu: GpuIndex) -> &Slot<gpu::Message> {
        &self.gpus[gpu.0 as usize]
    }

    pub(crate) fn executor(&self, gpu: GpuIndex) -> &Slot<executor::Message> {
        &self.executors[gpu.0 as usize]
    }

    pub(crate) fn link(&self, link: LinkId) -> &Slot<link::Message> {
        &self.links[&link]
    }

    /// The links that models come to a GPU over: those of its path from the host, then its NVLinks.
    pub(crate) fn links_to(&self, gpu: GpuIndex) -> impl Iterator<Item = &Slot<link::Message>> {
        let host_path = self.config.topology.gpus[gpu.0 as usize].host_path.iter().copied();
        let nvlinks = self.config.topology.nvlinks_of(gpu).map(|(link, _)| link);
        host_path.chain(nvlinks).map(|link| self.link(link))
    }

    /// The GPUs that NVLinks join a GPU with: those beside it, and those that objects come from.
    fn neighbours_of(&self, gpu: GpuIndex) -> BTreeSet<GpuIndex> {
        let beside = self.config.topology.nvlinks_of(gpu).map(|(_, other)| other);
        let leads = |other: &GpuIndex| self.routes.as_ref().is_some_and(|routes| routes.lead(*other, gpu));
        beside.chain(self.gpu_indices().filter(leads)).collect()
    }

    fn drive<C: millrace_policy::core::Core>(&self, core: C, id: CoreId) -> Driven<C> {
        Driven::new(core, id, self.trace.clone())
    }

    fn spawn<B: Behaviour>(self: &Rc<Self>, behaviour: B, who: Who, sleeper: Sleeper) -> Mailbox<B::Message> {
        let supervisor = Rc::clone(self);
        let panicked = move |message: String| supervisor.panicked(who, &message);
        seams::spawn(behaviour, Arc::clone(&self.clock), sleeper, panicked)
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
        // What is installed gives out no request.
        let mut tell = |event: dispatch::Event| {
            dispatch.on_event(self.clock.now(), event.into(), &mut Vec::new());
        };
        for (model, memory, prepared) in registry.models() {
            let weights = prepared.weights_bytes;
            tell(dispatch::Event::Install { model, memory, weights });
        }
        for (_, hosted) in registry.indexed() {
            let learned = hosted.config.profiles.iter().filter_map(|it| self.learned(hosted.model, it));
            learned.for_each(|learned| tell(dispatch::Event::Learned(learned)));
        }
        for (model, residency) in registry.residencies() {
            tell(dispatch::Event::Keep { model, copies: residency.min_warm });
        }
        if self.wants_scores() {
            for (function, hosted) in registry.indexed() {
                let objective = self.objective(&hosted.config);
                tell(dispatch::Event::Objective { function, objective });
                tell(dispatch::Event::Score { function, counts: counts(&hosted.score.get()) });
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
        let fabric = Fabric::with_sharing(topology, policy.sharing).with_host_links(policy.host_links);
        let node = Node::new(
            self.drive(dispatch, CoreId::Dispatch),
            self.drive(fabric, CoreId::Fabric),
            Rc::clone(self),
        );
        let mailbox = self.spawn(node, Who::Node, Sleeper::NODE);
        self.node.publish(mailbox.clone());
        self.directory.publish_node(Some(mailbox));
    }

    fn start_link(self: &Rc<Self>, id: LinkId) {
        let wire = self.config.topology.links[id.0 as usize].clone();
        let core = self.drive(LinkCore::default(), CoreId::Link(id));
        let link = Link::new(id, wire, core, self.node.clone(), Rc::clone(&self.executors));
        let sleeper = Sleeper::core(CoreId::Link(id));
        self.link(id).publish(self.spawn(link, Who::Link(id), sleeper));
    }

    fn start_gpu(self: &Rc<Self>, index: GpuIndex) {
        let hardware = self.config.topology.gpus[index.0 as usize].clone();
        let peers = gpu::Peers {
            node: self.node.clone(),
            executor: self.executor(index).clone(),
            own: self.gpu(index).clone(),
            directory: Arc::clone(&self.directory),
            joined: self.neighbours_of(index).into_iter().collect(),
        };
        let core = GpuCore::new(index, MemoryMap::new(hardware.memory))
            .with_eviction(self.policy().eviction)
            .with_isolation(self.config.isolation)
            .with_data(self.config.data.of(hardware.memory));
        let core = self.drive(core, CoreId::Gpu(index));
        let actor = Gpu::new(hardware, core, peers);
        let sleeper = Sleeper::core(CoreId::Gpu(index));
        self.gpu(index).publish(self.spawn(actor, Who::Gpu(index), sleeper));
        for (model, memory, prepared) in self.registry.borrow().models() {
            let prepared = Arc::clone(prepared);
            self.gpu(index).post(gpu::Message::Install { model, memory, prepared });
        }
        for (model, residency) in self.registry.borrow().residencies() {
            self.gpu(index).post(gpu::Message::Event(GpuEvent::Residency { model, residency }));
        }
    }

    fn start_executor(self: &Rc<Self>, index: GpuIndex) {
        let (first, stride) = (self.incarnations[index.0 as usize].get(), self.gpus.len() as u64);
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
        let peers = executor::Peers {
            gpu: self.gpu(index).clone(),
            links: issuers.map(|link| (link, self.link(link).clone())).collect(),
            neighbours: neighbours.collect(),
            node: self.node.clone(),
            directory: Arc::clone(&self.directory),
        };
        // The port is made once the actor has an address to hear it at.
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
        let actor = Executor::new(index, core, port, started, peers);
        let sleeper = Sleeper::core(CoreId::Executor(index));
        let mailbox = self.spawn(actor, Who::Executor(index), sleeper);
        heard.get_or_init(|| mailbox.clone());
        self.executor(index).publish(mailbox);
        self.executor(index).post(executor::Message::Start);
    }

    /// What a profile tells dispatch of a model; nothing of a type of GPU that is not here.
    pub(crate) fn learned(&self, model: ModelId, profile: &Profile) -> Option<dispatch::Learned> {
        let &Profile { ref gpu_type, load, swap, run } = profile;
        let kind = dispatch::kind_of(&self.config.topology, gpu_type)?;
        Some(dispatch::Learned { model, kind, load, swap, run })
    }

    /// The types of the node's GPUs, by kind.
    pub(crate) fn gpu_types(&self) -> Vec<String> {
        dispatch::gpu_types(&self.config.topology).into_iter().map(str::to_owned).collect()
    }

    /// The artifact that a model comes from.
    pub(crate) fn digest_of(&self, model: ModelId) -> Option<Digest> {
        self.registry.borrow().digest_of(model)
    }

    /// Ends the node: whoever still waits is answered, and nobody finds it any more.
    pub(crate) fn end(&self) {
        self.directory.publish_node(None);
        for hosted in self.registry.borrow().functions() {
            self.directory.withdraw_function(&hosted.config.key);
            hosted.slot.post(function::Message::NodeLost(Reason::ShuttingDown));
            if let Some(hosting) = &hosted.program {
                hosting.crew.post(crew::Message::Stop);
            }
        }
    }
}
