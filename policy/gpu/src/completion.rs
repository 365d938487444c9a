//! Handles requests that leave a GPU, and failures on the GPU.

use std::time::Duration;

use millrace_types::{GpuIndex, ModelId, Reason, Timestamp};

use super::gpu_core::{ExecutorHealth, GpuCore};
use super::isolation::ExecutorIsolation;
use super::lines::LinePlace;
use super::model_processes::seed;
use super::programs::ProgramLoadState;
use super::protocol::{Action, ComputeRight, GpuTimes, RunFailure, SmUse};
use super::slots::{AssignedRequest, RequestStage};

use millrace_core::attempts::{AttemptProgress, ReturnReason};
use millrace_core::ids::{RequestKey, RunId, TransferId};
use millrace_transfers::fabric::TransferOutcome;

/// Times that a request is sent to an executor, at most.
pub const SENDS_MAX: u32 = 3;

/// The times of a run, as in [`Event::RunDone`](super::Event::RunDone).
#[derive(Debug, Clone, Copy)]
pub(super) struct RunTimes {
    pub(super) started: Timestamp,
    pub(super) finished: Timestamp,
    pub(super) waited: Duration,
    pub(super) held: Duration,
    pub(super) sm: Duration,
    pub(super) on: Option<SmUse>,
}

impl GpuCore {
    pub(super) fn cancel(&mut self, now: Timestamp, key: RequestKey, actions: &mut Vec<Action>) {
        let Some(place) = self.lines.place_of(key) else { return };
        if self.give_up_waiting(place, actions) {
            actions.push(Action::Ended { key, ran: None });
        } else if let Some(slot) = self.lines.get_mut(place) {
            slot.cancelled = Some(now);
        }
    }

    pub(super) fn recall(&mut self, key: RequestKey, actions: &mut Vec<Action>) {
        // A request at its turn is served here: the first request of each seat.
        let Some(place) = self.lines.place_of(key).filter(|place| !place.is_first()) else { return };
        if self.give_up_waiting(place, actions) {
            actions.push(Action::RequestReturned { key, why: ReturnReason::Recalled });
        } else if let Some(slot) = self.lines.get_mut(place) {
            slot.recalled = true;
        }
    }

    /// Removes a request that was not sent. For a request that was sent, asks the executor to drop
    /// the run, and returns false.
    fn give_up_waiting(&mut self, place: LinePlace, actions: &mut Vec<Action>) -> bool {
        let Some(slot) = self.lines.get(place) else { return false };
        if let Some(run) = slot.run() {
            actions.push(Action::CancelRun { run });
            return false;
        }
        self.remove_request(place, actions);
        true
    }

    /// Removes a request, and tells the node if its model is not on this GPU.
    pub(super) fn remove_request(&mut self, place: LinePlace, actions: &mut Vec<Action>) -> AssignedRequest {
        let slot = self.lines.remove(place);
        if self.memory.region(slot.model).is_none() && !self.lines.uses(slot.model) {
            actions.push(Action::Evicted { models: vec![slot.model] });
        }
        self.drop_part(slot.model, actions);
        slot
    }

    pub(super) fn run_done(
        &mut self,
        now: Timestamp,
        run: RunId,
        times: RunTimes,
        actions: &mut Vec<Action>,
    ) {
        let RunTimes { started, finished, waited, held, sm, on } = times;
        let Some(place) = self.lines.place_of_run(run) else { return };
        let slot = self.remove_request(place, actions);
        let swapped = slot.swapped + self.take_unreported(slot.model);
        self.memory.touch(now, slot.model);
        let occupied = finished.since(started).saturating_sub(waited);
        let ran = occupied.saturating_sub(held);
        let of_whole_gpu = if self.tokens.is_some() { sm.min(ran) } else { ran };
        self.totals.busy += of_whole_gpu;
        if slot.cancelled.is_none() {
            // A queued request may begin before the end of the previous run is reported.
            let turn = match slot.turn {
                Some(turn) if slot.was_resident => turn.min(started),
                Some(turn) => turn,
                None => started,
            };
            let swap = if slot.was_resident {
                Duration::ZERO
            } else {
                finished.since(turn).saturating_sub(occupied)
            };
            let held = held.min(occupied);
            let spent = GpuTimes { turn, swap, ran, held, billed: of_whole_gpu, swapped, on };
            actions.push(Action::Completed { key: slot.key, spent });
        }
        // A trial's time says nothing about the function's requests, and is no use of the tenant.
        let is_trial = matches!(slot.right, ComputeRight::Trial(_));
        actions.push(Action::Ended { key: slot.key, ran: Some(occupied).filter(|_| !is_trial) });
    }

