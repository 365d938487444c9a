//! Models that a workflow is likely to ask for next (D29): brought while the step before runs, so that
//! the next one finds its model on a GPU or on its way.
//!
//! A hint, and never a promise. It is followed where that is in nobody's way: nobody waits in the queue
//! or to be let into it, and a GPU has time for it: the one that runs the step before and nothing else,
//! where the data will be, or else the idle one with most room; nothing else is on its way there; and it
//! has room beside what requests wait for and what is kept. What has to wait for such a GPU does so for
//! [`LIKELY_FOR`], at most [`LIKELY_MAX`] at a time.

use std::cmp::Reverse;
use std::time::Duration;

use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::models::Slot;
use super::{Action, Dispatch};

/// Models that wait for a GPU that has time for them.
pub const LIKELY_MAX: usize = 8;
/// How long each does: who was to ask for it has done so by then.
pub const LIKELY_FOR: Duration = Duration::from_secs(1);

/// What became of the models that were likely to be asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prewarms {
    /// A GPU was told to bring them.
    pub brought: u64,
    /// A GPU held them, or a request had asked for them.
    pub there: u64,
    /// No GPU had time or room for them, or requests waited.
    pub busy: u64,
}

/// A model that is likely to be asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hint {
    model: ModelId,
    after: Option<ModelId>,
    until: Timestamp,
}

impl Dispatch {
    /// So many requests wait to be let into the queue ([`crate::tenancy`]): what they need may be on a
    /// GPU, where nothing here says that it is needed.
    pub(crate) fn wait_outside(&mut self, requests: usize) {
        self.outside = requests;
    }

    /// A model is likely to be asked for, with the outputs of another.
    pub(super) fn likely(&mut self, now: Timestamp, model: ModelId, after: Option<ModelId>) {
        if self.models.installed(model).is_none() || self.likely.iter().any(|hint| hint.model == model) {
            return;
        }
        // A model that is bound to one GPU is of no use on another.
        if self.likely.len() >= LIKELY_MAX || self.config.policy.binds_early() {
            self.stats.prewarms.busy += 1;
            return;
        }
        self.likely.push(Hint { model, after, until: now + LIKELY_FOR });
    }

    /// Brings what can be brought now.
    pub(super) fn bring_likely(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        for hint in std::mem::take(&mut self.likely) {
            let Some(slot) = self.models.installed(hint.model) else { continue };
            let model = self.models.get(slot);
            if model.users > 0 || !model.holders.is_empty() {
                self.stats.prewarms.there += 1;
            } else if self.queued + self.outside > 0 || hint.until <= now {
                self.stats.prewarms.busy += 1;
            } else if let Some(gpu) = self.place_for_likely(slot, hint.after) {
                self.stats.prewarms.brought += 1;
                let model = self.comes_without_request(now, slot, gpu, actions);
                actions.push(Action::Prewarm { gpu, model });
            } else {
                self.likely.push(hint);
            }
        }
    }

    fn place_for_likely(&self, slot: Slot, after: Option<ModelId>) -> Option<GpuIndex> {
        let model = self.models.get(slot);
        let rank = model.rank?;
        let room = |gpu: GpuIndex| {
            let it = self.fleet.get(gpu);
            let room = self.room_beside(gpu).filter(|&room| room >= u64::from(model.blocks))?;
            (it.rank >= rank && !it.is_loading_any()).then_some(room)
        };
        let before = after.and_then(|after| self.models.slot(after));
        let runs_only_that = |gpu: &GpuIndex| {
            let it = self.fleet.get(*gpu);
            it.ahead.is_empty() && it.running.as_ref().map(|held| held.request.model) == before
        };
        let holders = before.into_iter().flat_map(|before| self.models.get(before).holders.iter());
        let beside = holders.filter(runs_only_that).find(|&gpu| room(gpu).is_some());
        let idle = self.fleet.all_idle().into_iter().filter_map(|gpu| Some((room(gpu)?, gpu)));
        beside.or_else(|| idle.min_by_key(|&(room, gpu)| (Reverse(room), gpu)).map(|(_, gpu)| gpu))
    }
}
