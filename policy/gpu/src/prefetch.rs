//! Models that are loaded before any request needs the model (T16). A single model is loaded at a
//! time, so that the executor is never busy with many prefetches when a request arrives. Prefetch
//! transfers wait for the link behind transfers of requests, and take no room that a request here
//! or another prefetched model relies on.
//!
//! A prefetched model is spared from eviction, as long as others make room, until a request uses
//! it. A prewarmed model, which is only likely to be needed (D29), is spared until fully loaded;
//! from then on the model is like any other. No pinned model is evicted for prewarming.

use millrace_types::{ModelId, Timestamp};

use super::gpu_core::{GpuCore, PrefetchProtection};
use super::protocol::Action;
use super::slots::RequestStage;

impl GpuCore {
    pub(super) fn prefetch(&mut self, model: ModelId, until: PrefetchProtection) {
        // Prefetches are dropped with the executor, like everything else on the GPU.
        if self.incarnation.is_none() || self.lines.uses(model) {
            return;
        }
        let spared = self.prefetched.entry(model).or_insert(until);
        *spared = until.max(*spared);
        self.end_prewarm_protection(model);
    }

    /// Ends the sparing of a prewarmed model that is fully loaded.
    pub(super) fn end_prewarm_protection(&mut self, model: ModelId) {
        if self.prefetched.get(&model) == Some(&PrefetchProtection::Here) && self.complete(model) {
            self.prefetched.remove(&model);
        }
    }

    /// Returns the models that are in use here, that queued requests wait for on this GPU, or that were
    /// loaded ahead of requests.
    pub(super) fn spared_models(&self) -> Vec<ModelId> {
        let mut spared_models = self.in_use();
        spared_models.extend(self.awaited.iter().chain(self.prefetched.keys()));
        spared_models
    }

    /// Keeps the link busy while no request needs it.
    pub(super) fn move_prefetched(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        // A request that waits for room may need the room of a model in flight.
        let waits_for_room = self.lines.iter().any(|slot| slot.stage == RequestStage::Waiting);
        if waits_for_room || !self.moving.is_empty() {
            return;
        }
        let wanted = |gpu: &Self| {
            let lacks = |&model: &ModelId| !gpu.complete(model) && !gpu.must_wait(now, model);
            gpu.prefetched.keys().copied().find(lacks)
        };
        while let Some(model) = wanted(self) {
            let mut spared = self.spared_models();
            // Without this, two kept models would evict each other without end.
            spared.extend(&self.kept);
            if self.prefetched.get(&model) == Some(&PrefetchProtection::Here) {
                let pinned = |model: &ModelId| self.programs.residency(*model).pin;
                spared.extend(self.memory.regions().map(|(model, _)| model).filter(pinned));
            }
            if self.memory.region(model).is_some() || self.map_model(now, model, &spared, actions).is_ok() {
                return self.start_transfer(model, None, actions);
            }
            self.prefetched.remove(&model);
            actions.push(Action::Evicted { models: vec![model] });
        }
    }
}
