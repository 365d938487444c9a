//! What the dispatcher knows of each model: its size, who holds it, and what it [costs](super::cost)
//! on each kind of GPU.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, ModelId};

use super::cost::Cost;
use super::holders::Holders;
use super::queue::SizeRank;
use crate::gpu::eviction::CopyKind;

/// A model's place in [`Models`], found in constant time. Given again once nobody refers to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(pub(super) u32);

impl Slot {
    pub(super) const FIRST: Self = Self(0);
    pub(super) const LAST: Self = Self(u32::MAX);
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) id: ModelId,
    pub(super) blocks: u32,
    pub(super) weights: Bytes,
    /// `None`: no GPU is large enough.
    pub(super) rank: Option<SizeRank>,
    /// The GPUs it is on, or on its way to.
    pub(super) holders: Holders,
    /// The one whose copy is not to make room before the others'.
    original: Option<GpuIndex>,
    installed: bool,
    /// Requests of it that went to a GPU.
    given: u64,
    /// Requests that refer to it.
    pub(super) users: u32,
    /// By kind of GPU.
    costs: Vec<Cost>,
}

/// What stands for a run that is not known.
const UNKNOWN: u64 = u64::MAX;

/// Every model that is installed or still referred to.
#[derive(Debug, Default)]
pub(super) struct Models {
    slots: Vec<Model>,
    free: Vec<Slot>,
    by_id: BTreeMap<ModelId, Slot>,
    /// What runs take in nanoseconds, by kind of GPU and slot, or [`UNKNOWN`]: asked for most of all
    /// that is known.
    runs: Vec<Vec<u64>>,
    /// No run was ever known to take less.
    briefest: Option<u64>,
    /// The one that was asked for most.
    top: Option<Slot>,
}

