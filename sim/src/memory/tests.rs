//! Cases and properties of the two tiers and the pool. No block has two owners, and no block is lost.
//! Pinned models keep their memory. Moves carry every block to the place that its model's region names.
//! Fragmentation stays within the bounds of [`super`].

use proptest::prelude::*;

use super::partitions::PartitionTier;
use super::*;

const A: ModelId = ModelId(1);
const B: ModelId = ModelId(2);
const C: ModelId = ModelId(3);
const D: ModelId = ModelId(4);

fn two_tiers(mib: u64, placement: BlockPlacement) -> BaselineMemory {
    BaselineMemory::two_tiers(Bytes::mib(mib), TierSizes::default(), placement)
}

fn map(memory: &mut BaselineMemory, at: u64, model: ModelId, pieces: &[u32]) -> Vec<ModelId> {
    memory.map(Timestamp(at), model, pieces, &[]).unwrap()
}

fn starts(memory: &BaselineMemory, model: ModelId) -> Vec<u32> {
    memory.pieces(model).unwrap().iter().map(|piece| piece.start).collect()
}

#[test]
fn pieces_of_a_common_size_share_a_partition_apart_from_irregular_pieces() {
    let mut memory = two_tiers(512, BlockPlacement::Contiguous);
    assert_eq!(map(&mut memory, 1, A, &[10, 33, 1, 10, 7]), []);
    let partitions = starts(&memory, A).into_iter().map(|start| start / 64).collect::<Vec<_>>();
    assert_eq!(partitions[0], partitions[3], "pieces of 20 MiB are in different partitions");
    assert_eq!(partitions[1], partitions[4], "irregular pieces are in different partitions");
    assert_eq!(partitions.iter().collect::<BTreeSet<_>>().len(), 3);
}

#[test]
fn a_piece_longer_than_a_partition_is_one_run() {
    let mut memory = two_tiers(512, BlockPlacement::Contiguous);
    map(&mut memory, 1, A, &[150]);
    assert_eq!(memory.pieces(A).unwrap(), [BlockRun { start: 0, len: 150 }]);
    assert_eq!(memory.map(Timestamp(2), B, &[100], &[A]), Err(MemoryShortage::Pinned));
    map(&mut memory, 2, B, &[12]);
    assert_eq!(starts(&memory, B), [160], "the rest of the last partition is not lent");
    assert_eq!(memory.map(Timestamp(3), C, &[300], &[]), Err(MemoryShortage::TooLarge));
}

#[test]
fn only_models_that_make_room_for_the_pieces_are_evicted() {
    let mut memory = two_tiers(256, BlockPlacement::Contiguous);
    map(&mut memory, 1, A, &[40]);
    map(&mut memory, 2, B, &[10; 4]);
    assert_eq!(memory.fragmentation(), Fragmentation { free: 48, stranded: 48, whole: 0, longest: 24 });
    assert_eq!(map(&mut memory, 3, C, &[30]), [A]);
    assert_eq!(memory.map(Timestamp(4), D, &[60], &[B, C]), Err(MemoryShortage::Pinned));
}

#[test]
fn consolidation_empties_the_emptiest_partition_into_the_fullest() {
    let mut memory = two_tiers(384, BlockPlacement::Scattered);
    map(&mut memory, 1, A, &[40]);
    map(&mut memory, 2, B, &[50]);
    map(&mut memory, 3, C, &[64]);
    memory.unmap(C);
    map(&mut memory, 4, C, &[20]);
    assert_eq!(starts(&memory, C), [40], "C is not beside A");
    map(&mut memory, 5, D, &[32]);
    memory.unmap(A);
    // 44 of 64 blocks are free beside C, 14 beside B, 32 beside D.
    let step = |from: (u32, u32), to: u32| BlockMove {
        model: C,
        from: BlockRun { start: from.0, len: from.1 },
        to: BlockRun { start: to, len: from.1 },
    };
    assert_eq!(memory.consolidate(&[]), [step((40, 14), 114), step((54, 6), 160)]);
    assert_eq!(memory.fragmentation().whole, 1);
    assert_eq!(memory.consolidate(&[]), []);
}

