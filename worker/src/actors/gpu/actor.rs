//! The state of a Gpu actor, and the steps of its core.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_core::ids::{RequestKey, RunId};
use millrace_device::emulated::SmPage;
use millrace_gpu::{Action, Event, GpuCore as Core};
use millrace_memory::BlockSize;
use millrace_proto::executor::command::Command;
use millrace_transfers::fabric;
use millrace_types::{GpuIndex, Incarnation, ModelId, Timestamp, topology};

use super::assigned_request::GpuRequest;
use super::object_table::GpuObjects;
use super::unsent_periods::UnsentPeriods;
use crate::actor_runtime::AddressSlot;
use crate::actors::spans::GpuSpans;
use crate::handle::ActorDirectory;
use crate::install::PreparedModel;
use crate::messages::gpu::Message;
use crate::messages::{executor, node};
use crate::object_handle::ObjectRequest;
use crate::port::Descriptor;
use crate::request::RunOutputs;
use crate::traced_core::TracedCore;

/// The data that came with the message being handled, and that an action consumes.
pub(super) enum GpuPayload {
    Nothing,
    Outputs(RunId, RunOutputs),
    Detail(String),
}

/// The actors that a Gpu actor sends messages to, and the parts of the node that the actor shares.
pub(crate) struct GpuPeers {
    pub(crate) node: AddressSlot<node::Message>,
    pub(crate) executor: AddressSlot<executor::Message>,
    /// The Gpu actor's own address, passed along for replies.
    pub(crate) own: AddressSlot<Message>,
    /// The Gpu actor's own address, for the handles of objects on this GPU.
    pub(crate) own_objects: AddressSlot<ObjectRequest>,
    pub(crate) directory: Arc<ActorDirectory>,
    /// The GPUs with NVLinks to this GPU.
    pub(crate) joined: Vec<GpuIndex>,
}

/// The Gpu actor.
pub(crate) struct GpuActor {
    pub(super) hardware: topology::TopologyGpu,
    pub(super) core: TracedCore<Core>,
    pub(super) models: BTreeMap<ModelId, Arc<PreparedModel>>,
    pub(super) entries: BTreeMap<RequestKey, GpuRequest>,
    pub(super) incarnation: Incarnation,
    /// The process of the executor that all models share; `None` without one, also in isolation.
    pub(super) pid: Option<u32>,
    /// The loaded models, each with the process of its own executor in isolation.
    pub(super) loaded: BTreeMap<ModelId, Option<u32>>,
    /// The spans of requests that ended before the transfer of their model, kept until the transfer ends.
    pub(super) unfinished_swaps: Vec<GpuSpans>,
    /// The number of models that the current step evicts.
    pub(super) evicted: usize,
    pub(super) data: GpuObjects,
    pub(super) periods: UnsentPeriods,
    /// The account of the SMs of the present executor, or of the last.
    sms: Option<SmPage>,
    /// The SM violations of earlier executors.
    past_violations: u64,
    pub(super) peers: GpuPeers,
}

impl GpuActor {
    pub(crate) fn new(hardware: topology::TopologyGpu, core: TracedCore<Core>, peers: GpuPeers) -> Self {
        Self {
            hardware,
            core,
            models: BTreeMap::new(),
            entries: BTreeMap::new(),
            incarnation: Incarnation(0),
            pid: None,
            loaded: BTreeMap::new(),
            unfinished_swaps: Vec::new(),
            evicted: 0,
            data: GpuObjects::default(),
            periods: UnsentPeriods::default(),
            sms: None,
            past_violations: 0,
            peers,
        }
    }

    /// Takes the account of the SMs of a new executor.
    pub(super) fn note_sms(&mut self, sms: Option<SmPage>) {
        self.past_violations = self.sm_violations();
        self.sms = sms;
    }

    /// Returns the number of launches on SMs that another launch had at the same time.
    pub(super) fn sm_violations(&self) -> u64 {
        let present = self.sms.as_ref().map_or(0, |sms| sms.figures().violations);
        // An executor may write any number into the account.
        self.past_violations.saturating_add(present)
    }

    pub(super) fn index(&self) -> GpuIndex {
        self.hardware.index
    }

    /// Returns the unit of this GPU's memory.
    pub(super) fn block(&self) -> BlockSize {
        self.core.core.memory().block()
    }

    /// Lets the core handle an event, and then the events about data that the event caused.
    pub(super) fn step(&mut self, now: Timestamp, event: Event, carried: GpuPayload) {
        self.step_once(now, event, carried);
        self.handle_data_events(now);
    }

    /// Lets the core handle the pending events about data.
    pub(super) fn handle_data_events(&mut self, now: Timestamp) {
        while let Some(event) = self.data.next_event() {
            self.step_once(now, event, GpuPayload::Nothing);
        }
    }

    fn step_once(&mut self, now: Timestamp, event: Event, mut carried: GpuPayload) {
        let mut actions = self.core.step(now, event);
        let evicted =
            |action: &Action| if let Action::Evicted { models } = action { models.len() } else { 0 };
        self.evicted = actions.iter().map(evicted).sum();
        for action in actions.drain(..) {
            self.carry_out(now, action, &mut carried);
        }
        self.core.done(actions);
        // Waiting runs may be ready now: a run in front of them may have left.
        self.send_ready();
        self.hasten_what_leaves();
    }

    pub(super) fn tell_fabric(&self, event: fabric::Event) {
        self.peers.node.post(node::Message::Fabric(event));
    }

    pub(super) fn send(&self, command: Command, descriptors: Vec<Descriptor>) {
        let incarnation = self.incarnation;
        self.peers.executor.post(executor::Message::Send { incarnation, command, descriptors });
    }
}
