//! A GPU's memory map: the blocks of each model, the weights that have arrived, the models that leave
//! to make room, and the blocks of intermediate data. The map is the only authority over the GPU's
//! memory, all of which is reserved at boot (T12).
//!
//! An eviction copies nothing back: the host copy stays authoritative, so an eviction only drops the
//! GPU copy (T10). The least recently used models leave first, pinned models never. A victim that the
//! other victims make needless stays, the most recently used first.
//!
//! Blocks are given out by best fit. With [`Placement::Scattered`], the default, an allocation fails
//! only if too few blocks are free: virtual memory management maps any blocks side by side, so there is
//! no fragmentation to undo. With [`Placement::Contiguous`] an allocation can fail by shape. The paper's
//! two tiers with consolidation (T13) and its baseline Torpor-Block are in the simulator
//! (`millrace_sim::memory`); `sim/benches/memory.rs` compares all of them.

mod allocator;
mod chunks;
mod data;
mod region;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use millrace_types::{Bytes, ModelId, Timestamp};

pub use allocator::{BestFit, Placement, Run};
pub use chunks::ChunkSet;
use region::Turn;
pub use region::{Rank, Region};

use allocator::join;

use crate::ids::Generation;

/// A block: the unit of GPU memory, and the chunk in which weights travel (D12, T09).
pub const BLOCK: Bytes = Bytes::mib(2);

/// How many of those that LRU would evict are looked at again, to see whether they may stay.
const SPARED_MAX: usize = 4;

/// How many blocks hold `size`.
#[must_use]
pub fn blocks_for(size: Bytes) -> u32 {
    u32::try_from(size.0.div_ceil(BLOCK.0)).unwrap_or(u32::MAX)
}

/// A model that was evicted, and the mapping that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Evicted {
    /// Which model.
    pub model: ModelId,
    /// Which mapping of it.
    pub generation: Generation,
}

/// Why there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// What would make room is pinned: wait for it.
    #[error("what would make room is in use")]
    Pinned,
    /// Even an empty GPU has less.
    #[error("the GPU is too small")]
    TooLarge,
}

/// The blocks of a GPU and their owners.
#[derive(Debug)]
pub struct MemoryMap {
    placement: Placement,
    total: u32,
    allocator: BestFit,
    regions: BTreeMap<ModelId, Region>,
    /// The models in the order in which they make room: by rank, then by last use.
    order: BTreeSet<Turn>,
    last_generation: Generation,
    /// The blocks of intermediate data.
    data: BTreeSet<Run>,
}

impl MemoryMap {
    /// Returns an empty map of this much memory, with scattered placement. A rest that does not fill a
    /// block is left out.
    #[must_use]
    pub fn new(memory: Bytes) -> Self {
        Self::with(memory, Placement::Scattered)
    }

    /// As [`Self::new`], with this placement.
    #[must_use]
    pub fn with(memory: Bytes, placement: Placement) -> Self {
        let total = u32::try_from(memory.0 / BLOCK.0).unwrap_or(u32::MAX);
        Self {
            placement,
            total,
            allocator: BestFit::new(total, placement),
            regions: BTreeMap::new(),
            order: BTreeSet::new(),
            last_generation: Generation(0),
            data: BTreeSet::new(),
        }
    }

