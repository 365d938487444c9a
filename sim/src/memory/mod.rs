//! The allocators of GPU memory of the Torpor paper: two tiers with consolidation (T13; §4.4, A.2), and the
//! baseline Torpor-Block, a pool over a native allocator (§7.3). Production allocates by best fit
//! (`millrace_memory`). The experiments and `benches/memory.rs` compare the three.
//!
//! When memory is short, the least recently used models are evicted. Pinned models are never evicted.
//!
//! # Fragmentation
//!
//! Free blocks in partly used partitions are *stranded*: a model that needs whole partitions cannot use them.
//! Let a partition have P blocks. Once [`BaselineMemory::consolidate`] moves nothing more, these bounds hold:
//!
//! - For each common size of s blocks, the free slots of all partly used partitions are fewer than the
//!   slots of one partition, hence below P blocks. The last P mod s blocks of each partition (4 of 64 for
//!   20 MiB) are in no slot, and are stranded too.
//! - Among buddies at most P - 1 blocks are free, besides the rest of each piece's buddy. That rest is
//!   smaller than the piece: the next power of two counts, not `irregular_min`.
//!
//! Each partition with a pinned model adds at most P - 1 blocks. So does each partition with an irregular
//! piece longer than a partition, which never moves, and a short last partition. `tests.rs` fails above
//! these bounds.

mod bits;
mod compared;
mod consolidate;
mod partitions;
mod pool;

use std::collections::{BTreeMap, BTreeSet};

use millrace_memory::{BlockPlacement, BlockRun, BlockSize, MemoryShortage};
use millrace_types::{Bytes, ModelId, Timestamp};

pub use self::compared::{AllocatorKind, AllocatorUnderTest};
pub use self::consolidate::BlockMove;
use self::partitions::Partitions;
pub use self::partitions::TierSizes;
use self::pool::BlockPool;
pub use self::pool::NativeCalls;

/// The fragmentation of a GPU's free memory, in blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// The number of free blocks.
    pub free: u32,
    /// The number of free blocks in partly used partitions.
    pub stranded: u32,
    /// The number of wholly free partitions.
    pub whole: u32,
    /// The length of the longest free run in blocks.
    pub longest: u32,
}

impl Fragmentation {
    /// Describes free runs of a GPU of `total` blocks in partitions of `partition` blocks.
    #[must_use]
    pub fn of(free: &[BlockRun], total: u32, partition: u32) -> Self {
        let mut found = Self::default();
        for run in join(free) {
            found.free += run.len;
            found.longest = found.longest.max(run.len);
            // A short last partition counts as a whole partition.
            let end = if run.end() == total { total.next_multiple_of(partition) } else { run.end() };
            let whole = (end / partition).saturating_sub(run.start.div_ceil(partition));
            let first = run.start.div_ceil(partition) * partition;
            let held = if whole > 0 { ((first + whole * partition).min(total)) - first } else { 0 };
            found.whole += whole;
            found.stranded += run.len - held;
        }
        found
    }
}

fn join(pieces: &[BlockRun]) -> Vec<BlockRun> {
    let mut runs: Vec<BlockRun> = Vec::new();
    for &piece in pieces {
        match runs.last_mut() {
            Some(last) if last.end() == piece.start => last.len += piece.len,
            _ => runs.push(piece),
        }
    }
    runs
}

/// The free memory of a GPU, by one of the allocators.
#[derive(Debug, Clone)]
enum Allocator {
    TwoTier(Partitions, BlockPlacement),
    Pool(BlockPool),
}

impl Allocator {
    fn take(&mut self, pieces: &[u32]) -> Option<Vec<BlockRun>> {
        match self {
            Self::TwoTier(partitions, placement) => partitions.take(pieces, *placement),
            Self::Pool(pool) => pool.take(pieces),
        }
    }

    fn give_back(&mut self, pieces: &[BlockRun]) {
        match self {
            Self::TwoTier(partitions, _) => partitions.give_back(pieces),
            Self::Pool(pool) => pool.give_back(pieces),
        }
    }

