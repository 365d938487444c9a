//! The Gpu actor, one per GPU: holds the memory map, and takes each request given to it from
//! "assigned" to its answer.
//!
//! In: requests from the Node, events from its Executor, arrivals from the fabric. Out: commands to
//! the Executor, transfers and requests' ends to the Node, answers to the Functions. Bounded by
//! dispatch: [`SLOTS_MAX`](millrace_policy::gpu::SLOTS_MAX) requests at one time.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_policy::dispatch::Return;
use millrace_policy::fabric;
use millrace_policy::gpu::{Action, Event, Gpu as Core, Health};
use millrace_policy::ids::{Generation, RequestKey, RunId};
use millrace_policy::memory::BLOCK;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::{
    Cancel, Fault, InjectFault, LaunchTimes, LoadProgram, Map, Relocate, Run, UnloadProgram, Unmap,
};
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Reason, RevisionKey, Timestamp, topology};
use tracing::Span;

use crate::actors::batch;
use crate::actors::driven::Driven;
use crate::actors::function::{self, Outputs};
use crate::actors::spans::{Copied, Spans};
use crate::actors::work::SharedWork;
use crate::actors::{executor, extents, node};
use crate::handle::{Directory, Parts};
use crate::install::PreparedModel;
use crate::port::Descriptor;
use crate::seams::{Behaviour, Slot};
use crate::snapshot::{GpuHealth, GpuSnapshot, ResidentModel, SnapshotPart};

/// What a fault names that is meant for no program in particular.
const NO_PROGRAM: u64 = u64::MAX;

/// Which functions of the node use a model.
pub(crate) type ModelUsers = BTreeMap<ModelId, Vec<RevisionKey>>;

/// What a Gpu actor is told.
pub(crate) enum Message {
    /// A model may be asked for.
    Install { model: ModelId, memory: Bytes, prepared: Arc<PreparedModel> },
    /// It will not be any more.
    Remove(ModelId),
    /// A request is to run here, or several as one, known by a key of theirs.
    Assign {
        key: RequestKey,
        works: Vec<SharedWork>,
        incarnation: Incarnation,
        attempt: u32,
        from: Option<GpuIndex>,
    },
    /// The node wants it back, if it has not begun.
    Recall(RequestKey),
    /// Nobody waits for it any more.
    Cancel(RequestKey),
    /// There is an executor.
    Up { incarnation: Incarnation, pid: u32 },
    /// A model's own executor is up.
    ProgramUp { model: ModelId, pid: u32 },
    /// Something for its core.
    Event(Event),
    /// A batch of a transfer came.
    Copied(Copied),
    /// A run ended with outputs, and when its launches ran, where that was asked for.
    RunDone { run: RunId, times: Vec<LaunchTimes>, event: Event, outputs: Outputs },
    /// A run ended without, and why.
    RunFailed { event: Event, detail: String },
    /// Pass a fault on.
    Inject { fault: Fault, model: Option<ModelId> },
    /// Tell what the GPU looks like.
    Report { parts: Parts, users: Arc<ModelUsers> },
}

/// A request here, or several that run as one.
struct Entry {
    key: RequestKey,
    /// At least one.
    works: Vec<SharedWork>,
    attempt: u32,
    spans: Spans,
}

impl Entry {
    /// The one whose trace shows what happens to all.
    fn work(&self) -> &SharedWork {
        &self.works[0]
    }
}

/// What came with the event that is handled.
enum Carried {
    Nothing,
    Outputs(Outputs),
    Detail(String),
}

/// Whom a Gpu actor talks to.
pub(crate) struct Peers {
    pub(crate) node: Slot<node::Message>,
    pub(crate) executor: Slot<executor::Message>,
    pub(crate) directory: Arc<Directory>,
}

