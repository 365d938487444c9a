//! Decides which models a GPU loads, evicts and runs. The core of the Gpu actor is the only
//! authority over the GPU's memory, intermediate data included ([`data`]).
//!
//! ```text
//!            no program: LoadProgram     no region: evict, Map
//! Assign ──► Waiting ───────────────────────────────────────► Sent (Run) ──► done
//!               ▲  no room: wait for the other to end             │
//!               └───────────── sent again (bounded) ◄─────────────┘ weights, map or program failed
//! ```
//!
//! A request is sent to the executor at once, while the weights are still being copied. The
//! executor lets each launch wait for the weights that the launch reads, so computing overlaps the
//! transfer. The next request is prepared in the same way while the first runs. One transfer runs
//! at a time: the first request that lacks weights has the link.
//!
//! A model is not evicted while another GPU copies it from this GPU (T25).
//!
//! When the executor is lost, everything on the GPU is lost: the memory map is cleared, and each
//! request is handed back with the request's progress. If each model has a process of its own
//! ([`isolation`]), a single process may be lost alone.
//!
//! | module | decides |
//! |---|---|
//! | [`GpuCore`] | which models a GPU loads, evicts and runs |
//! | [`lifecycle`] | when an executor process is started again |
//! | [`process_pool`] | which process of a program gets which request, and when a process is killed or started again |

mod completion;
mod data;
pub mod isolation;
pub mod lifecycle;
mod peer_copy_lock;
mod prefetch;
mod preparation;
pub mod process_pool;
mod programs;
mod protocol;
mod residency;
mod slots;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Timestamp};

pub use self::data::ObjectAction;
pub use self::isolation::{ExecutorIsolation, PROCESSES_MAX};
pub use self::programs::PROGRAMS_MAX;
pub use self::protocol::{Action, Event, GpuTimes, RunFailure};

use self::data::GpuDataStore;
use self::prefetch::PrefetchProtection;
use self::preparation::IncomingTransfer;
use self::programs::{ProgramLoadState, ProgramTable};
use self::slots::{AssignedRequest, RequestQueue, RequestStage};
use millrace_core::Core;
use millrace_core::attempts::AttemptProgress;
use millrace_core::decision_text::DecisionText;
use millrace_core::ids::{RequestKey, RunId, TransferId};
use millrace_memory::elastic;
use millrace_memory::eviction::Eviction;
use millrace_memory::{BLOCK, MemoryMap};

/// Times that a request is sent to an executor, at most.
pub const SENDS_MAX: u32 = 3;
/// Time that a cancelled run may take before its executor counts as hung.
pub const HANG_AFTER: Duration = Duration::from_secs(30);

/// The health of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExecutorHealth {
    /// The GPU's first executor is not up yet.
    Starting,
    /// The GPU serves requests.
    Up,
    /// The GPU's executor was lost, and another is being started.
    Restarting,
    /// The device failed, and its executor is being replaced.
    Unhealthy,
}

/// The counters of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuCounters {
    /// Models loaded onto the GPU.
    pub swaps: u64,
    /// Loaded models that were copied wholly from another GPU.
    pub peer_swaps: u64,
    /// Models evicted to make room.
    pub evictions: u64,
    /// Time spent computing.
    pub busy: Duration,
    /// Executors after the first.
    pub restarts: u64,
}

