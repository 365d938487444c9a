//! For every arrangement and placement: no block has two owners, none is lost, what is pinned stays,
//! moves carry every block to where its model looks for it, and fragmentation is bounded.

use proptest::prelude::*;

use super::super::partitions::{Partitions, Tier};
use super::*;

#[derive(Debug, Clone)]
enum Step {
    Map { model: u32, pieces: Vec<u32>, pinned: Vec<u32> },
    Unmap(u32),
    Touch(u32),
    Rank(u32, u8),
    Consolidate { pinned: Vec<u32> },
    Clear,
}

fn pinned() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..16u32, 0..3)
}

fn piece() -> impl Strategy<Value = u32> {
    prop_oneof![4 => Just(1u32), 4 => Just(5u32), 3 => 0..40u32, 6 => (1..4u32).prop_map(|order| 1 << order)]
}

fn step() -> impl Strategy<Value = Step> {
    let pieces = prop::collection::vec(piece(), 0..12);
    prop_oneof![
        12 => (0..16u32, pieces, pinned()).prop_map(|(model, pieces, pinned)| Step::Map { model, pieces, pinned }),
        6 => (0..16u32).prop_map(Step::Unmap),
        3 => (0..16u32).prop_map(Step::Touch),
        6 => (0..16u32, 0..3u8).prop_map(|(model, rank)| Step::Rank(model, rank)),
        4 => pinned().prop_map(|pinned| Step::Consolidate { pinned }),
        1 => Just(Step::Clear),
    ]
}

/// Partitions of 16 blocks or of 128, where the last is short; common sizes that leave a rest.
fn grid() -> impl Strategy<Value = Grid> {
    let arrangement = prop_oneof![1 => Just(Arrangement::BestFit), 4 => Just(Arrangement::Partitions), 1 => Just(Arrangement::Pool)];
    let placement = prop_oneof![1 => Just(Placement::Scattered), 2 => Just(Placement::Contiguous)];
    (arrangement, placement, prop_oneof![Just(16u64), Just(128)], prop_oneof![Just(1u64), Just(4)]).prop_map(
        |(arrangement, placement, partition, least)| {
            let mib = |blocks| Bytes::mib(2 * blocks);
            let (partition, irregular_min) = (mib(partition), mib(least));
            let regular = vec![mib(1), mib(5)];
            let config =
                Config { partition, regular, irregular_min, placement, arrangement, step: partition };
            config.grid().unwrap()
        },
    )
}

/// A GPU beside its map: what each block holds, as (model, which of its blocks).
struct Device {
    memory: MemoryMap,
    blocks: Vec<Option<(ModelId, u32)>>,
    asked: BTreeMap<ModelId, Vec<u32>>,
}

impl Device {
    fn new(memory: Bytes, grid: Grid) -> Self {
        let memory = MemoryMap::with(memory, grid);
        let blocks = vec![None; memory.total_blocks() as usize];
        Self { memory, blocks, asked: BTreeMap::new() }
    }

    fn forget(&mut self, model: ModelId) {
        self.asked.remove(&model);
        self.blocks
            .iter_mut()
            .filter(|block| block.is_some_and(|(owner, _)| owner == model))
            .for_each(|block| *block = None);
    }

    fn map(&mut self, now: Timestamp, model: ModelId, pieces: &[u32], pinned: &[ModelId]) {
        let blocks: u32 = pieces.iter().sum();
        let pinned_once: BTreeSet<_> =
            pinned.iter().filter_map(|model| Some((model, self.memory.region(*model)?.blocks))).collect();
        let held: u32 = pinned_once.iter().map(|(_, blocks)| blocks).sum();
        let before: Vec<_> = self.memory.regions().map(|(model, _)| model).collect();
        let ranks: BTreeMap<_, _> =
            self.memory.regions().map(|(model, region)| (model, region.rank)).collect();
        match self.memory.map_pieces(now, model, pieces, blocks, pinned) {
            Ok(evicted) => {
                assert!(evicted.iter().all(|evicted| !pinned.contains(&evicted.model)));
                let highest = evicted.iter().map(|evicted| ranks[&evicted.model]).max();
                let stayed = ranks.iter().filter(|(model, _)| {
                    !pinned.contains(model) && evicted.iter().all(|evicted| evicted.model != **model)
                });
                // T24: nobody goes while one that should go first stays.
                assert!(stayed.map(|(_, rank)| Some(*rank)).all(|rank| rank >= highest));
                evicted.iter().for_each(|evicted| self.forget(evicted.model));
                let places = places(&self.memory, model);
                for (index, place) in places.into_iter().enumerate() {
                    let block = &mut self.blocks[place as usize];
                    assert_eq!(*block, None, "block {place} has two owners");
                    *block = Some((model, index as u32));
                }
                self.asked.insert(model, pieces.to_vec());
            }
            Err(shortage) => {
                let after: Vec<_> = self.memory.regions().map(|(model, _)| model).collect();
                assert_eq!(after, before, "nothing is evicted on a shortage");
                if self.memory.allocator.takes_any(self.memory.grid.placement) {
                    let total = self.memory.total_blocks();
                    assert!(blocks > total - held, "{shortage:?}: {blocks} of {total} with {held} pinned");
                }
            }
        }
    }

