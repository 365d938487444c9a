//! Requests that wait for one GPU alone, and what keeps their models there: a model is pinned on a GPU
//! from the first request that waits for it there until the last has gone.

use millrace_types::GpuIndex;

use super::models::Slot;
use super::queue::Waiting;
use super::{Action, Dispatch, Place};

impl Dispatch {
    /// A request waits for a GPU alone.
    pub(super) fn reserve(&mut self, request: &Waiting, gpu: GpuIndex, actions: &mut Vec<Action>) {
        let reserved = Some(gpu);
        self.places.insert(request.key, Place::Queued { request: *request, reserved });
        let waiting = self.pins.entry((gpu, request.model)).or_default();
        *waiting += 1;
        if *waiting == 1 {
            actions.push(Action::Pin { gpu, model: self.models.get(request.model).id });
        }
    }

    /// It does no longer.
    pub(super) fn unpin(&mut self, request: &Waiting, gpu: Option<GpuIndex>, actions: &mut Vec<Action>) {
        let Some(gpu) = gpu else { return };
        let pin = (gpu, request.model);
        if let Some(waiting) = self.pins.get_mut(&pin) {
            *waiting -= 1;
            if *waiting == 0 {
                self.pins.remove(&pin);
                actions.push(Action::Unpin { gpu, model: self.models.get(request.model).id });
            }
        }
    }

    /// Nobody waits for a lost GPU any more. It has forgotten its pins, but one that was still on its
    /// way there as it died comes after that: the model would stay pinned in its next executor.
    pub(super) fn unpin_all(&mut self, gpu: GpuIndex, actions: &mut Vec<Action>) {
        let models: Vec<Slot> =
            self.pins.range((gpu, Slot::FIRST)..=(gpu, Slot::LAST)).map(|(&(_, slot), _)| slot).collect();
        for slot in models {
            self.pins.remove(&(gpu, slot));
            actions.push(Action::Unpin { gpu, model: self.models.get(slot).id });
        }
    }
}
