//! What of a model stays here without a request for it: pinned and kept copies make room last, and a
//! copy that was not used for as long as its functions' owners allow is dropped though nothing needs
//! its room. These options are ours; the papers evict for room alone (L07, T24). A part of a model stays
//! for whoever goes on with it, and else not.

use millrace_types::{ModelId, Residency, Timestamp};

use super::{Action, Gpu, Isolation};
use crate::memory::{Evicted, Rank};

impl Gpu {
    /// How soon a model makes room.
    pub(super) fn rank(&self, model: ModelId) -> Rank {
        if self.stays(model) { Rank::LAST } else { self.eviction.rank(self.programs.standing(model)) }
    }

    fn stays(&self, model: ModelId) -> bool {
        self.kept.contains(&model) || self.programs.residency(model).pin
    }

    pub(super) fn set_residency(&mut self, now: Timestamp, model: ModelId, residency: Residency) {
        self.programs.set_residency(model, residency);
        self.memory.rank(model, self.rank(model));
        self.look_after(now, model);
    }

    pub(super) fn keep(&mut self, model: ModelId, kept: bool) {
        // What a GPU without an executor was to keep went with it.
        if !kept {
            self.kept.remove(&model);
        } else if self.incarnation.is_some() {
            self.kept.insert(model);
        }
        self.memory.rank(model, self.rank(model));
    }

    /// Notes when a copy that is here may be too old.
    pub(super) fn look_after(&mut self, now: Timestamp, model: ModelId) {
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
        let waited_for = self.waited_for();
        let busy = |model| waited_for.contains(&model) || self.slots.uses(model) || self.stays(model);
        let (mut unused, mut next) = (Vec::new(), None);
        for (model, region) in self.memory.regions() {
            let Some(after) = self.programs.residency(model).evict_after else { continue };
            let due = region.last_used() + after;
            if due <= now && !region.is_locked() && !busy(model) {
                unused.push(model);
            } else {
                // What is busy now is used now.
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

    /// Drops what is here of a model where the rest is not on its way and nobody waits for it. Its load
    /// may have been cut short, or taken back before it began; the node would count it as one that is
    /// coming for ever.
    pub(super) fn drop_part(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        let Some(region) = self.memory.region(model).filter(|region| !region.is_locked()) else { return };
        let comes = self.moving.iter().any(|moving| moving.model == model);
        let waited_for = self.prefetched.contains_key(&model) || self.pinned.contains(&model);
        if !(region.loaded().complete() || comes || waited_for || self.slots.uses(model)) {
            self.drop_copy(model, actions);
        }
    }

    fn drop_copy(&mut self, model: ModelId, actions: &mut Vec<Action>) {
        if let Some(Evicted { model, generation }) = self.memory.unmap(model) {
            actions.push(Action::Unmap { model, generation });
            actions.push(Action::Evicted { models: vec![model] });
            if self.isolation == Isolation::Resident {
                self.unload(model, actions);
            }
        }
    }
}
