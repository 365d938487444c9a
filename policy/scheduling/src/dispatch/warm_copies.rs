//! The warm copies of each model.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{GpuIndex, Timestamp};

use super::models::ModelSlot;

/// Warm copies of a model.
#[derive(Debug, Default)]
pub(super) struct WarmCopies {
    /// Minimum number of copies.
    pub(super) wanted: usize,
    /// GPUs that need a copy because of their slices for the model.
    pub(super) needed_on: BTreeSet<GpuIndex>,
    pub(super) on: BTreeSet<GpuIndex>,
    /// Earliest time of the next load.
    pub(super) again_at: Option<Timestamp>,
}

impl WarmCopies {
    /// Returns whether a copy is missing.
    fn is_short(&self) -> bool {
        self.on.len() < self.wanted || !self.needed_on.is_subset(&self.on)
    }

    /// Returns a copy that is not needed.
    pub(super) fn surplus(&self) -> Option<GpuIndex> {
        let surplus = self.on.len() > self.wanted;
        surplus.then(|| self.on.difference(&self.needed_on).last().copied()).flatten()
    }
}

/// Warm copies of all models.
#[derive(Debug, Default)]
pub(super) struct WarmCopyTable {
    pub(super) models: BTreeMap<ModelSlot, WarmCopies>,
    /// Models with fewer warm copies than required.
    pub(super) short: BTreeSet<ModelSlot>,
}

impl WarmCopyTable {
    pub(super) fn note(&mut self, slot: ModelSlot) {
        let short = self.models.get(&slot).is_some_and(WarmCopies::is_short);
        if short {
            self.short.insert(slot)
        } else {
            self.short.remove(&slot)
        };
    }

    pub(super) fn on(&self, gpu: GpuIndex) -> impl Iterator<Item = ModelSlot> {
        let on = self.models.iter().filter(move |(_, kept)| kept.on.contains(&gpu));
        on.map(|(&slot, _)| slot)
    }

    /// Returns the earliest time at which a model may be loaded again.
    pub(super) fn next_wake(&self) -> Option<Timestamp> {
        self.short.iter().filter_map(|slot| self.models[slot].again_at).min()
    }
}
