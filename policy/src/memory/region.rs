//! One model's place on a GPU.

use millrace_types::{ModelId, Timestamp};

use super::allocator::Run;
use super::chunks::ChunkSet;
use crate::ids::Generation;

/// How soon a model makes room for others: the lowest first, and of equals the one that was used
/// longest ago.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u8);

impl Rank {
    /// After all others.
    pub const LAST: Self = Self(u8::MAX);
}

/// Where a model stands in the order in which they make room.
pub(super) type Turn = (Rank, Timestamp, ModelId);

/// One model's place on the GPU.
#[derive(Debug)]
pub struct Region {
    pub(super) generation: Generation,
    /// In the model's order, joined where they touch.
    pub(super) runs: Vec<Run>,
    pub(super) blocks: u32,
    pub(super) loaded: ChunkSet,
    pub(super) last_used: Timestamp,
    pub(super) rank: Rank,
    /// Copies of it to other GPUs that are under way.
    pub(super) locks: u32,
}

impl Region {
    /// The mapping it stands for.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Its blocks, in the model's order.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// How many there are.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// What of the weights has arrived.
    #[must_use]
    pub fn loaded(&self) -> &ChunkSet {
        &self.loaded
    }

    /// When it was used last.
    #[must_use]
    pub fn last_used(&self) -> Timestamp {
        self.last_used
    }

    pub(super) fn turn(&self, model: ModelId) -> Turn {
        (self.rank, self.last_used, model)
    }

    /// Whether another GPU is copying the model, which keeps it from eviction.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.locks > 0
    }
}
