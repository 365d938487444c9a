//! Suspects on GPUs with several seats. A suspect runs alone in its executor, so that no other
//! request is blamed for its failures, and so that it harms no other request. If the policy chooses a
//! GPU on which others still run, the GPU *drains*: it takes no further request until the suspect has
//! run. One GPU of each size drains at a time.
//!
//! A GPU with a single seat in use never drains, because a suspect is assigned to an idle seat only.
//! Requests that still run on closed seats have to end before a suspect runs.

use millrace_types::{GpuIndex, Timestamp};

use super::dispatcher::{Dispatcher, RequestLocation};
use super::policy::{CopyOrigin, QueueEntry};
use super::protocol::Action;
use super::queue::WaitingRequest;
use millrace_core::ids::SeatIndex;

impl Dispatcher {
    /// Returns whether a request has to wait until the other seats of a GPU are empty.
    pub(super) fn has_to_drain(&self, request: &WaitingRequest, seat: SeatIndex) -> bool {
        request.attempts.suspect() && !self.is_empty(self.fleet.gpu_of(seat))
    }

    fn is_empty(&self, gpu: GpuIndex) -> bool {
        self.fleet.seats_of(gpu).all(|(_, seat)| seat.running.is_none())
    }

    /// Lets a suspect wait until a GPU is empty: a GPU of the same size that drains already, else the
    /// chosen GPU. On a larger GPU the suspect could pass older requests.
    #[cold]
    pub(super) fn drain(&mut self, request: WaitingRequest, chosen: GpuIndex, actions: &mut Vec<Action>) {
        let rank = self.fleet.get(chosen).rank;
        let drains = self.draining.iter().copied().find(|&gpu| self.fleet.get(gpu).rank == rank);
        // An early-bound function runs on its own GPU alone.
        let gpu = drains.filter(|_| !self.config.policy.binds_early()).unwrap_or(chosen);
        self.reserve(&request, gpu, actions);
        self.draining.insert(gpu);
        self.fleet.change(gpu, |it, _| it.suspects.push_back(request));
    }

    /// Assigns the suspects that wait for GPUs without requests.
    #[cold]
    pub(super) fn assign_suspects(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let empty: Vec<GpuIndex> = self.draining.iter().copied().filter(|&gpu| self.is_empty(gpu)).collect();
        for gpu in empty {
            let suspect = self.fleet.change(gpu, |it, _| it.suspects.pop_front());
            self.forget_drained(gpu);
            if let (Some(request), Some(seat)) = (suspect, self.fleet.get(gpu).open_seats().next()) {
                self.assign(now, request, seat, CopyOrigin::Host, actions);
            }
        }
    }

    /// Removes a suspect that waits for a GPU to drain. Returns whether the request was such a suspect.
    pub(super) fn withdraw_suspect(&mut self, request: &WaitingRequest, reserved: Option<GpuIndex>) -> bool {
        let Some(gpu) = reserved.filter(|gpu| self.draining.contains(gpu)) else { return false };
        let removed = self.fleet.change(gpu, |it, _| {
            let place = it.suspects.iter().position(|waiting| waiting.key == request.key)?;
            it.suspects.remove(place)
        });
        self.forget_drained(gpu);
        removed.is_some()
    }

    /// Returns the suspects that wait for a GPU to the policy, because the GPU is lost.
    pub(super) fn return_suspects(&mut self, gpu: GpuIndex) {
        let suspects = self.fleet.change(gpu, |it, _| std::mem::take(&mut it.suspects));
        self.draining.remove(&gpu);
        for request in suspects {
            self.places.insert(request.key, RequestLocation::Queued { request, reserved: None });
            self.policy.push(request, QueueEntry::Back);
        }
    }

    /// Ends all draining: another policy takes over all waiting requests.
    pub(super) fn stop_draining(&mut self) {
        for gpu in std::mem::take(&mut self.draining) {
            self.fleet.change(gpu, |it, _| it.suspects.clear());
        }
    }

    /// Ends the draining of a GPU if no suspect waits for the GPU any longer.
    fn forget_drained(&mut self, gpu: GpuIndex) {
        if self.fleet.get(gpu).suspects.is_empty() && self.draining.remove(&gpu) {
            self.fleet.get(gpu).open_seats().for_each(|seat| self.policy.on_seat_freed(seat, gpu));
        }
    }
}
