//! A GPU's memory map: the blocks of each model, the weights that have arrived, the models that leave
//! to make room, and the blocks of intermediate data. The map is the only authority over the GPU's
//! memory, all of which is reserved at boot (T12).
//!
//! An eviction copies nothing back: the host copy stays authoritative, so an eviction only drops the
//! GPU copy (T10). Models of the lowest rank leave first, and of equal ranks the least recently used; models
//! that the caller spares never leave. A victim that the other victims make needless stays, the most recently
//! used first.
//!
//! Blocks are given out by best fit. With [`BlockPlacement::Scattered`], the default, an allocation fails
//! only if too few blocks are free: virtual memory management maps any blocks side by side, so there is
//! no fragmentation to undo. With [`BlockPlacement::Contiguous`] an allocation can fail by shape. The paper's
//! two tiers with consolidation (T13) and its baseline Torpor-Block are in the simulator
//! (`millrace_sim::memory`); `sim/benches/memory.rs` compares all of them.

mod allocator;
mod block_size;
mod chunks;
mod data;
pub mod elastic;
pub mod eviction;
mod region;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use millrace_types::{Bytes, ModelId, Timestamp};

pub use allocator::{BestFit, BlockPlacement, BlockRun};
pub use block_size::{BlockSize, BlockSizeError, CHUNK, chunks_for};
pub use chunks::ChunkSet;
use region::EvictionOrder;
pub use region::{EvictionRank, ModelRegion};

use allocator::join;

use millrace_core::ids::Generation;

/// Victims of LRU that are looked at again, at most, to see whether they may stay.
const SPARED_MAX: usize = 4;

/// A model that was evicted, and the mapping that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EvictedModel {
    pub model: ModelId,
    /// The number of the mapping that ended.
    pub generation: Generation,
}

/// The reason why there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryShortage {
    /// The models that would make room are spared by the caller, or another GPU copies them.
    #[error("all models that would make room are in use: wait until one is free")]
    Pinned,
    /// The request is larger than the whole GPU.
    #[error("the request is larger than the GPU's memory: use a larger GPU")]
    TooLarge,
}

/// The blocks of a GPU and their owners.
#[derive(Debug)]
pub struct MemoryMap {
    block: BlockSize,
    placement: BlockPlacement,
    total: u32,
    allocator: BestFit,
    regions: BTreeMap<ModelId, ModelRegion>,
    /// The models in the order of their eviction: by rank, then by last use.
    order: BTreeSet<EvictionOrder>,
    last_generation: Generation,
    /// The blocks of intermediate data.
    data: BTreeSet<BlockRun>,
}

impl MemoryMap {
    /// Returns an empty map of `memory` in blocks of the GPU's size, with scattered placement. A
    /// remainder smaller than a block is left out.
    #[must_use]
    pub fn new(memory: Bytes, block: BlockSize) -> Self {
        Self::with(memory, block, BlockPlacement::Scattered)
    }

    /// Returns an empty map of `memory` with this placement; see [`Self::new`].
    #[must_use]
    pub fn with(memory: Bytes, block: BlockSize, placement: BlockPlacement) -> Self {
        let total = block.blocks_in(memory);
        Self {
            block,
            placement,
            total,
            allocator: BestFit::new(total, placement),
            regions: BTreeMap::new(),
            order: BTreeSet::new(),
            last_generation: Generation(0),
            data: BTreeSet::new(),
        }
    }

    /// Returns the size of a block.
    #[must_use]
    pub fn block(&self) -> BlockSize {
        self.block
    }