/// The state of a GPU.
#[derive(Debug)]
pub struct GpuCore {
    index: GpuIndex,
    health: ExecutorHealth,
    incarnation: Option<Incarnation>,
    memory: MemoryMap,
    /// The store of intermediate data; `None` if such data stays in host memory.
    data: Option<GpuDataStore>,
    eviction: Eviction,
    isolation: ExecutorIsolation,
    /// Models that requests in the node's queue wait for on this GPU. Such a model is evicted only if
    /// nothing else makes room for a request that is already on this GPU.
    pinned: BTreeSet<ModelId>,
    /// Models with a copy here that the node keeps.
    kept: BTreeSet<ModelId>,
    /// The next time to look for copies that were not used for as long as they may stay.
    look_at: Option<Timestamp>,
    /// Models that are loaded before any request needs them, with the time until which each model
    /// is spared.
    prefetched: BTreeMap<ModelId, PrefetchProtection>,
    programs: ProgramTable,
    slots: RequestQueue,
    moving: Vec<IncomingTransfer>,
    /// Models that other GPUs copy from this GPU, by transfer. None of these is evicted.
    lent: BTreeMap<TransferId, ModelId>,
    /// Lent models that lost the process. No request can use such a model here any longer.
    leftovers: BTreeSet<ModelId>,
    /// The next time at which a model that waits for a new process may start one.
    look_again: Option<Timestamp>,
    last_run: RunId,
    last_transfer: TransferId,
    totals: GpuCounters,
}

impl GpuCore {
    /// Returns a GPU without an executor and with empty memory. It evicts the least recently used
    /// models first.
    #[must_use]
    pub fn new(gpu: GpuIndex, memory: MemoryMap) -> Self {
        Self {
            index: gpu,
            health: ExecutorHealth::Starting,
            incarnation: None,
            memory,
            data: None,
            eviction: Eviction::Lru,
            isolation: ExecutorIsolation::default(),
            pinned: BTreeSet::new(),
            kept: BTreeSet::new(),
            look_at: None,
            prefetched: BTreeMap::new(),
            programs: ProgramTable::default(),
            slots: RequestQueue::default(),
            moving: Vec::new(),
            lent: BTreeMap::new(),
            leftovers: BTreeSet::new(),
            look_again: None,
            last_run: RunId(0),
            // Transfer ids must differ between the GPUs of a node.
            last_transfer: TransferId(u64::from(gpu.0) << 40),
            totals: GpuCounters::default(),
        }
    }

    /// Returns the GPU with another eviction policy.
    #[must_use]
    pub fn with_eviction(self, eviction: Eviction) -> Self {
        Self { eviction, ..self }
    }

    /// Returns the GPU with another isolation of models.
    #[must_use]
    pub fn with_isolation(self, isolation: ExecutorIsolation) -> Self {
        Self { isolation, ..self }
    }

    /// Returns the GPU with a store of intermediate data. Without effect unless models share an
    /// executor and the memory layout can give out any free block.
    #[must_use]
    pub fn with_data(self, config: Option<elastic::Config>) -> Self {
        let fits = !self.isolation.per_model() && self.memory.gives_any_block();
        let data = config.filter(|_| fits).map(GpuDataStore::new);
        Self { data, ..self }
    }

    #[must_use]
    pub fn health(&self) -> ExecutorHealth {
        self.health
    }

    #[must_use]
    pub fn memory(&self) -> &MemoryMap {
        &self.memory
    }

    #[must_use]
    pub fn totals(&self) -> GpuCounters {
        self.totals
    }

    /// Returns the request that runs, or would run next.
    #[must_use]
    pub fn running(&self) -> Option<RequestKey> {
        Some(self.slots.get(0)?.key)
    }

    /// Whether a request is assigned to this GPU.
    #[must_use]
    pub fn has(&self, key: RequestKey) -> bool {
        self.slots.place_of(key).is_some()
    }

    /// Returns the number of requests on this GPU.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of models with a transfer to this GPU that has not ended.
    #[must_use]
    pub fn transfers(&self) -> usize {
        self.moving.len()
    }

    /// Returns the size of a model's weights that have arrived.
    #[must_use]
    pub fn loaded(&self, model: ModelId) -> Bytes {
        let chunks = self.memory.region(model).map_or(0, |region| region.loaded().held());
        let weights = self.programs.shape(model).map_or(Bytes::ZERO, |shape| shape.weights);
        // The last chunk is short.
        Bytes(BLOCK.0 * u64::from(chunks)).min(weights)
    }

