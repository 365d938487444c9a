//! The two-tier block allocator of Torpor (T13; §4.4, A.2): memory is cut into partitions, and each
//! holds either pieces of one common size, in slots, or irregular pieces, as buddies. A partition
//! that is wholly free has no tier until it is used.
//!
//! One model's pieces are packed into few partitions, and into partitions of their own where they
//! fill at least half of one, so that its eviction frees whole partitions. What is less goes where
//! it fits tightest. A buddy lends only as many blocks as were asked for: the rest of it stays free
//! for smaller pieces.
//!
//! Where blocks may be scattered every block is of the one common size, 2 MiB, and any free block
//! serves any model: no fragmentation makes a request fail. Where pieces have to be contiguous, a
//! slot is lent to no other size, and a piece longer than a partition takes partitions side by side.
//! Common sizes that find no slot go among the buddies rather than that someone is evicted.
//!
//! What the paper leaves open and is ours: the half, tightest fit, lending the rest of a buddy, and
//! common sizes among the buddies in need.

use std::collections::BTreeMap;
use std::ops::Range;

use millrace_policy::memory::{Placement, Run};

use super::Sizes;
use super::bits::{self, Word};

/// What a partition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    /// Nothing.
    Unset,
    /// Pieces of so many blocks.
    Slots(u32),
    /// Irregular pieces.
    Buddies,
}

#[derive(Debug, Clone)]
pub(super) struct Partition {
    pub(super) free: Word,
    pub(super) tier: Tier,
}

#[derive(Debug, Clone)]
pub(super) struct Partitions {
    /// All of the same length, but for the last.
    parts: Vec<Partition>,
    /// Blocks in a partition, a power of two.
    len: u32,
    total: u32,
    regular: Vec<u32>,
    irregular_min: u32,
    free_blocks: u32,
}

impl Partitions {
    pub(super) fn new(total: u32, sizes: &Sizes) -> Self {
        let len = sizes.partition;
        let part = |start| Partition { free: bits::first(len.min(total - start)), tier: Tier::Unset };
        Self {
            parts: (0..total).step_by(len as usize).map(part).collect(),
            len,
            total,
            regular: sizes.regular.clone(),
            irregular_min: sizes.irregular_min,
            free_blocks: total,
        }
    }

    pub(super) fn free_blocks(&self) -> u32 {
        self.free_blocks
    }

    pub(super) fn free(&self) -> Vec<Run> {
        let runs = |(place, part): (usize, &Partition)| {
            let base = self.base(place);
            bits::runs(part.free).map(move |(start, len)| Run { start: base + start, len })
        };
        self.parts.iter().enumerate().flat_map(runs).collect()
    }

    pub(super) fn parts(&self) -> &[Partition] {
        &self.parts
    }

    /// Blocks in all.
    pub(super) fn total(&self) -> u32 {
        self.total
    }

    /// Blocks in a partition.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Which partition a block is in.
    pub(super) fn part_of(&self, block: u32) -> usize {
        (block / self.len) as usize
    }

    /// A partition's first block.
    pub(super) fn base(&self, place: usize) -> u32 {
        place as u32 * self.len
    }

    /// The blocks that a partition has.
    fn all(&self, place: usize) -> Word {
        bits::first(self.len.min(self.total - self.base(place)))
    }

    /// Whether a partition is partly used, or too short to be given whole.
    pub(super) fn is_partly_used(&self, place: usize) -> bool {
        let Partition { free, .. } = self.parts[place];
        free != 0 && free != self.all(place)
    }

    fn is_fresh(&self, place: usize) -> bool {
        self.parts[place].free == bits::first(self.len)
    }

    /// Free slots of `slot` blocks in a partition that lends such. The last partition does as soon
    /// as it is free, being too short to be given whole.
    pub(super) fn slots(&self, place: usize, slot: u32) -> Word {
        let part = &self.parts[place];
        let lends = match part.tier {
            Tier::Slots(lent) => lent == slot,
            Tier::Unset => !self.is_fresh(place),
            Tier::Buddies => false,
        };
        if lends { bits::fits(part.free, slot) & bits::multiples(slot, self.len) } else { 0 }
    }

    /// Takes memory for pieces of these lengths in blocks, none of them 0: with contiguous placement a run
    /// for each piece, in order, else any runs of the sum. Returns `None`, and takes nothing, if the pieces
    /// do not fit.
    pub(super) fn take(&mut self, pieces: &[u32], placement: Placement) -> Option<Vec<Run>> {
        match placement {
            Placement::Scattered => {
                let blocks = pieces.iter().sum();
                if blocks > self.free_blocks {
                    return None;
                }
                let mut taken = Vec::new();
                assert_eq!(self.take_slots(1, blocks, &mut taken), 0, "enough blocks are free");
                taken.sort_unstable();
                Some(taken)
            }
            Placement::Contiguous => self.take_each(pieces),
        }
    }