    pub(super) fn run_failed(&mut self, run: RunId, why: RunFailure, actions: &mut Vec<Action>) {
        let Some(place) = self.lines.place_of_run(run) else { return };
        let Some(&slot) = self.lines.get(place) else { return };
        let key = slot.key;
        match why {
            RunFailure::Device => self.replace(ExecutorHealth::Unhealthy, actions),
            _ if slot.cancelled.is_some() => {
                self.remove_request(place, actions);
                actions.push(Action::Ended { key, ran: None });
            }
            RunFailure::Model | RunFailure::InputLost => {
                self.remove_request(place, actions);
                let (reason, may_have_executed) = match why {
                    RunFailure::InputLost => (Reason::DataLost, false),
                    _ => (Reason::ModelFailed, true),
                };
                actions.push(Action::Failed { key, reason, may_have_executed });
                actions.push(Action::Ended { key, ran: None });
            }
            RunFailure::NotThere if slot.recalled && !place.is_first() => {
                self.remove_request(place, actions);
                actions.push(Action::RequestReturned { key, why: ReturnReason::Recalled });
            }
            RunFailure::NotThere if slot.sends < SENDS_MAX && !slot.doomed => {
                let coming = self.moving.iter().any(|moving| moving.model == slot.model && !moving.cancelled);
                self.lines.requeue(place, if coming { RequestStage::Starved } else { RequestStage::Waiting });
            }
            RunFailure::NotThere => self.hand_back(place, actions),
            // The reports of copies take a longer way than the report of the run.
            RunFailure::OutOfMemory => {
                let progress = self.progress_before_reports(place, &slot);
                self.hand_back_after(place, progress, actions);
            }
        }
    }

    /// Hands back a request that cannot run here.
    fn hand_back(&mut self, place: LinePlace, actions: &mut Vec<Action>) {
        let Some(slot) = self.lines.get(place) else { return };
        let progress = self.progress(place, slot);
        self.hand_back_after(place, progress, actions);
    }

    fn hand_back_after(&mut self, place: LinePlace, progress: AttemptProgress, actions: &mut Vec<Action>) {
        let key = self.remove_request(place, actions).key;
        actions.push(Action::RequestReturned { key, why: ReturnReason::Failed(progress) });
    }

    pub(super) fn run_cancelled(&mut self, run: RunId, actions: &mut Vec<Action>) {
        let Some(place) = self.lines.place_of_run(run) else { return };
        let Some(&slot) = self.lines.get(place) else { return };
        if slot.cancelled.is_some() {
            self.remove_request(place, actions);
            actions.push(Action::Ended { key: slot.key, ran: None });
        } else if slot.recalled {
            self.remove_request(place, actions);
            actions.push(Action::RequestReturned { key: slot.key, why: ReturnReason::Recalled });
        } else {
            self.hand_back(place, actions);
        }
    }

    pub(super) fn program_failed(&mut self, now: Timestamp, model: ModelId, actions: &mut Vec<Action>) {
        if self.isolation.per_model() && self.programs.known(model) != ProgramLoadState::No {
            // If no process can be started, an immediate retry would only take time from other
            // models.
            self.programs.died(now, model, seed(self.index, model));
        }
        self.programs.forget(model);
        self.drop_region(model, actions);
        let users = self.lines.places().filter(|(_, slot)| slot.model == model);
        let users: Vec<_> = users.map(|(place, &slot)| (place, slot)).collect();
        // Iterate backwards, so that places stay valid. Reports of these runs arrive too late and are
        // ignored.
        for (place, slot) in users.into_iter().rev() {
            if slot.cancelled.is_some() {
                self.remove_request(place, actions);
                actions.push(Action::Ended { key: slot.key, ran: None });
            } else {
                self.hand_back(place, actions);
            }
        }
    }

    /// Drops a region that the executor does not have. The executor refuses copies into it.
    pub(super) fn drop_region(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        if self.is_lent(model) {
            // The whole model was copied there before, so an executor that denies the region cannot
            // be relied on.
            return self.replace(ExecutorHealth::Restarting, actions);
        }
        self.lines.feed(model);
        self.prefetched.remove(&model);
        if self.memory.unmap(model).is_some() {
            self.cancel_transfers(|moving| moving.model == model, actions);
            if !self.lines.uses(model) {
                actions.push(Action::Evicted { models: vec![model] });
            }
            // A request that waits here has the program loaded again at its turn. A run that was
            // sent is reported first.
            let sent = self.lines.iter().any(|slot| slot.model == model && slot.run().is_some());
            if self.isolation == ExecutorIsolation::Resident && !sent {
                self.unload(model, actions);
            }
        }
    }

    pub(super) fn transfer_ended(
        &mut self,
        transfer: TransferId,
        outcome: TransferOutcome,
        from: Option<GpuIndex>,
        actions: &mut Vec<Action>,
    ) {
        let Some(place) = self.moving.iter().position(|moving| moving.transfer == transfer) else { return };
        let ended = self.moving.remove(place);
        self.totals.peer_swaps += u64::from(outcome == TransferOutcome::Complete && from.is_some());
        self.lines.feed(ended.model);
        if outcome == TransferOutcome::Complete {
            self.end_prewarm_protection(ended.model);
        }
        if outcome == TransferOutcome::Failed {
            // The model is loaded again when a request needs it.
            self.prefetched.remove(&ended.model);
            let relies = |slot: &&mut AssignedRequest| matches!(slot.stage, RequestStage::Sent { generation, .. } if generation == ended.generation);
            for slot in self.lines.iter_mut().filter(relies) {
                slot.doomed = true;
                if let Some(run) = slot.run() {
                    actions.push(Action::CancelRun { run });
                }
            }
        }
        if outcome != TransferOutcome::Complete {
            self.drop_part(ended.model, actions);
        }
    }
}
