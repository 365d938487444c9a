//! Requests of one function that run as one (dynamic batching): stands before the gate and the
//! node's queue, and shows them a batch as one request, by the key of its first.
//!
//! ```text
//! Enqueue ─► joins what waits ──────┐
//!        └─► held back ─► full, or time, or nothing of its function at work
//!                                   ▼
//!                        Tenancy ─► Dispatch ─► Assign: closed; its members run as one
//! ```
//!
//! A batch that waits for a GPU is joined by what comes until it is given to one, so that batches
//! are as large as the wait for GPUs makes them, and nobody waits for others while a GPU is free. With a
//! wait ([`Batching::max_wait`]) a request is also held back while earlier ones of its function are at
//! work: so a second GPU is not taken for a single row.
//!
//! **Bounds.** A batch holds [`Batching::max_size`] rows, and what one message to an executor holds
//! ([`INLINE_MAX`], [`DESCRIPTORS_MAX`]). It does not grow where its run, by what its model's runs of so
//! many rows are expected to take (L15), would then end after the deadline of its oldest request.
//!
//! **Failures.** What a batch's run fails on may be one request's doing: each runs again alone, with a
//! record of its own ([`crate::attempts`]), as after the death of an executor. So nobody is
//! quarantined for another. Requests that must not run twice are never batched (`Serving::validate`).
//!
//! The papers profile batches (L15) and do not form them; how they form is ours, after Triton's
//! dynamic batcher and Nagle's algorithm.

mod protocol;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{Batching, GpuIndex, ModelId, Priority, Timestamp};

pub use self::protocol::{Event, Item};

use crate::attempts::{Attempts, Loss, Progress, Verdict};
use crate::core::Core;
use crate::dispatch::{self, Action, Config, Dispatch, Return};
use crate::ids::{FunctionIndex, RequestKey};
use crate::tenancy::{self, Tenancy};

/// The bytes of inputs that travel inside the message of one run.
pub const INLINE_MAX: u32 = 4 << 20;
/// The inputs of one run that travel as descriptors.
pub const DESCRIPTORS_MAX: u32 = 64;

/// What batches there were.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Runs of more than one request.
    pub batches: u64,
    /// Requests in them.
    pub requests: u64,
}

#[derive(Debug)]
struct Function {
    batching: Batching,
    deadline: Option<Duration>,
    /// What may still be joined, at most one of each kind.
    open: BTreeMap<(u64, Priority), RequestKey>,
    /// Its batches that wait for a GPU or are on one.
    at_work: u32,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    key: RequestKey,
    attempts: Attempts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Held { until: Timestamp },
    Queued,
    On(GpuIndex),
}

#[derive(Debug)]
struct Batch {
    function: FunctionIndex,
    model: ModelId,
    priority: Priority,
    class: u64,
    members: Vec<Member>,
    rows: u32,
    inline: u32,
    descriptors: u32,
    oldest: Timestamp,
    stage: Stage,
    /// Its run failed.
    split: bool,
}

/// The node's queue behind its gate, with batches.
#[derive(Debug)]
pub struct Batcher {
    queue: Tenancy,
    functions: BTreeMap<FunctionIndex, Function>,
    /// By the key of the first request, which may have left since.
    batches: BTreeMap<RequestKey, Batch>,
    batch_of: BTreeMap<RequestKey, RequestKey>,
    held: BTreeSet<(Timestamp, RequestKey)>,
    totals: Totals,
}

