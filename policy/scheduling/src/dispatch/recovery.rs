//! Recovery of the models of a lost GPU (T16). Models that requests wait for are loaded onto other
//! GPUs at once, by swap from the host, even if no GPU is free for a run. Such models are resident
//! or in transit long before an executor restarts.
//!
//! Each model goes to the GPU with most memory left beside the models that requests wait for there.
//! A model that fits nowhere is loaded with its first assigned request, as usual.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use millrace_types::{Bytes, GpuIndex, ModelId, Timestamp};

use super::dispatcher::Dispatcher;
use super::models::ModelSlot;
use super::protocol::Action;

impl Dispatcher {
    pub(super) fn reload_lost_models(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let homeless: Vec<_> = self.models.models_without_holder().collect();
        let room = |index: GpuIndex| {
            let gpu = self.fleet.get(index);
            (index, gpu.memory().saturating_sub(gpu.wanted_size(&self.models)))
        };
        let mut room: BTreeMap<GpuIndex, Bytes> = self.fleet.up().map(room).collect();
        for slot in homeless {
            let memory = self.models.get(slot).memory;
            let needs = |gpu: GpuIndex| self.fleet.get(gpu).size_of(memory);
            let fits = room.iter_mut().filter(|(gpu, room)| **room >= needs(**gpu));
            let Some((&gpu, left)) = fits.min_by_key(|(gpu, room)| (Reverse(**room), **gpu)) else {
                continue;
            };
            *left = *left - needs(gpu);
            self.prefetch(now, slot, gpu, actions);
        }
    }

    /// Loads a model onto a GPU without a request.
    pub(super) fn prefetch(
        &mut self,
        now: Timestamp,
        slot: ModelSlot,
        gpu: GpuIndex,
        actions: &mut Vec<Action>,
    ) {
        let model = self.record_load(now, slot, gpu, actions);
        actions.push(Action::Prefetch { gpu, model });
    }

    /// Notes that a GPU loads a model without a request, and returns the model's id.
    pub(super) fn record_load(
        &mut self,
        now: Timestamp,
        slot: ModelSlot,
        gpu: GpuIndex,
        actions: &mut Vec<Action>,
    ) -> ModelId {
        let model = self.models.get(slot);
        let id = model.id;
        let memory = model.memory;
        self.models.add_holder(slot, gpu);
        self.fleet.change(gpu, |it, _| it.add_resident(now, slot, memory));
        self.send_eviction_rank(slot, gpu, actions);
        id
    }
}
