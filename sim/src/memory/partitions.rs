//! The two-tier block allocator of Torpor (T13; §4.4, A.2). Memory is cut into partitions. Each partition
//! holds either pieces of one common size, in slots, or irregular pieces, as buddies. A wholly free
//! partition has no tier until the partition is used.
//!
//! The pieces of a model are packed into few partitions, so that an eviction frees whole partitions. Pieces
//! that fill at least half of a partition get a partition of their own. Fewer pieces are placed where they
//! fit tightest. A buddy lends only the requested blocks: the rest of the buddy stays free for smaller
//! pieces.
//!
//! With scattered placement every block has the common size of 2 MiB, and any free block serves any model.
//! Fragmentation then never makes a request fail. With contiguous placement a slot holds only pieces of its
//! own size, and a piece longer than a partition takes adjacent partitions. A piece of a common size that
//! finds no slot is placed among the buddies before any model is evicted.
//!
//! The paper leaves open, and Millrace chose: the threshold of half a partition, tightest fit, lending the
//! rest of a buddy, and placing common sizes among the buddies if there is no slot.

use std::collections::BTreeMap;
use std::ops::Range;

use millrace_memory::{BlockPlacement, BlockRun};

use super::bits::{self, Word};

/// The sizes of the two tiers, in blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierSizes {
    /// The length of a partition: a power of two, at most 128.
    pub partition: u32,
    /// The common sizes, ascending, at most a partition. Pieces of a common size share partitions.
    pub regular: Vec<u32>,
    /// The length of the smallest buddy, a power of two. Smaller irregular pieces begin at multiples of this length.
    pub irregular_min: u32,
    /// The most blocks that one step of consolidation moves, at least a partition.
    pub step: u32,
}

impl Default for TierSizes {
    /// Returns the sizes of the paper and its artifact: partitions of 128 MiB, common sizes of 2 MiB and
    /// 20 MiB, buddies of at least 16 MiB. The step of 512 MiB is Millrace's choice.
    fn default() -> Self {
        Self { partition: 64, regular: vec![1, 10], irregular_min: 8, step: 256 }
    }
}

/// The kind of pieces that a partition holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartitionTier {
    /// The partition is wholly free.
    Unset,
    /// The partition holds pieces of this number of blocks.
    Slots(u32),
    /// The partition holds irregular pieces.
    Buddies,
}

#[derive(Debug, Clone)]
pub(super) struct Partition {
    pub(super) free: Word,
    pub(super) tier: PartitionTier,
}

#[derive(Debug, Clone)]
pub(super) struct Partitions {
    /// The partitions, of the same length except for the last, which may be shorter.
    parts: Vec<Partition>,
    /// The number of blocks in a partition, a power of two.
    len: u32,
    total: u32,
    regular: Vec<u32>,
    irregular_min: u32,
    free_blocks: u32,
}

