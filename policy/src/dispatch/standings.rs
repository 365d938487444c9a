//! What each GPU is told of the models on it, so that it knows which make room first (T23, T24): of
//! all copies of a model one is the original, and a model is light or heavy by what was learned of it
//! on GPUs of that kind.

use millrace_types::GpuIndex;

use super::gpus::Loading;
use super::models::Slot;
use super::{Action, Dispatch};
use crate::gpu::Standing;
use crate::gpu::eviction::Weight;

impl Dispatch {
    pub(super) fn tell_standing(&self, model: Slot, gpu: GpuIndex, actions: &mut Vec<Action>) {
        if self.config.eviction.wants_standings() {
            let standing =
                Standing { copy: self.models.copy_kind(model, gpu), weight: self.weight(model, gpu) };
            actions.push(Action::Standing { gpu, model: self.models.get(model).id, standing });
        }
    }

    /// A model is no longer on a GPU.
    pub(super) fn left(&mut self, model: Slot, gpu: GpuIndex, actions: &mut Vec<Action>) {
        if let Some(heir) = self.models.left(model, gpu) {
            self.tell_standing(model, heir, actions);
        }
    }

    /// What a model weighs on each GPU of a kind that holds it, where anybody wants to know: before
    /// something is learned of it.
    pub(super) fn weights(&self, model: Slot, kind: u32) -> Vec<(GpuIndex, Weight)> {
        if !self.config.eviction.wants_standings() {
            return Vec::new();
        }
        let holders = self.models.get(model).holders.iter();
        let of_kind = holders.filter(|&gpu| self.fleet.get(gpu).kind == kind);
        of_kind.map(|gpu| (gpu, self.weight(model, gpu))).collect()
    }

    /// Tells those where it weighs otherwise now.
    pub(super) fn reweighed(&self, model: Slot, before: Vec<(GpuIndex, Weight)>, actions: &mut Vec<Action>) {
        for (gpu, before) in before {
            if self.weight(model, gpu) != before {
                self.tell_standing(model, gpu, actions);
            }
        }
    }

    fn weight(&self, model: Slot, gpu: GpuIndex) -> Weight {
        let gpu = self.fleet.get(gpu);
        let load = gpu.transfer_time(&self.models, model);
        match Loading::of(load, self.models.run_time(model, gpu.kind)) {
            Loading::Nothing | Loading::FromPeer | Loading::Light => Weight::Light,
            Loading::Medium => Weight::Medium,
            Loading::Heavy => Weight::Heavy,
        }
    }
}
