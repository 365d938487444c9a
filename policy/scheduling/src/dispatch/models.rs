//! The dispatcher's table of models: size, holders, and [cost](super::cost) on each kind of GPU.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, ModelId};

use super::cost::ModelCost;
use super::holders::ModelHolders;
use super::size_rank::SizeRank;
use millrace_memory::eviction::CopyKind;

/// Index of a model in [`ModelTable`], for access in constant time. Reused after the last reference to
/// the model is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ModelSlot(pub(super) u32);

impl ModelSlot {
    pub(super) const FIRST: Self = Self(0);
    pub(super) const LAST: Self = Self(u32::MAX);
}

#[derive(Debug)]
pub(super) struct ModelRecord {
    pub(super) id: ModelId,
    /// GPU memory that the model needs, before any rounding to a GPU's blocks.
    pub(super) memory: Bytes,
    pub(super) weights: Bytes,
    /// Size rank of the smallest GPU that fits the model. `None`: no GPU is large enough.
    pub(super) rank: Option<SizeRank>,
    /// GPUs that hold the model, or that are loading the model.
    pub(super) holders: ModelHolders,
    /// GPU with the original copy, which should be evicted after the replicas.
    original: Option<GpuIndex>,
    installed: bool,
    /// Requests for the model that were assigned to a GPU.
    given: u64,
    /// Requests that refer to the model.
    pub(super) users: u32,
    /// Costs by kind of GPU.
    costs: Vec<ModelCost>,
}

/// Value in [`ModelTable::runs`] for a run time that is not known.
const UNKNOWN: u64 = u64::MAX;

/// All models that are installed or still referred to.
#[derive(Debug, Default)]
pub(super) struct ModelTable {
    slots: Vec<ModelRecord>,
    free: Vec<ModelSlot>,
    by_id: BTreeMap<ModelId, ModelSlot>,
    /// Run times of single rows in nanoseconds, by kind of GPU and slot, or [`UNKNOWN`]. A dense
    /// copy, because decisions read this value more often than any other.
    runs: Vec<Vec<u64>>,
    /// Lower bound of all run times ever learned, in nanoseconds.
    briefest: Option<u64>,
    /// Model with most assigned requests.
    top: Option<ModelSlot>,
}

