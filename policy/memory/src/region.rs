//! The region of one model on a GPU.

use millrace_types::{ModelId, Timestamp};

use super::allocator::BlockRun;
use super::chunks::ChunkSet;
use millrace_core::ids::Generation;

/// The order of eviction: models of the lowest rank are evicted first, and of equal ranks the least
/// recently used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EvictionRank(pub u8);

impl EvictionRank {
    /// The rank of models that are evicted after all others.
    pub const LAST: Self = Self(u8::MAX);
}

/// A model's position in the order of eviction.
pub(super) type EvictionOrder = (EvictionRank, Timestamp, ModelId);

/// The region of one model on the GPU.
#[derive(Debug)]
pub struct ModelRegion {
    pub(super) generation: Generation,
    /// The blocks in the model's order; runs that touch are joined.
    pub(super) runs: Vec<BlockRun>,
    pub(super) blocks: u32,
    pub(super) loaded: ChunkSet,
    pub(super) last_used: Timestamp,
    pub(super) rank: EvictionRank,
    /// Number of copies of the model to other GPUs that are in progress.
    pub(super) locks: u32,
}

impl ModelRegion {
    /// Returns the number of the mapping.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Returns the blocks, in the model's order.
    #[must_use]
    pub fn runs(&self) -> &[BlockRun] {
        &self.runs
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Returns the chunks of the weights that have arrived.
    #[must_use]
    pub fn loaded(&self) -> &ChunkSet {
        &self.loaded
    }

    /// Returns the time of the last use.
    #[must_use]
    pub fn last_used(&self) -> Timestamp {
        self.last_used
    }

    pub(super) fn turn(&self, model: ModelId) -> EvictionOrder {
        (self.rank, self.last_used, model)
    }

    /// Whether another GPU is copying the model, which keeps it from eviction.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.locks > 0
    }
}
