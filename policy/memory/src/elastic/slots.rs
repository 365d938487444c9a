//! Bit sets of the store's blocks.

use crate::BlockRun;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BlockSet {
    words: Vec<u64>,
    len: u32,
}

/// Returns a mask of `len` bits from `start` within a word.
const fn mask(start: u32, len: u32) -> u64 {
    let ones = if len >= u64::BITS { u64::MAX } else { (1 << len) - 1 };
    ones << start
}

impl BlockSet {
    /// Returns an empty set with capacity for `total` blocks.
    pub(super) fn empty(total: u32) -> Self {
        Self { words: vec![0; total.div_ceil(u64::BITS) as usize], len: 0 }
    }

    /// Returns the set of all of `total` blocks.
    pub(super) fn full(total: u32) -> Self {
        let mut slots = Self::empty(total);
        slots.insert(BlockRun { start: 0, len: total });
        slots
    }

    /// Returns the number of blocks in the set.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Adds blocks, none of which may be in the set.
    pub(super) fn insert(&mut self, run: BlockRun) {
        let mut start = run.start;
        let mut left = run.len;
        while left > 0 {
            let bit = start % u64::BITS;
            let len = left.min(u64::BITS - bit);
            let word = &mut self.words[(start / u64::BITS) as usize];
            debug_assert_eq!(*word & mask(bit, len), 0, "a block of {run:?} is given back twice");
            *word |= mask(bit, len);
            (start, left) = (start + len, left - len);
        }
        self.len += run.len;
    }

    /// Removes the lowest blocks and returns them as runs that do not touch, ascending.
    pub(super) fn take_lowest(&mut self, count: u32) -> Vec<BlockRun> {
        debug_assert!(count <= self.len, "{count} of {} blocks", self.len);
        let mut runs: Vec<BlockRun> = Vec::new();
        let mut left = count;
        for (word, base) in self.words.iter_mut().zip((0..).step_by(u64::BITS as usize)) {
            while *word != 0 && left > 0 {
                let bit = word.trailing_zeros();
                let len = (*word >> bit).trailing_ones().min(left);
                *word &= !mask(bit, len);
                left -= len;
                match runs.last_mut() {
                    Some(last) if last.end() == base + bit => last.len += len,
                    _ => runs.push(BlockRun { start: base + bit, len }),
                }
            }
            if left == 0 {
                break;
            }
        }
        self.len -= count - left;
        runs
    }

    /// Removes the highest blocks and returns them as runs that do not touch, descending.
    pub(super) fn take_highest(&mut self, count: u32) -> Vec<BlockRun> {
        debug_assert!(count <= self.len, "{count} of {} blocks", self.len);
        let mut runs: Vec<BlockRun> = Vec::new();
        let mut left = count;
        let bases = (0..self.words.len() as u32).map(|word| word * u64::BITS);
        for (word, base) in self.words.iter_mut().rev().zip(bases.rev()) {
            while *word != 0 && left > 0 {
                let above = word.leading_zeros();
                let len = (*word << above).leading_ones().min(left);
                let bit = u64::BITS - above - len;
                *word &= !mask(bit, len);
                left -= len;
                match runs.last_mut() {
                    Some(last) if base + bit + len == last.start => {
                        *last = BlockRun { start: base + bit, len: last.len + len };
                    }
                    _ => runs.push(BlockRun { start: base + bit, len }),
                }
            }
            if left == 0 {
                break;
            }
        }
        self.len -= count - left;
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn run(start: u32, len: u32) -> BlockRun {
        BlockRun { start, len }
    }

    #[test]
    fn blocks_are_taken_from_either_end_as_runs() {
        let mut slots = BlockSet::full(150);
        assert_eq!(slots.take_lowest(100), [run(0, 100)], "across words");
        assert_eq!(slots.take_highest(30), [run(120, 30)]);
        slots.insert(run(3, 2));
        slots.insert(run(62, 4));
        assert_eq!(slots.len(), 26);
        assert_eq!(slots.take_lowest(5), [run(3, 2), run(62, 3)]);
        assert_eq!(slots.take_highest(21), [run(100, 20), run(65, 1)]);
        assert_eq!(slots, BlockSet::empty(150));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn inserting_a_block_twice_panics() {
        let mut slots = BlockSet::full(10);
        slots.insert(run(9, 1));
    }
}