    fn carry_out(&mut self, moves: &[Move], pinned: &[ModelId]) {
        assert!(moves.iter().map(|step| step.from.len).sum::<u32>() <= self.memory.grid.step);
        let used = self.memory.used_blocks();
        let relocated = self.memory.begin_moves(moves);
        assert_eq!(self.memory.used_blocks(), used + moves.iter().map(|step| step.to.len).sum::<u32>());
        assert_eq!(self.memory.consolidate(&[]), [], "one step at a time");
        // In whatever order they are carried out: they do not touch each other.
        for &Move { model, from, to } in moves.iter().rev() {
            assert!(!pinned.contains(&model), "{model} is pinned");
            assert!(self.memory.region(model).unwrap().is_locked());
            assert_eq!(from.len, to.len);
            for (from, to) in (from.start..from.end()).zip(to.start..to.end()) {
                assert_eq!(self.blocks[to as usize], None, "a move to block {to}, which has an owner");
                self.blocks[to as usize] = self.blocks[from as usize].take();
            }
        }
        relocated.iter().for_each(|relocated| self.memory.end_moves(relocated.model));
        assert!(!self.memory.is_moving() && self.memory.used_blocks() == used);
    }

    fn consolidate(&mut self, pinned: &[ModelId]) {
        for round in 0.. {
            let moves = self.memory.consolidate(pinned);
            if moves.is_empty() {
                break;
            }
            assert!(round < 1000, "consolidation goes on without end");
            self.carry_out(&moves, pinned);
            self.check();
        }
        if let Allocator::Partitions(partitions) = &self.memory.allocator {
            check_bound(&self.memory, partitions, pinned);
        }
    }

    fn check(&self) {
        let memory = &self.memory;
        for (model, region) in memory.regions() {
            let places = places(memory, model);
            assert_eq!(places.len(), region.blocks() as usize);
            for (index, place) in places.iter().enumerate() {
                assert_eq!(self.blocks[*place as usize], Some((model, index as u32)), "block {place}");
            }
            let asked = &self.asked[&model];
            assert_eq!(region.blocks(), asked.iter().sum::<u32>());
            if memory.grid.placement == Placement::Contiguous && memory.grid.arrangement != Arrangement::Pool
            {
                let asked = asked.iter().copied().filter(|&len| len > 0);
                assert!(region.pieces.iter().map(|piece| piece.len).eq(asked), "pieces stay in one");
            }
        }
        let used = self.blocks.iter().flatten().count();
        // The pool lends more than was asked for.
        let lent =
            if memory.grid.arrangement == Arrangement::Pool { memory.used_blocks() as usize } else { used };
        assert_eq!(memory.used_blocks() as usize, lent);
        assert!(lent >= used);
        assert_eq!(memory.fragmentation().free, memory.total_blocks() - memory.used_blocks());
        assert_eq!(memory.order.len(), memory.regions.len());
    }
}

fn places(memory: &MemoryMap, model: ModelId) -> Vec<u32> {
    let runs = memory.region(model).unwrap().runs().iter();
    runs.flat_map(|run| run.start..run.end()).collect()
}