    fn take_each(&mut self, pieces: &[u32]) -> Option<Vec<Run>> {
        // Longest first: short pieces must not cut up what long ones need.
        let mut sizes = BTreeMap::<u32, u32>::new();
        for &len in pieces {
            *sizes.entry(len).or_default() += 1;
        }
        let mut taken = BTreeMap::<u32, Vec<Run>>::new();
        let mut used = Vec::new();
        let irregular = sizes.iter().filter(|(len, _)| !self.regular.contains(len));
        let mut irregular_blocks: u32 = irregular.map(|(&len, count)| self.buddy(len) * count).sum();
        for (&len, &count) in sizes.iter().rev() {
            let runs = taken.entry(len).or_default();
            let had = if self.regular.contains(&len) {
                let left = self.take_slots(len, count, runs);
                // Rather than evict someone.
                (0..left).all(|_| {
                    let start = self.tightest(0..self.parts.len(), len, len.next_power_of_two());
                    runs.extend(start.map(|start| self.lend(Run { start, len }, &mut used)));
                    start.is_some()
                })
            } else {
                (0..count).all(|_| {
                    let own = irregular_blocks * 2 >= self.len;
                    irregular_blocks -= self.buddy(len);
                    let start = self.find_irregular(len, own, &used);
                    runs.extend(start.map(|start| self.lend(Run { start, len }, &mut used)));
                    start.is_some()
                })
            };
            if !had {
                taken.into_values().for_each(|runs| self.give_back(&runs));
                return None;
            }
        }
        // From here on each list is what is left to hand out, the lowest last.
        for (&len, runs) in &mut taken {
            let split =
                |run: Run| (run.start..run.end()).step_by(len as usize).map(move |start| Run { start, len });
            *runs = std::mem::take(runs).into_iter().flat_map(split).collect();
            runs.sort_unstable_by(|one, other| other.cmp(one));
        }
        let next = |len: &u32| taken.get_mut(len).and_then(Vec::pop);
        Some(pieces.iter().filter_map(next).collect())
    }

    /// Takes `count` slots, as runs of them. Returns how many could not be had.
    fn take_slots(&mut self, slot: u32, count: u32, taken: &mut Vec<Run>) -> u32 {
        let capacity = self.len / slot;
        let mut left = count;
        let own = u32::from(count % capacity * 2 >= capacity);
        let mut wanted = count / capacity + own;
        while let Some(stretch) = (wanted > 0).then(|| self.fresh(wanted, 1)).flatten() {
            wanted -= stretch.len() as u32;
            for place in stretch {
                let count = left.min(capacity);
                self.fill(place, slot, count, taken);
                left -= count;
            }
        }
        while left > 0 {
            let tight = || {
                let free = |place: &usize| self.slots(*place, slot).count_ones();
                let fits = (0..self.parts.len()).filter(|place| free(place) >= left);
                fits.min_by_key(free)
            };
            let fresh = || self.fresh(1, 1).map(|stretch| stretch.start);
            let fullest = || (0..self.parts.len()).max_by_key(|&place| self.slots(place, slot).count_ones());
            let Some(place) = tight().or_else(fresh).or_else(fullest) else { return left };
            let fresh = if self.is_fresh(place) { capacity } else { 0 };
            let count = left.min(self.slots(place, slot).count_ones().max(fresh));
            if count == 0 {
                return left;
            }
            self.fill(place, slot, count, taken);
            left -= count;
        }
        0
    }

    /// Takes slots of one partition that has as many: out of the tightest hole that has them all,
    /// else out of the longest.
    pub(super) fn fill(&mut self, place: usize, slot: u32, count: u32, taken: &mut Vec<Run>) {
        self.parts[place].tier = Tier::Slots(slot);
        let mut left = count;
        while left > 0 {
            // Slots that touch are runs once each is as long as one bit.
            let covered =
                bits::each(self.slots(place, slot)).fold(0, |word, bit| word | bits::stretch(bit, slot));
            let holes = || bits::runs(covered).map(|(start, len)| (start, len / slot));
            let tight = holes().filter(|&(_, len)| len >= left).min_by_key(|&(_, len)| len);
            let longest = || holes().max_by_key(|&(start, len)| (len, std::cmp::Reverse(start)));
            let (start, len) = tight.or_else(longest).expect("the partition has as many slots");
            let run = Run { start: self.base(place) + start, len: slot * len.min(left) };
            self.mark(run);
            left -= run.len / slot;
            taken.push(run);
        }
    }

