//! The Gpu actor, one per GPU. The actor owns the GPU's memory map, and carries each assigned request
//! through swap and run to its answer.
//!
//! In: requests from the Node, events from the GPU's Executor, arrivals from the fabric. Out: commands to
//! the Executor, transfers and ends of requests to the Node, answers to the Functions. Dispatch bounds the
//! actor's state: [`SLOTS_MAX`](millrace_policy::gpu::SLOTS_MAX) requests at a time.

mod actions;
mod books;
mod data;
mod inputs;
mod message;
mod moves;
mod outgoing;
mod report;
mod requests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_policy::fabric;
use millrace_policy::gpu::{Action, Event, Gpu as Core};
use millrace_policy::ids::{RequestKey, RunId};
use millrace_proto::executor::InjectFault;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::tensor::Contents as TensorContents;
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, RevisionKey, Timestamp, topology};
use tracing::Span;

use crate::actors::driven::Driven;
use crate::actors::function::Outputs;
use crate::actors::spans::Spans;
use crate::actors::{executor, node};
use crate::handle::Directory;
use crate::install::PreparedModel;
use crate::port::Descriptor;
use crate::seams::{Behaviour, Slot};

use self::books::Data;
pub(crate) use self::data::DataSaid;
pub(crate) use self::message::Message;
use self::requests::Entry;

/// The program of a fault that concerns no particular program.
const NO_PROGRAM: u64 = u64::MAX;

/// The functions of the node that use each model.
pub(crate) type ModelUsers = BTreeMap<ModelId, Vec<RevisionKey>>;

/// The data that came with the message being handled, and that an action consumes.
enum Carried {
    Nothing,
    Outputs(RunId, Outputs),
    Detail(String),
}

/// The actors that a Gpu actor sends messages to, and the parts of the node that the actor shares.
pub(crate) struct Peers {
    pub(crate) node: Slot<node::Message>,
    pub(crate) executor: Slot<executor::Message>,
    /// The Gpu actor's own address, passed along for replies.
    pub(crate) own: Slot<Message>,
    pub(crate) directory: Arc<Directory>,
    /// The GPUs with NVLinks to this GPU.
    pub(crate) joined: Vec<GpuIndex>,
}

/// The Gpu actor.
pub(crate) struct Gpu {
    hardware: topology::Gpu,
    core: Driven<Core>,
    models: BTreeMap<ModelId, Arc<PreparedModel>>,
    entries: BTreeMap<RequestKey, Entry>,
    incarnation: Incarnation,
    /// The process of the executor that all models share; `None` without one, also in isolation.
    pid: Option<u32>,
    /// The loaded models, each with the process of its own executor in isolation.
    loaded: BTreeMap<ModelId, Option<u32>>,
    /// The spans of requests that ended before the transfer of their model, kept until the transfer ends.
    leaving: Vec<Spans>,
    /// The number of models that the current step evicts.
    evicted: usize,
    data: Data,
    peers: Peers,
}

impl Gpu {
    pub(crate) fn new(hardware: topology::Gpu, core: Driven<Core>, peers: Peers) -> Self {
        Self {
            hardware,
            core,
            models: BTreeMap::new(),
            entries: BTreeMap::new(),
            incarnation: Incarnation(0),
            pid: None,
            loaded: BTreeMap::new(),
            leaving: Vec::new(),
            evicted: 0,
            data: Data::default(),
            peers,
        }
    }

    fn index(&self) -> GpuIndex {
        self.hardware.index
    }

    /// Lets the core handle an event, and then the events about data that the event caused.
    fn step(&mut self, now: Timestamp, event: Event, carried: Carried) {
        self.step_once(now, event, carried);
        self.follow(now);
    }

    /// Lets the core handle the pending events about data.
    fn follow(&mut self, now: Timestamp) {
        while let Some(event) = self.data.next_event() {
            self.step_once(now, event, Carried::Nothing);
        }
    }