    /// Returns the number of all blocks.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.total
    }

    /// Returns the number of blocks in use.
    #[must_use]
    pub fn used_blocks(&self) -> u32 {
        self.total - self.allocator.free_blocks()
    }

    /// Returns the region of a model that has a region.
    #[must_use]
    pub fn region(&self, model: ModelId) -> Option<&ModelRegion> {
        self.regions.get(&model)
    }

    /// Returns every region, in model order.
    pub fn regions(&self) -> impl Iterator<Item = (ModelId, &ModelRegion)> {
        self.regions.iter().map(|(&model, region)| (model, region))
    }

    /// Maps a region of `blocks` blocks for a model that has none, and evicts models that are not
    /// in `spared` until there is room. `chunks` chunks of weights will arrive in the region. A shortage
    /// evicts no model. With contiguous placement the region is one run.
    ///
    /// # Errors
    /// [`MemoryShortage`].
    ///
    /// # Panics
    /// If the model has a region: a bug of the caller.
    pub fn map(
        &mut self,
        now: Timestamp,
        model: ModelId,
        blocks: u32,
        chunks: u32,
        spared: &[ModelId],
    ) -> Result<Vec<EvictedModel>, MemoryShortage> {
        self.map_pieces(now, model, &[blocks], chunks, spared)
    }

    /// Maps a region like [`Self::map`], for a framework that asks for pieces of the given lengths,
    /// in blocks. With contiguous placement each piece is a single run.
    ///
    /// # Errors
    /// [`MemoryShortage`].
    ///
    /// # Panics
    /// If the model has a region: a bug of the caller.
    pub fn map_pieces(
        &mut self,
        now: Timestamp,
        model: ModelId,
        pieces: &[u32],
        chunks: u32,
        spared: &[ModelId],
    ) -> Result<Vec<EvictedModel>, MemoryShortage> {
        assert!(!self.regions.contains_key(&model), "model {model} is mapped already");
        let pieces: Vec<_> = pieces.iter().copied().filter(|&len| len > 0).collect();
        let (taken, evicted) = self.take(&pieces, spared)?;
        let region = ModelRegion {
            generation: self.next_generation(),
            runs: join(&taken),
            blocks: pieces.iter().sum(),
            loaded: ChunkSet::empty(chunks),
            last_used: now,
            rank: EvictionRank::default(),
            locks: 0,
        };
        self.order.insert(region.turn(model));
        self.regions.insert(model, region);
        Ok(evicted)
    }

    /// Takes runs for these pieces, and evicts models that are not in `spared` until there is room.
    fn take(
        &mut self,
        pieces: &[u32],
        spared: &[ModelId],
    ) -> Result<(Vec<BlockRun>, Vec<EvictedModel>), MemoryShortage> {
        if let Some(taken) = self.allocator.take(pieces) {
            return Ok((taken, Vec::new()));
        }
        let victims = self.victims(pieces, spared)?;
        let evicted = victims.into_iter().filter_map(|model| self.unmap(model)).collect();
        let taken = self.allocator.take(pieces).expect("the victims made room");
        Ok((taken, evicted))
    }

    fn next_generation(&mut self) -> Generation {
        self.last_generation = Generation(self.last_generation.0 + 1);
        self.last_generation
    }

    /// Returns the models to evict so that these pieces fit, in the order of their eviction.
    fn victims(&self, pieces: &[u32], spared: &[ModelId]) -> Result<Vec<ModelId>, MemoryShortage> {
        let mut trial = self.allocator.clone();
        let mut victims = Vec::new();
        let may_go = |model: &ModelId| !spared.contains(model) && !self.regions[model].is_locked();
        let mut candidates = self.order.iter().map(|&(.., model)| model).filter(may_go);
        while !suffices(&trial, pieces) {
            let Some(model) = candidates.next() else {
                let fits = suffices(&self.empty(), pieces);
                return Err(if fits { MemoryShortage::Pinned } else { MemoryShortage::TooLarge });
            };
            trial.give_back(&self.regions[&model].runs);
            victims.push(model);
        }
        self.spare(&mut victims, pieces, trial.free_blocks());
        Ok(victims)
    }

    /// Returns the books of a GPU on which every block is free.
    fn empty(&self) -> BestFit {
        BestFit::new(self.total, self.placement)
    }

    /// Removes victims that are needless beside the others. Only victims of the highest rank may
    /// stay, so that no model is evicted before a model of a lower rank.
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

    /// Keeps a model from eviction while another GPU copies it (T25), until the model has been
    /// unlocked as often as locked. Returns the region, if there is one.
    pub fn lock(&mut self, model: ModelId) -> Option<&ModelRegion> {
        let region = self.regions.get_mut(&model)?;
        region.locks += 1;
        Some(region)
    }

    /// Reverts one [`Self::lock`].
    ///
    /// # Panics
    /// If the model is not locked: a bug of the caller.
    pub fn unlock(&mut self, model: ModelId) {
        let region = self.regions.get_mut(&model).expect("a locked model has a region");
        region.locks = region.locks.checked_sub(1).expect("every unlock follows a lock");
    }

    /// Drops the region of a model that has a region.
    ///
    /// # Panics
    /// If the model is locked: a bug of the caller.
    pub fn unmap(&mut self, model: ModelId) -> Option<EvictedModel> {
        let region = self.regions.remove(&model)?;
        assert!(!region.is_locked(), "model {model} is being copied");
        self.order.remove(&region.turn(model));
        self.allocator.give_back(&region.runs);
        Some(EvictedModel { model, generation: region.generation })
    }

    /// Records that a model is used.
    pub fn touch(&mut self, now: Timestamp, model: ModelId) {
        self.reorder(model, |region| region.last_used = now);
    }

    /// Sets the rank of a model. The model is evicted before all models of a higher rank,
    /// regardless of their last use.
    pub fn rank(&mut self, model: ModelId, rank: EvictionRank) {
        self.reorder(model, |region| region.rank = rank);
    }

    fn reorder(&mut self, model: ModelId, change: impl FnOnce(&mut ModelRegion)) {
        if let Some(region) = self.regions.get_mut(&model) {
            self.order.remove(&region.turn(model));
            change(region);
            self.order.insert(region.turn(model));
        }
    }

    /// Records that chunks of a model's weights have arrived.
    pub fn arrived(&mut self, model: ModelId, chunks: Range<u32>) {
        if let Some(region) = self.regions.get_mut(&model) {
            region.loaded.insert(chunks);
        }
    }

    /// Clears the map after the device's contents are lost. Generation numbers continue.
    pub fn clear(&mut self) {
        self.allocator = self.empty();
        self.regions.clear();
        self.order.clear();
        self.data.clear();
    }
}

/// Whether an allocator can give out these pieces.
fn suffices(allocator: &BestFit, pieces: &[u32]) -> bool {
    let blocks = pieces.iter().map(|&len| u64::from(len)).sum::<u64>();
    let enough = blocks <= allocator.free_blocks().into();
    enough && (allocator.takes_any() || allocator.clone().take(pieces).is_some())
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
