//! Forming of batches: requests join, are held back, and are released into the queue.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{BatchingOptions, Timestamp};

use super::{Batch, BatchItem, BatchStage, BatchedFunction, Batcher, DESCRIPTORS_MAX, INLINE_MAX};
use crate::dispatch::{self, Action, QueuedRequest};
use millrace_core::ids::{FunctionIndex, RequestKey};

/// Progress of filling a batch.
#[derive(Debug, Default)]
struct FillProgress {
    any: bool,
    /// Arrival of the oldest taken request that is still in time.
    in_time: Option<Timestamp>,
}

impl Batcher {
    pub(super) fn enqueue(
        &mut self,
        now: Timestamp,
        request: QueuedRequest,
        item: BatchItem,
        actions: &mut Vec<Action>,
    ) {
        let key = request.key;
        let kind = (item.class, request.priority);
        let limits = self.functions.get(&request.function).filter(|it| item.rows <= it.batching.max_size);
        let Some(it) = limits else { return self.forward(now, dispatch::Event::Enqueue(request), actions) };
        let BatchingOptions { max_size, max_wait } = it.batching;
        if let Some(open) = it.open.get(&kind).copied() {
            if self.fits(now, open, item) {
                return self.join(now, open, request, item, actions);
            }
            self.close(open);
            self.release(now, open, actions);
        }
        let Some(it) = self.functions.get_mut(&request.function) else { return };
        let may_grow = item.rows < max_size;
        let waits = may_grow && it.at_work > 0 && !max_wait.is_zero();
        if may_grow {
            it.open.insert(kind, key);
        }
        let until = now + max_wait;
        let members = vec![(request, item)];
        let stage = BatchStage::Held { until };
        let batch = Batch { first: request, members, whole: item, oldest: now, stage, split: false };
        self.held.insert((until, key));
        self.batch_of.insert(key, key);
        self.batches.insert(key, batch);
        if !waits {
            self.release(now, key, actions);
        }
    }

    /// Returns whether a batch may grow by a request.
    fn fits(&self, now: Timestamp, key: RequestKey, item: BatchItem) -> bool {
        let batch = &self.batches[&key];
        let Some(it) = self.functions.get(&batch.first.function) else { return false };
        let larger = batch.whole.plus(item);
        larger.rows <= it.batching.max_size
            && larger.inline <= INLINE_MAX
            && larger.descriptors <= DESCRIPTORS_MAX
            && (self.in_time(now, batch, larger.rows) || !self.in_time(now, batch, batch.whole.rows))
    }

    fn join(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        request: QueuedRequest,
        item: BatchItem,
        actions: &mut Vec<Action>,
    ) {
        let Some(batch) = self.batches.get_mut(&key) else { return };
        batch.members.push((request, item));
        batch.whole = batch.whole.plus(item);
        self.batch_of.insert(request.key, key);
        let rows = batch.whole.rows;
        let inputs = batch.inputs();
        let stage = batch.stage;
        let full = self.functions.get(&request.function).is_some_and(|it| rows >= it.batching.max_size);
        if full {
            self.close(key);
        }
        match stage {
            BatchStage::Held { .. } if full => self.release(now, key, actions),
            BatchStage::Held { .. } | BatchStage::On(_) => {}
            BatchStage::Queued => {
                self.forward(now, dispatch::Event::BatchChanged { key, rows, inputs }, actions)
            }
        }
    }

    /// Fills an assigned batch from waiting batches of its kind, the oldest batch first, while
    /// their requests fit. A late request then costs a share of a run instead of a run of its own.
    /// From each waiting batch, the request that identifies the batch in the queue is taken last.
    pub(super) fn fill(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        let mut taken = FillProgress::default();
        while let Some((request, item)) = self.taken_along(now, key, &mut taken) {
            self.withdraw(now, request.key, actions);
            let batch = self.batches.get_mut(&key).expect("an assigned batch stays until its end");
            batch.members.push((request, item));
            batch.whole = batch.whole.plus(item);
            self.batch_of.insert(request.key, key);
        }
        if taken.any
            && let Some(batch) = self.batches.get(&key)
        {
            let rows = batch.whole.rows;
            let inputs = batch.inputs();
            self.forward(now, dispatch::Event::BatchChanged { key, rows, inputs }, actions);
        }
    }

