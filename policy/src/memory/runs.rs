//! Free memory as runs of blocks: the tightest that fits, else the longest there are. Any block
//! serves any model, so where blocks may be scattered nothing that fits by size is ever refused.

use std::collections::BTreeMap;

use super::allocator::Run;

/// Which blocks are free, as runs that never touch each other.
#[derive(Debug, Clone)]
pub(super) struct Runs {
    free: BTreeMap<u32, u32>,
    free_blocks: u32,
}

impl Runs {
    /// All of `total` blocks free.
    pub(super) fn new(total: u32) -> Self {
        let free = (total > 0).then_some((0, total)).into_iter().collect();
        Self { free, free_blocks: total }
    }

    /// Blocks free.
    pub(super) fn free_blocks(&self) -> u32 {
        self.free_blocks
    }

    /// Takes `blocks` blocks: one run where one is long enough (the shortest such, the lowest of
    /// equals), else the longest runs there are. `None`, and nothing taken, where too few are free.
    pub(super) fn take(&mut self, blocks: u32) -> Option<Vec<Run>> {
        if blocks > self.free_blocks {
            return None;
        }
        let mut taken = Vec::new();
        let mut left = blocks;
        while left > 0 {
            let fits = self.free.iter().filter(|&(_, &len)| len >= left).min_by_key(|&(_, &len)| len);
            // The lowest of equals: the map is in order, and max_by_key would keep the last.
            let longest = || self.free.iter().rev().max_by_key(|&(_, &len)| len);
            let (&start, &len) = fits.or_else(longest).expect("enough blocks are free");
            let run = Run { start, len: len.min(left) };
            self.free.remove(&start);
            if run.len < len {
                self.free.insert(start + run.len, len - run.len);
            }
            left -= run.len;
            taken.push(run);
        }
        self.free_blocks -= blocks;
        taken.sort_unstable();
        Some(taken)
    }

    /// Takes one run for each length, the tightest that fits, the longest length first so that short
    /// ones do not cut up what long ones need. `None`, and nothing taken, where one does not fit.
    pub(super) fn take_each(&mut self, lengths: &[u32]) -> Option<Vec<Run>> {
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|&place| std::cmp::Reverse(lengths[place]));
        let mut taken = vec![None; lengths.len()];
        for place in order {
            let len = lengths[place];
            let fits = self.free.iter().filter(|&(_, &free)| free >= len).min_by_key(|&(_, &free)| free);
            let Some((&start, &free)) = fits else {
                let back: Vec<Run> = taken.into_iter().flatten().collect();
                self.give_back(&back);
                return None;
            };
            self.free.remove(&start);
            if len < free {
                self.free.insert(start + len, free - len);
            }
            self.free_blocks -= len;
            taken[place] = Some(Run { start, len });
        }
        taken.into_iter().collect()
    }

    /// What is free, in order.
    pub(super) fn free(&self) -> impl Iterator<Item = Run> {
        self.free.iter().map(|(&start, &len)| Run { start, len })
    }

    /// Gives runs back.
    ///
    /// # Panics
    /// When one is free already: a bug of the caller.
    pub(super) fn give_back(&mut self, runs: &[Run]) {
        for &run in runs {
            self.give_back_one(run);
        }
    }

    fn give_back_one(&mut self, Run { mut start, mut len }: Run) {
        self.free_blocks += len;
        if let Some((&before, &before_len)) = self.free.range(..start).next_back() {
            assert!(before + before_len <= start, "block {start} is given back twice");
            if before + before_len == start {
                self.free.remove(&before);
                (start, len) = (before, before_len + len);
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

    const fn run(start: u32, len: u32) -> Run {
        Run { start, len }
    }

    #[test]
    fn prefers_one_run_and_the_tightest() {
        let mut blocks = Runs::new(100);
        let a = blocks.take(10).unwrap();
        let b = blocks.take(20).unwrap();
        let c = blocks.take(5).unwrap();
        assert_eq!((&a[..], &b[..], &c[..]), (&[run(0, 10)][..], &[run(10, 20)][..], &[run(30, 5)][..]));
        blocks.give_back(&a);
        assert_eq!(blocks.take(8), Some(vec![run(0, 8)]), "the hole of ten is tighter than the rest");
    }

    #[test]
    fn gathers_runs_where_none_is_long_enough() {
        let mut blocks = Runs::new(30);
        let runs: Vec<_> = (0..6).map(|_| blocks.take(5).unwrap()).collect();
        blocks.give_back(&runs[1]);
        blocks.give_back(&runs[4]);
        assert_eq!(blocks.take(8), Some(vec![run(5, 5), run(20, 3)]));
        assert_eq!(blocks.take(3), None);
        assert_eq!(blocks.free_blocks(), 2);
    }

    #[test]
    fn neighbours_join_when_they_come_back() {
        let mut blocks = Runs::new(30);
        let runs: Vec<_> = (0..3).map(|_| blocks.take(10).unwrap()).collect();
        for place in [0, 2, 1] {
            blocks.give_back(&runs[place]);
        }
        assert_eq!(blocks.take(30), Some(vec![run(0, 30)]));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn giving_back_twice_is_caught() {
        let mut blocks = Runs::new(30);
        let a = blocks.take(10).unwrap();
        blocks.give_back(&a);
        blocks.give_back(&a);
    }
}
