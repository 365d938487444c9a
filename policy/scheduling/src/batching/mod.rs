//! Dynamic batching: requests of one function that run as one. The batcher stands before the tenant
//! gate and the node's queue, which see a batch as one request with the key of its first member.
//!
//! ```text
//! Enqueue ─► joins a waiting batch ──┐
//!        └─► held back ─► full, a request that does not fit, max_wait over, or no batch of the
//!                          function at work
//!                                    ▼
//!                         Tenancy ─► Dispatch ─► Assign: closed; its members run as one
//! ```
//!
//! Requests join a batch that waits for a GPU until the batch is assigned. Without a wait,
//! batches are therefore as large as the wait for GPUs makes them, and no request waits for others while a
//! GPU is free. An assigned batch is filled from other waiting batches of its function: often with requests that
//! could not join in time and are late by now. With a wait ([`BatchingOptions::max_wait`]), a new
//! batch is also held back while another batch of its function waits for a GPU or is on one, so that a
//! second GPU is not occupied for a single row.
//!
//! **Bounds.** A batch has at most [`BatchingOptions::max_size`] rows, and at most the inputs that fit one
//! message to an executor ([`INLINE_MAX`], [`DESCRIPTORS_MAX`]). A batch does not grow if its run,
//! by the predicted run time for that many rows (L15), would then end after the deadline of its
//! oldest request, unless the oldest request would be late even without the growth.
//!
//! **Failures.** One request may be the cause of a failed batch. Each member therefore runs again
//! alone, with a record of its own ([`millrace_core::attempts`]), as after the death of an executor. So no
//! request is quarantined because of another. Requests that must not run twice are never batched
//! (`SchedulingOptions::validate`).
//!
//! The papers profile batches (L15) but do not form them. The rules for forming are ours, after
//! Triton's dynamic batcher and Nagle's algorithm.

mod ending;
mod forming;
mod protocol;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{BatchingOptions, GpuIndex, Priority, Timestamp};

pub use self::protocol::{BatchItem, Event};

use crate::dispatch::{self, Action, Config, Dispatcher, InputLocations, QueuedRequest};
use crate::tenancy::{self, TenantGate};
use millrace_core::Core;
use millrace_core::attempts::AttemptProgress;
use millrace_core::ids::{FunctionIndex, RequestKey};

/// Maximum bytes of inputs inside the message of one run.
pub const INLINE_MAX: u32 = 4 << 20;
/// Maximum number of inputs that travel as descriptors in one run.
pub const DESCRIPTORS_MAX: u32 = 64;

/// Counters of batches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// Runs of more than one request.
    pub batches: u64,
    /// Requests in these runs.
    pub requests: u64,
}

/// Key of batchable requests: a class of inputs and outputs, and a priority.
type Kind = (u64, Priority);

/// Batches of a function.
#[derive(Debug)]
struct BatchedFunction {
    batching: BatchingOptions,
    deadline: Option<Duration>,
    /// Batches that requests may still join, at most a single batch of each kind.
    open: BTreeMap<Kind, RequestKey>,
    /// Batches that wait for a GPU.
    waiting: BTreeSet<(Kind, RequestKey)>,
    /// Number of batches that wait for a GPU or are on a GPU.
    at_work: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BatchStage {
    Held { until: Timestamp },
    Queued,
    On(GpuIndex),
}

#[derive(Debug)]
struct Batch {
    /// First request, which gives the batch its key in the queue. May have been withdrawn since.
    first: QueuedRequest,
    members: Vec<(QueuedRequest, BatchItem)>,
    /// Sum of all members.
    whole: BatchItem,
    oldest: Timestamp,
    stage: BatchStage,
    /// Whether the run failed, so that the members run again alone.
    split: bool,
}

impl Batch {
    fn kind(&self) -> Kind {
        (self.whole.class, self.first.priority)
    }

    /// Returns the location of the inputs of all members.
    fn inputs(&self) -> InputLocations {
        self.members.iter().fold(InputLocations::NONE, |all, (request, _)| all.plus(request.inputs))
    }

