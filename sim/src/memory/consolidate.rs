//! Plans moves of blocks that make partly used partitions whole again (A.2).
//!
//! **Slots.** For each common size, the emptiest partition is emptied into the others, fullest first, as
//! long as the others have room for all its pieces. In the end the partly used partitions of a size have
//! fewer free slots than one partition has, unless each of these partitions has a model that must not move.
//!
//! **Buddies.** Two free buddies of the same length become one of twice that length: the blocks beside one
//! of them move into the other. In the end at most one free buddy of each length is left, apart from
//! buddies beside blocks that must not move, and from the rest of a longer piece's buddy.
//!
//! A step of slots is planned only if the step frees a partition. Buddies are joined once their free blocks
//! add up to a partition. [`super`] states the bound on fragmentation that follows.

use std::cmp::Reverse;

use millrace_memory::BlockRun;
use millrace_types::ModelId;

use super::bits;
use super::partitions::{PartitionTier, Partitions};

/// A move of a model's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockMove {
    pub model: ModelId,
    /// The present place of the blocks.
    pub from: BlockRun,
    /// The new place, of the same length. The new place is free once all earlier moves of the plan are done.
    pub to: BlockRun,
}

/// A model's blocks within one partition, and whether they may move.
#[derive(Debug, Clone, Copy)]
struct PlacedBlocks {
    model: ModelId,
    run: BlockRun,
    fixed: bool,
}

struct Planner {
    partitions: Partitions,
    items: Vec<Vec<PlacedBlocks>>,
    left: u32,
    moves: Vec<BlockMove>,
}

/// Plans one step of at most `step` blocks. Returns the moves, and the partitions after the moves. `held`
/// lists every model with its pieces, and whether the model must not move.
pub(super) fn plan<'a>(
    partitions: &Partitions,
    held: impl Iterator<Item = (ModelId, &'a [BlockRun], bool)>,
    step: u32,
) -> (Vec<BlockMove>, Partitions) {
    let mut items = vec![Vec::new(); partitions.parts().len()];
    for (model, runs, pinned) in held {
        for &run in runs {
            let places = partitions.part_of(run.start)..=partitions.part_of(run.end().max(1) - 1);
            // An irregular piece longer than a partition must stay one run, so its parts cannot move apart.
            let long =
                partitions.parts()[*places.start()].tier == PartitionTier::Buddies && places.count() > 1;
            for run in partitions.split(run) {
                items[partitions.part_of(run.start)].push(PlacedBlocks { model, run, fixed: pinned || long });
            }
        }
    }
    let mut planner = Planner { partitions: partitions.clone(), items, left: step, moves: Vec::new() };
    for slot in planner.slot_lengths() {
        while planner.empty_a_partition(slot) {}
    }
    if planner.free_among_buddies() >= partitions.len() {
        let lengths = (0..=partitions.len().ilog2()).map(|order| 1 << order);
        lengths.take_while(|&len| len < partitions.len()).for_each(|len| while planner.join_buddies(len) {});
    }
    (planner.moves, planner.partitions)
}

impl Planner {
    fn slot_lengths(&self) -> Vec<u32> {
        let lent = |part: &super::partitions::Partition| match part.tier {
            PartitionTier::Slots(slot) => Some(slot),
            _ => None,
        };
        let mut lengths: Vec<_> = self.partitions.parts().iter().filter_map(lent).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths
    }

    /// Returns the partly used partitions of a tier.
    fn partly_used(&self, tier: PartitionTier) -> Vec<usize> {
        let parts = self.partitions.parts();
        let of_tier = |&place: &usize| parts[place].tier == tier && self.partitions.is_partly_used(place);
        (0..parts.len()).filter(of_tier).collect()
    }

    fn used(&self, place: usize) -> u32 {
        self.items[place].iter().map(|item| item.run.len).sum()
    }