impl Models {
    pub(super) fn install(&mut self, id: ModelId, blocks: u32, weights: Bytes, rank: Option<SizeRank>) {
        if let Some(&slot) = self.by_id.get(&id) {
            let model = self.get_mut(slot);
            (model.blocks, model.weights, model.rank, model.installed) = (blocks, weights, rank, true);
            return;
        }
        let (holders, costs) = (Holders::default(), Vec::new());
        let (original, installed, given, users) = (None, true, 0, 0);
        let model = Model { id, blocks, weights, rank, holders, original, installed, given, users, costs };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot.0 as usize] = model;
                slot
            }
            None => {
                self.slots.push(model);
                Slot(self.slots.len() as u32 - 1)
            }
        };
        self.by_id.insert(id, slot);
    }

    pub(super) fn remove(&mut self, id: ModelId) {
        if let Some(&slot) = self.by_id.get(&id) {
            self.get_mut(slot).installed = false;
            self.free_if_unused(slot);
        }
    }

    /// A model that may be asked for.
    pub(super) fn installed(&self, id: ModelId) -> Option<Slot> {
        self.slot(id).filter(|&slot| self.get(slot).installed)
    }

    pub(super) fn slot(&self, id: ModelId) -> Option<Slot> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn get(&self, slot: Slot) -> &Model {
        &self.slots[slot.0 as usize]
    }

    fn get_mut(&mut self, slot: Slot) -> &mut Model {
        &mut self.slots[slot.0 as usize]
    }

    pub(super) fn used(&mut self, slot: Slot) {
        self.get_mut(slot).users += 1;
    }

    pub(super) fn unused(&mut self, slot: Slot) {
        self.get_mut(slot).users -= 1;
        self.free_if_unused(slot);
    }

    pub(super) fn held_by(&mut self, slot: Slot, gpu: GpuIndex) {
        let model = self.get_mut(slot);
        model.holders.insert(gpu);
        model.original.get_or_insert(gpu);
    }

    /// A request of it goes to a GPU, and it too, unless it is there.
    pub(super) fn given(&mut self, slot: Slot, gpu: GpuIndex) {
        self.held_by(slot, gpu);
        self.get_mut(slot).given += 1;
        if self.top().is_none_or(|top| self.get(slot).given > top.given) {
            self.top = Some(slot);
        }
    }

    /// The model that was asked for most.
    pub(super) fn top(&self) -> Option<&Model> {
        self.top.map(|slot| self.get(slot))
    }

    /// A GPU has it no more. Gives the one whose copy is the original from now on, where that is
    /// another.
    pub(super) fn left(&mut self, slot: Slot, gpu: GpuIndex) -> Option<GpuIndex> {
        let model = self.get_mut(slot);
        model.holders.remove(gpu);
        let heir = if model.original == Some(gpu) {
            model.original = model.holders.first();
            model.original
        } else {
            None
        };
        self.free_if_unused(slot);
        heir
    }

    /// Models that requests refer to and no GPU holds: all of those wait.
    pub(super) fn homeless(&self) -> impl Iterator<Item = Slot> {
        let homeless = |model: &Model| model.users > 0 && model.holders.is_empty();
        let slots = (0..).map(Slot).zip(&self.slots);
        slots.filter(move |(_, model)| homeless(model)).map(|(slot, _)| slot)
    }

    /// What its copy on one of its holders is.
    pub(super) fn copy_kind(&self, slot: Slot, gpu: GpuIndex) -> CopyKind {
        if self.get(slot).original == Some(gpu) { CopyKind::Original } else { CopyKind::Replica }
    }

    fn free_if_unused(&mut self, slot: Slot) {
        let model = self.get(slot);
        if !model.installed && model.users == 0 && model.holders.is_empty() {
            let id = model.id;
            let runs = self.runs.iter_mut().filter_map(|runs| runs.get_mut(slot.0 as usize));
            runs.for_each(|run| *run = UNKNOWN);
            self.by_id.remove(&id);
            self.free.push(slot);
            if self.top == Some(slot) {
                // Rare: the one that was asked for most is gone.
                let others = self.by_id.values().copied().filter(|&other| self.get(other).given > 0);
                self.top = others.max_by_key(|&other| (self.get(other).given, Reverse(other)));
            }
        }
    }

    /// Takes in what is learned of it on this kind of GPU.
    pub(super) fn learn(&mut self, slot: Slot, kind: u32, of: impl FnOnce(&mut Cost)) {
        let cost = self.cost_mut(slot, kind);
        of(cost);
        let nanos = |run: Duration| u64::try_from(run.as_nanos()).unwrap_or(u64::MAX);
        let (run, briefest) = (cost.run(1).map(nanos), cost.briefest().map(nanos));
        self.briefest = self.briefest.into_iter().chain(run).chain(briefest).min();
        let (place, kind) = (slot.0 as usize, kind as usize);
        if self.runs.len() <= kind {
            self.runs.resize_with(kind + 1, Vec::new);
        }
        let runs = &mut self.runs[kind];
        if runs.len() <= place {
            runs.resize(place + 1, UNKNOWN);
        }
        runs[place] = run.unwrap_or(UNKNOWN);
    }

    fn cost_mut(&mut self, slot: Slot, kind: u32) -> &mut Cost {
        let (costs, kind) = (&mut self.get_mut(slot).costs, kind as usize);
        if costs.len() <= kind {
            costs.resize(kind + 1, Cost::default());
        }
        &mut costs[kind]
    }

    /// What is known of it on this kind of GPU.
    pub(super) fn cost(&self, slot: Slot, kind: u32) -> Option<&Cost> {
        self.get(slot).costs.get(kind as usize)
    }

    /// What a run of one row takes on this kind of GPU, where that is known.
    pub(super) fn run_time(&self, slot: Slot, kind: u32) -> Option<Duration> {
        self.run_nanos(slot, kind).map(Duration::from_nanos)
    }

    /// The same in nanoseconds.
    pub(super) fn run_nanos(&self, slot: Slot, kind: u32) -> Option<u64> {
        let run = *self.runs.get(kind as usize)?.get(slot.0 as usize)?;
        (run != UNKNOWN).then_some(run)
    }

    /// Whether every run that is known takes longer than this.
    pub(super) fn all_take_longer(&self, than: Duration) -> bool {
        self.briefest.is_none_or(|briefest| u128::from(briefest) > than.as_nanos())
    }

    /// What a run of so many rows takes.
    pub(super) fn run_time_of(&self, slot: Slot, kind: u32, rows: u32) -> Option<Duration> {
        if rows == 1 { self.run_time(slot, kind) } else { self.cost(slot, kind)?.run(rows) }
    }

    /// What such a run takes on the kind of GPU where it takes longest, of those where it is known.
    pub(super) fn longest_run(&self, slot: Slot, rows: u32) -> Option<Duration> {
        self.get(slot).costs.iter().filter_map(|cost| cost.run(rows)).max()
    }

    /// Every model that is installed and ran, by kind of GPU, with how long a run takes.
    pub(super) fn ran(&self) -> impl Iterator<Item = (Slot, u32, Duration)> {
        let slots = (0..).map(Slot).zip(&self.slots).filter(|(_, model)| model.installed);
        slots.flat_map(|(slot, model)| {
            let known = model.costs.iter().zip(0..);
            known.filter_map(move |(cost, kind)| Some((slot, kind, cost.run(1)?)))
        })
    }

    /// How wrong regressions over rows are on average, in percent, over all models and kinds of GPU
    /// (L15).
    pub(super) fn held_out(&self) -> Option<f64> {
        let all = self.slots.iter().flat_map(|model| &model.costs).filter_map(Cost::held_out);
        let (sum, sizes) =
            all.fold((0.0, 0), |(sum, sizes), (error, of)| (sum + error * of as f64, sizes + of));
        (sizes > 0).then(|| sum / sizes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_given_again_only_when_nobody_refers_to_it() {
        let mut models = Models::default();
        models.install(ModelId(7), 1, Bytes(1), None);
        let slot = models.installed(ModelId(7)).unwrap();
        models.used(slot);
        models.given(slot, GpuIndex(3));
        models.remove(ModelId(7));
        assert_eq!((models.installed(ModelId(7)), models.slot(ModelId(7))), (None, Some(slot)));
        models.unused(slot);
        models.install(ModelId(8), 1, Bytes(1), None);
        assert_ne!(models.installed(ModelId(8)), Some(slot), "a GPU still has it");
        models.left(slot, GpuIndex(3));
        assert_eq!(models.slot(ModelId(7)), None);
        models.install(ModelId(9), 1, Bytes(1), None);
        assert_eq!(models.installed(ModelId(9)), Some(slot));
        assert_eq!(models.run_time(slot, 0), None, "what was learned is another's");
    }

    #[test]
    fn each_kind_of_gpu_has_costs_of_its_own() {
        let mut models = Models::default();
        models.install(ModelId(1), 1, Bytes(1), None);
        let slot = models.installed(ModelId(1)).unwrap();
        let ms = Duration::from_millis;
        models.learn(slot, 1, |cost| cost.ran(1, ms(8)));
        assert_eq!((models.run_time(slot, 0), models.run_time(slot, 1)), (None, Some(ms(8))));
        models.learn(slot, 0, |cost| cost.learned(ms(30), None, ms(4)));
        let transfer = |kind| models.cost(slot, kind).unwrap().transfer();
        assert_eq!((transfer(0), transfer(1)), (Some(ms(30)), None));
    }

    #[test]
    fn when_the_most_asked_for_goes_the_next_one_is() {
        let mut models = Models::default();
        for (id, given) in [(1, 2), (2, 5), (3, 3), (4, 0)] {
            models.install(ModelId(id), 1, Bytes(1), None);
            let slot = models.installed(ModelId(id)).unwrap();
            (0..given).for_each(|_| models.given(slot, GpuIndex(0)));
        }
        let top = |models: &Models| models.top().map(|model| model.id);
        assert_eq!(top(&models), Some(ModelId(2)));
        for (gone, next) in [(2, Some(ModelId(3))), (3, Some(ModelId(1))), (1, None)] {
            models.remove(ModelId(gone));
            models.left(models.slot(ModelId(gone)).unwrap(), GpuIndex(0));
            assert_eq!(top(&models), next);
        }
    }
}