    fn up(&mut self, incarnation: Incarnation, actions: &mut Vec<Action>) {
        self.totals.restarts += u64::from(self.health != ExecutorHealth::Starting);
        self.health = ExecutorHealth::Up;
        self.incarnation = Some(incarnation);
        actions.push(Action::Up { incarnation });
    }

    /// Clears the state of the GPU after everything on it is lost.
    fn lose_all(&mut self, health: ExecutorHealth, actions: &mut Vec<Action>) {
        if self.incarnation.take().is_some() {
            let progress =
                |(place, slot): (usize, &AssignedRequest)| Some((slot.key, self.progress(place, slot)));
            let waited_for = self.slots.iter().enumerate().filter(|(_, slot)| slot.cancelled.is_none());
            let lost = waited_for.filter_map(progress).collect();
            self.slots.drain();
            self.moving.clear();
            self.lent.clear();
            self.leftovers.clear();
            self.look_again = None;
            self.memory.clear();
            self.data.iter_mut().for_each(GpuDataStore::clear);
            self.pinned.clear();
            self.prefetched.clear();
            self.kept.clear();
            self.look_at = None;
            self.programs.forget_all();
            actions.push(Action::Down { lost });
        }
        if !(health == ExecutorHealth::Restarting && self.health == ExecutorHealth::Unhealthy) {
            self.health = health;
        }
    }

    /// Returns a request's progress: whether the request may have run, and whether the request may
    /// be the cause of a failure.
    fn progress(&self, place: usize, slot: &AssignedRequest) -> AttemptProgress {
        let sent = matches!(slot.stage, RequestStage::Sent { .. });
        if place > 0 {
            let harmless = !sent || self.programs.known(slot.model) == ProgramLoadState::Loaded;
            return if harmless { AttemptProgress::Waiting } else { AttemptProgress::Preparing };
        }
        let loaded = self.memory.region(slot.model).map(|region| region.loaded());
        let readable = loaded.is_some_and(|loaded| loaded.held() > 0 || loaded.complete());
        if sent && readable { AttemptProgress::Begun } else { AttemptProgress::Preparing }
    }

    fn replace(&mut self, health: ExecutorHealth, actions: &mut Vec<Action>) {
        if self.incarnation.is_some() {
            self.lose_all(health, actions);
            actions.push(Action::Replace);
        }
    }

    /// Returns the time at which the executor counts as hung if a cancelled run does not end.
    fn hung_at(&self) -> Option<Timestamp> {
        let cancelled =
            self.slots.iter().filter(|slot| slot.run().is_some()).filter_map(|slot| slot.cancelled);
        cancelled.min().map(|since| since + HANG_AFTER)
    }
}

impl Core for GpuCore {
    type Event = Event;
    type Action = Action;