impl ModelTable {
    pub(super) fn install(&mut self, id: ModelId, memory: Bytes, weights: Bytes, rank: Option<SizeRank>) {
        if let Some(&slot) = self.by_id.get(&id) {
            let model = self.get_mut(slot);
            (model.memory, model.weights, model.rank, model.installed) = (memory, weights, rank, true);
            return;
        }
        let model = ModelRecord {
            id,
            memory,
            weights,
            rank,
            holders: ModelHolders::default(),
            original: None,
            installed: true,
            given: 0,
            users: 0,
            costs: Vec::new(),
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot.0 as usize] = model;
                slot
            }
            None => {
                self.slots.push(model);
                ModelSlot(self.slots.len() as u32 - 1)
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

    /// Returns the slot of a model that may be requested.
    pub(super) fn installed(&self, id: ModelId) -> Option<ModelSlot> {
        self.slot(id).filter(|&slot| self.get(slot).installed)
    }

    pub(super) fn slot(&self, id: ModelId) -> Option<ModelSlot> {
        self.by_id.get(&id).copied()
    }

    pub(super) fn get(&self, slot: ModelSlot) -> &ModelRecord {
        &self.slots[slot.0 as usize]
    }

    fn get_mut(&mut self, slot: ModelSlot) -> &mut ModelRecord {
        &mut self.slots[slot.0 as usize]
    }

    pub(super) fn add_user(&mut self, slot: ModelSlot) {
        self.get_mut(slot).users += 1;
    }

    pub(super) fn remove_user(&mut self, slot: ModelSlot) {
        self.get_mut(slot).users -= 1;
        self.free_if_unused(slot);
    }

    pub(super) fn add_holder(&mut self, slot: ModelSlot, gpu: GpuIndex) {
        let model = self.get_mut(slot);
        model.holders.insert(gpu);
        model.original.get_or_insert(gpu);
    }

    /// Notes that a request for the model is assigned to a GPU, which loads the model unless
    /// resident.
    pub(super) fn record_assignment(&mut self, slot: ModelSlot, gpu: GpuIndex) {
        self.add_holder(slot, gpu);
        self.get_mut(slot).given += 1;
        if self.most_requested().is_none_or(|top| self.get(slot).given > top.given) {
            self.top = Some(slot);
        }
    }

    /// Returns the model with most assigned requests.
    pub(super) fn most_requested(&self) -> Option<&ModelRecord> {
        self.top.map(|slot| self.get(slot))
    }

    /// Notes that a GPU no longer holds a model. Returns the GPU that has the original copy from
    /// now on, if that changed.
    pub(super) fn remove_holder(&mut self, slot: ModelSlot, gpu: GpuIndex) -> Option<GpuIndex> {
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

    /// Returns the models that requests refer to and no GPU holds. All these requests wait.
    pub(super) fn models_without_holder(&self) -> impl Iterator<Item = ModelSlot> {
        let homeless = |model: &ModelRecord| model.users > 0 && model.holders.is_empty();
        let slots = (0..).map(ModelSlot).zip(&self.slots);
        slots.filter(move |(_, model)| homeless(model)).map(|(slot, _)| slot)
    }

    /// Returns whether a holder's copy of the model is the original or a replica.
    pub(super) fn copy_kind(&self, slot: ModelSlot, gpu: GpuIndex) -> CopyKind {
        if self.get(slot).original == Some(gpu) { CopyKind::Original } else { CopyKind::Replica }
    }

    fn free_if_unused(&mut self, slot: ModelSlot) {
        let model = self.get(slot);
        if !model.installed && model.users == 0 && model.holders.is_empty() {
            let id = model.id;
            let runs = self.runs.iter_mut().filter_map(|runs| runs.get_mut(slot.0 as usize));
            runs.for_each(|run| *run = UNKNOWN);
            self.by_id.remove(&id);
            self.free.push(slot);
            if self.top == Some(slot) {
                // A full scan is acceptable, because the model with most requests is rarely
                // removed.
                let others = self.by_id.values().copied().filter(|&other| self.get(other).given > 0);
                self.top = others.max_by_key(|&other| (self.get(other).given, Reverse(other)));
            }
        }
    }

    /// Applies a change to the costs of a model on a kind of GPU.
    pub(super) fn learn(&mut self, slot: ModelSlot, kind: u32, of: impl FnOnce(&mut ModelCost)) {
        let cost = self.cost_mut(slot, kind);
        of(cost);
        let nanos = |run: Duration| u64::try_from(run.as_nanos()).unwrap_or(u64::MAX);
        let run = cost.run(1).map(nanos);
        let briefest = cost.shortest_run().map(nanos);
        self.briefest = self.briefest.into_iter().chain(run).chain(briefest).min();
        let place = slot.0 as usize;
        let kind = kind as usize;
        if self.runs.len() <= kind {
            self.runs.resize_with(kind + 1, Vec::new);
        }
        let runs = &mut self.runs[kind];
        if runs.len() <= place {
            runs.resize(place + 1, UNKNOWN);
        }
        runs[place] = run.unwrap_or(UNKNOWN);
    }

    fn cost_mut(&mut self, slot: ModelSlot, kind: u32) -> &mut ModelCost {
        let costs = &mut self.get_mut(slot).costs;
        let kind = kind as usize;
        if costs.len() <= kind {
            costs.resize(kind + 1, ModelCost::default());
        }
        &mut costs[kind]
    }

    /// Returns the costs of a model on a kind of GPU, if any are known.
    pub(super) fn cost(&self, slot: ModelSlot, kind: u32) -> Option<&ModelCost> {
        self.get(slot).costs.get(kind as usize)
    }

    /// Returns the run time of one row on a kind of GPU, if known.
    pub(super) fn run_time(&self, slot: ModelSlot, kind: u32) -> Option<Duration> {
        self.run_nanos(slot, kind).map(Duration::from_nanos)
    }

    /// Returns the run time of one row in nanoseconds, if known.
    pub(super) fn run_nanos(&self, slot: ModelSlot, kind: u32) -> Option<u64> {
        let run = *self.runs.get(kind as usize)?.get(slot.0 as usize)?;
        (run != UNKNOWN).then_some(run)
    }

    /// Returns whether every known run time exceeds `than`.
    pub(super) fn all_take_longer(&self, than: Duration) -> bool {
        self.briefest.is_none_or(|briefest| u128::from(briefest) > than.as_nanos())
    }

    /// Returns the run time of `rows` rows, if known.
    pub(super) fn run_time_of(&self, slot: ModelSlot, kind: u32, rows: u32) -> Option<Duration> {
        if rows == 1 { self.run_time(slot, kind) } else { self.cost(slot, kind)?.run(rows) }
    }

    /// Returns the run time of `rows` rows on the slowest kind of GPU with a known run time.
    pub(super) fn longest_run(&self, slot: ModelSlot, rows: u32) -> Option<Duration> {
        self.get(slot).costs.iter().filter_map(|cost| cost.run(rows)).max()
    }

    /// Returns every installed model that ran, by kind of GPU, with the run time of one row.
    pub(super) fn profiled_models(&self) -> impl Iterator<Item = (ModelSlot, u32, Duration)> {
        let slots = (0..).map(ModelSlot).zip(&self.slots).filter(|(_, model)| model.installed);
        slots.flat_map(|(slot, model)| {
            let known = model.costs.iter().zip(0..);
            known.filter_map(move |(cost, kind)| Some((slot, kind, cost.run(1)?)))
        })
    }

    /// Returns the mean error, in percent, of the regressions over rows, over all models and kinds
    /// of GPU (L15).
    pub(super) fn held_out(&self) -> Option<f64> {
        let all = self.slots.iter().flat_map(|model| &model.costs).filter_map(ModelCost::held_out);
        let (sum, sizes) =
            all.fold((0.0, 0), |(sum, sizes), (error, of)| (sum + error * of as f64, sizes + of));
        (sizes > 0).then(|| sum / sizes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_is_reused_only_after_the_last_reference_is_gone() {
        let mut models = ModelTable::default();
        models.install(ModelId(7), Bytes(1), Bytes(1), None);
        let slot = models.installed(ModelId(7)).unwrap();
        models.add_user(slot);
        models.record_assignment(slot, GpuIndex(3));
        models.remove(ModelId(7));
        assert_eq!((models.installed(ModelId(7)), models.slot(ModelId(7))), (None, Some(slot)));
        models.remove_user(slot);
        models.install(ModelId(8), Bytes(1), Bytes(1), None);
        assert_ne!(models.installed(ModelId(8)), Some(slot), "a GPU still has it");
        models.remove_holder(slot, GpuIndex(3));
        assert_eq!(models.slot(ModelId(7)), None);
        models.install(ModelId(9), Bytes(1), Bytes(1), None);
        assert_eq!(models.installed(ModelId(9)), Some(slot));
        assert_eq!(models.run_time(slot, 0), None, "the old model's run time is gone");
    }

    #[test]
    fn costs_are_separate_for_each_kind_of_gpu() {
        let mut models = ModelTable::default();
        models.install(ModelId(1), Bytes(1), Bytes(1), None);
        let slot = models.installed(ModelId(1)).unwrap();
        let ms = Duration::from_millis;
        models.learn(slot, 1, |cost| cost.ran(1, ms(8)));
        assert_eq!((models.run_time(slot, 0), models.run_time(slot, 1)), (None, Some(ms(8))));
        models.learn(slot, 0, |cost| cost.restore_profile(ms(30), None, ms(4)));
        let transfer = |kind| models.cost(slot, kind).unwrap().transfer();
        assert_eq!((transfer(0), transfer(1)), (Some(ms(30)), None));
    }

    #[test]
    fn removing_the_most_requested_model_promotes_the_next() {
        let mut models = ModelTable::default();
        for (id, given) in [(1, 2), (2, 5), (3, 3), (4, 0)] {
            models.install(ModelId(id), Bytes(1), Bytes(1), None);
            let slot = models.installed(ModelId(id)).unwrap();
            (0..given).for_each(|_| models.record_assignment(slot, GpuIndex(0)));
        }
        let top = |models: &ModelTable| models.most_requested().map(|model| model.id);
        assert_eq!(top(&models), Some(ModelId(2)));
        for (gone, next) in [(2, Some(ModelId(3))), (3, Some(ModelId(1))), (1, None)] {
            models.remove(ModelId(gone));
            models.remove_holder(models.slot(ModelId(gone)).unwrap(), GpuIndex(0));
            assert_eq!(top(&models), next);
        }
    }
}
