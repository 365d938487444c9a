use super::*;

const A: ModelId = ModelId(1);
const B: ModelId = ModelId(2);
const C: ModelId = ModelId(3);
const D: ModelId = ModelId(4);

fn map(memory: &mut MemoryMap, at: u64, model: ModelId, blocks: u32, pinned: &[ModelId]) -> Vec<ModelId> {
    let evicted = memory.map(Timestamp(at), model, blocks, blocks, pinned).unwrap();
    evicted.into_iter().map(|evicted| evicted.model).collect()
}

#[test]
fn evicts_the_least_recently_used_and_no_more_than_needed() {
    let mut memory = MemoryMap::new(Bytes::mib(20));
    map(&mut memory, 1, A, 4, &[]);
    map(&mut memory, 2, B, 4, &[]);
    map(&mut memory, 3, C, 2, &[]);
    memory.touch(Timestamp(4), A);
    assert_eq!(map(&mut memory, 5, D, 3, &[]), [B]);
    assert_eq!(memory.used_blocks(), 9);
}

#[test]
fn what_is_pinned_stays() {
    let mut memory = MemoryMap::new(Bytes::mib(20));
    map(&mut memory, 1, A, 4, &[]);
    map(&mut memory, 2, B, 4, &[]);
    assert_eq!(map(&mut memory, 3, C, 4, &[A]), [B]);
    assert_eq!(memory.map(Timestamp(4), D, 7, 7, &[A]), Err(Shortage::Pinned));
    assert!(memory.region(C).is_some(), "nothing is evicted where it would not help");
    assert_eq!(memory.map(Timestamp(4), D, 11, 11, &[]), Err(Shortage::TooLarge));
}

#[test]
fn every_mapping_has_a_generation_of_its_own() {
    let mut memory = MemoryMap::new(Bytes::mib(20));
    map(&mut memory, 1, A, 4, &[]);
    let first = memory.region(A).unwrap().generation();
    memory.clear();
    assert_eq!(memory.used_blocks(), 0);
    map(&mut memory, 2, A, 4, &[]);
    assert!(memory.region(A).unwrap().generation() > first);
}

#[test]
fn sizes_round_up_to_blocks() {
    for (size, blocks) in [(0, 0), (1, 1), (BLOCK.0, 1), (BLOCK.0 + 1, 2)] {
        assert_eq!(blocks_for(Bytes(size)), blocks);
    }
}

fn tiers(memory: Bytes, placement: Placement) -> MemoryMap {
    let config = Config { placement, arrangement: Arrangement::Partitions, ..Config::default() };
    MemoryMap::with(memory, config.grid().unwrap())
}

fn contiguous(memory: Bytes) -> MemoryMap {
    tiers(memory, Placement::Contiguous)
}

fn starts(memory: &MemoryMap, model: ModelId) -> Vec<u32> {
    memory.region(model).unwrap().pieces.iter().map(|piece| piece.start).collect()
}

#[test]
fn what_a_later_victim_makes_needless_stays() {
    let mut memory = MemoryMap::new(Bytes::mib(20));
    map(&mut memory, 1, A, 3, &[]);
    map(&mut memory, 2, B, 6, &[]);
    assert_eq!(map(&mut memory, 3, C, 7, &[]), [B], "one block is free and B has six");
    assert!(memory.region(A).is_some());
}

#[test]
fn of_needless_victims_the_one_that_frees_a_partition_goes() {
    // Two partitions: A has one to itself, B and C share the other.
    let mut memory = tiers(Bytes::mib(256), Placement::Scattered);
    map(&mut memory, 1, A, 60, &[]);
    map(&mut memory, 2, B, 60, &[]);
    map(&mut memory, 3, C, 4, &[]);
    map(&mut memory, 4, D, 4, &[]);
    assert_eq!(memory.fragmentation(), Fragmentation::default());
    // B is older than C, and either would do with A; without A neither would.
    let large = ModelId(5);
    assert_eq!(map(&mut memory, 5, large, 60, &[]), [A]);
    assert_eq!(memory.fragmentation().free, 0);
}

#[test]
fn common_sizes_keep_apart_from_the_rest() {
    let mut memory = contiguous(Bytes::mib(512));
    let evicted = memory.map_pieces(Timestamp(1), A, &[10, 33, 1, 10, 7], 61, &[]);
    assert_eq!(evicted, Ok(vec![]));
    let partitions = starts(&memory, A).into_iter().map(|start| start / 64).collect::<Vec<_>>();
    assert_eq!((partitions[0], partitions[1]), (partitions[3], partitions[4]), "tens, and irregular ones");
    assert_eq!(partitions.iter().collect::<BTreeSet<_>>().len(), 3);
}

