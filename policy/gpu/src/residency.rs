//! Decides which models stay on this GPU without a request. Copies with `residency.pin`, and warm
//! copies, are evicted last. A copy that was not used for as long as the owners of its functions allow is dropped, even
//! if no room is needed. These options are ours; the papers evict only to make room (L07, T24). A
//! partly loaded model stays only while a transfer continues the load or a request waits for the
//! model.

use millrace_types::{ModelId, ResidencyOptions, Timestamp};

use super::gpu_core::GpuCore;
use super::isolation::ExecutorIsolation;
use super::protocol::Action;
use millrace_memory::{EvictedModel, EvictionRank};

impl GpuCore {
    /// Returns the eviction rank of a model.
    pub(super) fn rank(&self, model: ModelId) -> EvictionRank {
        if self.stays(model) {
            EvictionRank::LAST
        } else {
            self.eviction.rank(self.programs.candidate(model))
        }
    }

    fn stays(&self, model: ModelId) -> bool {
        self.kept.contains(&model) || self.programs.residency(model).pin
    }

    pub(super) fn set_residency(&mut self, now: Timestamp, model: ModelId, residency: ResidencyOptions) {
        self.programs.set_residency(model, residency);
        self.memory.rank(model, self.rank(model));
        self.schedule_unused_check(now, model);
    }

    pub(super) fn keep(&mut self, model: ModelId, kept: bool) {
        // A GPU without an executor has lost the copy that it was to keep.
        if !kept {
            self.kept.remove(&model);
        } else if self.incarnation.is_some() {
            self.kept.insert(model);
        }
        self.memory.rank(model, self.rank(model));
    }

    /// Records the time at which a copy may have been unused for too long.
    pub(super) fn schedule_unused_check(&mut self, now: Timestamp, model: ModelId) {
        let after = self.programs.residency(model).evict_after;
        if let Some(after) = after.filter(|_| self.memory.region(model).is_some()) {
            let at = now + after;
            self.look_at = Some(self.look_at.map_or(at, |look_at| look_at.min(at)));
        }
    }

    /// Drops the copies that were not used for too long.
    pub(super) fn drop_unused(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        if self.look_at.is_none_or(|at| at > now) {
            return;
        }
        let spared_models = self.spared_models();
        let busy = |model| spared_models.contains(&model) || self.lines.uses(model) || self.stays(model);
        let mut unused = Vec::new();
        let mut next = None;
        for (model, region) in self.memory.regions() {
            let Some(after) = self.programs.residency(model).evict_after else { continue };
            let due = region.last_used() + after;
            if due <= now && !region.is_locked() && !busy(model) {
                unused.push(model);
            } else {
                // A copy that is busy now counts as used now.
                let at = if due <= now { now + after } else { due };
                next = Some(next.map_or(at, |next: Timestamp| next.min(at)));
            }
        }
        self.look_at = next;
        for model in unused {
            self.totals.evictions += 1;
            self.drop_copy(model, actions);
        }
    }

    /// Drops a partly loaded model if no transfer continues the load and no request waits for the
    /// model. The load may have been cut short, or recalled before the start. Otherwise the node
    /// would count the model as loading for ever.
    pub(super) fn drop_part(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let Some(region) = self.memory.region(model).filter(|region| !region.is_locked()) else { return };
        let comes = self.moving.iter().any(|moving| moving.model == model);
        let is_spared = self.prefetched.contains_key(&model) || self.awaited.contains(&model);
        if !(region.loaded().complete() || comes || is_spared || self.lines.uses(model)) {
            self.drop_copy(model, actions);
        }
    }

    fn drop_copy(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        if let Some(EvictedModel { model, generation }) = self.memory.unmap(model) {
            actions.push(Action::Unmap { model, generation });
            actions.push(Action::Evicted { models: vec![model] });
            if self.isolation == ExecutorIsolation::Resident {
                self.unload(model, actions);
            }
        }
    }
}
