//! Departures of requests: from the queue if the client no longer waits, or from a GPU after the
//! request ended, was returned, or was lost with the GPU.

use std::time::Duration;

use millrace_types::{GpuIndex, Timestamp};

use super::dispatcher::{Dispatcher, RequestLocation};
use super::models::ModelSlot;
use super::policy::QueueEntry;
use super::protocol::Action;
use super::queue::WaitingRequest;
use super::seats::{Assignment, Seat};
use millrace_core::attempts::ReturnReason;
use millrace_core::attempts::{AttemptLoss, AttemptProgress, RetryDecision};
use millrace_core::ids::RequestKey;

/// Position of a request on a seat of a lost GPU.
#[derive(Debug, Clone, Copy)]
pub(super) enum TurnState {
    Running,
    Next,
}

impl Dispatcher {
    pub(super) fn withdraw(&mut self, key: RequestKey, actions: &mut Vec<Action>) {
        match self.places.get(&key).copied() {
            Some(RequestLocation::Queued { request, reserved }) => {
                if !self.withdraw_suspect(&request, reserved) && !self.sliced.remove(&request) {
                    self.policy.remove(&request);
                }
                self.unpin(&request, reserved, actions);
                self.forget_request(&request);
                self.queued -= 1;
            }
            Some(RequestLocation::On(seat)) => {
                let gpu = self.fleet.gpu_of(seat);
                let withdraw = |held: &mut Assignment| held.withdrawn = true;
                let known = self.fleet.change_seat(seat, |_, it| {
                    it.requests_mut().find(|held| held.request.key == key).map(withdraw)
                });
                if known.is_some() {
                    actions.push(Action::Cancel { gpu, key });
                }
            }
            None => {}
        }
    }

    /// Removes all records of a request that left this node.
    pub(super) fn forget_request(&mut self, request: &WaitingRequest) {
        self.places.remove(&request.key);
        self.rows.remove(&request.key);
        self.inputs.remove(&request.key);
        self.models.remove_user(request.model);
    }

    /// Removes a request from a GPU.
    fn remove_from_gpu(&mut self, now: Timestamp, gpu: GpuIndex, key: RequestKey) -> Option<Assignment> {
        let seat = self.fleet.seat_with(gpu, key)?;
        let held = self.fleet.change_seat(seat, |_, it| it.remove(now, key))?;
        if !self.fleet.get(gpu).is_for_slices(seat) {
            self.policy.on_seat_freed(seat, gpu);
        }
        Some(held)
    }

    pub(super) fn ended(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        key: RequestKey,
        ran: Option<Duration>,
        actions: &mut Vec<Action>,
    ) {
        let Some(held) = self.remove_from_gpu(now, gpu, key) else { return };
        if let Some(ran) = ran {
            self.fleet.change(gpu, |it, _| it.arrived(held.request.model));
            self.learn(&held, gpu, now.since(held.since), ran, actions);
        }
        self.forget_request(&held.request);
    }

    pub(super) fn returned(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        key: RequestKey,
        why: ReturnReason,
        actions: &mut Vec<Action>,
    ) {
        let Some(held) = self.remove_from_gpu(now, gpu, key) else { return };
        match why {
            ReturnReason::Recalled if held.withdrawn => self.forget_request(&held.request),
            ReturnReason::Recalled => self.queue_up(held.request, QueueEntry::Back),
            ReturnReason::Failed(progress) => self.lost(&held, AttemptLoss::Failed(progress), actions),
            ReturnReason::Died(progress) => self.lost(&held, AttemptLoss::Died(progress), actions),
        }
    }

    fn lost(&mut self, held: &Assignment, loss: AttemptLoss, actions: &mut Vec<Action>) {
        let request = held.request;
        if held.withdrawn {
            return self.forget_request(&request);
        }
        match request.attempts.after(loss) {
            RetryDecision::Again(attempts) => {
                self.queue_up(WaitingRequest { attempts, ..request }, QueueEntry::Back)
            }
            RetryDecision::Refuse { reason, may_have_executed } => {
                self.forget_request(&request);
                actions.push(Action::Fail { key: request.key, reason, may_have_executed });
            }
        }
    }

    pub(super) fn down(
        &mut self,
        gpu: GpuIndex,
        progress: impl Fn(&Assignment, TurnState) -> AttemptProgress,
        actions: &mut Vec<Action>,
    ) {
        let (requests, resident) = self.fleet.change(gpu, |gone, seats| {
            gone.executor = None;
            let resident: Vec<ModelSlot> = gone.resident().collect();
            resident.iter().for_each(|&model| gone.remove_resident(model));
            let requests: Vec<_> = seats.iter_mut().flat_map(take_requests).collect();
            (requests, resident)
        });
        resident.into_iter().for_each(|model| self.remove_holder(model, gpu, actions));
        for (held, turn) in requests {
            self.lost(&held, AttemptLoss::Died(progress(&held, turn)), actions);
        }
        for request in self.policy.on_gpu_lost(gpu) {
            self.places.insert(request.key, RequestLocation::Queued { request, reserved: None });
        }
        self.return_suspects(gpu);
        self.unpin_all(gpu, actions);
        self.remove_warm_copies(gpu, actions);
    }
}

/// Takes all requests from a seat.
fn take_requests(seat: &mut Seat) -> Vec<(Assignment, TurnState)> {
    let running = seat.running.take().map(|held| (held, TurnState::Running));
    let ahead = std::mem::take(&mut seat.ahead).into_iter().map(|held| (held, TurnState::Next));
    running.into_iter().chain(ahead).collect()
}