#[test]
fn a_piece_longer_than_a_partition_lies_in_one_stretch() {
    let mut memory = contiguous(Bytes::mib(512));
    memory.map_pieces(Timestamp(1), A, &[150], 150, &[]).unwrap();
    assert_eq!(memory.region(A).unwrap().runs(), [Run { start: 0, len: 150 }]);
    memory.map_pieces(Timestamp(2), B, &[100], 100, &[A]).unwrap_err();
    memory.map_pieces(Timestamp(2), B, &[12], 12, &[A]).unwrap();
    assert_eq!(starts(&memory, B), [160], "the rest of its last partition serves others");
    let large = memory.map_pieces(Timestamp(3), C, &[300], 300, &[]);
    assert_eq!(large, Err(Shortage::TooLarge));
}

#[test]
fn eviction_makes_room_of_the_right_shape() {
    let mut memory = contiguous(Bytes::mib(256));
    memory.map_pieces(Timestamp(1), A, &[40], 40, &[]).unwrap();
    memory.map_pieces(Timestamp(2), B, &[10; 4], 40, &[]).unwrap();
    assert_eq!(memory.fragmentation(), Fragmentation { free: 48, stranded: 48, whole: 0, longest: 24 });
    let evicted = memory.map_pieces(Timestamp(3), C, &[30], 30, &[]).unwrap();
    assert_eq!(evicted.iter().map(|evicted| evicted.model).collect::<Vec<_>>(), [A]);
    assert_eq!(memory.map_pieces(Timestamp(4), D, &[60], 60, &[B, C]), Err(Shortage::Pinned));
}

#[test]
fn consolidation_empties_the_emptiest_partition_into_the_fullest() {
    let mut memory = tiers(Bytes::mib(384), Placement::Scattered);
    map(&mut memory, 1, A, 40, &[]);
    map(&mut memory, 2, B, 50, &[]);
    map(&mut memory, 3, C, 64, &[]);
    memory.unmap(C);
    map(&mut memory, 4, C, 20, &[]);
    let was = memory.region(C).unwrap().generation();
    memory.arrived(C, 0..7);
    assert_eq!(starts(&memory, C), [40], "it fits beside A");
    map(&mut memory, 5, D, 32, &[]);
    memory.unmap(A);
    // 44 of 64 are free beside C, 14 beside B, 32 beside D.
    let moves = memory.consolidate(&[]);
    let runs = |model, from: (u32, u32), to: u32| {
        let (from, to) = (Run { start: from.0, len: from.1 }, Run { start: to, len: from.1 });
        Move { model, from, to }
    };
    assert_eq!(moves, [runs(C, (40, 14), 114), runs(C, (54, 6), 160)]);
    let generation = Generation(was.0 + 2);
    assert_eq!(memory.begin_moves(&moves), [Relocated { model: C, was, generation }]);
    assert_eq!(memory.fragmentation().whole, 0, "what C leaves is still being read");
    memory.end_moves(C);
    assert_eq!(memory.region(C).unwrap().loaded().held(), 7, "what had arrived has moved along");
    assert_eq!(memory.fragmentation().whole, 1);
    assert_eq!(memory.consolidate(&[]), []);
}

#[test]
fn two_free_buddies_become_one() {
    let mut memory = contiguous(Bytes::mib(256));
    let halves = [A, B, C, D].map(|model| (model, [32]));
    for (model, pieces) in halves {
        memory.map_pieces(Timestamp(1), model, &pieces, 32, &[]).unwrap();
    }
    memory.unmap(A);
    memory.unmap(B);
    assert_eq!((starts(&memory, C), starts(&memory, D)), (vec![32], vec![96]));
    assert_eq!(memory.consolidate(&[C, D]), [], "nothing may move");
    let moves = memory.consolidate(&[C]);
    let to = Run { start: 0, len: 32 };
    assert_eq!(moves, [Move { model: D, from: Run { start: 96, len: 32 }, to }]);
    memory.begin_moves(&moves);
    memory.end_moves(D);
    assert_eq!(memory.fragmentation().whole, 1);
}

#[path = "properties.rs"]
mod properties;
