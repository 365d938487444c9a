//! The Gpu actor, one per GPU. The actor owns the GPU's memory map, and carries each assigned request
//! through swap and run to its answer.
//!
//! In: requests from the Node, events from the GPU's Executor, arrivals from the fabric. Out: commands to
//! the Executor, transfers and ends of requests to the Node, answers to the Functions. Dispatch bounds the
//! actor's state: [`SLOTS_MAX`](millrace_core::SLOTS_MAX) requests at a time.

mod actions;
mod data;
mod incoming;
mod inputs;
mod message;
mod object_table;
mod outgoing;
mod report;
mod requests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_core::ids::{RequestKey, RunId};
use millrace_gpu::{Action, Event, GpuCore as Core};
use millrace_proto::executor::InjectFault;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::tensor::Contents as TensorContents;
use millrace_transfers::fabric;
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, RevisionKey, Timestamp, topology};
use tracing::Span;

use crate::actor_runtime::{ActorBehaviour, AddressSlot};
use crate::actors::driven::TracedCore;
use crate::actors::function::RunOutputs;
use crate::actors::spans::GpuSpans;
use crate::actors::{executor, node};
use crate::handle::ActorDirectory;
use crate::install::PreparedModel;
use crate::port::Descriptor;

pub(crate) use self::data::ObjectReport;
pub(crate) use self::message::Message;
use self::object_table::GpuObjects;
use self::requests::GpuRequest;

/// The program of a fault that concerns no particular program.
const NO_PROGRAM: u64 = u64::MAX;

/// The functions of the node that use each model.
pub(crate) type ModelUsers = BTreeMap<ModelId, Vec<RevisionKey>>;

/// The data that came with the message being handled, and that an action consumes.
enum GpuPayload {
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
    pub(crate) directory: Arc<ActorDirectory>,
    /// The GPUs with NVLinks to this GPU.
    pub(crate) joined: Vec<GpuIndex>,
}

/// The Gpu actor.
pub(crate) struct GpuActor {
    hardware: topology::TopologyGpu,
    core: TracedCore<Core>,
    models: BTreeMap<ModelId, Arc<PreparedModel>>,
    entries: BTreeMap<RequestKey, GpuRequest>,
    incarnation: Incarnation,
    /// The process of the executor that all models share; `None` without one, also in isolation.
    pid: Option<u32>,
    /// The loaded models, each with the process of its own executor in isolation.
    loaded: BTreeMap<ModelId, Option<u32>>,
    /// The spans of requests that ended before the transfer of their model, kept until the transfer ends.
    unfinished_swaps: Vec<GpuSpans>,
    /// The number of models that the current step evicts.
    evicted: usize,
    data: GpuObjects,
    peers: GpuPeers,
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
            peers,
        }
    }

    fn index(&self) -> GpuIndex {
        self.hardware.index
    }

    /// Lets the core handle an event, and then the events about data that the event caused.
    fn step(&mut self, now: Timestamp, event: Event, carried: GpuPayload) {
        self.step_once(now, event, carried);
        self.handle_data_events(now);
    }

    /// Lets the core handle the pending events about data.
    fn handle_data_events(&mut self, now: Timestamp) {
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

    fn tell_fabric(&self, event: fabric::Event) {
        self.peers.node.post(node::Message::Fabric(event));
    }

    fn send(&self, command: Command, descriptors: Vec<Descriptor>) {
        let incarnation = self.incarnation;
        self.peers.executor.post(executor::Message::Send { incarnation, command, descriptors });
    }

    fn weights(&self, model: ModelId) -> Bytes {
        self.models.get(&model).map_or(Bytes::ZERO, |model| model.weights_bytes)
    }
}

