//! The supervisor: starts the actors, and restarts an actor that panicked. The supervisor of actix does not
//! restart an actor after a panic. Here each actor has a factory, starts with fresh state, and gets a new
//! address that is published with the next epoch. The actors of functions have a supervisor of their own
//! ([`FunctionSupervisor`](crate::actors::function_supervisor::FunctionSupervisor)), because the Node actor
//! starts them.
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

mod panics;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use millrace_core::Core as _;
use millrace_core::trace::CoreId;
use millrace_gpu::lifecycle::Lifecycle;
use millrace_gpu::{Event as GpuEvent, GpuCore};
use millrace_memory::MemoryMap;
use millrace_scheduling::batching::Batcher;
use millrace_scheduling::dispatch;
use millrace_transfers::fabric::{self, LinkScheduler, link::LinkLedger as LinkCore};
use millrace_transfers::paths::PathPlanner;
use millrace_types::topology::LinkId;
use millrace_types::{GpuIndex, Incarnation};

use crate::actor_runtime::{self, ActorBehaviour, Mailbox, StartedActor};
use crate::actors::executor::{ExecutorActor, ExecutorPeers};
use crate::actors::gpu::{GpuActor, GpuPeers};
use crate::actors::link::LinkActor;
use crate::actors::node::NodeActor;
use crate::clock::Sleeper;
use crate::handle::{ActorDirectory, NodeHandle};
use crate::messages::{executor, gpu};
use crate::node_config::{NodeConfig, NodeContext};
use crate::node_state::{NodeState, slo_counts};
use crate::port::{PortFactory, PortSink};

/// The identity of an actor.
#[derive(Debug, Clone, Copy)]
enum ActorId {
    Node,
    Gpu(GpuIndex),
    Executor(GpuIndex),
    Link(LinkId),
}