    /// Returns the next request that a batch takes from another batch.
    fn taken_along(
        &self,
        now: Timestamp,
        key: RequestKey,
        taken: &mut FillProgress,
    ) -> Option<(QueuedRequest, BatchItem)> {
        let batch = self.batches.get(&key)?;
        let waiting = &self.functions.get(&batch.first.function)?.waiting;
        let alike = (batch.kind(), RequestKey(u64::MIN))..=(batch.kind(), RequestKey(u64::MAX));
        let &(_, known_by) = waiting.range(alike).next()?;
        let other = self.batches.get(&known_by)?;
        let further = other.members.iter().find(|(request, _)| request.key != known_by);
        let &(request, item) = further.or(other.members.first())?;
        let larger = batch.whole.plus(item).rows;
        let in_time = self.in_time(now, other, larger);
        let made_late = self.in_time(now, other, other.whole.rows) && !in_time
            || taken.in_time.is_some_and(|oldest| !self.in_time_of(now, batch, oldest, larger));
        if made_late || !self.fits(now, key, item) {
            return None;
        }
        taken.any = true;
        if in_time {
            taken.in_time = Some(taken.in_time.map_or(other.oldest, |oldest| oldest.min(other.oldest)));
        }
        Some((request, item))
    }

    /// Returns whether the oldest request of a batch would be in time in a run of `rows` rows that
    /// began now. True if the run time or the deadline is unknown.
    fn in_time(&self, now: Timestamp, batch: &Batch, rows: u32) -> bool {
        self.in_time_of(now, batch, batch.oldest, rows)
    }

    /// Returns the same for a request that arrived at `came`.
    fn in_time_of(&self, now: Timestamp, batch: &Batch, came: Timestamp, rows: u32) -> bool {
        let Some(it) = self.functions.get(&batch.first.function) else { return true };
        let run = self.dispatch().predicted_run(batch.first.model, rows);
        let limits = run.zip(it.deadline);
        limits.is_none_or(|(run, deadline)| now + run <= came + deadline)
    }

    /// Closes a batch to further requests.
    pub(super) fn close(&mut self, key: RequestKey) {
        let Some(batch) = self.batches.get(&key) else { return };
        let kind = batch.kind();
        if let Some(it) = self.functions.get_mut(&batch.first.function)
            && it.open.get(&kind) == Some(&key)
        {
            it.open.remove(&kind);
        }
    }

    /// Releases a held batch into the queue.
    pub(super) fn release(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        let Some(batch) = self.batches.get_mut(&key) else { return };
        let BatchStage::Held { until } = batch.stage else { return };
        self.held.remove(&(until, key));
        let rows = batch.whole.rows;
        let inputs = batch.inputs();
        let first = QueuedRequest { inputs, ..batch.first };
        // No batch may take members from this batch yet: the queue does not know the batch, and may
        // assign others first.
        batch.stage = BatchStage::Queued;
        if let Some(it) = self.functions.get_mut(&first.function) {
            it.at_work += 1;
        }
        // The rows must be known before the batch is assigned, which may happen at once.
        if rows > 1 {
            self.forward(now, dispatch::Event::BatchChanged { key, rows, inputs }, actions);
        }
        self.set_stage(key, BatchStage::Queued);
        self.forward(now, dispatch::Event::Enqueue(first), actions);
    }

    /// Releases the batches that were held for the full wait.
    pub(super) fn release_due(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while let Some(&(_, key)) = self.held.first().filter(|(until, _)| *until <= now) {
            self.release(now, key, actions);
        }
    }

    pub(super) fn limits(
        &mut self,
        now: Timestamp,
        function: FunctionIndex,
        batching: Option<BatchingOptions>,
        deadline: Option<Duration>,
        actions: &mut Vec<Action>,
    ) {
        let Some(batching) = batching else {
            let Some(gone) = self.functions.remove(&function) else { return };
            return gone.open.into_values().for_each(|key| self.release(now, key, actions));
        };
        // Batches from before the function's batching was last switched off may still be at work.
        let out = |batch: &&Batch| {
            batch.first.function == function && !matches!(batch.stage, BatchStage::Held { .. })
        };
        let waits = |(_, batch): &(&RequestKey, &Batch)| out(batch) && batch.stage == BatchStage::Queued;
        let waiting = self.batches.iter().filter(waits).map(|(&key, batch)| (batch.kind(), key));
        let it = self.functions.entry(function).or_insert_with(|| BatchedFunction {
            batching,
            deadline,
            open: BTreeMap::new(),
            waiting: waiting.collect(),
            at_work: self.batches.values().filter(out).count() as u32,
        });
        it.batching = batching;
        it.deadline = deadline;
    }
}
