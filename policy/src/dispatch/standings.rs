//! Eviction ranks that each GPU gets for its models (T23, T24). A single copy of a model is the
//! original, and a model is light or heavy by its profile on GPUs of that kind.

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

    /// Notes that a model is no longer on a GPU, and informs the GPU that has the original copy
    /// from now on.
    pub(super) fn left(&mut self, model: Slot, gpu: GpuIndex, actions: &mut Vec<Action>) {
        if let Some(heir) = self.models.left(model, gpu) {
            self.tell_standing(model, heir, actions);
        }
    }

    /// Returns the weight of a model on each holder of a kind, for comparison after the profile
    /// changes. Empty if evictions do not depend on weights.
    pub(super) fn weights(&self, model: Slot, kind: u32) -> Vec<(GpuIndex, Weight)> {
        if !self.config.eviction.wants_standings() {
            return Vec::new();
        }
        let holders = self.models.get(model).holders.iter();
        let of_kind = holders.filter(|&gpu| self.fleet.get(gpu).kind == kind);
        of_kind.map(|gpu| (gpu, self.weight(model, gpu))).collect()
    }

    /// Informs the GPUs on which the weight of a model changed.
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
