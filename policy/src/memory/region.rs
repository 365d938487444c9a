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
    /// As they were given out, in the model's order.
    pub(super) pieces: Vec<Run>,
    /// The same, joined where they touch.
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

    /// Whether it is being copied to another GPU, and has to stay where it is.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.locks > 0
    }

    pub(super) fn relocate(&mut self, from: Run, to: Run) {
        let holds = |piece: &Run| piece.start <= from.start && from.end() <= piece.end();
        let place = self.pieces.iter().position(holds).expect("who moves holds what it leaves");
        let piece = self.pieces[place];
        let before = Run { start: piece.start, len: from.start - piece.start };
        let after = Run { start: from.end(), len: piece.end() - from.end() };
        let parts = [before, to, after].into_iter().filter(|run| run.len > 0);
        self.pieces.splice(place..=place, parts);
    }
}
