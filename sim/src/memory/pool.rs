//! The paper's baseline Torpor-Block (§7.3). Freed pieces are cached in one pool. A request gets a whole
//! piece of the pool that is long enough. If there is no such piece, pieces are released to the native
//! allocator until the native allocator has enough blocks for a new piece.
//!
//! The native allocator has virtual memory of its own, so it can combine any free blocks into a piece. A call
//! costs time, so the calls are counted.

use std::collections::{BTreeMap, VecDeque};

use millrace_memory::{BestFit, BlockPlacement, BlockRun};

/// The number of calls of the native allocator so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NativeCalls {
    pub allocations: u64,
    pub releases: u64,
}

/// A native allocation.
type Piece = Vec<BlockRun>;

#[derive(Debug, Clone)]
pub(super) struct BlockPool {
    native: BestFit,
    /// Freed pieces that are not released to the native allocator, oldest first.
    cached: VecDeque<Piece>,
    cached_blocks: u32,
    /// Pieces in use, by their first block. A model may use only the begin of a piece.
    lent: BTreeMap<u32, Piece>,
    calls: NativeCalls,
}

fn len(piece: &[BlockRun]) -> u32 {
    piece.iter().map(|run| run.len).sum()
}

impl BlockPool {
    pub(super) fn new(total: u32) -> Self {
        Self {
            native: BestFit::new(total, BlockPlacement::Scattered),
            cached: VecDeque::new(),
            cached_blocks: 0,
            lent: BTreeMap::new(),
            calls: NativeCalls::default(),
        }
    }

    pub(super) fn free_blocks(&self) -> u32 {
        self.native.free_blocks() + self.cached_blocks
    }

    pub(super) fn calls(&self) -> NativeCalls {
        self.calls
    }

    pub(super) fn free(&self) -> Vec<BlockRun> {
        let mut free: Vec<_> = self.native.free_runs().chain(self.cached.iter().flatten().copied()).collect();
        free.sort_unstable();
        free
    }

    pub(super) fn take(&mut self, lengths: &[u32]) -> Option<Vec<BlockRun>> {
        let mut taken = Vec::new();
        for &wanted in lengths {
            let Some(piece) = self.take_one(wanted) else {
                self.give_back(&taken);
                return None;
            };
            let mut left = wanted;
            taken.extend(piece.iter().map_while(|run| {
                let len = run.len.min(left);
                left -= len;
                (len > 0).then_some(BlockRun { start: run.start, len })
            }));
            self.lent.insert(piece[0].start, piece);
        }
        Some(taken)
    }

    fn take_one(&mut self, wanted: u32) -> Option<Piece> {
        if let Some(place) = self.cached.iter().position(|piece| len(piece) >= wanted) {
            let piece = self.cached.remove(place).expect("the piece was just found");
            self.cached_blocks -= len(&piece);
            return Some(piece);
        }
        while self.native.free_blocks() < wanted {
            let piece = self.cached.pop_front()?;
            self.cached_blocks -= len(&piece);
            self.native.give_back(&piece);
            self.calls.releases += 1;
        }
        self.calls.allocations += 1;
        self.native.take(&[wanted])
    }

    pub(super) fn give_back(&mut self, runs: &[BlockRun]) {
        // A run that is not the first run of a piece is a later run of a piece that is freed here too.
        for piece in runs.iter().filter_map(|run| self.lent.remove(&run.start)) {
            self.cached_blocks += len(&piece);
            self.cached.push_back(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_piece_is_lent_and_freed_as_a_whole() {
        let mut pool = BlockPool::new(30);
        let first = pool.take(&[20]).unwrap();
        pool.give_back(&first);
        assert_eq!(pool.take(&[5]), Some(vec![BlockRun { start: 0, len: 5 }]));
        assert_eq!(pool.free_blocks(), 10, "the cached piece of 20 blocks was not lent for 5");
        pool.give_back(&[BlockRun { start: 0, len: 5 }]);
        assert_eq!(pool.free_blocks(), 30);
        assert_eq!(pool.calls(), NativeCalls { allocations: 1, releases: 0 });
    }

    #[test]
    fn cached_pieces_that_are_too_short_are_released_to_the_native_allocator() {
        let mut pool = BlockPool::new(30);
        let short = pool.take(&[10, 10, 10]).unwrap();
        pool.give_back(&short);
        assert_eq!(pool.take(&[15]).map(|runs| len(&runs)), Some(15));
        assert_eq!(pool.calls(), NativeCalls { allocations: 4, releases: 2 });
        assert_eq!(pool.take(&[16]), None);
        assert_eq!(pool.free_blocks(), 15, "a failed request kept blocks");
    }
}
