//! Requests that wait for a single GPU, and the pins that keep their models there. A model is
//! pinned on a GPU from the first such request until the last such request has left.

use millrace_types::GpuIndex;

use super::dispatcher::{Dispatcher, RequestLocation};
use super::models::ModelSlot;
use super::protocol::Action;
use super::queue::WaitingRequest;

impl Dispatcher {
    /// Notes that a request waits for a GPU alone, and pins the model for the first such request.
    pub(super) fn reserve(&mut self, request: &WaitingRequest, gpu: GpuIndex, actions: &mut Vec<Action>) {
        let reserved = Some(gpu);
        self.places.insert(request.key, RequestLocation::Queued { request: *request, reserved });
        let waiting = self.pins.entry((gpu, request.model)).or_default();
        *waiting += 1;
        if *waiting == 1 {
            actions.push(Action::Pin { gpu, model: self.models.get(request.model).id });
        }
    }

    /// Notes that a request no longer waits for a GPU alone, and unpins the model after the last
    /// such request.
    pub(super) fn unpin(
        &mut self,
        request: &WaitingRequest,
        gpu: Option<GpuIndex>,
        actions: &mut Vec<Action>,
    ) {
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

    /// Removes all pins of a lost GPU. The executor that died forgot its pins, but a pin in transit
    /// at that moment arrives afterwards: without these actions the model would stay pinned in the
    /// next executor.
    pub(super) fn unpin_all(&mut self, gpu: GpuIndex, actions: &mut Vec<Action>) {
        let models: Vec<ModelSlot> = self
            .pins
            .range((gpu, ModelSlot::FIRST)..=(gpu, ModelSlot::LAST))
            .map(|(&(_, slot), _)| slot)
            .collect();
        for slot in models {
            self.pins.remove(&(gpu, slot));
            actions.push(Action::Unpin { gpu, model: self.models.get(slot).id });
        }
    }
}