/// The supervisor of a node's actors, except those of functions. Lives on the actor thread.
pub(crate) struct Supervisor {
    /// The state from which each actor can be restarted.
    state: Rc<NodeState>,
    spawner: RefCell<Box<dyn PortFactory>>,
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
        let routes = fabric::object_route_planner(&config.topology).inspect_err(|why| {
            tracing::info!(
                %why,
                "the GPUs of a machine of this size cannot forward for each other: 'host_links: all' has no effect"
            );
        });
        let supervisor = Rc::new(Self {
            state: Rc::new(NodeState::new(config, clock, seed, trace, directory)),
            spawner: RefCell::new(spawner),
            routes: routes.ok(),
            // Each GPU counts in steps of the number of GPUs, so that no two GPUs share an incarnation.
            // GPU 0 starts with 1, GPU 1 with 2, and so on.
            incarnations: (1..=gpus as u64).map(|gpu| Cell::new(Incarnation(gpu))).collect(),
        });
        supervisor.start_all();
        handle
    }

    fn start_all(self: &Rc<Self>) {
        self.start_node();
        self.state.links.keys().for_each(|&link| self.start_link(link));
        for gpu in self.state.gpu_indices() {
            self.start_gpu(gpu);
            self.start_executor(gpu);
        }
    }

    /// Returns the GPUs that NVLinks join with a GPU, directly or over routes through other GPUs.
    fn neighbours_of(&self, gpu: GpuIndex) -> BTreeSet<GpuIndex> {
        let beside = self.state.config.topology.nvlinks_of(gpu).map(|(_, other)| other);
        let leads =
            |other: &GpuIndex| self.routes.as_ref().is_some_and(|routes| routes.is_reachable(*other, gpu));
        beside.chain(self.state.gpu_indices().filter(leads)).collect()
    }

    fn spawn<B: ActorBehaviour>(
        self: &Rc<Self>,
        behaviour: B,
        who: ActorId,
        sleeper: Sleeper,
    ) -> StartedActor<B> {
        let supervisor = Rc::clone(self);
        let panicked = move |message: String| supervisor.panicked(who, &message);
        actor_runtime::spawn(behaviour, Arc::clone(&self.state.clock), sleeper, panicked)
    }

    fn start_node(self: &Rc<Self>) {
        let topology = &self.state.config.topology;
        let config = dispatch::Config::of(topology, self.state.config.requests_max)
            .with_peers(topology)
            .with_ways(topology)
            .with_block(self.state.config.block)
            .with_seats(self.state.config.seats())
            .with_slice_seats(self.state.config.slice_seats())
            .with_open_seats(self.state.config.open_seats(&self.state.policy()))
            .with_eviction(self.state.policy().eviction)
            .with_policy(self.state.policy().dispatch, self.state.seed);
        let mut dispatch = Batcher::new(&config);
        let registry = self.state.registry.borrow();
        // The new core has no requests, so the events that replay the installation cause no actions.
        let mut tell = |event: dispatch::Event| {
            dispatch.on_event(self.state.clock.now(), event.into(), &mut Vec::new());
        };
        for (model, memory, prepared) in registry.models() {
            let weights = prepared.weights_bytes;
            tell(dispatch::Event::Install { model, memory, weights });
        }
        for (_, hosted) in registry.indexed() {
            let learned = hosted.config.profiles.iter().filter_map(|it| self.state.learned(hosted.model, it));
            learned.for_each(|learned| tell(dispatch::Event::ProfileLoaded(learned)));
        }
        for (model, residency) in registry.residencies() {
            tell(dispatch::Event::WarmCopiesRequired { model, copies: residency.min_warm });
        }
        if self.state.wants_scores() {
            for (function, hosted) in registry.indexed() {
                let objective = self.state.objective(&hosted.config);
                tell(dispatch::Event::Objective { function, objective });
                tell(dispatch::Event::SloCountsChanged { function, counts: slo_counts(&hosted.score.get()) });
            }
        }
        for event in self.state.tenants.borrow().again(registry.owners()) {
            dispatch.on_event(self.state.clock.now(), event.into(), &mut Vec::new());
        }
        for (function, hosted) in registry.indexed() {
            if let Some(limits) = self.state.limits(function, &hosted.config) {
                dispatch.on_event(self.state.clock.now(), limits, &mut Vec::new());
            }
        }
        drop(registry);
        for event in self.state.all_slices() {
            dispatch.on_event(self.state.clock.now(), event.into(), &mut Vec::new());
        }
        let policy = self.state.policy();
        let fabric = LinkScheduler::with_sharing(topology, policy.sharing).with_host_links(policy.host_links);
        let node = NodeActor::new(
            self.state.drive(dispatch, CoreId::Dispatch),
            self.state.drive(fabric, CoreId::Fabric),
            Rc::clone(&self.state),
        );
        let started = self.spawn(node, ActorId::Node, Sleeper::NODE);
        self.state.node.publish(started.mailbox());
        self.state.directory().publish_node(started.mailbox(), started.mailbox());
    }

    fn start_link(self: &Rc<Self>, id: LinkId) {
        let wire = self.state.config.topology.links[id.0 as usize].clone();
        let core = self.state.drive(LinkCore::default(), CoreId::Link(id));
        let link = LinkActor::new(id, wire, core, self.state.node.clone(), Rc::clone(&self.state.executors));
        let sleeper = Sleeper::core(CoreId::Link(id));
        self.state.link(id).publish(self.spawn(link, ActorId::Link(id), sleeper).mailbox());
    }

    fn start_gpu(self: &Rc<Self>, index: GpuIndex) {
        let hardware = self.state.config.topology.gpus[index.0 as usize].clone();
        let peers = GpuPeers {
            node: self.state.node.clone(),
            executor: self.state.executor(index).clone(),
            own: self.state.gpu(index).clone(),
            own_objects: self.state.gpu_objects(index).clone(),
            directory: Arc::clone(self.state.directory()),
            joined: self.neighbours_of(index).into_iter().collect(),
        };
        let core = GpuCore::new(index, MemoryMap::new(hardware.memory, self.state.config.block))
            .with_eviction(self.state.policy().eviction)
            .with_isolation(self.state.config.isolation)
            .with_data(self.state.config.data.store_config(hardware.memory))
            .with_sharing(self.state.config.sharing_of(&self.state.policy()))
            .with_slices(self.state.slices_on(index));
        let core = self.state.drive(core, CoreId::Gpu(index));
        let actor = GpuActor::new(hardware, core, peers);
        let sleeper = Sleeper::core(CoreId::Gpu(index));
        let started = self.spawn(actor, ActorId::Gpu(index), sleeper);
        self.state.gpu(index).publish(started.mailbox());
        self.state.gpu_objects(index).publish(started.mailbox());
        for (model, memory, prepared) in self.state.registry.borrow().models() {
            let prepared = Arc::clone(prepared);
            self.state.gpu(index).post(gpu::Message::Install { model, memory, prepared });
        }
        for (model, residency) in self.state.registry.borrow().residencies() {
            self.state.gpu(index).post(gpu::Message::Event(GpuEvent::Residency { model, residency }));
        }
    }

    fn start_executor(self: &Rc<Self>, index: GpuIndex) {
        let first = self.incarnations[index.0 as usize].get();
        let stride = self.incarnations.len() as u64;
        let life = Lifecycle::new(index, first, stride, self.state.seed);
        let incarnations = Rc::clone(&self.incarnations);
        let started = Box::new(move |Incarnation(started)| {
            incarnations[index.0 as usize].set(Incarnation(started + stride));
        });
        let topology = &self.state.config.topology;
        let first_link = topology.gpus[index.0 as usize].host_path[0];
        let issuers = std::iter::once(first_link).chain(topology.nvlinks_of(index).map(|(link, _)| link));
        let neighbours = self.neighbours_of(index).into_iter();
        let neighbours = neighbours.map(|gpu| (gpu, self.state.executor(gpu).clone()));
        let peers = ExecutorPeers {
            gpu: self.state.gpu(index).clone(),
            links: issuers.map(|link| (link, self.state.link(link).clone())).collect(),
            neighbours: neighbours.collect(),
            node: self.state.node.clone(),
            directory: Arc::clone(self.state.directory()),
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
        let core = self.state.drive(life, CoreId::Executor(index));
        let actor = ExecutorActor::new(index, core, port, started, peers);
        let sleeper = Sleeper::core(CoreId::Executor(index));
        let mailbox: Mailbox<executor::Message> =
            self.spawn(actor, ActorId::Executor(index), sleeper).mailbox();
        heard.get_or_init(|| mailbox.clone());
        self.state.executor(index).publish(mailbox);
        self.state.executor(index).post(executor::Message::Start);
    }
}
