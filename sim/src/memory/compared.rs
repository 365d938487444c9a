//! One interface over all allocators of GPU memory, for the experiments and benches that compare them.

use std::fmt;

use millrace_memory::{BlockPlacement, BlockRun, BlockSize, MemoryMap, MemoryShortage};
use millrace_types::{Bytes, ModelId, Timestamp};

use super::{BaselineMemory, BlockMove, Fragmentation, NativeCalls, TierSizes};

/// A kind of allocator of GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocatorKind {
    /// Best fit, which production uses.
    BestFit(BlockPlacement),
    /// Partitions of common sizes and of buddies (T13), with the default [`TierSizes`].
    TwoTiers(BlockPlacement),
    /// A pool of released pieces over a native allocator: the baseline Torpor-Block (§7.3).
    Pool,
}

impl fmt::Display for AllocatorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::BestFit(BlockPlacement::Scattered) => "best fit, scattered",
            Self::BestFit(BlockPlacement::Contiguous) => "best fit, contiguous",
            Self::TwoTiers(BlockPlacement::Scattered) => "two tiers, scattered",
            Self::TwoTiers(BlockPlacement::Contiguous) => "two tiers, contiguous",
            Self::Pool => "pool (Torpor-Block)",
        })
    }
}

/// The memory of a GPU under one of the compared allocators.
#[derive(Debug)]
pub enum AllocatorUnderTest {
    BestFit(MemoryMap),
    /// Memory under one of the paper's allocators.
    Baseline(BaselineMemory),
}

impl AllocatorUnderTest {
    /// Returns an empty GPU with `memory` bytes.
    #[must_use]
    pub fn new(memory: Bytes, kind: AllocatorKind) -> Self {
        match kind {
            AllocatorKind::BestFit(placement) => {
                Self::BestFit(MemoryMap::with(memory, BlockSize::DEFAULT, placement))
            }
            AllocatorKind::TwoTiers(placement) => {
                Self::Baseline(BaselineMemory::two_tiers(memory, TierSizes::default(), placement))
            }
            AllocatorKind::Pool => Self::Baseline(BaselineMemory::pool(memory)),
        }
    }

    /// Returns the number of blocks of the GPU.
    #[must_use]
    pub fn total_blocks(&self) -> u32 {
        match self {
            Self::BestFit(memory) => memory.total_blocks(),
            Self::Baseline(memory) => memory.total_blocks(),
        }
    }

    /// Returns the memory of a model as runs, in the order of the model's bytes. Returns `None` for a model
    /// without memory.
    #[must_use]
    pub fn runs(&self, model: ModelId) -> Option<&[BlockRun]> {
        match self {
            Self::BestFit(memory) => memory.region(model).map(millrace_memory::ModelRegion::runs),
            Self::Baseline(memory) => memory.pieces(model),
        }
    }

    /// Records the use of a model. Returns whether the model has memory.
    pub fn touch(&mut self, now: Timestamp, model: ModelId) -> bool {
        match self {
            Self::BestFit(memory) => memory.touch(now, model),
            Self::Baseline(memory) => memory.touch(now, model),
        }
        self.runs(model).is_some()
    }

    /// Allocates memory to a model, for pieces of these lengths in blocks. Evicts models that are not in
    /// `pinned` until the pieces fit, and returns the evicted models.
    ///
    /// # Errors
    /// Returns [`MemoryShortage`], and evicts nothing, if the pieces do not fit.
    pub fn map(
        &mut self,
        now: Timestamp,
        model: ModelId,
        pieces: &[u32],
        pinned: &[ModelId],
    ) -> Result<Vec<ModelId>, MemoryShortage> {
        match self {
            Self::BestFit(memory) => {
                let evicted = memory.map_pieces(now, model, pieces, 0, pinned)?;
                Ok(evicted.into_iter().map(|evicted| evicted.model).collect())
            }
            Self::Baseline(memory) => memory.map(now, model, pieces, pinned),
        }
    }

    /// Frees the memory of a model, if the model has any.
    pub fn unmap(&mut self, model: ModelId) {
        match self {
            Self::BestFit(memory) => drop(memory.unmap(model)),
            Self::Baseline(memory) => memory.unmap(model),
        }
    }

    /// Returns the models that have memory, each with the time of its last use.
    #[must_use]
    pub fn models(&self) -> Vec<(Timestamp, ModelId)> {
        match self {
            Self::BestFit(memory) => {
                memory.regions().map(|(model, region)| (region.last_used(), model)).collect()
            }
            Self::Baseline(memory) => memory.models().collect(),
        }
    }

    /// Returns the number of allocations and releases of the native allocator so far.
    #[must_use]
    pub fn native_calls(&self) -> u64 {
        match self {
            Self::BestFit(_) => 0,
            Self::Baseline(memory) => {
                let NativeCalls { allocations, releases } = memory.native_calls();
                allocations + releases
            }
        }
    }

    /// Returns the fragmentation of the free memory, by partitions of the default [`TierSizes`].
    #[must_use]
    pub fn fragmentation(&self) -> Fragmentation {
        match self {
            Self::BestFit(memory) => {
                let mut used: Vec<BlockRun> =
                    memory.regions().flat_map(|(_, region)| region.runs().iter().copied()).collect();
                used.sort_unstable();
                let total = memory.total_blocks();
                let ends = [0].into_iter().chain(used.iter().map(|run| run.end()));
                let starts = used.iter().map(|run| run.start).chain([total]);
                let gaps = ends.zip(starts).filter(|(end, start)| end < start);
                let free: Vec<_> =
                    gaps.map(|(end, start)| BlockRun { start: end, len: start - end }).collect();
                Fragmentation::of(&free, total, TierSizes::default().partition)
            }
            Self::Baseline(memory) => memory.fragmentation(),
        }
    }

    /// Carries out one step of consolidation, and returns its moves in order. Best fit and a pool never move
    /// blocks.
    pub fn consolidate(&mut self, pinned: &[ModelId]) -> Vec<BlockMove> {
        match self {
            Self::BestFit(_) => Vec::new(),
            Self::Baseline(memory) => memory.consolidate(pinned),
        }
    }
}