    fn step_once(&mut self, now: Timestamp, event: Event, mut carried: Carried) {
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

impl Behaviour for Gpu {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Install { model, memory, prepared } => {
                let weights = prepared.weights_bytes;
                self.models.insert(model, prepared);
                self.step(now, Event::Install { model, memory, weights }, Carried::Nothing);
            }
            Message::Remove(model) => self.step(now, Event::Remove { model }, Carried::Nothing),
            Message::Assign { key, works, incarnation, attempt, from } => {
                let parent = works.first().map_or_else(Span::none, |work| work.span.clone());
                let entry = Entry {
                    key,
                    works,
                    attempt,
                    spans: Spans::new(parent, self.index()),
                    claimed: Vec::new(),
                    copies: Vec::new(),
                    brought: Vec::new(),
                };
                self.assign(now, entry, incarnation, from);
            }
            Message::Recall(key) => self.step(now, Event::Recall { key }, Carried::Nothing),
            Message::Cancel(key) => self.step(now, Event::Cancel { key }, Carried::Nothing),
            Message::Up { incarnation, pid } => {
                self.data.begin(incarnation);
                self.incarnation = incarnation;
                // In isolation each model has its own process, and the shared executor's number is 0.
                self.pid = Some(pid).filter(|&pid| pid != 0);
                self.step(now, Event::Up { incarnation }, Carried::Nothing);
            }
            Message::ProgramUp { model, pid } => {
                if let Some(loaded) = self.loaded.get_mut(&model) {
                    *loaded = Some(pid);
                    self.peers.directory.changed();
                }
            }
            Message::Event(Event::Unlock { transfer }) if self.unlend_object(transfer) => self.follow(now),
            Message::Event(event) => {
                if let Event::ProgramLost { model } | Event::ProgramFailed { model } = event {
                    self.loaded.remove(&model);
                    self.peers.directory.changed();
                }
                if let Event::TransferEnded { transfer, .. } = event {
                    self.leaving.retain(|spans| !spans.swaps_by(transfer));
                    let waiting = self.entries.values_mut().filter(|entry| entry.spans.swaps_by(transfer));
                    waiting.for_each(|entry| entry.spans.swap_ends());
                }
                let arrived = matches!(event, Event::Arrived { .. });
                self.step(now, event, Carried::Nothing);
                if arrived {
                    self.end_swaps();
                }
            }
            Message::Copied(copied) => {
                let spans = self.entries.values().map(|entry| &entry.spans).chain(&self.leaving);
                spans.for_each(|spans| spans.copied(now, &copied));
                self.batch_crossed(now, &copied);
            }
            Message::RunDone { run, times, event, outputs } => {
                self.entries.values().for_each(|entry| entry.spans.launched(now, run, &times));
                let kept = outputs
                    .tensors
                    .iter()
                    .any(|it| matches!(it.contents, Some(TensorContents::KeptBytes(_))));
                self.step(now, event, Carried::Outputs(run, outputs));
                if kept {
                    self.drop_unwanted(run);
                }
            }
            Message::Data(said) => {
                self.data_said(said);
                self.follow(now);
            }
            Message::Queued { object, place, waits } => {
                self.data.queued(object, place, waits);
                self.follow(now);
            }
            Message::Fetch { part, reader, reply } => {
                self.fetch(part, reader, reply);
                self.follow(now);
            }
            Message::Brought { run, place, found } => {
                self.input_brought(now, run, place, found);
                self.follow(now);
            }
            Message::LockObject { transfer, piece } => {
                self.lend_object(transfer, piece);
                self.follow(now);
            }
            Message::Came { transfer, outcome, routes } => {
                self.came(now, transfer, outcome, &routes);
                self.follow(now);
            }
            Message::Left { transfer, outcome } => {
                self.went_out(transfer, outcome);
                self.follow(now);
            }
            Message::Replaced => self.lose_data(),
            Message::Discard(object) => {
                self.data.discard(object);
                self.follow(now);
            }
            Message::RunFailed { event, detail } => self.step(now, event, Carried::Detail(detail)),
            Message::Inject { fault, model } => {
                let program = model.map_or(NO_PROGRAM, |model| model.0.into());
                self.send(Command::InjectFault(InjectFault { fault: fault.into(), program }), Vec::new());
            }
            Message::Report { parts, users } => self.report(now, &parts, &users),
        }
    }

    fn tick(&mut self, now: Timestamp) {
        self.step(now, Event::Tick, Carried::Nothing);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.core.next_wake()
    }
}
