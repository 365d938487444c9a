//! A GPU's memory map: which model holds which blocks, what of it has arrived, who is evicted to make
//! room, and which blocks hold intermediate data. The only authority about the GPU's memory, all of
//! which is reserved at boot (T12).
//!
//! Eviction never copies back: the host copy stays authoritative, so dropping the GPU copy is all
//! there is to it (T10). Victims are taken least recently used first, never one that is pinned. Of
//! those, what is not needed after all stays: first what would free the fewest whole partitions,
//! then what was used last (T13, as far as it costs no more than LRU does).
//!
//! | [`Arrangement`] | [`Placement::Scattered`] | [`Placement::Contiguous`] |
//! |---|---|---|
//! | `Partitions` (T13) | fails only for lack of blocks | can fail by shape |
//! | `BestFit` (ours) | fails only for lack of blocks | can fail by shape |
//! | `Pool` (Torpor-Block) | lends more than is asked for | the same |
//!
//! The default is `BestFit`, scattered, and not the paper's two tiers: under virtual memory
//! management no fragmentation makes an allocation fail, and the runs it finds are fewer (each is a
//! map operation) and found sooner; what two tiers give is whole partitions. Where pieces have to be
//! contiguous, two tiers are faster and free more whole partitions, and hold less: with pieces of 22
//! to 150 MiB, rests that no other piece fits. `benches/memory.rs` has the figures. With two tiers a
//! model of several common sizes needs a partition for each, so a GPU of few partitions is too small
//! for models that would fit it by size.
//!
//! # Fragmentation
//!
//! Free blocks in partly used partitions are *stranded*: they serve no model that needs whole
//! partitions. With `Partitions`, P blocks a partition, once [`MemoryMap::consolidate`] plans no
//! more:
//!
//! - for each common size of s blocks, the partly used partitions have less than one partition's
//!   slots free, that is less than P blocks, besides P mod s blocks at the end of each partition,
//!   which are in no slot (4 of 64 for 20 MiB);
//! - among buddies at most P - 1 blocks are free, besides the rest of each piece's buddy (less than
//!   the piece; the next power of two counts, not `irregular_min`).
//!
//! Scattered memory has one size of one block, so that less than P blocks are stranded in all. What
//! is pinned adds at most P - 1 for each partition it is in; so does an irregular piece longer than a
//! partition (it never moves), and a last partition that is short. `properties.rs` fails above that.
//!
//! Consolidation is due, and its plan not empty, when a step frees a whole partition among slots, or
//! when what is free among buddies adds up to one. A Gpu core looks once a second where something has
//! changed, and carries steps out until none is due ([`consolidation`](crate::gpu::consolidation)); a step moves
//! at most [`Config::step`].
//!
//! `BestFit`, scattered, needs none: whatever the fragmentation, an allocation fails only where fewer
//! blocks are free than it asks for (`scattered_memory_fails_for_lack_of_blocks_alone`), and what it
//! finds is shown side by side by remapping. `Pool` has none: that it goes to the native allocator
//! instead is what it is compared for.

mod allocator;
mod bits;
mod chunks;
mod config;
mod consolidate;
mod data;
mod layout;
mod moves;
mod partitions;
mod pool;
mod region;
mod runs;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use millrace_types::{Bytes, ModelId, Timestamp};

pub use allocator::{Fragmentation, Run};
pub use chunks::ChunkSet;
pub use config::{Arrangement, Config, ConfigError, Grid, PARTITION_BLOCKS_MAX, Placement, REGULAR_MAX};
pub use consolidate::Move;
pub use layout::{LAYOUTS, Layout};
pub use pool::NativeCalls;
use region::Turn;
pub use region::{Rank, Region};

use allocator::{Allocator, join};

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

/// A model that has other blocks than before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Relocated {
    /// Which model.
    pub model: ModelId,
    /// The mapping that ended.
    pub was: Generation,
    /// The mapping there is now.
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

/// Which model holds what.
#[derive(Debug)]
pub struct MemoryMap {
    grid: Grid,
    total: u32,
    allocator: Allocator,
    regions: BTreeMap<ModelId, Region>,
    /// In the order in which they make room: by rank, then by last use.
    order: BTreeSet<Turn>,
    last_generation: Generation,
    /// Blocks that models which are being moved leave, and which are theirs until they have.
    leaving: BTreeMap<ModelId, Vec<Run>>,
    /// What intermediate data holds.
    data: BTreeSet<Run>,
    /// Whether something changed since consolidation was found not to be due.
    untidy: bool,
}

impl MemoryMap {
    /// An empty GPU of this much memory, cut up by default. What does not fill a block is left out.
    #[must_use]
    pub fn new(memory: Bytes) -> Self {
        Self::with(memory, Grid::default())
    }

    /// An empty GPU whose memory is cut up like this.
    #[must_use]
    pub fn with(memory: Bytes, grid: Grid) -> Self {
        let total = u32::try_from(memory.0 / BLOCK.0).unwrap_or(u32::MAX);
        Self {
            allocator: Allocator::new(total, &grid),
            grid,
            total,
            regions: BTreeMap::new(),
            order: BTreeSet::new(),
            last_generation: Generation(0),
            leaving: BTreeMap::new(),
            data: BTreeSet::new(),
            untidy: false,
        }
    }