impl Partitions {
    pub(super) fn new(total: u32, sizes: &TierSizes) -> Self {
        let len = sizes.partition;
        let part =
            |start| Partition { free: bits::first(len.min(total - start)), tier: PartitionTier::Unset };
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

    pub(super) fn free(&self) -> Vec<BlockRun> {
        let runs = |(place, part): (usize, &Partition)| {
            let base = self.base(place);
            bits::runs(part.free).map(move |(start, len)| BlockRun { start: base + start, len })
        };
        self.parts.iter().enumerate().flat_map(runs).collect()
    }

    pub(super) fn parts(&self) -> &[Partition] {
        &self.parts
    }

    /// Returns the number of blocks of the GPU.
    pub(super) fn total(&self) -> u32 {
        self.total
    }

    /// Returns the number of blocks in a partition.
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the index of the partition of a block.
    pub(super) fn part_of(&self, block: u32) -> usize {
        (block / self.len) as usize
    }

    /// Returns the first block of a partition.
    pub(super) fn base(&self, place: usize) -> u32 {
        place as u32 * self.len
    }

    /// Returns the set of all blocks of a partition; fewer for a short last partition.
    fn all(&self, place: usize) -> Word {
        bits::first(self.len.min(self.total - self.base(place)))
    }

    /// Returns whether a partition has both free and used blocks.
    pub(super) fn is_partly_used(&self, place: usize) -> bool {
        let Partition { free, .. } = self.parts[place];
        free != 0 && free != self.all(place)
    }

    /// Returns whether a partition is wholly free and has the full length.
    fn is_fresh(&self, place: usize) -> bool {
        self.parts[place].free == bits::first(self.len)
    }

    /// Returns the first blocks of the free slots of `slot` blocks in a partition of that slot size. A
    /// short last partition without a tier has slots of every size, because it never counts as a whole
    /// partition.
    pub(super) fn slots(&self, place: usize, slot: u32) -> Word {
        let part = &self.parts[place];
        let lends = match part.tier {
            PartitionTier::Slots(lent) => lent == slot,
            PartitionTier::Unset => !self.is_fresh(place),
            PartitionTier::Buddies => false,
        };
        if lends { bits::fits(part.free, slot) & bits::multiples(slot, self.len) } else { 0 }
    }

    /// Takes memory for pieces of these lengths in blocks, none of which is 0. Returns a run for each
    /// piece, in order, with contiguous placement, and any runs of the total length with scattered
    /// placement. Returns `None`, and takes nothing, if the pieces do not fit.
    pub(super) fn take(&mut self, pieces: &[u32], placement: BlockPlacement) -> Option<Vec<BlockRun>> {
        match placement {
            BlockPlacement::Scattered => {
                let blocks = pieces.iter().sum();
                if blocks > self.free_blocks {
                    return None;
                }
                let mut taken = Vec::new();
                assert_eq!(self.take_slots(1, blocks, &mut taken), 0, "enough blocks are free");
                taken.sort_unstable();
                Some(taken)
            }
            BlockPlacement::Contiguous => self.take_each(pieces),
        }
    }

    fn take_each(&mut self, pieces: &[u32]) -> Option<Vec<BlockRun>> {
        // The longest pieces are placed first: short pieces would cut up the runs that long pieces need.
        let mut sizes = BTreeMap::<u32, u32>::new();
        for &len in pieces {
            *sizes.entry(len).or_default() += 1;
        }
        let mut taken = BTreeMap::<u32, Vec<BlockRun>>::new();
        let mut used = Vec::new();
        let irregular = sizes.iter().filter(|(len, _)| !self.regular.contains(len));
        let mut irregular_blocks: u32 = irregular.map(|(&len, count)| self.buddy(len) * count).sum();
        for (&len, &count) in sizes.iter().rev() {
            let runs = taken.entry(len).or_default();
            let had = if self.regular.contains(&len) {
                let left = self.take_slots(len, count, runs);
                // A place among the buddies is tried before any model is evicted.
                (0..left).all(|_| {
                    let start = self.tightest(0..self.parts.len(), len, len.next_power_of_two());
                    runs.extend(start.map(|start| self.lend(BlockRun { start, len }, &mut used)));
                    start.is_some()
                })
            } else {
                (0..count).all(|_| {
                    let own = irregular_blocks * 2 >= self.len;
                    irregular_blocks -= self.buddy(len);
                    let start = self.find_irregular(len, own, &used);
                    runs.extend(start.map(|start| self.lend(BlockRun { start, len }, &mut used)));
                    start.is_some()
                })
            };
            if !had {
                taken.into_values().for_each(|runs| self.give_back(&runs));
                return None;
            }
        }
        // From here on each list holds the runs that are not handed out yet, in descending order.
        for (&len, runs) in &mut taken {
            let split = |run: BlockRun| {
                (run.start..run.end()).step_by(len as usize).map(move |start| BlockRun { start, len })
            };
            *runs = std::mem::take(runs).into_iter().flat_map(split).collect();
            runs.sort_unstable_by(|one, other| other.cmp(one));
        }
        let next = |len: &u32| taken.get_mut(len).and_then(Vec::pop);
        Some(pieces.iter().filter_map(next).collect())
    }

    /// Takes up to `count` slots, and appends the slots to `taken` as runs. Returns the number of missing
    /// slots.
    fn take_slots(&mut self, slot: u32, count: u32, taken: &mut Vec<BlockRun>) -> u32 {
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

    /// Takes `count` slots of one partition, which must have as many free slots: from the shortest hole
    /// that has all of them, else from the longest holes.
    pub(super) fn fill(&mut self, place: usize, slot: u32, count: u32, taken: &mut Vec<BlockRun>) {
        self.parts[place].tier = PartitionTier::Slots(slot);
        let mut left = count;
        while left > 0 {
            // The set of all blocks of free slots: adjacent slots form one run of bits.
            let covered =
                bits::each(self.slots(place, slot)).fold(0, |word, bit| word | bits::stretch(bit, slot));
            let holes = || bits::runs(covered).map(|(start, len)| (start, len / slot));
            let tight = holes().filter(|&(_, len)| len >= left).min_by_key(|&(_, len)| len);
            let longest = || holes().max_by_key(|&(start, len)| (len, std::cmp::Reverse(start)));
            let (start, len) = tight.or_else(longest).expect("the partition has enough slots");
            let run = BlockRun { start: self.base(place) + start, len: slot * len.min(left) };
            self.mark(run);
            left -= run.len / slot;
            taken.push(run);
        }
    }

    /// Returns the length of the buddy for an irregular piece; whole partitions for a piece longer than one.
    pub(super) fn buddy(&self, len: u32) -> u32 {
        if len > self.len {
            len.next_multiple_of(self.len)
        } else {
            len.next_power_of_two().max(self.irregular_min)
        }
    }

    /// Returns the first block of a place for an irregular piece. `used` lists the partitions in which the
    /// model has irregular pieces already, and `own` is whether the model may take a fresh partition first.
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

    /// Takes a run among the buddies, and adds its partitions to `used`.
    fn lend(&mut self, run: BlockRun, used: &mut Vec<usize>) -> BlockRun {
        self.mark(run);
        for place in self.part_of(run.start)..=self.part_of(run.end() - 1) {
            self.parts[place].tier = PartitionTier::Buddies;
            if !used.contains(&place) {
                used.push(place);
            }
        }
        run
    }

    /// Returns the first block of the tightest place for a piece among the buddies of these partitions. The
    /// piece's buddy has `align` blocks.
    fn tightest(&self, places: impl Iterator<Item = usize>, len: u32, align: u32) -> Option<u32> {
        let find = |place: usize| {
            let part = &self.parts[place];
            let lends = part.tier == PartitionTier::Buddies
                || part.tier == PartitionTier::Unset && !self.is_fresh(place);
            let starts = bits::fits(part.free, len) & bits::multiples(align, Word::BITS);
            if !lends || starts == 0 {
                return None;
            }
            // The best place is a buddy whose end is used already, then the smallest hole.
            let cut = starts & !bits::buddies(part.free, align);
            let mut hole = align;
            let mut tight = cut;
            while tight == 0 {
                tight = starts & bits::holes(part.free, hole);
                // A longer hole is tried in a later round, and only at its start.
                hole *= 2;
            }
            Some((if cut != 0 { 0 } else { hole }, self.base(place) + tight.trailing_zeros()))
        };
        places.filter_map(find).min().map(|(_, start)| start)
    }

    /// Returns adjacent fresh partitions: the shortest stretch of at least `wanted`, cut to `wanted`, else
    /// the longest stretch of at least `least`.
    fn fresh(&self, wanted: u32, least: u32) -> Option<Range<usize>> {
        let mut tight = None::<Range<usize>>;
        let mut longest = 0..0;
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

    /// Marks a run as used. The run may cross partitions.
    ///
    /// # Panics
    /// Panics if a block of the run is used already, which is a bug of the caller.
    pub(super) fn mark(&mut self, run: BlockRun) {
        self.free_blocks -= run.len;
        for (place, word) in self.words(run) {
            let part = &mut self.parts[place];
            assert!(part.free & word == word, "blocks of {run:?} have an owner");
            part.free &= !word;
        }
    }

    /// Frees runs. A partition that becomes wholly free loses its tier.
    pub(super) fn give_back(&mut self, runs: &[BlockRun]) {
        for &run in runs {
            self.free_blocks += run.len;
            for (place, word) in self.words(run) {
                let all = self.all(place);
                let part = &mut self.parts[place];
                assert!(part.free & word == 0, "blocks of {run:?} are freed twice");
                part.free |= word;
                if part.free == all {
                    part.tier = PartitionTier::Unset;
                }
            }
        }
    }

    /// Returns the blocks of a run as a set for each partition.
    fn words(&self, run: BlockRun) -> impl Iterator<Item = (usize, Word)> + use<> {
        let len = self.len;
        self.split(run)
            .map(move |part| ((part.start / len) as usize, bits::stretch(part.start % len, part.len)))
    }

    /// Cuts a run at the borders of partitions.
    pub(super) fn split(&self, run: BlockRun) -> impl Iterator<Item = BlockRun> + use<> {
        let len = self.len;
        let mut start = run.start;
        std::iter::from_fn(move || {
            (start < run.end()).then(|| {
                let end = ((start / len + 1) * len).min(run.end());
                let part = BlockRun { start, len: end - start };
                start = end;
                part
            })
        })
    }
}
