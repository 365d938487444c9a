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
fn the_least_recently_used_models_are_evicted_and_no_more_than_needed() {
    let mut memory = MemoryMap::new(Bytes::mib(20), BlockSize::DEFAULT);
    map(&mut memory, 1, A, 4, &[]);
    map(&mut memory, 2, B, 4, &[]);
    map(&mut memory, 3, C, 2, &[]);
    memory.touch(Timestamp(4), A);
    assert_eq!(map(&mut memory, 5, D, 3, &[]), [B]);
    assert_eq!(memory.used_blocks(), 9);
}

#[test]
fn pinned_models_are_never_evicted() {
    let mut memory = MemoryMap::new(Bytes::mib(20), BlockSize::DEFAULT);
    map(&mut memory, 1, A, 4, &[]);
    map(&mut memory, 2, B, 4, &[]);
    assert_eq!(map(&mut memory, 3, C, 4, &[A]), [B]);
    assert_eq!(memory.map(Timestamp(4), D, 7, 7, &[A]), Err(MemoryShortage::Pinned));
    assert!(memory.region(C).is_some(), "a shortage evicts nothing");
    assert_eq!(memory.map(Timestamp(4), D, 11, 11, &[]), Err(MemoryShortage::TooLarge));
}

#[test]
fn every_mapping_has_a_generation_of_its_own() {
    let mut memory = MemoryMap::new(Bytes::mib(20), BlockSize::DEFAULT);
    map(&mut memory, 1, A, 4, &[]);
    let first = memory.region(A).unwrap().generation();
    memory.clear();
    assert_eq!(memory.used_blocks(), 0);
    map(&mut memory, 2, A, 4, &[]);
    assert!(memory.region(A).unwrap().generation() > first);
}

#[test]
fn a_victim_that_a_later_victim_makes_needless_stays() {
    let mut memory = MemoryMap::new(Bytes::mib(20), BlockSize::DEFAULT);
    map(&mut memory, 1, A, 3, &[]);
    map(&mut memory, 2, B, 6, &[]);
    assert_eq!(map(&mut memory, 3, C, 7, &[]), [B], "one block is free and B has six");
    assert!(memory.region(A).is_some());
}

#[test]
fn contiguous_placement_evicts_until_a_run_is_long_enough() {
    let mut memory = MemoryMap::with(Bytes::mib(20), BlockSize::DEFAULT, BlockPlacement::Contiguous);
    map(&mut memory, 1, A, 4, &[]);
    map(&mut memory, 2, B, 2, &[]);
    map(&mut memory, 3, C, 4, &[]);
    memory.unmap(A);
    assert_eq!(memory.map(Timestamp(4), D, 5, 5, &[B, C]), Err(MemoryShortage::Pinned));
    assert_eq!(map(&mut memory, 5, D, 5, &[]), [B]);
    assert_eq!(memory.region(D).unwrap().runs(), [BlockRun { start: 0, len: 5 }]);
    assert_eq!(memory.map(Timestamp(6), B, 11, 11, &[]), Err(MemoryShortage::TooLarge));
}

#[path = "properties.rs"]
mod properties;
