//! Models that are brought before any request that needs them is here (T16). They come one at a time,
//! so that the executor is never busy with many of them when a request comes, wait for the link behind
//! those of requests, and take no room that a request here, or another of them, relies on; until they
//! are used they are spared as long as others make room; those that are only likely to be asked for
//! (D29), until they are here: after that they are models as any. For these nothing goes that is pinned.

use millrace_types::{ModelId, Timestamp};

use super::slots::Stage;
use super::{Action, Gpu};

/// How long a model that was brought before its requests is spared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Until {
    /// Until all of it is here.
    Here,
    /// Until a request uses it.
    Used,
}

impl Gpu {
    pub(super) fn prefetch(&mut self, model: ModelId, until: Until) {
        // What a GPU without an executor was to bring went with it, as all that it had.
        if self.incarnation.is_none() || self.slots.uses(model) {
            return;
        }
        let spared = self.prefetched.entry(model).or_insert(until);
        *spared = until.max(*spared);
        self.has_come(model);
    }

    /// A model that is spared until it is here may be.
    pub(super) fn has_come(&mut self, model: ModelId) {
        if self.prefetched.get(&model) == Some(&Until::Here) && self.complete(model) {
            self.prefetched.remove(&model);
        }
    }

    /// What is in use here, and what requests elsewhere wait for.
    pub(super) fn waited_for(&self) -> Vec<ModelId> {
        let mut waited_for = self.in_use();
        waited_for.extend(self.pinned.iter().chain(self.prefetched.keys()));
        waited_for
    }

    /// Keeps the link busy where no request needs it.
    pub(super) fn move_prefetched(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        // A request that waits for room may need that of what is on its way.
        let waits_for_room = self.slots.iter().any(|slot| slot.stage == Stage::Waiting);
        if waits_for_room || !self.moving.is_empty() {
            return;
        }
        let wanted = |gpu: &Self| {
            let lacks = |&model: &ModelId| !gpu.complete(model) && !gpu.held_back(now, model);
            gpu.prefetched.keys().copied().find(lacks)
        };
        while let Some(model) = wanted(self) {
            let mut spared = self.waited_for();
            // Else two that are kept would push each other out for ever.
            spared.extend(&self.kept);
            if self.prefetched.get(&model) == Some(&Until::Here) {
                let pinned = |model: &ModelId| self.programs.residency(*model).pin;
                spared.extend(self.memory.regions().map(|(model, _)| model).filter(pinned));
            }
            if self.memory.region(model).is_some() || self.place(now, model, &spared, actions).is_ok() {
                return self.start_transfer(model, None, actions);
            }
            self.prefetched.remove(&model);
            actions.push(Action::Evicted { models: vec![model] });
        }
    }
}
