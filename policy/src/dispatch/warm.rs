//! Models that are kept on GPUs without a request for them (minimum warm copies). A copy that is
//! there is kept; where too few are, the model is brought to an idle GPU, if it has room beside what
//! is kept there. What is kept makes room last; where it had to all the same, or did not fit, it is
//! tried again after [`WARM_RETRY`], so that two models never push each other out in a loop.
//!
//! The papers have nothing of it: this option is ours.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::models::Slot;
use super::{Action, Dispatch};

/// How long a model is not brought again that did not stay where it was brought.
pub const WARM_RETRY: Duration = Duration::from_secs(1);

/// What is kept of one model.
#[derive(Debug, Default)]
struct Kept {
    wanted: usize,
    on: BTreeSet<GpuIndex>,
    /// It is not brought before then.
    again_at: Option<Timestamp>,
}

/// What is kept.
#[derive(Debug, Default)]
pub(super) struct Warm {
    models: BTreeMap<Slot, Kept>,
    /// Those with fewer copies than are wanted.
    short: BTreeSet<Slot>,
}

impl Warm {
    fn note(&mut self, slot: Slot) {
        let short = self.models.get(&slot).is_some_and(|kept| kept.on.len() < kept.wanted);
        if short {
            self.short.insert(slot)
        } else {
            self.short.remove(&slot)
        };
    }

    fn on(&self, gpu: GpuIndex) -> impl Iterator<Item = Slot> {
        let on = self.models.iter().filter(move |(_, kept)| kept.on.contains(&gpu));
        on.map(|(&slot, _)| slot)
    }

    /// When a model that did not stay is tried again.
    pub(super) fn next_wake(&self) -> Option<Timestamp> {
        self.short.iter().filter_map(|slot| self.models[slot].again_at).min()
    }
}

impl Dispatch {
    /// So many GPUs are to hold a model from now on.
    pub(super) fn keep(&mut self, model: ModelId, wanted: u32, actions: &mut Vec<Action>) {
        let Some(slot) = self.models.installed(model) else { return };
        let wanted = wanted as usize;
        if wanted == 0 && !self.warm.models.contains_key(&slot) {
            return;
        }
        let kept = self.warm.models.entry(slot).or_default();
        kept.wanted = wanted;
        while kept.on.len() > wanted
            && let Some(gpu) = kept.on.pop_last()
        {
            actions.push(Action::Keep { gpu, model, kept: false });
        }
        if wanted == 0 {
            self.warm.models.remove(&slot);
        }
        self.warm.note(slot);
    }

    /// A model that was kept on a GPU is no longer there.
    pub(super) fn not_kept(&mut self, now: Timestamp, slot: Slot, gpu: GpuIndex, actions: &mut Vec<Action>) {
        let Some(kept) = self.warm.models.get_mut(&slot).filter(|kept| kept.on.contains(&gpu)) else {
            return;
        };
        kept.on.remove(&gpu);
        kept.again_at = Some(now + WARM_RETRY);
        self.warm.note(slot);
        actions.push(Action::Keep { gpu, model: self.models.get(slot).id, kept: false });
    }

    /// Everything that was kept on a GPU went with it.
    pub(super) fn none_kept(&mut self, gpu: GpuIndex, actions: &mut Vec<Action>) {
        for slot in self.warm.on(gpu).collect::<Vec<_>>() {
            if let Some(kept) = self.warm.models.get_mut(&slot) {
                kept.on.remove(&gpu);
            }
            self.warm.note(slot);
            // It may have been on its way as the GPU was lost: the next executor keeps nothing.
            actions.push(Action::Keep { gpu, model: self.models.get(slot).id, kept: false });
        }
    }

    /// Keeps and brings what is missing, as far as that is possible now.
    pub(super) fn keep_warm(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
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
                actions.push(Action::Keep { gpu, model, kept: true });
            }
        }
    }

    /// What a GPU has room for beside what is kept there and what requests wait for.
    pub(super) fn room_beside(&self, gpu: GpuIndex) -> Option<u64> {
        let it = self.fleet.get(gpu);
        let blocks = |slot: Slot| u64::from(self.models.get(slot).blocks);
        let unwanted = |slot: &Slot| self.models.get(*slot).users == 0 || !it.holds(*slot);
        let kept: u64 = self.warm.on(gpu).filter(unwanted).map(blocks).sum();
        let used = it.wanted_blocks(&self.models) + kept;
        u64::from(self.sizes[it.rank.0]).checked_sub(used)
    }

    /// A GPU that holds the model and does not keep it yet, else the idle one with most room beside
    /// what is kept and what requests wait for, if that is enough.
    fn place_to_keep(&self, now: Timestamp, slot: Slot) -> Option<GpuIndex> {
        let (model, kept) = (self.models.get(slot), self.warm.models.get(&slot)?);
        let here = model.holders.iter().find(|gpu| !kept.on.contains(gpu));
        if here.is_some() || kept.again_at.is_some_and(|at| at > now) {
            return here;
        }
        let rank = model.rank?;
        let idle = self.fleet.all_idle().into_iter().filter(|&gpu| self.fleet.get(gpu).rank >= rank);
        let fits = idle.filter_map(|gpu| Some((self.room_beside(gpu)?, gpu)));
        let fits = fits.filter(|&(room, gpu)| room >= model.blocks.into() && !kept.on.contains(&gpu));
        fits.min_by_key(|&(room, gpu)| (Reverse(room), gpu)).map(|(_, gpu)| gpu)
    }
}
