//! Departures of requests: from the queue if the client no longer waits, or from a GPU after the
//! request ended, was returned, or was lost with the GPU.

use std::time::Duration;

use millrace_types::{GpuIndex, Timestamp};

use super::gpus::Held;
use super::models::Slot;
use super::policy::Entry;
use super::queue::Waiting;
use super::{Action, Dispatch, Place, Return};
use crate::attempts::{Loss, Progress, Verdict};
use crate::ids::RequestKey;

/// Position of a request on a lost GPU.
#[derive(Debug, Clone, Copy)]
pub(super) enum Turn {
    Running,
    Next,
}

impl Dispatch {
    pub(super) fn withdraw(&mut self, key: RequestKey, actions: &mut Vec<Action>) {
        match self.places.get(&key).copied() {
            Some(Place::Queued { request, reserved }) => {
                self.policy.remove(&request);
                self.unpin(&request, reserved, actions);
                self.gone(&request);
                self.queued -= 1;
            }
            Some(Place::On(gpu)) => {
                let withdraw = |held: &mut Held| held.withdrawn = true;
                if self.fleet.change(gpu, |it| it.held_mut(key).map(withdraw)).is_some() {
                    actions.push(Action::Cancel { gpu, key });
                }
            }
            None => {}
        }
    }

    /// Removes all records of a request that left this node.
    pub(super) fn gone(&mut self, request: &Waiting) {
        self.places.remove(&request.key);
        self.rows.remove(&request.key);
        self.inputs.remove(&request.key);
        self.models.unused(request.model);
    }

    /// Removes a request from a GPU.
    fn take_off(&mut self, now: Timestamp, gpu: GpuIndex, key: RequestKey) -> Option<Held> {
        let held = self.fleet.change(gpu, |it| it.remove(now, key))?;
        self.policy.freed(gpu);
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
        let Some(held) = self.take_off(now, gpu, key) else { return };
        if let Some(ran) = ran {
            self.fleet.change(gpu, |it| it.ran(held.request.model));
            self.learn(&held, gpu, now.since(held.since), ran, actions);
        }
        self.gone(&held.request);
    }

    pub(super) fn returned(
        &mut self,
        now: Timestamp,
        gpu: GpuIndex,
        key: RequestKey,
        why: Return,
        actions: &mut Vec<Action>,
    ) {
        let Some(held) = self.take_off(now, gpu, key) else { return };
        match why {
            Return::Recalled if held.withdrawn => self.gone(&held.request),
            Return::Recalled => self.queue_up(held.request, Entry::Back),
            Return::Failed(progress) => self.lost(&held, Loss::Failed(progress), actions),
            Return::Died(progress) => self.lost(&held, Loss::Died(progress), actions),
        }
    }

    fn lost(&mut self, held: &Held, loss: Loss, actions: &mut Vec<Action>) {
        let request = held.request;
        if held.withdrawn {
            return self.gone(&request);
        }
        match request.attempts.after(loss) {
            Verdict::Again(attempts) => self.queue_up(Waiting { attempts, ..request }, Entry::Back),
            Verdict::Refuse { reason, may_have_executed } => {
                self.gone(&request);
                actions.push(Action::Fail { key: request.key, reason, may_have_executed });
            }
        }
    }

    pub(super) fn down(
        &mut self,
        gpu: GpuIndex,
        progress: impl Fn(&Held, Turn) -> Progress,
        actions: &mut Vec<Action>,
    ) {
        let (running, ahead, resident) = self.fleet.change(gpu, |gone| {
            gone.executor = None;
            let resident: Vec<Slot> = gone.resident().collect();
            resident.iter().for_each(|&model| gone.remove_resident(model));
            (gone.running.take(), std::mem::take(&mut gone.ahead), resident)
        });
        resident.into_iter().for_each(|model| self.left(model, gpu, actions));
        let running = running.map(|held| (held, Turn::Running));
        let ahead = ahead.into_iter().map(|held| (held, Turn::Next));
        for (held, turn) in running.into_iter().chain(ahead) {
            self.lost(&held, Loss::Died(progress(&held, turn)), actions);
        }
        for request in self.policy.lost(gpu) {
            self.places.insert(request.key, Place::Queued { request, reserved: None });
        }
        self.unpin_all(gpu, actions);
        self.none_kept(gpu, actions);
    }
}