#[test]
fn two_free_buddies_become_one() {
    let mut memory = two_tiers(256, BlockPlacement::Contiguous);
    for model in [A, B, C, D] {
        map(&mut memory, 1, model, &[32]);
    }
    memory.unmap(A);
    memory.unmap(B);
    assert_eq!(starts(&memory, C), [32]);
    assert_eq!(starts(&memory, D), [96]);
    assert_eq!(memory.consolidate(&[C, D]), [], "pinned models were moved");
    let to = BlockRun { start: 0, len: 32 };
    assert_eq!(memory.consolidate(&[C]), [BlockMove { model: D, from: BlockRun { start: 96, len: 32 }, to }]);
    assert_eq!(memory.fragmentation().whole, 1);
}

#[derive(Debug, Clone)]
enum Step {
    Map { model: u32, pieces: Vec<u32>, pinned: Vec<u32> },
    Unmap(u32),
    Touch(u32),
    Consolidate { pinned: Vec<u32> },
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
        4 => pinned().prop_map(|pinned| Step::Consolidate { pinned }),
    ]
}

/// Generates a GPU of `blocks` blocks under either allocator. The last partition may be short, and the
/// common size of 5 blocks does not divide a partition.
fn memory(blocks: u64) -> impl Strategy<Value = BaselineMemory> {
    let placement = prop_oneof![1 => Just(BlockPlacement::Scattered), 2 => Just(BlockPlacement::Contiguous)];
    let sizes = (prop_oneof![Just(16u32), Just(128)], prop_oneof![Just(1u32), Just(4)]);
    let size = Bytes::mib(2 * blocks);
    let tiers = (placement, sizes).prop_map(move |(placement, (partition, irregular_min))| {
        let sizes = TierSizes { partition, regular: vec![1, 5], irregular_min, step: partition };
        BaselineMemory::two_tiers(size, sizes, placement)
    });
    prop_oneof![4 => tiers, 1 => Just(BaselineMemory::pool(size))]
}

/// A GPU's memory with the content of each block: the model, and the number of the block within the model.
struct Device {
    memory: BaselineMemory,
    blocks: Vec<Option<(ModelId, u32)>>,
    asked: BTreeMap<ModelId, Vec<u32>>,
}

impl Device {
    fn new(memory: BaselineMemory) -> Self {
        let blocks = vec![None; memory.total_blocks() as usize];
        Self { memory, blocks, asked: BTreeMap::new() }
    }

    fn forget(&mut self, model: ModelId) {
        self.asked.remove(&model);
        let of_model = |block: &&mut Option<(ModelId, u32)>| block.is_some_and(|(owner, _)| owner == model);
        self.blocks.iter_mut().filter(of_model).for_each(|block| *block = None);
    }

    fn map(&mut self, now: Timestamp, model: ModelId, pieces: &[u32], pinned: &[ModelId]) {
        let before: Vec<_> = self.memory.models().collect();
        match self.memory.map(now, model, pieces, pinned) {
            Ok(evicted) => {
                assert!(evicted.iter().all(|evicted| !pinned.contains(evicted)));
                evicted.iter().for_each(|&evicted| self.forget(evicted));
                for (index, place) in places(&self.memory, model).into_iter().enumerate() {
                    let block = &mut self.blocks[place as usize];
                    assert_eq!(*block, None, "block {place} has two owners");
                    *block = Some((model, index as u32));
                }
                self.asked.insert(model, pieces.to_vec());
            }
            Err(_) => assert!(self.memory.models().eq(before), "a shortage evicted a model"),
        }
    }

    fn consolidate(&mut self, pinned: &[ModelId]) {
        for round in 0.. {
            let used = self.memory.used_blocks();
            let moves = self.memory.consolidate(pinned);
            if moves.is_empty() {
                break;
            }
            assert!(round < 1000, "consolidation did not end within 1000 rounds");
            assert!(moves.iter().map(|step| step.from.len).sum::<u32>() <= self.memory.sizes.step);
            for BlockMove { model, from, to } in moves {
                assert!(!pinned.contains(&model), "the pinned {model} was moved");
                assert_eq!(from.len, to.len);
                for (from, to) in (from.start..from.end()).zip(to.start..to.end()) {
                    assert_eq!(
                        self.blocks[to as usize], None,
                        "the target block {to} of a move has an owner"
                    );
                    self.blocks[to as usize] = self.blocks[from as usize].take();
                }
            }
            assert_eq!(self.memory.used_blocks(), used);
            self.check();
        }
        check_bound(&self.memory, pinned);
    }