    fn free_blocks(&self) -> u32 {
        match self {
            Self::TwoTier(partitions, _) => partitions.free_blocks(),
            Self::Pool(pool) => pool.free_blocks(),
        }
    }

    /// Returns whether the allocator has memory for the pieces.
    fn suffices(&self, pieces: &[u32]) -> bool {
        pieces.iter().sum::<u32>() <= self.free_blocks() && self.clone().take(pieces).is_some()
    }
}

/// The memory of one model.
#[derive(Debug, Clone)]
struct ModelPieces {
    /// The pieces, in the order of the model's bytes.
    pieces: Vec<BlockRun>,
    last_used: Timestamp,
}

impl ModelPieces {
    fn move_blocks(&mut self, BlockMove { from, to, .. }: BlockMove) {
        let holds = |piece: &BlockRun| piece.start <= from.start && from.end() <= piece.end();
        let place = self.pieces.iter().position(holds).expect("the model owns the moved blocks");
        let piece = self.pieces[place];
        let before = BlockRun { start: piece.start, len: from.start - piece.start };
        let after = BlockRun { start: from.end(), len: piece.end() - from.end() };
        let parts = [before, to, after].into_iter().filter(|run| run.len > 0);
        self.pieces.splice(place..=place, parts);
    }
}

/// The memory of a GPU under one of the paper's allocators.
#[derive(Debug, Clone)]
pub struct BaselineMemory {
    empty: Allocator,
    allocator: Allocator,
    sizes: TierSizes,
    total: u32,
    regions: BTreeMap<ModelId, ModelPieces>,
    /// The models, least recently used first.
    order: BTreeSet<(Timestamp, ModelId)>,
}

impl BaselineMemory {
    /// Returns an empty GPU with memory in two tiers (T13).
    #[must_use]
    pub fn two_tiers(memory: Bytes, sizes: TierSizes, placement: BlockPlacement) -> Self {
        let total = BlockSize::DEFAULT.blocks_in(memory);
        Self::new(total, Allocator::TwoTier(Partitions::new(total, &sizes), placement), sizes)
    }

    /// Returns an empty GPU with memory in a pool over a native allocator (Torpor-Block).
    #[must_use]
    pub fn pool(memory: Bytes) -> Self {
        let total = BlockSize::DEFAULT.blocks_in(memory);
        Self::new(total, Allocator::Pool(BlockPool::new(total)), TierSizes::default())
    }

    fn new(total: u32, allocator: Allocator, sizes: TierSizes) -> Self {
        let empty = allocator.clone();
        Self { empty, allocator, sizes, total, regions: BTreeMap::new(), order: BTreeSet::new() }
    }

