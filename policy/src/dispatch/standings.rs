//! What each GPU is told of the models on it, so that it knows which make room first (T23, T24): of
//! all copies of a model one is the original, and a model is light or heavy by what was learned of it
//! on GPUs of that kind.

use millrace_types::GpuIndex;

use super::gpus::Loading;
use super::models::{Models, Slot};
use super::{Action, Dispatch};
use crate::gpu::Standing;
use crate::gpu::eviction::Weight;

impl Dispatch {
    pub(super) fn tell_standing(&self, model: Slot, gpu: GpuIndex, actions: &mut Vec<Action>) {
        if self.eviction.wants_standings() {
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

    /// Learns something of a model on one kind of GPU, and tells those that hold it if it weighs
    /// otherwise now.
    pub(super) fn reweigh(
        &mut self,
        model: Slot,
        kind: u32,
        actions: &mut Vec<Action>,
        learn: impl FnOnce(&mut Models),
    ) {
        if !self.eviction.wants_standings() {
            return learn(&mut self.models);
        }
        let holders = self.models.get(model).holders.iter().copied();
        let of_kind: Vec<_> = holders.filter(|&gpu| self.fleet.get(gpu).kind == kind).collect();
        let before: Vec<_> = of_kind.iter().map(|&gpu| self.weight(model, gpu)).collect();
        learn(&mut self.models);
        for (gpu, before) in of_kind.into_iter().zip(before) {
            if self.weight(model, gpu) != before {
                self.tell_standing(model, gpu, actions);
            }
        }
    }

    fn weight(&self, model: Slot, gpu: GpuIndex) -> Weight {
        let gpu = self.fleet.get(gpu);
        let load = gpu.load_time(&self.models, model);
        match Loading::of(load, self.models.run_time(model, gpu.kind)) {
            Loading::Nothing | Loading::FromPeer | Loading::Light => Weight::Light,
            Loading::Medium => Weight::Medium,
            Loading::Heavy => Weight::Heavy,
        }
    }
}