    fn check(&self) {
        let memory = &self.memory;
        for (_, model) in memory.models() {
            let places = places(memory, model);
            for (index, place) in places.iter().enumerate() {
                assert_eq!(self.blocks[*place as usize], Some((model, index as u32)), "block {place}");
            }
            let asked = self.asked[&model].iter().copied().filter(|&len| len > 0);
            assert_eq!(places.len(), asked.clone().sum::<u32>() as usize);
            if let Allocator::TwoTier(_, BlockPlacement::Contiguous) = memory.allocator {
                let lengths = memory.pieces(model).unwrap().iter().map(|piece| piece.len);
                assert!(lengths.eq(asked), "a piece is not one run");
            }
        }
        let owned = self.blocks.iter().flatten().count();
        match &memory.allocator {
            Allocator::TwoTier(..) => assert_eq!(memory.used_blocks() as usize, owned),
            // A pool may lend a model more blocks than requested.
            Allocator::Pool(_) => assert!(memory.used_blocks() as usize >= owned),
        }
        assert_eq!(memory.fragmentation().free, memory.total_blocks() - memory.used_blocks());
    }
}

fn places(memory: &BaselineMemory, model: ModelId) -> Vec<u32> {
    memory.pieces(model).unwrap().iter().flat_map(|run| run.start..run.end()).collect()
}

/// Checks the bounds on fragmentation that [`super`] states.
fn check_bound(memory: &BaselineMemory, pinned: &[ModelId]) {
    let Allocator::TwoTier(partitions, _) = &memory.allocator else { return };
    let parts = partitions.parts();
    let len = partitions.len();
    let mut fixed = vec![false; parts.len()];
    let mut rests = 0;
    let mut slots = BTreeSet::new();
    for (&model, region) in &memory.regions {
        for piece in &region.pieces {
            let places = partitions.part_of(piece.start)..=partitions.part_of(piece.end() - 1);
            let irregular = parts[*places.start()].tier == PartitionTier::Buddies;
            if irregular {
                rests += if piece.len > len { 0 } else { piece.len.next_power_of_two() - piece.len };
            }
            if pinned.contains(&model) || irregular && piece.len > len {
                places.for_each(|place| fixed[place] = true);
            }
        }
    }
    let partly_used = |tier: PartitionTier| {
        (0..parts.len()).filter(move |&place| parts[place].tier == tier && partitions.is_partly_used(place))
    };
    slots.extend(
        parts
            .iter()
            .filter_map(|part| if let PartitionTier::Slots(slot) = part.tier { Some(slot) } else { None }),
    );
    for slot in slots {
        let places = partly_used(PartitionTier::Slots(slot)).collect::<Vec<_>>();
        let free: u32 = places.iter().map(|&place| partitions.slots(place, slot).count_ones()).sum();
        assert!(free < len / slot || places.iter().all(|&place| fixed[place]), "{free} slots of {slot}");
    }
    let is_short = |place: usize| partitions.base(place) + len > partitions.total();
    let short = if partly_used(PartitionTier::Buddies).any(is_short) { len - 1 } else { 0 };
    let stuck = partly_used(PartitionTier::Buddies).filter(|&place| fixed[place]).count() as u32 * (len - 1);
    let free: u32 = partly_used(PartitionTier::Buddies).map(|place| parts[place].free.count_ones()).sum();
    assert!(free <= len - 1 + rests + short + stuck, "{free} free among buddies, {rests} of them rests");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn regions_and_free_memory_match_the_contents_of_the_blocks(
        memory in prop_oneof![memory(192), memory(200)],
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut device = Device::new(memory);
        let ids = |models: Vec<u32>| models.into_iter().map(ModelId).collect::<Vec<_>>();
        for (at, step) in steps.into_iter().enumerate() {
            let now = Timestamp(at as u64);
            match step {
                Step::Map { model, pieces, pinned } => {
                    if device.memory.pieces(ModelId(model)).is_none() {
                        device.map(now, ModelId(model), &pieces, &ids(pinned));
                    }
                }
                Step::Unmap(model) => {
                    device.memory.unmap(ModelId(model));
                    device.forget(ModelId(model));
                }
                Step::Touch(model) => device.memory.touch(now, ModelId(model)),
                Step::Consolidate { pinned } => device.consolidate(&ids(pinned)),
            }
            device.check();
        }
        for model in (0..16).map(ModelId) {
            device.memory.unmap(model);
        }
        let free = device.memory.fragmentation();
        prop_assert_eq!((free.longest, free.stranded), (device.memory.total_blocks(), 0));
    }
}