/// The bound that the module states.
fn check_bound(memory: &MemoryMap, partitions: &Partitions, pinned: &[ModelId]) {
    let (parts, len) = (partitions.parts(), partitions.len());
    let mut fixed = vec![false; parts.len()];
    let (mut rests, mut slots) = (0, BTreeSet::new());
    for (model, region) in memory.regions() {
        for piece in &region.pieces {
            let places = partitions.part_of(piece.start)..=partitions.part_of(piece.end() - 1);
            let irregular = parts[*places.start()].tier == Tier::Buddies;
            if irregular {
                rests += if piece.len > len { 0 } else { piece.len.next_power_of_two() - piece.len };
            }
            if pinned.contains(&model) || irregular && piece.len > len {
                places.for_each(|place| fixed[place] = true);
            }
        }
    }
    let partly_used = |tier: Tier| {
        (0..parts.len()).filter(move |&place| parts[place].tier == tier && partitions.is_partly_used(place))
    };
    slots.extend(
        parts.iter().filter_map(|part| if let Tier::Slots(slot) = part.tier { Some(slot) } else { None }),
    );
    for slot in slots {
        let places = partly_used(Tier::Slots(slot)).collect::<Vec<_>>();
        let free: u32 = places.iter().map(|&place| partitions.slots(place, slot).count_ones()).sum();
        assert!(free < len / slot || places.iter().all(|&place| fixed[place]), "{free} slots of {slot}");
    }
    let is_short = |place: usize| partitions.base(place) + len > partitions.total();
    let short = if partly_used(Tier::Buddies).any(is_short) { len - 1 } else { 0 };
    let stuck = partly_used(Tier::Buddies).filter(|&place| fixed[place]).count() as u32 * (len - 1);
    let free: u32 = partly_used(Tier::Buddies).map(|place| parts[place].free.count_ones()).sum();
    assert!(free <= len - 1 + rests + short + stuck, "{free} free among buddies, {rests} of them rests");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_map_and_the_memory_agree(
        grid in grid(),
        blocks in prop_oneof![Just(192u64), Just(200)],
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut device = Device::new(Bytes::mib(2 * blocks), grid);
        let ids = |models: Vec<u32>| models.into_iter().map(ModelId).collect::<Vec<_>>();
        for (at, step) in steps.into_iter().enumerate() {
            let now = Timestamp(at as u64);
            match step {
                Step::Map { model, pieces, pinned } => {
                    if device.memory.region(ModelId(model)).is_none() {
                        device.map(now, ModelId(model), &pieces, &ids(pinned));
                    }
                }
                Step::Unmap(model) => {
                    device.memory.unmap(ModelId(model));
                    device.forget(ModelId(model));
                }
                Step::Touch(model) => device.memory.touch(now, ModelId(model)),
                Step::Rank(model, rank) => device.memory.rank(ModelId(model), Rank(rank)),
                Step::Consolidate { pinned } => device.consolidate(&ids(pinned)),
                Step::Clear => {
                    device.memory.clear();
                    (0..16).for_each(|model| device.forget(ModelId(model)));
                }
            }
            device.check();
        }
        // What was lent comes back, and in one stretch.
        for model in (0..16).map(ModelId) {
            device.memory.unmap(model);
        }
        let whole = device.memory.fragmentation();
        prop_assert_eq!((whole.longest, whole.stranded), (device.memory.total_blocks(), 0));
    }

    /// Why best fit needs no consolidation where blocks may be anywhere, and two tiers none to serve.
    #[test]
    fn scattered_memory_fails_for_lack_of_blocks_alone(
        arrangement in prop_oneof![Just(Arrangement::BestFit), Just(Arrangement::Partitions)],
        sizes in prop::collection::vec(0..40u32, 1..40),
        gone in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        asked in 1..200u32,
    ) {
        let config = Config { arrangement, ..Config::default() };
        let mut memory = MemoryMap::with(Bytes::mib(2 * 200), config.grid().unwrap());
        let mut models = Vec::new();
        for (model, &blocks) in (0..).map(ModelId).zip(&sizes) {
            let held = models.clone();
            if memory.map(Timestamp(0), model, blocks, blocks, &held).is_ok() {
                models.push(model);
            }
        }
        for index in gone {
            memory.unmap(*index.get(&models));
        }
        let free = memory.fragmentation().free;
        let held: Vec<_> = memory.regions().map(|(model, _)| model).collect();
        let mapped = memory.map(Timestamp(1), ModelId(1000), asked, asked, &held);
        prop_assert_eq!(mapped.is_ok(), asked <= free, "{} asked for, {} free", asked, free);
    }
}
