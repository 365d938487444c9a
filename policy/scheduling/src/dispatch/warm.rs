//! Minimum warm copies: models that stay on GPUs without requests for them. A resident copy becomes
//! a warm copy. If there are too few copies, the model is loaded onto an idle GPU with enough
//! memory beside the warm copies there. Warm copies are evicted last. A warm copy that was evicted
//! all the same, or did not fit, is retried after [`WARM_RETRY`], so that two models never evict
//! each other in a loop.
//!
//! This option is ours; the papers have no equivalent.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, ModelId, Timestamp};

use super::dispatcher::Dispatcher;
use super::models::ModelSlot;
use super::protocol::Action;

/// Time until a model is loaded again as a warm copy after its copy was evicted or did not fit.
pub const WARM_RETRY: Duration = Duration::from_secs(1);

impl Dispatcher {
    /// Sets the minimum number of GPUs that hold a model.
    pub(super) fn set_minimum_copies(&mut self, model: ModelId, wanted: u32, actions: &mut Vec<Action>) {
        let Some(slot) = self.models.installed(model) else { return };
        let wanted = wanted as usize;
        if wanted == 0 && !self.warm.models.contains_key(&slot) {
            return;
        }
        self.warm.models.entry(slot).or_default().wanted = wanted;
        self.release_surplus(slot, model, actions);
    }

    /// Sets the GPUs that need a warm copy of a model because of their slices.
    pub(super) fn keep_on(&mut self, model: ModelId, gpus: BTreeSet<GpuIndex>, actions: &mut Vec<Action>) {
        let Some(slot) = self.models.installed(model) else { return };
        if gpus.is_empty() && !self.warm.models.contains_key(&slot) {
            return;
        }
        self.warm.models.entry(slot).or_default().needed_on = gpus;
        self.release_surplus(slot, model, actions);
    }

    /// Releases warm copies that are no longer needed.
    fn release_surplus(&mut self, slot: ModelSlot, model: ModelId, actions: &mut Vec<Action>) {
        let Some(kept) = self.warm.models.get_mut(&slot) else { return };
        while let Some(gpu) = kept.surplus() {
            kept.on.remove(&gpu);
            actions.push(Action::SetWarmCopy { gpu, model, kept: false });
        }
        if kept.wanted == 0 && kept.needed_on.is_empty() {
            self.warm.models.remove(&slot);
        }
        self.warm.note(slot);
    }

    /// Notes that a warm copy of a model is gone.
    pub(super) fn remove_warm_copy(
        &mut self,
        now: Timestamp,
        slot: ModelSlot,
        gpu: GpuIndex,
        actions: &mut Vec<Action>,
    ) {
        let Some(kept) = self.warm.models.get_mut(&slot).filter(|kept| kept.on.contains(&gpu)) else {
            return;
        };
        kept.on.remove(&gpu);
        kept.again_at = Some(now + WARM_RETRY);
        self.warm.note(slot);
        actions.push(Action::SetWarmCopy { gpu, model: self.models.get(slot).id, kept: false });
    }

    /// Removes all warm copies of a lost GPU.
    pub(super) fn remove_warm_copies(&mut self, gpu: GpuIndex, actions: &mut Vec<Action>) {
        for slot in self.warm.on(gpu).collect::<Vec<_>>() {
            if let Some(kept) = self.warm.models.get_mut(&slot) {
                kept.on.remove(&gpu);
            }
            self.warm.note(slot);
            // A `SetWarmCopy` action may have been in transit as the GPU was lost; without this action, the
            // next executor would mark a warm copy.
            actions.push(Action::SetWarmCopy { gpu, model: self.models.get(slot).id, kept: false });
        }
    }

    /// Creates the missing warm copies, as far as possible now.
    pub(super) fn create_warm_copies(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        for slot in self.warm.short.iter().copied().collect::<Vec<_>>() {
            while self.warm.short.contains(&slot)
                && let Some(gpu) = self.place_to_keep(now, slot)
            {
                let model = self.models.get(slot).id;
                if let Some(kept) = self.warm.models.get_mut(&slot) {
                    kept.on.insert(gpu);
                    kept.again_at = None;
                }
                self.warm.note(slot);
                if !self.fleet.get(gpu).holds(slot) {
                    self.prefetch(now, slot, gpu, actions);
                }
                actions.push(Action::SetWarmCopy { gpu, model, kept: true });
            }
        }
    }

    /// Returns the memory that a GPU has left beside its warm copies and the models that requests
    /// wait for. `None` if these exceed its memory.
    pub(super) fn room_beside(&self, gpu: GpuIndex) -> Option<Bytes> {
        let it = self.fleet.get(gpu);
        let size = |slot: ModelSlot| it.size_of(self.models.get(slot).memory);
        let unwanted = |slot: &ModelSlot| self.models.get(*slot).users == 0 || !it.holds(*slot);
        let kept: Bytes = self.warm.on(gpu).filter(unwanted).map(size).sum();
        let used = it.wanted_size(&self.models) + kept;
        it.memory().0.checked_sub(used.0).map(Bytes)
    }

    /// Returns a GPU that needs a warm copy, else a holder for a further warm copy; otherwise the idle
    /// GPU with most memory left, if the model fits there.
    fn place_to_keep(&self, now: Timestamp, slot: ModelSlot) -> Option<GpuIndex> {
        let model = self.models.get(slot);
        let kept = self.warm.models.get(&slot)?;
        let may_load = kept.again_at.is_none_or(|at| at <= now);
        let fits_beside = |gpu: GpuIndex| {
            let needed = self.fleet.get(gpu).size_of(model.memory);
            self.fleet.get(gpu).executor.is_some() && self.room_beside(gpu).is_some_and(|room| room >= needed)
        };
        let takes = |&gpu: &GpuIndex| model.holders.contains(gpu) || (may_load && fits_beside(gpu));
        let needed = kept.needed_on.difference(&kept.on).copied().find(takes);
        if needed.is_some() || kept.on.len() >= kept.wanted {
            return needed;
        }
        let here = model.holders.iter().find(|gpu| !kept.on.contains(gpu));
        if here.is_some() || kept.again_at.is_some_and(|at| at > now) {
            return here;
        }
        let rank = model.rank?;
        let idle = self.fleet.idle_gpus().into_iter().filter(|&gpu| self.fleet.get(gpu).rank >= rank);
        let fits = idle.filter_map(|gpu| Some((self.room_beside(gpu)?, gpu)));
        let needs = |gpu: GpuIndex| self.fleet.get(gpu).size_of(model.memory);
        let fits = fits.filter(|&(room, gpu)| room >= needs(gpu) && !kept.on.contains(&gpu));
        fits.min_by_key(|&(room, gpu)| (Reverse(room), gpu)).map(|(_, gpu)| gpu)
    }
}