    /// Returns the number of blocks of the GPU.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        self.total
    }

    /// Returns the number of blocks that are not free. A pool may lend a model more blocks than requested.
    #[must_use]
    pub fn used_blocks(&self) -> u32 {
        self.total - self.allocator.free_blocks()
    }

    /// Returns the pieces of a model, in the order of the model's bytes. Returns `None` for a model without
    /// memory.
    #[must_use]
    pub fn pieces(&self, model: ModelId) -> Option<&[BlockRun]> {
        self.regions.get(&model).map(|region| &region.pieces[..])
    }

    /// Returns the models that have memory, each with the time of its last use.
    pub fn models(&self) -> impl Iterator<Item = (Timestamp, ModelId)> + '_ {
        self.regions.iter().map(|(&model, region)| (region.last_used, model))
    }

    /// Returns the number of calls of the native allocator so far. Two tiers make no such calls.
    #[must_use]
    pub fn native_calls(&self) -> NativeCalls {
        match &self.allocator {
            Allocator::TwoTier(..) => NativeCalls::default(),
            Allocator::Pool(pool) => pool.calls(),
        }
    }

    /// Returns the fragmentation of the free memory, by partitions of [`TierSizes::partition`] blocks.
    #[must_use]
    pub fn fragmentation(&self) -> Fragmentation {
        let free = match &self.allocator {
            Allocator::TwoTier(partitions, _) => partitions.free(),
            Allocator::Pool(pool) => pool.free(),
        };
        Fragmentation::of(&free, self.total, self.sizes.partition)
    }

    /// Allocates memory to a model, for pieces of these lengths in blocks. Evicts models that are not in
    /// `pinned` until the pieces fit, and returns the evicted models.
    ///
    /// # Errors
    /// Returns [`MemoryShortage`], and evicts nothing, if the pieces do not fit.
    ///
    /// # Panics
    /// Panics if the model has memory already, which is a bug of the caller.
    pub fn map(
        &mut self,
        now: Timestamp,
        model: ModelId,
        pieces: &[u32],
        pinned: &[ModelId],
    ) -> Result<Vec<ModelId>, MemoryShortage> {
        assert!(!self.regions.contains_key(&model), "model {model} has memory already");
        let pieces: Vec<_> = pieces.iter().copied().filter(|&len| len > 0).collect();
        let mut evicted = Vec::new();
        let taken = match self.allocator.take(&pieces) {
            Some(taken) => taken,
            None => {
                evicted = self.victims(&pieces, pinned)?;
                evicted.iter().for_each(|&model| self.unmap(model));
                self.allocator.take(&pieces).expect("the pieces fit after the evictions")
            }
        };
        self.regions.insert(model, ModelPieces { pieces: taken, last_used: now });
        self.order.insert((now, model));
        Ok(evicted)
    }

    /// Returns the models to evict for these pieces, least recently used first. A model is left out again
    /// if the evictions of the other models suffice.
    fn victims(&self, pieces: &[u32], pinned: &[ModelId]) -> Result<Vec<ModelId>, MemoryShortage> {
        let mut trial = self.allocator.clone();
        let mut victims = Vec::new();
        let mut candidates =
            self.order.iter().map(|&(_, model)| model).filter(|model| !pinned.contains(model));
        while !trial.suffices(pieces) {
            let Some(model) = candidates.next() else {
                let fits = self.empty.suffices(pieces);
                return Err(if fits { MemoryShortage::Pinned } else { MemoryShortage::TooLarge });
            };
            trial.give_back(&self.regions[&model].pieces);
            victims.push(model);
        }
        for model in victims.clone().into_iter().rev() {
            let rest: Vec<_> = victims.iter().copied().filter(|&victim| victim != model).collect();
            let mut trial = self.allocator.clone();
            rest.iter().for_each(|victim| trial.give_back(&self.regions[victim].pieces));
            if trial.suffices(pieces) {
                victims = rest;
            }
        }
        Ok(victims)
    }

    /// Records the use of a model, if the model has memory.
    pub fn touch(&mut self, now: Timestamp, model: ModelId) {
        if let Some(region) = self.regions.get_mut(&model) {
            self.order.remove(&(region.last_used, model));
            region.last_used = now;
            self.order.insert((now, model));
        }
    }

    /// Frees the memory of a model, if the model has any.
    pub fn unmap(&mut self, model: ModelId) {
        if let Some(region) = self.regions.remove(&model) {
            self.order.remove(&(region.last_used, model));
            self.allocator.give_back(&region.pieces);
        }
    }

    /// Carries out one step of consolidation, and returns its moves in order. Returns no moves if no step
    /// is due, or for a pool. Pinned models do not move.
    pub fn consolidate(&mut self, pinned: &[ModelId]) -> Vec<BlockMove> {
        let Allocator::TwoTier(partitions, placement) = &self.allocator else { return Vec::new() };
        let held =
            self.regions.iter().map(|(model, region)| (*model, &region.pieces[..], pinned.contains(model)));
        let (moves, after) = consolidate::plan(partitions, held, self.sizes.step);
        self.allocator = Allocator::TwoTier(after, *placement);
        for &step in &moves {
            self.regions.get_mut(&step.model).expect("a moved model has memory").move_blocks(step);
        }
        moves
    }
}

#[cfg(test)]
mod tests;