    fn decision(action: &Action) -> Option<DecisionText> {
        let named = DecisionText::new;
        Some(match *action {
            Action::Run { key, model, .. } => named("run").request(key).model(model),
            Action::Unmap { model, .. } => named("unload").model(model),
            Action::Transfer { weights, ref chunks, .. } => {
                let bytes = chunks.iter().map(|chunks| weights.span(chunks).1);
                named("bring").model(weights.model).bytes(bytes.sum())
            }
            Action::Replace => named("replace the executor"),
            Action::EndProgram { model } => named("end the process").model(model),
            Action::RequestReturned { key, .. } => named("return").request(key),
            Action::Failed { key, .. } => named("fail on the GPU").request(key),
            Action::Data(ref action) => return action.decision(),
            Action::LoadProgram { .. }
            | Action::UnloadProgram { .. }
            | Action::Map { .. }
            | Action::CancelRun { .. }
            | Action::Hasten { .. }
            | Action::Locked { .. }
            | Action::NotLocked { .. }
            | Action::LockLost { .. }
            | Action::CancelTransfer { .. }
            | Action::Completed { .. }
            | Action::Up { .. }
            | Action::Down { .. }
            | Action::Ended { .. }
            | Action::Evicted { .. }
            | Action::ModelForgotten { .. } => return None,
        })
    }

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Install { model, memory, weights } => self.programs.install(model, memory, weights),
            Event::Remove { model } => {
                self.pinned.remove(&model);
                self.kept.remove(&model);
                self.prefetched.remove(&model);
                self.programs.remove(model);
            }
            Event::Prefetch { model } => self.prefetch(model, PrefetchProtection::Used),
            Event::Prewarm { model } => self.prefetch(model, PrefetchProtection::Here),
            Event::CandidateChanged { model, standing } => {
                self.programs.set_standing(model, standing);
                self.memory.rank(model, self.rank(model));
            }
            Event::Eviction(eviction) => {
                self.eviction = eviction;
                for model in self.memory.regions().map(|(model, _)| model).collect::<Vec<_>>() {
                    self.memory.rank(model, self.rank(model));
                }
            }
            Event::Residency { model, residency } => self.set_residency(now, model, residency),
            Event::Keep { model, kept } => self.keep(model, kept),
            Event::Pin { model } => {
                self.pinned.insert(model);
            }
            Event::Unpin { model } => {
                self.pinned.remove(&model);
                self.drop_part(model, actions);
            }
            // The node itself takes back a request that was assigned to a lost executor.
            Event::Assign { key, model, incarnation, from } if self.incarnation == Some(incarnation) => {
                self.slots.push(AssignedRequest::new(key, model, from));
            }
            Event::Assign { .. } => {}
            Event::Recall { key } => self.recall(key, actions),
            Event::Cancel { key } => self.cancel(now, key, actions),
            Event::Up { incarnation } => self.up(incarnation, actions),
            Event::Down => self.lose_all(ExecutorHealth::Restarting, actions),
            Event::ProgramLoaded { model } => self.programs.loaded(now, model),
            Event::ProgramLost { model } => self.program_lost(now, model, actions),
            Event::ProgramFailed { model } => self.program_failed(now, model, actions),
            Event::MapFailed { model, generation } => {
                if self.memory.region(model).is_some_and(|region| region.generation() == generation) {
                    self.drop_region(model, actions);
                }
            }
            Event::Arrived { model, generation, chunks } => self.arrived(model, generation, chunks),
            Event::TransferEnded { transfer, outcome, from } => {
                self.transfer_ended(transfer, outcome, from, actions);
            }
            Event::Lock { transfer, model } => self.lock(transfer, model, actions),
            Event::Unlock { transfer } => self.unlock(transfer),
            Event::RunDone { run, started, finished, waited } => {
                self.run_done(now, run, started, finished, waited, actions);
            }
            Event::RunFailed { run, why } => self.run_failed(run, why, actions),
            Event::RunCancelled { run } => self.run_cancelled(run, actions),
            Event::DeviceFailed => self.replace(ExecutorHealth::Unhealthy, actions),
            Event::Data(event) => self.on_data(now, event, actions),
            Event::Tick => {
                if self.data.as_ref().and_then(GpuDataStore::next_wake).is_some_and(|at| at <= now) {
                    self.tell_store(now, elastic::Event::Tick, actions);
                }
                if self.isolation.per_model() {
                    self.end_hung(now, actions);
                } else if self.hung_at().is_some_and(|at| at <= now) {
                    self.replace(ExecutorHealth::Restarting, actions);
                }
                self.drop_unused(now, actions);
            }
        }
        self.advance(now, actions);
        let before = self.memory.used_blocks();
        self.limit_data(now, actions);
        if self.memory.used_blocks() < before {
            self.advance(now, actions);
        }
        self.sweep(actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let data = self.data.as_ref().and_then(GpuDataStore::next_wake);
        [self.hung_at(), self.look_at, self.look_again, data].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests;