impl Batcher {
    /// An empty queue; no GPU is up yet, and nothing is batched.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self {
            queue: Tenancy::new(config),
            functions: BTreeMap::new(),
            batches: BTreeMap::new(),
            batch_of: BTreeMap::new(),
            held: BTreeSet::new(),
            totals: Totals::default(),
        }
    }

    /// The queue itself.
    #[must_use]
    pub fn dispatch(&self) -> &Dispatch {
        self.queue.dispatch()
    }

    /// The gate before it.
    #[must_use]
    pub fn tenancy(&self) -> &Tenancy {
        &self.queue
    }

    /// Requests that wait, those in batches each by itself.
    #[must_use]
    pub fn queued(&self) -> usize {
        let extra = |batch: &Batch| match batch.stage {
            Stage::Held { .. } => batch.members.len(),
            Stage::Queued => batch.members.len().saturating_sub(1),
            Stage::On(_) => 0,
        };
        self.queue.queued() + self.batches.values().map(extra).sum::<usize>()
    }

    /// Whether a request waits or is on a GPU, and anybody waits for it.
    #[must_use]
    pub fn holds(&self, key: RequestKey) -> bool {
        // The queue may still know a batch by a request that has left.
        self.batch_of.contains_key(&key) || (!self.batches.contains_key(&key) && self.queue.holds(key))
    }

    /// Whether a function's requests are batched.
    #[must_use]
    pub fn batches(&self, function: FunctionIndex) -> bool {
        self.functions.contains_key(&function)
    }

    /// The requests that the queue knows by this key.
    #[must_use]
    pub fn members(&self, key: RequestKey) -> Vec<RequestKey> {
        let batch = self.batches.get(&key);
        batch.map_or_else(|| vec![key], |batch| batch.members.iter().map(|member| member.key).collect())
    }

    /// What batches there were.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    fn enqueue(&mut self, now: Timestamp, batch: Batch, item: Item, actions: &mut Vec<Action>) {
        let member = batch.members[0];
        let (key, function, kind) = (member.key, batch.function, (item.class, batch.priority));
        let limits = self.functions.get(&function).filter(|it| item.rows <= it.batching.max_size);
        let Some(it) = limits else {
            return self.forward(now, Kind::of(&batch).enqueue(key, member.attempts), actions);
        };
        let (open, batching) = (it.open.get(&kind).copied(), it.batching);
        if let Some(open) = open {
            if self.fits(now, open, item) {
                return self.join(now, open, member, item, actions);
            }
            self.close(open);
            self.release(now, open, actions);
        }
        let Some(it) = self.functions.get_mut(&function) else { return };
        let waits = it.at_work > 0 && !batching.max_wait.is_zero() && item.rows < batching.max_size;
        if item.rows < batching.max_size {
            it.open.insert(kind, key);
        }
        let until = now + batching.max_wait;
        self.held.insert((until, key));
        self.batch_of.insert(key, key);
        self.batches.insert(key, Batch { stage: Stage::Held { until }, ..batch });
        if !waits {
            self.release(now, key, actions);
        }
    }

    /// Whether a batch may grow by a request.
    fn fits(&self, now: Timestamp, key: RequestKey, item: Item) -> bool {
        let batch = &self.batches[&key];
        let Some(it) = self.functions.get(&batch.function) else { return false };
        let rows = batch.rows + item.rows;
        let in_time = |rows: u32| {
            let (deadline, run) = (it.deadline?, self.dispatch().predicted_run(batch.model, rows)?);
            Some(now + run <= batch.oldest + deadline)
        };
        rows <= it.batching.max_size
            && batch.inline + item.inline <= INLINE_MAX
            && batch.descriptors + item.descriptors <= DESCRIPTORS_MAX
            && (in_time(rows) != Some(false) || in_time(batch.rows) == Some(false))
    }

    fn join(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        member: Member,
        item: Item,
        actions: &mut Vec<Action>,
    ) {
        let Some(batch) = self.batches.get_mut(&key) else { return };
        batch.members.push(member);
        batch.rows += item.rows;
        batch.inline += item.inline;
        batch.descriptors += item.descriptors;
        self.batch_of.insert(member.key, key);
        let (rows, stage) = (batch.rows, batch.stage);
        let full = self.functions.get(&batch.function).is_some_and(|it| rows >= it.batching.max_size);
        if full {
            self.close(key);
        }
        match stage {
            Stage::Held { .. } if full => self.release(now, key, actions),
            Stage::Held { .. } | Stage::On(_) => {}
            Stage::Queued => self.forward(now, dispatch::Event::Rows { key, rows }, actions),
        }
    }

    /// Nobody joins a batch any more.
    fn close(&mut self, key: RequestKey) {
        let Some(batch) = self.batches.get(&key) else { return };
        let kind = (batch.class, batch.priority);
        if let Some(it) = self.functions.get_mut(&batch.function)
            && it.open.get(&kind) == Some(&key)
        {
            it.open.remove(&kind);
        }
    }

    /// Lets a batch that was held back wait for a GPU.
    fn release(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.get_mut(&key) else { return };
        let Stage::Held { until } = batch.stage else { return };
        self.held.remove(&(until, key));
        batch.stage = Stage::Queued;
        let Some(&lead) = batch.members.first() else { return };
        let (event, rows) = (Kind::of(batch).enqueue(key, lead.attempts), batch.rows);
        if let Some(it) = self.functions.get_mut(&batch.function) {
            it.at_work += 1;
        }
        // Before it is given to a GPU, which may be at once.
        if rows > 1 {
            self.forward(now, dispatch::Event::Rows { key, rows }, actions);
        }
        self.forward(now, event, actions);
    }

    /// Tells the queue, and sees what it does.
    fn forward(&mut self, now: Timestamp, event: impl Into<tenancy::Event>, actions: &mut Vec<Action>) {
        let mut done = Vec::new();
        self.queue.on_event(now, event.into(), &mut done);
        for action in done {
            match action {
                Action::Assign { gpu, key, .. } if self.batches.contains_key(&key) => {
                    self.close(key);
                    if let Some(batch) = self.batches.get_mut(&key) {
                        batch.stage = Stage::On(gpu);
                    }
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
    }

    /// Forgets a batch.
    fn remove(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        if let Some(batch) = self.take_out(key) {
            self.taken_out(now, key, &batch, actions);
        }
    }

    fn take_out(&mut self, key: RequestKey) -> Option<Batch> {
        self.close(key);
        let batch = self.batches.remove(&key)?;
        for member in &batch.members {
            self.batch_of.remove(&member.key);
        }
        Some(batch)
    }

    /// Does what follows from a batch being forgotten.
    fn taken_out(&mut self, now: Timestamp, key: RequestKey, batch: &Batch, actions: &mut Vec<Action>) {
        if batch.rows > 1 {
            self.forward(now, dispatch::Event::Rows { key, rows: 1 }, actions);
        }
        if let Stage::Held { until } = batch.stage {
            self.held.remove(&(until, key));
        } else {
            self.one_less(now, batch.function, actions);
        }
    }

    /// A batch of a function is not at work any more: without any nobody is held back.
    fn one_less(&mut self, now: Timestamp, function: FunctionIndex, actions: &mut Vec<Action>) {
        let Some(it) = self.functions.get_mut(&function) else { return };
        it.at_work -= 1;
        if it.at_work == 0 {
            for key in it.open.values().copied().collect::<Vec<_>>() {
                self.release(now, key, actions);
            }
        }
    }

    fn withdraw(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        let Some(lead) = self.batch_of.remove(&key) else {
            return self.forward(now, dispatch::Event::Withdraw { key }, actions);
        };
        let Some(batch) = self.batches.get_mut(&lead) else { return };
        batch.members.retain(|member| member.key != key);
        if !batch.members.is_empty() {
            // What it was stays counted: it is joined by as much less.
            return;
        }
        match batch.stage {
            Stage::Held { .. } => self.remove(now, lead, actions),
            Stage::Queued => {
                self.forward(now, dispatch::Event::Withdraw { key: lead }, actions);
                self.remove(now, lead, actions);
            }
            Stage::On(_) => self.forward(now, dispatch::Event::Withdraw { key: lead }, actions),
        }
    }

    fn ended(&mut self, now: Timestamp, key: RequestKey, event: dispatch::Event, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.get(&key) else { return self.forward(now, event, actions) };
        if batch.members.len() > 1 && !batch.split {
            self.totals.batches += 1;
            self.totals.requests += batch.members.len() as u64;
        }
        let again = if batch.split { batch.members.clone() } else { Vec::new() };
        let kind = Kind::of(batch);
        self.forward(now, event, actions);
        self.remove(now, key, actions);
        let failed = Loss::Failed(Progress::Begun);
        again.into_iter().for_each(|member| self.again(now, kind, member, failed, actions));
    }

    fn returned(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        why: Return,
        event: dispatch::Event,
        actions: &mut Vec<Action>,
    ) {
        match why {
            Return::Recalled if self.batches.get(&key).is_some_and(|batch| batch.members.is_empty()) => {
                self.forward(now, event, actions);
                self.remove(now, key, actions);
            }
            Return::Recalled => {
                if let Some(batch) = self.batches.get_mut(&key) {
                    batch.stage = Stage::Queued;
                }
                self.forward(now, event, actions);
            }
            Return::Failed(progress) => {
                self.lose(now, self.known(key, progress), Loss::Failed, event, actions);
            }
            Return::Died(progress) => self.lose(now, self.known(key, progress), Loss::Died, event, actions),
        }
    }

    fn known(&self, key: RequestKey, progress: Progress) -> Vec<(RequestKey, Progress)> {
        self.batches.contains_key(&key).then_some((key, progress)).into_iter().collect()
    }

    fn down(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        progress: impl Fn(RequestKey) -> Progress,
        event: dispatch::Event,
        actions: &mut Vec<Action>,
    ) {
        let there = self.batches.iter().filter(|(_, batch)| batch.stage == Stage::On(gpu));
        let lost = there.map(|(&key, _)| (key, progress(key))).collect();
        self.lose(now, lost, Loss::Died, event, actions);
    }

    /// Batches lost their GPU: each of their requests goes on by itself.
    fn lose(
        &mut self,
        now: Timestamp,
        lost: Vec<(RequestKey, Progress)>,
        loss: fn(Progress) -> Loss,
        event: dispatch::Event,
        actions: &mut Vec<Action>,
    ) {
        let mut gone = Vec::new();
        for (key, progress) in lost {
            let Some(batch) = self.take_out(key) else { continue };
            // The one that the queue knows it by goes on there, unless it has left.
            let led = batch.members.iter().any(|member| member.key == key);
            if !led && !batch.members.is_empty() {
                let mut cancelled = Vec::new();
                self.queue.on_event(now, dispatch::Event::Withdraw { key }.into(), &mut cancelled);
                cancelled
                    .retain(|action| !matches!(action, Action::Cancel { key: gone, .. } if *gone == key));
                actions.extend(cancelled);
            }
            gone.push((key, batch, loss(progress)));
        }
        // Nothing that follows may go to the GPU before it is known to be gone.
        self.forward(now, event, actions);
        for (key, batch, loss) in gone {
            let others = batch.members.iter().filter(|member| member.key != key);
            others.for_each(|&member| self.again(now, Kind::of(&batch), member, loss, actions));
            self.taken_out(now, key, &batch, actions);
        }
    }

    /// Runs a request of a lost batch by itself, if it may run again.
    fn again(&mut self, now: Timestamp, kind: Kind, member: Member, loss: Loss, actions: &mut Vec<Action>) {
        match member.attempts.after(loss) {
            Verdict::Again(attempts) => {
                self.forward(now, kind.enqueue(member.key, attempts), actions);
            }
            Verdict::Refuse { reason, may_have_executed } => {
                actions.push(Action::Fail { key: member.key, reason, may_have_executed });
            }
        }
    }

    fn limits(
        &mut self,
        now: Timestamp,
        function: FunctionIndex,
        limits: (Option<Batching>, Option<Duration>),
        actions: &mut Vec<Action>,
    ) {
        let (Some(batching), deadline) = limits else {
            let Some(gone) = self.functions.remove(&function) else { return };
            return gone.open.into_values().for_each(|key| self.release(now, key, actions));
        };
        let it = self.functions.entry(function).or_insert_with(|| Function {
            batching,
            deadline,
            open: BTreeMap::new(),
            at_work: 0,
        });
        (it.batching, it.deadline) = (batching, deadline);
    }

    fn pass(&mut self, now: Timestamp, event: tenancy::Event, actions: &mut Vec<Action>) {
        let tenancy::Event::Dispatch(event) = event else { return self.forward(now, event, actions) };
        match event {
            dispatch::Event::Withdraw { key } => self.withdraw(now, key, actions),
            dispatch::Event::Ended { key, .. } => self.ended(now, key, event, actions),
            dispatch::Event::Returned { key, why, .. } => self.returned(now, key, why, event, actions),
            dispatch::Event::Down { gpu, ref lost } => {
                let said: BTreeMap<_, _> = lost.iter().copied().collect();
                let progress = |key| said.get(&key).copied().unwrap_or(Progress::Waiting);
                self.down(now, gpu, progress, event, actions);
            }
            dispatch::Event::Reset { gpu } => self.down(now, gpu, |_| Progress::Begun, event, actions),
            dispatch::Event::Tick => {
                while let Some(&(_, key)) = self.held.first().filter(|(until, _)| *until <= now) {
                    self.release(now, key, actions);
                }
                self.forward(now, event, actions);
            }
            event => self.forward(now, event, actions),
        }
    }
}

/// What a request is besides its key and record.
#[derive(Debug, Clone, Copy)]
struct Kind {
    function: FunctionIndex,
    model: ModelId,
    priority: Priority,
}

impl Kind {
    fn of(batch: &Batch) -> Self {
        let Batch { function, model, priority, .. } = *batch;
        Self { function, model, priority }
    }

    /// A request as the queue sees one.
    fn enqueue(self, key: RequestKey, attempts: Attempts) -> dispatch::Event {
        let Self { function, model, priority } = self;
        dispatch::Event::Enqueue { key, function, model, attempts, priority }
    }
}

impl Core for Batcher {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Queue(event) => self.pass(now, event, actions),
            Event::Enqueue { key, function, model, attempts, priority, item } => {
                let Item { rows, class, inline, descriptors } = item;
                let members = vec![Member { key, attempts }];
                let (oldest, stage, split) = (now, Stage::Queued, false);
                let batch = Batch {
                    function,
                    model,
                    priority,
                    class,
                    members,
                    rows,
                    inline,
                    descriptors,
                    oldest,
                    stage,
                    split,
                };
                self.enqueue(now, batch, item, actions);
            }
            Event::Limits { function, batching, deadline } => {
                self.limits(now, function, (batching, deadline), actions);
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
