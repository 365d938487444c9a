//! Allocates a GPU's free blocks by best fit: the shortest free run that is long enough, else the
//! longest runs. The worker reserves all of a GPU's memory at boot (T12), so an allocation only
//! changes these books.

use std::collections::BTreeMap;

/// Consecutive blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockRun {
    /// The index of the first block.
    pub start: u32,
    /// The number of blocks, at least 1.
    pub len: u32,
}

impl BlockRun {
    /// Returns the block after the last block of the run.
    #[must_use]
    pub fn end(self) -> u32 {
        self.start + self.len
    }
}

/// Joins runs that follow on each other, and keeps their order.
pub(super) fn join(pieces: &[BlockRun]) -> Vec<BlockRun> {
    let mut runs: Vec<BlockRun> = Vec::new();
    for &piece in pieces {
        match runs.last_mut() {
            Some(last) if last.end() == piece.start => last.len += piece.len,
            _ => runs.push(piece),
        }
    }
    runs
}

/// The addresses that an allocation needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BlockPlacement {
    /// Any blocks: virtual memory management maps them side by side.
    #[default]
    Scattered,
    /// One run for each piece. A device that cannot map blocks while kernels run needs this
    /// placement; the executor patches pointers instead (§4.4).
    Contiguous,
}

/// The free blocks of a GPU, as runs that do not touch each other.
#[derive(Debug, Clone)]
pub struct BestFit {
    placement: BlockPlacement,
    free: BTreeMap<u32, u32>,
    free_blocks: u32,
}

impl BestFit {
    /// Returns the books of `total` free blocks.
    #[must_use]
    pub fn new(total: u32, placement: BlockPlacement) -> Self {
        let free = (total > 0).then_some((0, total)).into_iter().collect();
        Self { placement, free, free_blocks: total }
    }

    /// Returns the number of free blocks.
    #[must_use]
    pub fn free_blocks(&self) -> u32 {
        self.free_blocks
    }

