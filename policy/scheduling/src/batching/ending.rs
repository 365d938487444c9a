//! End of batches: a batch ends or is lost and its members continue alone, or members are withdrawn
//! individually.

use millrace_types::{GpuIndex, Timestamp};

use super::{Batch, BatchItem, BatchStage, Batcher};
use crate::dispatch::{self, Action, QueuedRequest};
use millrace_core::Core as _;
use millrace_core::attempts::ReturnReason;
use millrace_core::attempts::{AttemptLoss, AttemptProgress, RetryDecision};
use millrace_core::ids::{FunctionIndex, RequestKey};

impl Batcher {
    /// Removes a batch.
    pub(super) fn remove(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        if let Some(batch) = self.take_out(key) {
            self.taken_out(now, key, &batch, actions);
        }
    }

    fn take_out(&mut self, key: RequestKey) -> Option<Batch> {
        self.close(key);
        let batch = self.batches.remove(&key)?;
        if let Some(it) = self.functions.get_mut(&batch.first.function) {
            it.waiting.remove(&(batch.kind(), key));
        }
        for key in batch.keys() {
            self.batch_of.remove(&key);
        }
        Some(batch)
    }

    /// Applies the consequences of a removed batch.
    fn taken_out(&mut self, now: Timestamp, key: RequestKey, batch: &Batch, actions: &mut Vec<Action>) {
        if batch.whole.rows > 1 {
            let inputs = batch.first.inputs;
            self.forward(now, dispatch::Event::BatchChanged { key, rows: 1, inputs }, actions);
        }
        if let BatchStage::Held { until } = batch.stage {
            self.held.remove(&(until, key));
        } else {
            self.record_batch_end(now, batch.first.function, actions);
        }
    }

    /// Notes that a batch of a function ended. Without any batch at work, no request is held back.
    fn record_batch_end(&mut self, now: Timestamp, function: FunctionIndex, actions: &mut Vec<Action>) {
        let Some(it) = self.functions.get_mut(&function) else { return };
        it.at_work -= 1;
        if it.at_work == 0 {
            for key in it.open.values().copied().collect::<Vec<_>>() {
                self.release(now, key, actions);
            }
        }
    }

    pub(super) fn withdraw(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        let Some(lead) = self.batch_of.remove(&key) else {
            return self.forward(now, dispatch::Event::Withdraw { key }, actions);
        };
        let Some(batch) = self.batches.get_mut(&lead) else { return };
        let Some(place) = batch.keys().position(|member| member == key) else { return };
        batch.members.remove(place);
        if !batch.members.is_empty() {
            return self.shrink(now, lead, actions);
        }
        match batch.stage {
            BatchStage::Held { .. } => self.remove(now, lead, actions),
            BatchStage::Queued => {
                self.forward(now, dispatch::Event::Withdraw { key: lead }, actions);
                self.remove(now, lead, actions);
            }
            BatchStage::On(_) => self.forward(now, dispatch::Event::Withdraw { key: lead }, actions),
        }
    }

    /// Updates the size of a waiting batch after a withdrawal. A batch on a GPU keeps its size.
    fn shrink(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        let Some(batch) =
            self.batches.get_mut(&key).filter(|batch| !matches!(batch.stage, BatchStage::On(_)))
        else {
            return;
        };
        let left = batch.members.iter().map(|&(_, item)| item).reduce(BatchItem::plus);
        batch.whole = left.unwrap_or(batch.whole);
        let rows = batch.whole.rows;
        let inputs = batch.inputs();
        if batch.stage == BatchStage::Queued {
            self.forward(now, dispatch::Event::BatchChanged { key, rows, inputs }, actions);
        }
    }

