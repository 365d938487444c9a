//! Eviction ranks that each GPU gets for its models (T23, T24). A single copy of a model is the
//! original, and a model is light or heavy by its profile on GPUs of that kind.

use millrace_types::GpuIndex;

use super::dispatcher::Dispatcher;
use super::load_class::LoadClass;
use super::models::ModelSlot;
use super::protocol::Action;
use millrace_memory::eviction::EvictionCandidate;
use millrace_memory::eviction::LoadInterference;

impl Dispatcher {
    pub(super) fn send_eviction_rank(&self, model: ModelSlot, gpu: GpuIndex, actions: &mut Vec<Action>) {
        if self.config.eviction.uses_candidates() {
            let candidate = EvictionCandidate {
                copy: self.models.copy_kind(model, gpu),
                weight: self.weight(model, gpu),
            };
            actions.push(Action::SetEvictionRank { gpu, model: self.models.get(model).id, candidate });
        }
    }

    /// Notes that a model is no longer on a GPU, and informs the GPU that has the original copy
    /// from now on.
    pub(super) fn remove_holder(&mut self, model: ModelSlot, gpu: GpuIndex, actions: &mut Vec<Action>) {
        if let Some(heir) = self.models.remove_holder(model, gpu) {
            self.send_eviction_rank(model, heir, actions);
        }
    }

    /// Returns the weight of a model on each holder of a kind, for comparison after the profile
    /// changes. Empty if evictions do not depend on weights.
    pub(super) fn weights(&self, model: ModelSlot, kind: u32) -> Vec<(GpuIndex, LoadInterference)> {
        if !self.config.eviction.uses_candidates() {
            return Vec::new();
        }
        let holders = self.models.get(model).holders.iter();
        let of_kind = holders.filter(|&gpu| self.fleet.get(gpu).kind == kind);
        of_kind.map(|gpu| (gpu, self.weight(model, gpu))).collect()
    }

    /// Informs the GPUs on which the weight of a model changed.
    pub(super) fn send_changed_weights(
        &self,
        model: ModelSlot,
        before: Vec<(GpuIndex, LoadInterference)>,
        actions: &mut Vec<Action>,
    ) {
        for (gpu, before) in before {
            if self.weight(model, gpu) != before {
                self.send_eviction_rank(model, gpu, actions);
            }
        }
    }

    fn weight(&self, model: ModelSlot, gpu: GpuIndex) -> LoadInterference {
        let gpu = self.fleet.get(gpu);
        let load = gpu.transfer_time(&self.models, model);
        match LoadClass::of(load, self.models.run_time(model, gpu.kind)) {
            LoadClass::Nothing | LoadClass::FromPeer | LoadClass::Light => LoadInterference::Light,
            LoadClass::Medium => LoadInterference::Medium,
            LoadClass::Heavy => LoadInterference::Heavy,
        }
    }
}
