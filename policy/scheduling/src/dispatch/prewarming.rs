//! Prewarming (D29): loads the model that a workflow is likely to need next while the step before
//! runs, so that the next step finds its model on a GPU or in transit.
//!
//! A prewarming hint is never a promise. Dispatch follows a hint only if that delays no request: no
//! request waits in the queue or for its tenant's caps, and a GPU has time for the load. The
//! preferred GPU runs the step before and nothing else, because the data will be there; otherwise
//! the idle GPU with most free memory is chosen. No other load may be under way on that GPU, and
//! the model must fit beside the models that requests wait for and the warm copies. At most
//! [`LIKELY_MAX`] hints wait for such a GPU, each for [`LIKELY_FOR`].

use std::cmp::Reverse;
use std::time::Duration;

use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::dispatcher::Dispatcher;
use super::models::ModelSlot;
use super::prewarm_hint::PendingPrewarm;
use super::protocol::Action;

/// Maximum number of hints that wait for a GPU.
pub const LIKELY_MAX: usize = 8;
/// Lifetime of a waiting hint. The workflow step has requested its model by then.
pub const LIKELY_FOR: Duration = Duration::from_secs(1);

impl Dispatcher {
    /// Sets the number of requests that wait for their tenant's caps ([`crate::tenancy`]). Their
    /// models may be on a GPU although no request in this queue needs them, so these requests block
    /// prewarming.
    pub(crate) fn set_parked_requests(&mut self, requests: usize) {
        self.outside = requests;
    }

    /// Adds a hint that a model will be requested, with the outputs of the model `after`.
    pub(super) fn add_prewarm_hint(&mut self, now: Timestamp, model: ModelId, after: Option<ModelId>) {
        if self.models.installed(model).is_none() || self.likely.iter().any(|hint| hint.model == model) {
            return;
        }
        // With early binding, a model is useless except on the GPU that its function is bound to.
        if self.likely.len() >= LIKELY_MAX || self.config.policy.binds_early() {
            self.stats.prewarms.busy += 1;
            return;
        }
        self.likely.push(PendingPrewarm { model, after, until: now + LIKELY_FOR });
    }

    /// Carries out the hints that are possible now, and drops the expired ones.
    pub(super) fn prewarm_models(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        for hint in std::mem::take(&mut self.likely) {
            let Some(slot) = self.models.installed(hint.model) else { continue };
            let model = self.models.get(slot);
            if model.users > 0 || !model.holders.is_empty() {
                self.stats.prewarms.there += 1;
            } else if self.queued + self.outside > 0 || hint.until <= now {
                self.stats.prewarms.busy += 1;
            } else if let Some(gpu) = self.place_for_likely(slot, hint.after) {
                self.stats.prewarms.brought += 1;
                let model = self.record_load(now, slot, gpu, actions);
                actions.push(Action::Prewarm { gpu, model });
            } else {
                self.likely.push(hint);
            }
        }
    }

    fn place_for_likely(&self, slot: ModelSlot, after: Option<ModelId>) -> Option<GpuIndex> {
        let model = self.models.get(slot);
        let rank = model.rank?;
        let room = |gpu: GpuIndex| {
            let it = self.fleet.get(gpu);
            let room = self.room_beside(gpu).filter(|&room| room >= it.size_of(model.memory))?;
            (it.rank >= rank && !it.is_loading_any()).then_some(room)
        };
        let before = after.and_then(|after| self.models.slot(after));
        let runs_only_that = |gpu: &GpuIndex| {
            let mut here = self.fleet.seats_of(*gpu).flat_map(|(_, seat)| seat.requests());
            here.next().map(|held| held.request.model) == before && here.next().is_none()
        };
        let holders = before.into_iter().flat_map(|before| self.models.get(before).holders.iter());
        let beside = holders.filter(runs_only_that).find(|&gpu| room(gpu).is_some());
        let idle = self.fleet.idle_gpus().into_iter().filter_map(|gpu| Some((room(gpu)?, gpu)));
        beside.or_else(|| idle.min_by_key(|&(room, gpu)| (Reverse(room), gpu)).map(|(_, gpu)| gpu))
    }
}