impl ActorBehaviour for GpuActor {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Install { model, memory, prepared } => {
                let weights = prepared.weights_bytes;
                self.models.insert(model, prepared);
                self.step(now, Event::Install { model, memory, weights }, GpuPayload::Nothing);
            }
            Message::Remove(model) => self.step(now, Event::Remove { model }, GpuPayload::Nothing),
            Message::Assign { key, works, incarnation, attempt, from } => {
                let parent = works.first().map_or_else(Span::none, |work| work.span.clone());
                let entry = GpuRequest {
                    key,
                    works,
                    attempt,
                    spans: GpuSpans::new(parent, self.index()),
                    reserved: Vec::new(),
                    copies: Vec::new(),
                    fetches: Vec::new(),
                };
                self.assign(now, entry, incarnation, from);
            }
            Message::Recall(key) => self.step(now, Event::Recall { key }, GpuPayload::Nothing),
            Message::Cancel(key) => self.step(now, Event::Cancel { key }, GpuPayload::Nothing),
            Message::Up { incarnation, pid } => {
                self.data.start_keys(incarnation);
                self.incarnation = incarnation;
                // In isolation each model has its own process, and the shared executor's number is 0.
                self.pid = Some(pid).filter(|&pid| pid != 0);
                self.step(now, Event::Up { incarnation }, GpuPayload::Nothing);
            }
            Message::ProgramUp { model, pid } => {
                if let Some(loaded) = self.loaded.get_mut(&model) {
                    *loaded = Some(pid);
                    self.peers.directory.changed();
                }
            }
            Message::Event(Event::Unlock { transfer }) if self.unlock_object(transfer) => {
                self.handle_data_events(now)
            }
            Message::Event(event) => {
                if let Event::ProgramLost { model } | Event::ProgramFailed { model } = event {
                    self.loaded.remove(&model);
                    self.peers.directory.changed();
                }
                if let Event::TransferEnded { transfer, .. } = event {
                    self.unfinished_swaps.retain(|spans| !spans.swaps_by(transfer));
                    let waiting = self.entries.values_mut().filter(|entry| entry.spans.swaps_by(transfer));
                    waiting.for_each(|entry| entry.spans.swap_ends());
                }
                let arrived = matches!(event, Event::Arrived { .. });
                self.step(now, event, GpuPayload::Nothing);
                if arrived {
                    self.end_swaps();
                }
            }
            Message::Copied(copied) => {
                let spans = self.entries.values().map(|entry| &entry.spans).chain(&self.unfinished_swaps);
                spans.for_each(|spans| spans.copied(now, &copied));
                self.batch_crossed(now, &copied);
            }
            Message::RunDone { run, times, event, outputs } => {
                self.entries.values().for_each(|entry| entry.spans.launched(now, run, &times));
                let kept = outputs
                    .tensors
                    .iter()
                    .any(|it| matches!(it.contents, Some(TensorContents::KeptBytes(_))));
                self.step(now, event, GpuPayload::Outputs(run, outputs));
                if kept {
                    self.drop_unwanted(run);
                }
            }
            Message::Data(said) => {
                self.handle_object_report(said);
                self.handle_data_events(now);
            }
            Message::ReaderQueued { object, place, waits } => {
                self.data.queued(object, place, waits);
                self.handle_data_events(now);
            }
            Message::Fetch { part, reader, reply } => {
                self.fetch(part, reader, reply);
                self.handle_data_events(now);
            }
            Message::InputFetched { run, place, found } => {
                self.input_fetched(now, run, place, found);
                self.handle_data_events(now);
            }
            Message::LockObject { transfer, piece } => {
                self.lock_object(transfer, piece);
                self.handle_data_events(now);
            }
            Message::ObjectTransferEnded { transfer, outcome, routes } => {
                self.object_transfer_ended(now, transfer, outcome, &routes);
                self.handle_data_events(now);
            }
            Message::HostTransferEnded { transfer, outcome } => {
                self.host_transfer_ended(transfer, outcome);
                self.handle_data_events(now);
            }
            Message::ActorReplaced => self.mark_data_lost(),
            Message::Discard(object) => {
                self.data.discard(object);
                self.handle_data_events(now);
            }
            Message::RunFailed { event, detail } => self.step(now, event, GpuPayload::Detail(detail)),
            Message::Inject { fault, model } => {
                let program = model.map_or(NO_PROGRAM, |model| model.0.into());
                self.send(Command::InjectFault(InjectFault { fault: fault.into(), program }), Vec::new());
            }
            Message::Report { parts, users } => self.report(now, &parts, &users),
        }
    }

    fn tick(&mut self, now: Timestamp) {
        self.step(now, Event::Tick, GpuPayload::Nothing);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.core.next_wake()
    }
}