    /// Blocks in all.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.total
    }

    /// Blocks taken.
    #[must_use]
    pub fn used_blocks(&self) -> u32 {
        self.total - self.allocator.free_blocks()
    }

    /// A model's region, if it has one.
    #[must_use]
    pub fn region(&self, model: ModelId) -> Option<&Region> {
        self.regions.get(&model)
    }

    /// Every region, in model order.
    pub fn regions(&self) -> impl Iterator<Item = (ModelId, &Region)> {
        self.regions.iter().map(|(&model, region)| (model, region))
    }

    /// Gives a model that has none a region of `blocks` blocks, of which `chunks` will be filled,
    /// and evicts models that are not in `pinned` until there is room. On a shortage nothing is
    /// evicted. With contiguous placement the region is one run.
    ///
    /// # Errors
    /// [`Shortage`].
    ///
    /// # Panics
    /// When the model has a region: a bug of the caller.
    pub fn map(
        &mut self,
        now: Timestamp,
        model: ModelId,
        blocks: u32,
        chunks: u32,
        pinned: &[ModelId],
    ) -> Result<Vec<Evicted>, Shortage> {
        self.map_pieces(now, model, &[blocks], chunks, pinned)
    }

    /// As [`Self::map`], for a model whose framework asks for pieces of these lengths, in blocks. With
    /// contiguous placement each piece is one run.
    ///
    /// # Errors
    /// [`Shortage`].
    ///
    /// # Panics
    /// When the model has a region: a bug of the caller.
    pub fn map_pieces(
        &mut self,
        now: Timestamp,
        model: ModelId,
        pieces: &[u32],
        chunks: u32,
        pinned: &[ModelId],
    ) -> Result<Vec<Evicted>, Shortage> {
        assert!(!self.regions.contains_key(&model), "model {model} is mapped already");
        let pieces: Vec<_> = pieces.iter().copied().filter(|&len| len > 0).collect();
        let (taken, evicted) = self.take(&pieces, pinned)?;
        let region = Region {
            generation: self.next_generation(),
            runs: join(&taken),
            blocks: pieces.iter().sum(),
            loaded: ChunkSet::empty(chunks),
            last_used: now,
            rank: Rank::default(),
            locks: 0,
        };
        self.order.insert(region.turn(model));
        self.regions.insert(model, region);
        Ok(evicted)
    }

    /// Takes runs for these pieces, and evicts models that are not in `pinned` until there is room.
    fn take(&mut self, pieces: &[u32], pinned: &[ModelId]) -> Result<(Vec<Run>, Vec<Evicted>), Shortage> {
        if let Some(taken) = self.allocator.take(pieces) {
            return Ok((taken, Vec::new()));
        }
        let victims = self.victims(pieces, pinned)?;
        let evicted = victims.into_iter().filter_map(|model| self.unmap(model)).collect();
        let taken = self.allocator.take(pieces).expect("the victims made room");
        Ok((taken, evicted))
    }

    fn next_generation(&mut self) -> Generation {
        self.last_generation = Generation(self.last_generation.0 + 1);
        self.last_generation
    }

    /// Whom to evict so that these pieces can be had, in this order.
    fn victims(&self, pieces: &[u32], pinned: &[ModelId]) -> Result<Vec<ModelId>, Shortage> {
        let mut trial = self.allocator.clone();
        let mut victims = Vec::new();
        let may_go = |model: &ModelId| !pinned.contains(model) && !self.regions[model].is_locked();
        let mut candidates = self.order.iter().map(|&(.., model)| model).filter(may_go);
        while !suffices(&trial, pieces) {
            let Some(model) = candidates.next() else {
                let fits = suffices(&self.empty(), pieces);
                return Err(if fits { Shortage::Pinned } else { Shortage::TooLarge });
            };
            trial.give_back(&self.regions[&model].runs);
            victims.push(model);
        }
        self.spare(&mut victims, pieces, trial.free_blocks());
        Ok(victims)
    }

    /// The books of a GPU on which everything is free.
    fn empty(&self) -> BestFit {
        BestFit::new(self.total, self.placement)
    }

    /// Takes victims back that are needless beside the others: only of the highest rank, so that no
    /// model leaves before one of a lower rank.
    fn spare(&self, victims: &mut Vec<ModelId>, pieces: &[u32], free: u32) {
        let surplus = free - pieces.iter().sum::<u32>();
        let highest = victims.iter().map(|model| self.regions[model].rank).max().unwrap_or_default();
        let small = |model: &&ModelId| {
            let region = &self.regions[*model];
            region.blocks <= surplus && region.rank == highest
        };
        let latest: Vec<_> = victims.iter().rev().filter(small).take(SPARED_MAX).copied().collect();
        for model in latest {
            let rest: Vec<_> = victims.iter().copied().filter(|&victim| victim != model).collect();
            let mut trial = self.allocator.clone();
            rest.iter().for_each(|victim| trial.give_back(&self.regions[victim].runs));
            if suffices(&trial, pieces) {
                *victims = rest;
            }
        }
    }

    /// Keeps a model from eviction while another GPU copies it (T25), until it was unlocked as often as
    /// it was locked. Returns the model's region, if it has one.
    pub fn lock(&mut self, model: ModelId) -> Option<&Region> {
        let region = self.regions.get_mut(&model)?;
        region.locks += 1;
        Some(region)
    }

    /// Takes back one [`Self::lock`].
    ///
    /// # Panics
    /// When the model is not locked: a bug of the caller.
    pub fn unlock(&mut self, model: ModelId) {
        let region = self.regions.get_mut(&model).expect("what is locked has a region");
        region.locks = region.locks.checked_sub(1).expect("every unlock follows a lock");
    }

    /// Drops a model's region, if it has one.
    ///
    /// # Panics
    /// When the model is locked: a bug of the caller.
    pub fn unmap(&mut self, model: ModelId) -> Option<Evicted> {
        let region = self.regions.remove(&model)?;
        assert!(!region.is_locked(), "model {model} is being copied");
        self.order.remove(&region.turn(model));
        self.allocator.give_back(&region.runs);
        Some(Evicted { model, generation: region.generation })
    }

    /// Notes that a model is used.
    pub fn touch(&mut self, now: Timestamp, model: ModelId) {
        self.reorder(model, |region| region.last_used = now);
    }

    /// Says how soon a model makes room: before all of a higher rank, whenever they were used.
    pub fn rank(&mut self, model: ModelId, rank: Rank) {
        self.reorder(model, |region| region.rank = rank);
    }

    fn reorder(&mut self, model: ModelId, change: impl FnOnce(&mut Region)) {
        if let Some(region) = self.regions.get_mut(&model) {
            self.order.remove(&region.turn(model));
            change(region);
            self.order.insert(region.turn(model));
        }
    }

    /// Notes that chunks of a model's weights have arrived.
    pub fn arrived(&mut self, model: ModelId, chunks: Range<u32>) {
        if let Some(region) = self.regions.get_mut(&model) {
            region.loaded.insert(chunks);
        }
    }

    /// Forgets everything: the device's contents are lost. Generations go on counting.
    pub fn clear(&mut self) {
        self.allocator = self.empty();
        self.regions.clear();
        self.order.clear();
        self.data.clear();
    }
}

/// Whether these pieces can be taken.
fn suffices(allocator: &BestFit, pieces: &[u32]) -> bool {
    let blocks = pieces.iter().map(|&len| u64::from(len)).sum::<u64>();
    let enough = blocks <= allocator.free_blocks().into();
    enough && (allocator.takes_any() || allocator.clone().take(pieces).is_some())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