/// The actor.
pub(crate) struct Gpu {
    hardware: topology::Gpu,
    core: Driven<Core>,
    models: BTreeMap<ModelId, Arc<PreparedModel>>,
    entries: BTreeMap<RequestKey, Entry>,
    incarnation: Incarnation,
    /// Of the executor that all models share.
    pid: Option<u32>,
    /// The models that were loaded, with the executors they have to themselves.
    loaded: BTreeMap<ModelId, Option<u32>>,
    /// Of requests that ended before their model's transfer did: until that does.
    leaving: Vec<Spans>,
    /// How many models made room in what is carried out now.
    evicted: usize,
    peers: Peers,
}

impl Gpu {
    pub(crate) fn new(hardware: topology::Gpu, core: Driven<Core>, peers: Peers) -> Self {
        let (models, entries, loaded) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (incarnation, pid, evicted) = (Incarnation(0), None, 0);
        let leaving = Vec::new();
        Self { hardware, core, models, entries, incarnation, pid, loaded, leaving, evicted, peers }
    }

    fn index(&self) -> GpuIndex {
        self.hardware.index
    }

    fn assign(&mut self, now: Timestamp, entry: Entry, incarnation: Incarnation, from: Option<GpuIndex>) {
        let (key, model) = (entry.key, entry.work().model);
        self.entries.insert(key, entry);
        self.step(now, Event::Assign { key, model, incarnation, from }, Carried::Nothing);
        // The core does not take what was meant for an executor that is gone.
        if !self.core.core.has(key) {
            self.entries.remove(&key);
        }
    }

    fn step(&mut self, now: Timestamp, event: Event, mut carried: Carried) {
        let mut actions = self.core.step(now, event);
        let evicted =
            |action: &Action| if let Action::Evicted { models } = action { models.len() } else { 0 };
        self.evicted = actions.iter().map(evicted).sum();
        for action in actions.drain(..) {
            self.carry_out(action, &mut carried);
        }
        self.core.done(actions);
    }

