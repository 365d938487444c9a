//! Gives out a GPU's blocks. All memory is reserved at boot (T12), so this only keeps the books.

use super::config::{Arrangement, Grid, Placement};
use super::partitions::Partitions;
use super::pool::Pool;
use super::runs::Runs;

/// A run of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The first.
    pub start: u32,
    /// How many, at least 1.
    pub len: u32,
}

impl Run {
    /// The block after the last.
    #[must_use]
    pub fn end(self) -> u32 {
        self.start + self.len
    }
}

/// Joins runs that follow on each other, keeping their order.
pub(super) fn join(pieces: &[Run]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for &piece in pieces {
        match runs.last_mut() {
            Some(last) if last.end() == piece.start => last.len += piece.len,
            _ => runs.push(piece),
        }
    }
    runs
}

/// What is free, and in what state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// Blocks free.
    pub free: u32,
    /// Of them, blocks in partitions that are partly used: the rest is in whole partitions.
    pub stranded: u32,
    /// Partitions that are wholly free.
    pub whole: u32,
    /// The longest run of free blocks.
    pub longest: u32,
}

/// Free memory, kept as configured.
#[derive(Debug, Clone)]
pub(super) enum Allocator {
    BestFit(Runs),
    Partitions(Partitions),
    Pool(Pool),
}

impl Allocator {
    /// All of `total` blocks free.
    pub(super) fn new(total: u32, grid: &Grid) -> Self {
        match grid.arrangement {
            Arrangement::BestFit => Self::BestFit(Runs::new(total)),
            Arrangement::Partitions => Self::Partitions(Partitions::new(total, grid)),
            Arrangement::Pool => Self::Pool(Pool::new(total)),
        }
    }

    /// Takes memory for a model's pieces (in blocks, none of them 0, in the model's order): a run for each where
    /// they have to be contiguous, else any runs of as much in all. `None`, and nothing taken,
    /// where that cannot be had.
    pub(super) fn take(&mut self, pieces: &[u32], placement: Placement) -> Option<Vec<Run>> {
        match (self, placement) {
            (Self::BestFit(runs), Placement::Scattered) => runs.take(pieces.iter().sum()),
            (Self::BestFit(runs), Placement::Contiguous) => runs.take_each(pieces),
            (Self::Partitions(partitions), _) => partitions.take(pieces, placement),
            (Self::Pool(pool), _) => pool.take(pieces),
        }
    }

    /// Gives back what was taken.
    ///
    /// # Panics
    /// When something is free already: a bug of the caller.
    pub(super) fn give_back(&mut self, pieces: &[Run]) {
        match self {
            Self::BestFit(runs) => runs.give_back(pieces),
            Self::Partitions(partitions) => partitions.give_back(pieces),
            Self::Pool(pool) => pool.give_back(pieces),
        }
    }

    /// Whether enough free blocks are all that [`Self::take`] needs.
    pub(super) fn takes_any(&self, placement: Placement) -> bool {
        placement == Placement::Scattered && !matches!(self, Self::Pool(_))
    }

    /// Takes a run that something is moved to.
    pub(super) fn begin_move(&mut self, to: Run) {
        if let Self::Partitions(partitions) = self {
            partitions.mark(to);
        }
    }

    /// Blocks free.
    pub(super) fn free_blocks(&self) -> u32 {
        match self {
            Self::BestFit(runs) => runs.free_blocks(),
            Self::Partitions(partitions) => partitions.free_blocks(),
            Self::Pool(pool) => pool.free_blocks(),
        }
    }

    /// What is free, by partitions of `partition` blocks.
    pub(super) fn fragmentation(&self, total: u32, partition: u32) -> Fragmentation {
        let free = match self {
            Self::BestFit(runs) => runs.free().collect(),
            Self::Partitions(partitions) => partitions.free(),
            Self::Pool(pool) => pool.free(),
        };
        let mut found = Fragmentation::default();
        for run in join(&free) {
            found.free += run.len;
            found.longest = found.longest.max(run.len);
            // A short partition at the end counts as whole too.
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