    fn keys(&self) -> impl Iterator<Item = RequestKey> {
        self.members.iter().map(|(request, _)| request.key)
    }
}

/// The node's queue behind its gate, with batching.
#[derive(Debug)]
pub struct Batcher {
    queue: TenantGate,
    functions: BTreeMap<FunctionIndex, BatchedFunction>,
    /// Batches by the key of their first request.
    batches: BTreeMap<RequestKey, Batch>,
    batch_of: BTreeMap<RequestKey, RequestKey>,
    held: BTreeSet<(Timestamp, RequestKey)>,
    totals: BatchCounts,
}

impl Batcher {
    /// Creates an empty queue, with all GPUs down and no batching.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self {
            queue: TenantGate::new(config),
            functions: BTreeMap::new(),
            batches: BTreeMap::new(),
            batch_of: BTreeMap::new(),
            held: BTreeSet::new(),
            totals: BatchCounts::default(),
        }
    }

    /// Returns the node's queue.
    #[must_use]
    pub fn dispatch(&self) -> &Dispatcher {
        self.queue.dispatch()
    }

    /// Returns the tenant gate.
    #[must_use]
    pub fn tenancy(&self) -> &TenantGate {
        &self.queue
    }

    /// Returns the number of waiting requests; each member of a batch counts.
    #[must_use]
    pub fn queued(&self) -> usize {
        let extra = |batch: &Batch| match batch.stage {
            BatchStage::Held { .. } => batch.members.len(),
            BatchStage::Queued => batch.members.len().saturating_sub(1),
            BatchStage::On(_) => 0,
        };
        self.queue.queued() + self.batches.values().map(extra).sum::<usize>()
    }

    /// Returns whether a request waits or is on a GPU, and has not been withdrawn.
    #[must_use]
    pub fn holds(&self, key: RequestKey) -> bool {
        // The queue may still identify a batch by a request that was withdrawn.
        self.batch_of.contains_key(&key) || (!self.batches.contains_key(&key) && self.queue.holds(key))
    }

    /// Returns whether a function's requests are batched.
    #[must_use]
    pub fn batches(&self, function: FunctionIndex) -> bool {
        self.functions.contains_key(&function)
    }

    /// Returns the requests that the queue knows by this key.
    #[must_use]
    pub fn members(&self, key: RequestKey) -> Vec<RequestKey> {
        let batch = self.batches.get(&key);
        batch.map_or_else(|| vec![key], |batch| batch.keys().collect())
    }

    /// Returns the counters of batches.
    #[must_use]
    pub fn totals(&self) -> BatchCounts {
        self.totals
    }

    /// Forwards an event to the queue, and accounts for the resulting actions.
    fn forward(&mut self, now: Timestamp, event: impl Into<tenancy::Event>, actions: &mut Vec<Action>) {
        let mut done = Vec::new();
        self.queue.on_event(now, event.into(), &mut done);
        let mut given = Vec::new();
        for action in done {
            match action {
                Action::Assign { gpu, key, .. } if self.batches.contains_key(&key) => {
                    self.close(key);
                    self.set_stage(key, BatchStage::On(gpu));
                    given.push(key);
                    actions.push(action);
                }
                Action::Fail { key, reason, may_have_executed } if self.batches.contains_key(&key) => {
                    let members = self.members(key);
                    let fail = |key| Action::Fail { key, reason, may_have_executed };
                    actions.extend(members.into_iter().map(fail));
                    self.remove(now, key, actions);
                }
                action => actions.push(action),
            }
        }
        // Fill batches only after all assignments are recorded, or a batch could take members of an
        // assigned batch.
        for key in given {
            self.fill(now, key, actions);
        }
    }

    fn set_stage(&mut self, key: RequestKey, stage: BatchStage) {
        let Some(batch) = self.batches.get_mut(&key) else { return };
        batch.stage = stage;
        let id = (batch.kind(), key);
        let Some(it) = self.functions.get_mut(&batch.first.function) else { return };
        if stage == BatchStage::Queued {
            it.waiting.insert(id);
        } else {
            it.waiting.remove(&id);
        }
    }

    /// Updates the location of a request's inputs, for its whole batch.
    fn moved(&mut self, now: Timestamp, key: RequestKey, inputs: InputLocations, actions: &mut Vec<Action>) {
        let Some(&lead) = self.batch_of.get(&key) else {
            return self.forward(now, dispatch::Event::InputsMoved { key, inputs }, actions);
        };
        let Some(batch) = self.batches.get_mut(&lead) else { return };
        let members = batch.members.iter_mut().map(|(request, _)| request);
        let its = members.chain([&mut batch.first]).filter(|request| request.key == key);
        its.for_each(|request| request.inputs = inputs);
        let key = lead;
        let rows = batch.whole.rows;
        let inputs = batch.inputs();
        let stage = batch.stage;
        match stage {
            // The location is sent with the release of the batch.
            BatchStage::Held { .. } => {}
            BatchStage::Queued | BatchStage::On(_) if rows > 1 => {
                self.forward(now, dispatch::Event::BatchChanged { key, rows, inputs }, actions);
            }
            BatchStage::Queued | BatchStage::On(_) => {
                self.forward(now, dispatch::Event::InputsMoved { key, inputs }, actions);
            }
        }
    }

    fn pass(&mut self, now: Timestamp, event: tenancy::Event, actions: &mut Vec<Action>) {
        let tenancy::Event::Dispatch(event) = event else { return self.forward(now, event, actions) };
        match event {
            dispatch::Event::Withdraw { key } => self.withdraw(now, key, actions),
            dispatch::Event::InputsMoved { key, inputs } => self.moved(now, key, inputs, actions),
            dispatch::Event::RequestEnded { key, .. } => self.ended(now, key, event, actions),
            dispatch::Event::RequestReturned { key, why, .. } => self.returned(now, key, why, event, actions),
            dispatch::Event::Down { gpu, ref lost } => {
                let said: BTreeMap<_, _> = lost.iter().copied().collect();
                let progress = |key| said.get(&key).copied().unwrap_or(AttemptProgress::Waiting);
                self.down(now, gpu, progress, event, actions);
            }
            dispatch::Event::Reset { gpu } => self.down(now, gpu, |_| AttemptProgress::Begun, event, actions),
            dispatch::Event::Tick => {
                self.release_due(now, actions);
                self.forward(now, event, actions);
            }
            event => self.forward(now, event, actions),
        }
    }
}

impl Core for Batcher {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Queue(event) => self.pass(now, event, actions),
            Event::Enqueue { request, item } => self.enqueue(now, request, item, actions),
            Event::Limits { function, batching, deadline } => {
                self.limits(now, function, batching, deadline, actions);
            }
            Event::Split { key } => {
                if let Some(batch) = self.batches.get_mut(&key) {
                    batch.split = true;
                }
            }
        }
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let held = self.held.first().map(|&(until, _)| until);
        held.into_iter().chain(self.queue.next_wake()).min()
    }
}

#[cfg(test)]
mod tests;
