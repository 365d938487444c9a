//! Moves of what models hold, from the plan to its end (A.2).
//!
//! ```text
//! consolidate ─► moves ─► begin_moves: old and new blocks are the model's ─► end_moves: only the new
//! ```
//! In between a device copies. Nobody else gets blocks of either kind, and the model is locked: it is
//! neither evicted nor moved again.

use std::collections::BTreeSet;

use millrace_types::ModelId;

use super::allocator::{Allocator, Run, join};
use super::consolidate::{self, Move};
use super::region::Region;
use super::{MemoryMap, Relocated};

impl MemoryMap {
    /// Whether something changed since consolidation was last found not to be due, where it ever is.
    #[must_use]
    pub fn is_untidy(&self) -> bool {
        self.untidy && matches!(self.allocator, Allocator::Partitions(_))
    }

    /// Notes that consolidation is not due, whatever could move.
    pub fn found_tidy(&mut self) {
        self.untidy = false;
    }

    /// Whether models are being moved.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Plans one step of consolidation; empty where none is due, or where one is under way. Nothing
    /// of a model in `pinned`, or of one that is locked, moves: whoever copies a model's blocks lets
    /// nobody else read or write them meanwhile. All moves go to blocks that are free now.
    #[must_use]
    pub fn consolidate(&self, pinned: &[ModelId]) -> Vec<Move> {
        let Allocator::Partitions(partitions) = &self.allocator else { return Vec::new() };
        if self.is_moving() {
            return Vec::new();
        }
        let stays = |model, region: &Region| pinned.contains(model) || region.is_locked();
        let held =
            self.regions.iter().map(|(model, region)| (*model, &region.pieces[..], stays(model, region)));
        let data: Vec<_> = self.data.iter().copied().collect();
        // No model's, and it stays.
        let held = held.chain(std::iter::once((ModelId(u32::MAX), &data[..], true)));
        let mut moves = consolidate::plan(partitions, held, self.grid.step);
        let overlap = |one: Run, other: Run| one.start < other.end() && other.start < one.end();
        let waits = |place: usize| {
            let touches = |before: &Move| {
                overlap(before.from, moves[place].to) || overlap(before.to, moves[place].from)
            };
            moves[..place].iter().any(touches)
        };
        // What goes where an earlier move was, or on from where one went, waits for a later step.
        let ready = (0..moves.len()).find(|&place| waits(place)).unwrap_or(moves.len());
        moves.truncate(ready);
        moves
    }

    /// Begins moves that were planned just now. Each model that moves has a new mapping, with what of
    /// it had arrived, and is locked until [`Self::end_moves`].
    ///
    /// # Panics
    /// When a move is of blocks that its model does not hold, or to some that are not free: a bug of
    /// the caller.
    pub fn begin_moves(&mut self, moves: &[Move]) -> Vec<Relocated> {
        let mut moved = BTreeSet::new();
        for &Move { model, from, to } in moves {
            let region = self.regions.get_mut(&model).expect("who moves has a region");
            region.relocate(from, to);
            self.allocator.begin_move(to);
            self.leaving.entry(model).or_default().push(from);
            moved.insert(model);
        }
        let remap = |model| {
            let generation = self.next_generation();
            let region = self.regions.get_mut(&model).expect("it moved");
            region.runs = join(&region.pieces);
            region.locks += 1;
            Relocated { model, was: std::mem::replace(&mut region.generation, generation), generation }
        };
        moved.into_iter().map(remap).collect()
    }

    /// Notes that a model has left the blocks it was moved from, or is about to lose all it has.
    pub fn end_moves(&mut self, model: ModelId) {
        if let Some(left) = self.leaving.remove(&model) {
            self.allocator.give_back(&left);
            self.unlock(model);
        }
    }
}