    fn carry_out(&mut self, action: Action, carried: &mut Carried) {
        let gpu = self.index();
        match action {
            Action::LoadProgram { model } => {
                self.loaded.insert(model, None);
                self.load_program(model);
            }
            Action::UnloadProgram { model } => {
                self.loaded.remove(&model);
                self.send(Command::UnloadProgram(UnloadProgram { program: model.0.into() }), Vec::new());
            }
            Action::Map { model, generation, blocks } => {
                let extents = extents::of_program(&blocks, self.weights(model));
                let map = Map { program: model.0.into(), generation: generation.0, extents };
                self.send(Command::Map(map), Vec::new());
                self.peers.directory.changed();
            }
            Action::Relocate { model, was, generation, blocks } => {
                let extents = extents::of_program(&blocks, self.weights(model));
                let (program, was, generation) = (model.0.into(), was.0, generation.0);
                self.send(Command::Relocate(Relocate { program, was, generation, extents }), Vec::new());
            }
            Action::Unmap { model, generation } => {
                let unmap = Unmap { program: model.0.into(), generation: generation.0 };
                self.send(Command::Unmap(unmap), Vec::new());
                self.peers.directory.changed();
            }
            Action::Run { run, key, model, generation } => self.run(run, key, model, generation),
            Action::CancelRun { run } => self.send(Command::Cancel(Cancel { run: run.0 }), Vec::new()),
            Action::EndProgram { model } => {
                let incarnation = self.incarnation;
                self.peers.executor.post(executor::Message::EndProgram { incarnation, model });
            }
            Action::Replace => self.peers.executor.post(executor::Message::Replace),
            Action::Transfer { transfer, cargo, chunks, from } => {
                let evicted = self.evicted;
                let waiting = self.entries.values_mut().filter(|entry| entry.work().model == cargo.model);
                waiting.for_each(|entry| entry.spans.swap_begins(transfer, cargo, from, evicted));
                self.peers.node.post(node::Message::Transfer { gpu, transfer, cargo, chunks, from });
            }
            Action::Locked { transfer, peer } => self.tell_fabric(fabric::Event::Locked { transfer, peer }),
            Action::LockLost { transfer } => self.tell_fabric(fabric::Event::LockLost { transfer }),
            Action::NotLocked { transfer } => self.tell_fabric(fabric::Event::NotLocked { transfer }),
            Action::CancelTransfer { transfer } => {
                self.peers.node.post(node::Message::CancelTransfer(transfer))
            }
            Action::Completed { key, spent } => self.completed(key, spent, carried),
            Action::Failed { key, reason, may_have_executed } => {
                if let Some(entry) = self.entries.get(&key) {
                    entry.spans.fail(reason);
                    let detail = if let Carried::Detail(detail) = carried {
                        Some(std::mem::take(detail))
                    } else {
                        None
                    };
                    if entry.works.len() > 1 && reason == Reason::ModelFailed {
                        // Perhaps for one of them alone.
                        return self.peers.node.post(node::Message::Split(key));
                    }
                    for work in &entry.works {
                        let (key, detail) = (work.key, detail.clone());
                        let failed = function::Message::Failed { key, reason, may_have_executed, detail };
                        work.home.post(failed);
                    }
                }
            }
            Action::Up { incarnation } => {
                self.peers.node.post(node::Message::Up { gpu, incarnation });
                self.peers.directory.changed();
            }
            Action::Down { lost } => {
                self.entries.values().for_each(|entry| entry.spans.fail("the executor was lost"));
                self.entries.clear();
                self.leaving.clear();
                self.pid = None;
                self.loaded.clear();
                self.peers.node.post(node::Message::Down { gpu, lost });
                self.peers.directory.changed();
            }
            Action::Ended { key, ran } => {
                self.leaving.extend(self.entries.remove(&key).and_then(|entry| entry.spans.leave()));
                self.peers.node.post(node::Message::Ended { gpu, key, ran });
            }
            Action::Returned { key, why } => {
                if let Some(entry) = self.entries.remove(&key) {
                    match why {
                        Return::Recalled => entry.spans.recalled(),
                        Return::Failed(_) => entry.spans.fail("the GPU could not do it"),
                        Return::Died(_) => entry.spans.fail("the model's executor was lost"),
                    }
                }
                self.peers.node.post(node::Message::Returned { gpu, key, why });
            }
            Action::Evicted { models } => self.peers.node.post(node::Message::Evicted { gpu, models }),
            Action::Forgot { model } => {
                self.models.remove(&model);
            }
        }
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

    fn load_program(&self, model: ModelId) {
        let Some(prepared) = self.models.get(&model) else { return };
        let load = LoadProgram {
            program: model.0.into(),
            name: prepared.name.clone(),
            graph_fd: 0,
            graph_bytes: prepared.graph_bytes.0,
            weights_fd: 1,
            weights_bytes: prepared.weights_bytes.0,
            launches: prepared.launches.clone(),
            inputs: prepared.inputs.clone(),
            outputs: prepared.outputs.clone(),
            weights_pageable: false,
            opaque_block_bytes: 0,
            group_bytes: prepared.group_bytes.0,
        };
        let descriptors = vec![Arc::clone(&prepared.graph), Arc::clone(&prepared.weights)];
        self.send(Command::LoadProgram(load), descriptors);
    }

    fn run(&mut self, run: RunId, key: RequestKey, model: ModelId, generation: Generation) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let times = entry.spans.run_begins(run, entry.attempt, entry.works.len());
        let (inputs, descriptors) = batch::inputs(&entry.works);
        let command = Command::Run(Run {
            run: run.0,
            program: model.0.into(),
            generation: generation.0,
            inputs,
            outputs: entry.work().invocation.outputs.clone(),
            reads: Vec::new(),
            times,
            members: u32::try_from(entry.works.len()).unwrap_or(u32::MAX),
        });
        self.send(command, descriptors);
    }

    /// Ends the swap spans of models that are all there.
    fn end_swaps(&mut self) {
        let memory = self.core.core.memory();
        for entry in self.entries.values_mut().filter(|entry| entry.spans.swapping()) {
            if memory.region(entry.work().model).is_some_and(|region| region.loaded().complete()) {
                entry.spans.swap_ends();
            }
        }
    }

