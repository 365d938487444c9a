//! The state of a node: the addresses of the actors, and the parts that survive the restarts of actors.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use millrace_core::Core;
use millrace_core::trace::CoreId;
use millrace_scheduling::dispatch;
use millrace_scheduling::residence::IdleResidenceMeter;
use millrace_types::topology::LinkId;
use millrace_types::{Digest, GpuIndex, ModelId, Reason};
use millrace_workflow::hints::Prewarm;

use super::slo_counts::{SloCountReports, slo_reports};
use crate::actor_runtime::AddressSlot;
use crate::clock::Clock;
use crate::desired_state::NodeSlices;
use crate::handle::ActorDirectory;
use crate::install::Profile;
use crate::messages::{executor, function, gpu, link, node, process_pool};
use crate::node_config::NodeConfig;
use crate::object_handle::ObjectRequest;
use crate::policy::{DesiredPolicy, EffectivePolicy};
use crate::registry::Registry;
use crate::tenants::TenantCaps;
use crate::traced_core::{SharedTrace, TracedCore};

/// The addresses of a node's actors, and the state from which each actor can be restarted.
pub(crate) struct NodeState {
    pub(crate) config: NodeConfig,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) seed: u64,
    trace: Option<SharedTrace>,
    pub(super) directory: Arc<ActorDirectory>,
    pub(crate) node: AddressSlot<node::Message>,
    pub(super) gpus: Vec<AddressSlot<gpu::Message>>,
    /// The addresses of the Gpu actors for the handles of objects.
    gpu_objects: Vec<AddressSlot<ObjectRequest>>,
    pub(crate) executors: Rc<[AddressSlot<executor::Message>]>,
    pub(crate) links: BTreeMap<LinkId, AddressSlot<link::Message>>,
    /// The installed functions and models, which survive a restart of the Node actor.
    pub(crate) registry: RefCell<Registry>,
    /// The idle residence of functions, which is billed across restarts of the Node actor.
    pub(super) residence: RefCell<IdleResidenceMeter>,
    /// The caps of tenants, which hold across restarts of the Node actor.
    pub(crate) tenants: RefCell<TenantCaps>,
    /// The slices that the leader wants, which survive restarts of all actors.
    pub(super) wanted_slices: RefCell<Arc<NodeSlices>>,
    /// The scheduling policy in force, which survives restarts of all actors.
    pub(super) in_force: Cell<EffectivePolicy>,
    /// Whether Function actors report SLO counts, because the policy depends on the counts.
    pub(crate) slo_reports: Rc<Cell<SloCountReports>>,
}

impl NodeState {
    /// Returns the state of a node without actors and functions.
    pub(crate) fn new(
        config: NodeConfig,
        clock: Arc<dyn Clock>,
        seed: u64,
        trace: Option<SharedTrace>,
        directory: Arc<ActorDirectory>,
    ) -> Self {
        let gpus = config.topology.gpus.len();
        let of_host = config.topology.gpus.iter().flat_map(|gpu| gpu.host_path.iter().copied());
        let nvlinks = config.topology.gpus.iter().flat_map(|gpu| config.topology.nvlinks_of(gpu.index));
        let crossed = of_host.chain(nvlinks.map(|(link, _)| link));
        let in_force = EffectivePolicy::of(&config.policy(), &DesiredPolicy::default());
        Self {
            node: AddressSlot::empty(),
            gpus: (0..gpus).map(|_| AddressSlot::empty()).collect(),
            gpu_objects: (0..gpus).map(|_| AddressSlot::empty()).collect(),
            executors: (0..gpus).map(|_| AddressSlot::empty()).collect(),
            links: crossed.map(|link| (link, AddressSlot::empty())).collect(),
            registry: RefCell::new(Registry::default()),
            residence: RefCell::default(),
            tenants: RefCell::default(),
            wanted_slices: RefCell::default(),
            in_force: Cell::new(in_force),
            slo_reports: Rc::new(Cell::new(slo_reports(&in_force))),
            config,
            clock,
            seed,
            trace,
            directory,
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

    /// Returns the address of a Gpu actor for the handles of objects on the GPU.
    pub(crate) fn gpu_objects(&self, gpu: GpuIndex) -> &AddressSlot<ObjectRequest> {
        &self.gpu_objects[gpu.0 as usize]
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

    /// Returns a core inside an actor. If the node keeps a trace, the core's steps are folded into the trace.
    pub(crate) fn drive<C: Core>(&self, core: C, id: CoreId) -> TracedCore<C> {
        TracedCore::new(core, id, self.trace.clone())
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
        self.directory.withdraw_node();
        for hosted in self.registry.borrow().functions() {
            self.directory.withdraw_function(&hosted.config.key);
            hosted.slot.post(function::Message::NodeLost(Reason::ShuttingDown));
            if let Some(hosting) = &hosted.program {
                hosting.pool.post(process_pool::Message::Stop);
            }
        }
    }
}