    /// Moves the slots of the emptiest movable partition into the other partitions of its size. Returns
    /// whether the partition was emptied.
    fn empty_a_partition(&mut self, slot: u32) -> bool {
        let places = self.partly_used(PartitionTier::Slots(slot));
        let movable = |&&place: &&usize| self.items[place].iter().all(|item| !item.fixed);
        let Some(&victim) = places.iter().filter(movable).min_by_key(|&&place| self.used(place)) else {
            return false;
        };
        let free = |place: usize| self.partitions.slots(place, slot).count_ones();
        let mut targets: Vec<_> =
            places.into_iter().filter(|&place| place != victim && free(place) > 0).collect();
        targets.sort_by_key(|&place| (free(place), place));
        let used = self.used(victim);
        let room = targets.iter().map(|&place| free(place)).sum::<u32>() * slot;
        if room < used || self.left < used {
            return false;
        }
        let mut targets = targets.into_iter();
        let mut target = targets.next();
        for PlacedBlocks { model, run, .. } in std::mem::take(&mut self.items[victim]) {
            let mut from = run;
            while from.len > 0 {
                let place = target.expect("the other partitions have room for all slots");
                let free = self.partitions.slots(place, slot).count_ones();
                if free == 0 {
                    target = targets.next();
                    continue;
                }
                let mut taken = Vec::new();
                self.partitions.fill(place, slot, free.min(from.len / slot), &mut taken);
                for to in taken {
                    self.items[place].push(PlacedBlocks { model, run: to, fixed: false });
                    self.moves.push(BlockMove {
                        model,
                        from: BlockRun { start: from.start, len: to.len },
                        to,
                    });
                    from = BlockRun { start: from.start + to.len, len: from.len - to.len };
                }
            }
            self.partitions.give_back(&[run]);
        }
        self.left -= used;
        true
    }

    fn free_among_buddies(&self) -> u32 {
        let free = |place: usize| self.partitions.parts()[place].free.count_ones();
        self.partly_used(PartitionTier::Buddies).into_iter().map(free).sum()
    }

    /// Returns the free buddies of this length whose parents are not free, each as partition and first block.
    fn holes(&self, len: u32) -> Vec<(usize, u32)> {
        let holes = |place: usize| {
            bits::each(bits::holes(self.partitions.parts()[place].free, len)).map(move |bit| (place, bit))
        };
        self.partly_used(PartitionTier::Buddies).into_iter().flat_map(holes).collect()
    }

    /// Returns the number of used blocks in the buddy beside a hole, and the indexes of its items. Returns
    /// `None` if the buddy is empty, is cut off by a short last partition, or has an item that must not
    /// move or that reaches out of the buddy.
    fn beside(&self, place: usize, hole: u32, len: u32) -> Option<(u32, Vec<usize>)> {
        let start = self.partitions.base(place) + (hole ^ len);
        let end = start + len;
        if end > self.partitions.total() {
            return None;
        }
        let mut inside = Vec::new();
        for (at, item) in self.items[place].iter().enumerate() {
            if item.run.end() <= start || item.run.start >= end {
                continue;
            }
            if item.fixed || item.run.start < start || item.run.end() > end {
                return None;
            }
            inside.push(at);
        }
        let blocks = inside.iter().map(|&at| self.items[place][at].run.len).sum();
        (!inside.is_empty()).then_some((blocks, inside))
    }

    /// Joins two free buddies of this length by moving the items beside one of them into the other. Returns
    /// whether a pair was joined.
    fn join_buddies(&mut self, len: u32) -> bool {
        let holes = self.holes(len);
        if holes.len() < 2 {
            return false;
        }
        let beside = |&hole: &(usize, u32)| Some((self.beside(hole.0, hole.1, len)?, hole));
        let Some(((blocks, inside), grown)) =
            holes.iter().filter_map(beside).min_by_key(|((blocks, _), hole)| (*blocks, *hole))
        else {
            return false;
        };
        if blocks > self.left {
            return false;
        }
        // The hole in the fullest partition is filled, so that emptier partitions become whole.
        let others = holes.iter().filter(|&&hole| hole != grown);
        let filled = others.max_by_key(|&&(place, bit)| (self.used(place), Reverse((place, bit))));
        let &filled = filled.expect("at least two holes exist");
        let source = self.partitions.base(grown.0) + (grown.1 ^ len);
        let goal = self.partitions.base(filled.0) + filled.1;
        for at in inside.into_iter().rev() {
            let PlacedBlocks { model, run: from, .. } = self.items[grown.0].remove(at);
            let to = BlockRun { start: goal + (from.start - source), len: from.len };
            self.partitions.mark(to);
            self.partitions.give_back(&[from]);
            self.items[filled.0].push(PlacedBlocks { model, run: to, fixed: false });
            self.moves.push(BlockMove { model, from, to });
        }
        self.left -= blocks;
        true
    }
}