    pub(super) fn ended(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        event: dispatch::Event,
        actions: &mut Vec<Action>,
    ) {
        let Some(batch) = self.batches.get(&key) else { return self.forward(now, event, actions) };
        if batch.members.len() > 1 && !batch.split {
            self.totals.batches += 1;
            self.totals.requests += batch.members.len() as u64;
        }
        let again = if batch.split { batch.members.clone() } else { Vec::new() };
        self.forward(now, event, actions);
        self.remove(now, key, actions);
        let failed = AttemptLoss::Failed(AttemptProgress::Begun);
        again.into_iter().for_each(|(request, _)| self.rerun_alone(now, request, failed, actions));
    }

    pub(super) fn returned(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        why: ReturnReason,
        event: dispatch::Event,
        actions: &mut Vec<Action>,
    ) {
        match why {
            ReturnReason::Recalled
                if self.batches.get(&key).is_some_and(|batch| batch.members.is_empty()) =>
            {
                self.forward(now, event, actions);
                self.remove(now, key, actions);
            }
            ReturnReason::Recalled => {
                self.set_stage(key, BatchStage::Queued);
                self.forward(now, event, actions);
            }
            ReturnReason::Failed(progress) => {
                self.lose(now, self.known(key, progress), AttemptLoss::Failed, event, actions);
            }
            ReturnReason::Died(progress) => {
                self.lose(now, self.known(key, progress), AttemptLoss::Died, event, actions)
            }
        }
    }

    fn known(&self, key: RequestKey, progress: AttemptProgress) -> Vec<(RequestKey, AttemptProgress)> {
        self.batches.contains_key(&key).then_some((key, progress)).into_iter().collect()
    }

    pub(super) fn down(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        progress: impl Fn(RequestKey) -> AttemptProgress,
        event: dispatch::Event,
        actions: &mut Vec<Action>,
    ) {
        let there = self.batches.iter().filter(|(_, batch)| batch.stage == BatchStage::On(gpu));
        let lost = there.map(|(&key, _)| (key, progress(key))).collect();
        self.lose(now, lost, AttemptLoss::Died, event, actions);
    }

    /// Splits batches that lost their GPU: each member continues alone.
    fn lose(
        &mut self,
        now: Timestamp,
        lost: Vec<(RequestKey, AttemptProgress)>,
        loss: fn(AttemptProgress) -> AttemptLoss,
        event: dispatch::Event,
        actions: &mut Vec<Action>,
    ) {
        let mut gone = Vec::new();
        for (key, progress) in lost {
            let Some(batch) = self.take_out(key) else { continue };
            // The request that identifies the batch in the queue continues there, unless withdrawn.
            let led = batch.keys().any(|member| member == key);
            if !led && !batch.members.is_empty() {
                let mut cancelled = Vec::new();
                self.queue.on_event(now, dispatch::Event::Withdraw { key }.into(), &mut cancelled);
                cancelled
                    .retain(|action| !matches!(action, Action::Cancel { key: gone, .. } if *gone == key));
                actions.extend(cancelled);
            }
            gone.push((key, batch, loss(progress)));
        }
        // Forward the loss first: no request may be assigned to a GPU that is already gone.
        self.forward(now, event, actions);
        for (key, batch, loss) in gone {
            let others =
                batch.members.iter().map(|&(request, _)| request).filter(|request| request.key != key);
            others.for_each(|request| self.rerun_alone(now, request, loss, actions));
            self.taken_out(now, key, &batch, actions);
        }
    }

    /// Runs a member of a lost batch alone, if another run is allowed.
    fn rerun_alone(
        &mut self,
        now: Timestamp,
        request: QueuedRequest,
        loss: AttemptLoss,
        actions: &mut Vec<Action>,
    ) {
        match request.attempts.after(loss) {
            RetryDecision::Again(attempts) => {
                let request = QueuedRequest { attempts, ..request };
                self.forward(now, dispatch::Event::Enqueue(request), actions);
            }
            RetryDecision::Refuse { reason, may_have_executed } => {
                actions.push(Action::Fail { key: request.key, reason, may_have_executed });
            }
        }
    }
}