    /// Returns the free runs, in the order of their blocks.
    pub fn free_runs(&self) -> impl Iterator<Item = BlockRun> + '_ {
        self.free.iter().map(|(&start, &len)| BlockRun { start, len })
    }

    /// Whether [`Self::take`] fails only for lack of blocks.
    #[must_use]
    pub fn takes_any(&self) -> bool {
        self.placement == BlockPlacement::Scattered
    }

    /// Takes memory for pieces of the given lengths in blocks, none of which is 0. Contiguous
    /// placement gives a run for each piece, in order; scattered placement gives runs of the sum.
    /// Returns `None`, and takes nothing, if the pieces do not fit.
    pub fn take(&mut self, pieces: &[u32]) -> Option<Vec<BlockRun>> {
        match self.placement {
            BlockPlacement::Scattered => self.take_scattered(pieces.iter().sum()),
            BlockPlacement::Contiguous => self.take_contiguous(pieces),
        }
    }

    fn take_scattered(&mut self, blocks: u32) -> Option<Vec<BlockRun>> {
        if blocks > self.free_blocks {
            return None;
        }
        let mut taken = Vec::new();
        let mut left = blocks;
        while left > 0 {
            let fits = self.free.iter().filter(|&(_, &len)| len >= left).min_by_key(|&(_, &len)| len);
            // Of equal runs the lowest is chosen: the map is in order, and `max_by_key` returns the
            // last maximum.
            let longest = || self.free.iter().rev().max_by_key(|&(_, &len)| len);
            let (&start, &len) = fits.or_else(longest).expect("enough blocks are free");
            let run = BlockRun { start, len: len.min(left) };
            self.take_front(run, len);
            left -= run.len;
            taken.push(run);
        }
        taken.sort_unstable();
        Some(taken)
    }

    fn take_contiguous(&mut self, lengths: &[u32]) -> Option<Vec<BlockRun>> {
        // The longest piece comes first: a short piece could cut up the run that a long piece
        // needs.
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|&place| std::cmp::Reverse(lengths[place]));
        let mut taken = vec![None; lengths.len()];
        for place in order {
            let len = lengths[place];
            let fits = self.free.iter().filter(|&(_, &free)| free >= len).min_by_key(|&(_, &free)| free);
            let Some((&start, &free)) = fits else {
                let back: Vec<BlockRun> = taken.into_iter().flatten().collect();
                self.give_back(&back);
                return None;
            };
            let run = BlockRun { start, len };
            self.take_front(run, free);
            taken[place] = Some(run);
        }
        taken.into_iter().collect()
    }

    /// Takes the front of a free run of `free` blocks.
    fn take_front(&mut self, run: BlockRun, free: u32) {
        self.free.remove(&run.start);
        if run.len < free {
            self.free.insert(run.end(), free - run.len);
        }
        self.free_blocks -= run.len;
    }

    /// Gives runs back.
    ///
    /// # Panics
    /// If a block is free already: a bug of the caller.
    pub fn give_back(&mut self, runs: &[BlockRun]) {
        for &run in runs {
            self.give_back_one(run);
        }
    }

    fn give_back_one(&mut self, BlockRun { mut start, mut len }: BlockRun) {
        self.free_blocks += len;
        if let Some((&before, &before_len)) = self.free.range(..start).next_back() {
            assert!(before + before_len <= start, "block {start} is given back twice");
            if before + before_len == start {
                self.free.remove(&before);
                start = before;
                len += before_len;
            }
        }
        if let Some((&after, &after_len)) = self.free.range(start..).next() {
            assert!(start + len <= after, "block {after} is given back twice");
            if start + len == after {
                self.free.remove(&after);
                len += after_len;
            }
        }
        self.free.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn run(start: u32, len: u32) -> BlockRun {
        BlockRun { start, len }
    }

    fn scattered(total: u32) -> BestFit {
        BestFit::new(total, BlockPlacement::Scattered)
    }

    #[test]
    fn an_allocation_prefers_the_tightest_single_run() {
        let mut blocks = scattered(100);
        let first = blocks.take(&[10]).unwrap();
        assert_eq!(first, [run(0, 10)]);
        assert_eq!(blocks.take(&[20]), Some(vec![run(10, 20)]));
        assert_eq!(blocks.take(&[5]), Some(vec![run(30, 5)]));
        blocks.give_back(&first);
        assert_eq!(blocks.take(&[8]), Some(vec![run(0, 8)]), "the hole of ten is tighter than the rest");
    }

    #[test]
    fn an_allocation_gathers_runs_if_no_single_run_is_long_enough() {
        let mut blocks = scattered(30);
        let runs: Vec<_> = (0..6).map(|_| blocks.take(&[5]).unwrap()).collect();
        blocks.give_back(&runs[1]);
        blocks.give_back(&runs[4]);
        assert_eq!(blocks.take(&[8]), Some(vec![run(5, 5), run(20, 3)]));
        assert_eq!(blocks.take(&[3]), None);
        assert_eq!(blocks.free_blocks(), 2);
    }

    #[test]
    fn contiguous_pieces_get_a_run_each_or_nothing() {
        let mut blocks = BestFit::new(30, BlockPlacement::Contiguous);
        let pieces = blocks.take(&[5, 10, 5]).unwrap();
        assert_eq!(pieces, [run(10, 5), run(0, 10), run(15, 5)]);
        blocks.give_back(&[pieces[0]]);
        assert_eq!(blocks.take(&[11]), None, "15 blocks are free, and no 11 of them follow on each other");
        assert_eq!(blocks.take(&[5, 6, 5]), None);
        assert_eq!(blocks.free_blocks(), 15, "a refused allocation takes nothing");
        assert_eq!(blocks.take(&[5, 10]), Some(vec![run(10, 5), run(20, 10)]));
    }

    #[test]
    fn neighbouring_free_runs_join() {
        let mut blocks = scattered(30);
        let runs: Vec<_> = (0..3).map(|_| blocks.take(&[10]).unwrap()).collect();
        for place in [0, 2, 1] {
            blocks.give_back(&runs[place]);
        }
        assert_eq!(blocks.take(&[30]), Some(vec![run(0, 30)]));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_block_that_is_given_back_twice_panics() {
        let mut blocks = scattered(30);
        let run = blocks.take(&[10]).unwrap();
        blocks.give_back(&run);
        blocks.give_back(&run);
    }
}