    fn completed(&mut self, key: RequestKey, spent: millrace_policy::gpu::Spent, carried: &mut Carried) {
        let (Some(entry), Carried::Outputs(outputs)) =
            (self.entries.get(&key), std::mem::replace(carried, Carried::Nothing))
        else {
            return;
        };
        let (gpu, attempts) = (self.hardware.index, entry.attempt);
        for (work, share) in entry.works.iter().zip(batch::shares(&entry.works)) {
            let (key, outputs) = (work.key, Outputs { share, ..outputs.clone() });
            work.home.post(function::Message::Completed { key, outputs, spent, gpu, attempts });
        }
    }

    fn report(&self, now: Timestamp, parts: &Parts, users: &ModelUsers) {
        let (core, totals) = (&self.core.core, self.core.core.totals());
        let blocks = |blocks: u32| Bytes(BLOCK.0 * u64::from(blocks));
        let resident = |(model, region): (ModelId, &millrace_policy::memory::Region)| {
            Some(ResidentModel {
                digest: self.models.get(&model)?.digest,
                functions: users.get(&model).cloned().unwrap_or_default(),
                bytes: blocks(region.blocks()),
                loaded: core.loaded(model),
                idle: now.since(region.last_used()),
                executor_pid: self.loaded.get(&model).copied().flatten().or(self.pid),
            })
        };
        let mut models: Vec<_> = core.memory().regions().filter_map(resident).collect();
        models.sort_by_key(|model| model.digest);
        let running = core.running().and_then(|key| self.entries.get(&key));
        let part = SnapshotPart::Gpu(GpuSnapshot {
            index: self.index(),
            gpu_type: self.hardware.gpu_type.clone(),
            health: match core.health() {
                Health::Starting => GpuHealth::Starting,
                Health::Up => GpuHealth::Up,
                Health::Restarting => GpuHealth::Restarting,
                Health::Unhealthy => GpuHealth::Unhealthy,
            },
            memory: blocks(core.memory().total_blocks()),
            used: blocks(core.memory().used_blocks()),
            models,
            running: running.map(|entry| entry.work().invocation.revision.clone()),
            incarnation: self.incarnation,
            executor_pid: self.pid,
            executor_pids: self.pid.into_iter().chain(self.loaded.values().copied().flatten()).collect(),
            restarts: totals.restarts,
            swaps: totals.swaps,
            peer_swaps: totals.peer_swaps,
            evictions: totals.evictions,
            busy: totals.busy,
            moved: Bytes(BLOCK.0 * totals.moved_blocks),
        });
        // Whoever asked may have given up.
        parts.send(part).unwrap_or_default();
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
                let spans = Spans::new(parent, self.index());
                self.assign(now, Entry { key, works, attempt, spans }, incarnation, from);
            }
            Message::Recall(key) => self.step(now, Event::Recall { key }, Carried::Nothing),
            Message::Cancel(key) => self.step(now, Event::Cancel { key }, Carried::Nothing),
            Message::Up { incarnation, pid } => {
                // Where each model has its own there is none of all of them.
                (self.incarnation, self.pid) = (incarnation, Some(pid).filter(|&pid| pid != 0));
                self.step(now, Event::Up { incarnation }, Carried::Nothing);
            }
            Message::ProgramUp { model, pid } => {
                if let Some(loaded) = self.loaded.get_mut(&model) {
                    *loaded = Some(pid);
                    self.peers.directory.changed();
                }
            }
            Message::Event(event) => {
                if let Event::ProgramLost { model } | Event::ProgramFailed { model } = event {
                    self.loaded.remove(&model);
                    self.peers.directory.changed();
                }
                if let Event::TransferEnded { transfer, .. } = event {
                    self.leaving.retain(|spans| !spans.swaps_by(transfer));
                    let coming = self.entries.values_mut().filter(|entry| entry.spans.swaps_by(transfer));
                    coming.for_each(|entry| entry.spans.swap_ends());
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
            }
            Message::RunDone { run, times, event, outputs } => {
                self.entries.values().for_each(|entry| entry.spans.launched(now, run, &times));
                self.step(now, event, Carried::Outputs(outputs));
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