    /// Blocks in all.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.total
    }

    /// Blocks taken, and lent beyond what was asked for.
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

    /// What is free, and in what state.
    #[must_use]
    pub fn fragmentation(&self) -> Fragmentation {
        self.allocator.fragmentation(self.total, self.grid.partition)
    }

    /// What the pool asked of the native allocator; nothing in other arrangements (T12).
    #[must_use]
    pub fn native_calls(&self) -> NativeCalls {
        match &self.allocator {
            Allocator::Pool(pool) => pool.calls(),
            Allocator::BestFit(_) | Allocator::Partitions(_) => NativeCalls::default(),
        }
    }

    /// Gives a model that has none a region of `blocks` blocks, of which `chunks` will be filled,
    /// evicting what is not in `pinned` until there is room. On a shortage nothing is evicted. The
    /// model's pieces are taken to be of the common sizes ([`Grid::cut`]).
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
        if self.allocator.takes_any(self.grid.placement) {
            return self.map_pieces(now, model, &[blocks], chunks, pinned);
        }
        self.map_pieces(now, model, &self.grid.cut(blocks), chunks, pinned)
    }

    /// As [`Self::map`], for a model that asks for pieces of these lengths, in blocks, in its order.
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
        let (evicted, pieces) = match self.allocator.take(&pieces, self.grid.placement) {
            Some(taken) => (Vec::new(), taken),
            None => {
                let victims = self.victims(&pieces, pinned)?;
                let evicted = victims.into_iter().filter_map(|model| self.unmap(model)).collect();
                let taken = self.allocator.take(&pieces, self.grid.placement);
                (evicted, taken.expect("room was made"))
            }
        };
        let generation = self.next_generation();
        let (runs, blocks) = (join(&pieces), pieces.iter().map(|run| run.len).sum());
        let loaded = ChunkSet::empty(chunks);
        let (last_used, rank, locks) = (now, Rank::default(), 0);
        let region = Region { generation, pieces, runs, blocks, loaded, last_used, rank, locks };
        self.order.insert(region.turn(model));
        self.regions.insert(model, region);
        self.untidy = true;
        Ok(evicted)
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
        while !self.suffices(&trial, pieces) {
            let Some(model) = candidates.next() else {
                let empty = Allocator::new(self.total, &self.grid);
                let fits = self.suffices(&empty, pieces);
                return Err(if fits { Shortage::Pinned } else { Shortage::TooLarge });
            };
            trial.give_back(&self.regions[&model].pieces);
            victims.push(model);
        }
        self.spare(&mut victims, pieces, trial.free_blocks());
        Ok(victims)
    }

    /// Whether these pieces could be taken.
    fn suffices(&self, allocator: &Allocator, pieces: &[u32]) -> bool {
        let blocks = pieces.iter().map(|&len| u64::from(len)).sum::<u64>();
        let enough = blocks <= allocator.free_blocks().into();
        enough
            && (allocator.takes_any(self.grid.placement)
                || allocator.clone().take(pieces, self.grid.placement).is_some())
    }

    /// Takes victims back that the others make room without: only of the highest rank, so that
    /// none goes before one of a lower rank.
    fn spare(&self, victims: &mut Vec<ModelId>, pieces: &[u32], free: u32) {
        let surplus = free - pieces.iter().sum::<u32>();
        let highest = victims.iter().map(|model| self.regions[model].rank).max().unwrap_or_default();
        let small = |model: &ModelId| {
            let region = &self.regions[model];
            region.blocks <= surplus && region.rank == highest
        };
        let whole = |model: &ModelId| {
            let mut without = self.allocator.clone();
            without.give_back(&self.regions[model].pieces);
            without.fragmentation(self.total, self.grid.partition).whole
        };
        let latest = victims.iter().enumerate().rev().filter(|(_, model)| small(model));
        let mut order: Vec<_> = latest.take(SPARED_MAX).collect();
        order.sort_by_cached_key(|&(age, model)| (whole(model), Reverse(age)));
        for model in order.into_iter().map(|(_, &model)| model).collect::<Vec<_>>() {
            let rest: Vec<_> = victims.iter().copied().filter(|&victim| victim != model).collect();
            let mut trial = self.allocator.clone();
            rest.iter().for_each(|victim| trial.give_back(&self.regions[victim].pieces));
            if self.suffices(&trial, pieces) {
                *victims = rest;
            }
        }
    }

    /// Keeps a model where it is, neither evicted nor moved, while another GPU copies it (T25): until
    /// it was unlocked as often as it was locked. Gives its region, if it has one.
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
    /// When the model is locked or being moved: a bug of the caller.
    pub fn unmap(&mut self, model: ModelId) -> Option<Evicted> {
        let region = self.regions.remove(&model)?;
        assert!(!region.is_locked(), "model {model} is being copied or moved");
        self.untidy = true;
        self.order.remove(&region.turn(model));
        self.allocator.give_back(&region.pieces);
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
        self.allocator = Allocator::new(self.total, &self.grid);
        self.regions.clear();
        self.order.clear();
        self.leaving.clear();
        self.data.clear();
        self.untidy = false;
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