    /// The blocks of the buddy for an irregular piece, whole partitions for a long one.
    pub(super) fn buddy(&self, len: u32) -> u32 {
        if len > self.len {
            len.next_multiple_of(self.len)
        } else {
            len.next_power_of_two().max(self.irregular_min)
        }
    }

    /// Where there is room for an irregular piece. `used`: the partitions its model has such pieces in.
    fn find_irregular(&self, len: u32, own: bool, used: &[usize]) -> Option<u32> {
        let fresh = |count| Some(self.base(self.fresh(count, count)?.start));
        if len > self.len {
            return fresh(len.div_ceil(self.len));
        }
        let align = self.buddy(len);
        let mine = self.tightest(used.iter().copied(), len, align);
        let shared = || self.tightest(0..self.parts.len(), len, align);
        if own {
            mine.or_else(|| fresh(1)).or_else(shared)
        } else {
            mine.or_else(shared).or_else(|| fresh(1))
        }
    }

    /// Lends a run among buddies.
    fn lend(&mut self, run: Run, used: &mut Vec<usize>) -> Run {
        self.mark(run);
        for place in self.part_of(run.start)..=self.part_of(run.end() - 1) {
            self.parts[place].tier = Tier::Buddies;
            if !used.contains(&place) {
                used.push(place);
            }
        }
        run
    }

    /// Where a piece whose buddy has `align` blocks fits tightest among the buddies of these partitions.
    fn tightest(&self, places: impl Iterator<Item = usize>, len: u32, align: u32) -> Option<u32> {
        let find = |place: usize| {
            let part = &self.parts[place];
            let lends = part.tier == Tier::Buddies || part.tier == Tier::Unset && !self.is_fresh(place);
            let starts = bits::fits(part.free, len) & bits::multiples(align, Word::BITS);
            if !lends || starts == 0 {
                return None;
            }
            // A buddy whose end is lent already, then the smallest hole.
            let cut = starts & !bits::buddies(part.free, align);
            let mut hole = align;
            let mut tight = cut;
            while tight == 0 {
                tight = starts & bits::holes(part.free, hole);
                // The start of a larger hole stands for all of it.
                hole *= 2;
            }
            Some((if cut != 0 { 0 } else { hole }, self.base(place) + tight.trailing_zeros()))
        };
        places.filter_map(find).min().map(|(_, start)| start)
    }

    /// Wholly free partitions side by side: the shortest stretch of at least `wanted`, cut to
    /// `wanted`; else, where it has at least `least`, the longest.
    fn fresh(&self, wanted: u32, least: u32) -> Option<Range<usize>> {
        let (mut tight, mut longest) = (None::<Range<usize>>, 0..0);
        let mut start = 0;
        for place in 0..=self.parts.len() {
            if place < self.parts.len() && self.is_fresh(place) {
                continue;
            }
            let len = place - start;
            if len >= wanted as usize && tight.as_ref().is_none_or(|tight| len < tight.len()) {
                tight = Some(start..place);
            }
            if len > longest.len() {
                longest = start..place;
            }
            start = place + 1;
        }
        let longest = (longest.len() >= least as usize).then_some(longest);
        tight.map(|tight| tight.start..tight.start + wanted as usize).or(longest)
    }

    /// Notes that a run, which may cross partitions, is used.
    ///
    /// # Panics
    /// When part of it is: a bug of the caller.
    pub(super) fn mark(&mut self, run: Run) {
        self.free_blocks -= run.len;
        for (place, word) in self.words(run) {
            let part = &mut self.parts[place];
            assert!(part.free & word == word, "blocks of {run:?} have an owner");
            part.free &= !word;
        }
    }

    /// Gives runs back.
    pub(super) fn give_back(&mut self, runs: &[Run]) {
        for &run in runs {
            self.free_blocks += run.len;
            for (place, word) in self.words(run) {
                let all = self.all(place);
                let part = &mut self.parts[place];
                assert!(part.free & word == 0, "block {} is given back twice", run.start);
                part.free |= word;
                if part.free == all {
                    part.tier = Tier::Unset;
                }
            }
        }
    }

    /// A run, by partition.
    fn words(&self, run: Run) -> impl Iterator<Item = (usize, Word)> + use<> {
        let len = self.len;
        self.split(run)
            .map(move |part| ((part.start / len) as usize, bits::stretch(part.start % len, part.len)))
    }

    /// A run, cut where partitions meet.
    pub(super) fn split(&self, run: Run) -> impl Iterator<Item = Run> + use<> {
        let len = self.len;
        let mut start = run.start;
        std::iter::from_fn(move || {
            (start < run.end()).then(|| {
                let end = ((start / len + 1) * len).min(run.end());
                let part = Run { start, len: end - start };
                start = end;
                part
            })
        })
    }
}
