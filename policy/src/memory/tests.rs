use proptest::prelude::*;

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

#[derive(Debug, Clone)]
enum Step {
    Map { model: u32, blocks: u32, pinned: Vec<u32> },
    Unmap(u32),
    Touch(u32),
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..12u32, 0..40u32, prop::collection::vec(0..12u32, 0..3))
            .prop_map(|(model, blocks, pinned)| Step::Map { model, blocks, pinned }),
        2 => (0..12u32).prop_map(Step::Unmap),
        2 => (0..12u32).prop_map(Step::Touch),
        1 => Just(Step::Clear),
    ]
}

/// No block has two owners, none is lost, and the books agree with the map.
fn check(memory: &MemoryMap) {
    let mut owned = vec![false; memory.total_blocks() as usize];
    for (model, region) in memory.regions() {
        assert_eq!(region.runs().iter().map(|run| run.len).sum::<u32>(), region.blocks(), "{model}");
        for block in region.runs().iter().flat_map(|run| run.start..run.start + run.len) {
            assert!(!std::mem::replace(&mut owned[block as usize], true), "block {block} has two owners");
        }
    }
    let used = owned.iter().filter(|&&owned| owned).count();
    assert_eq!(used, memory.used_blocks() as usize);
    assert_eq!(memory.by_last_use.len(), memory.regions.len());
}

proptest! {
    #[test]
    fn blocks_are_neither_shared_nor_lost(steps in prop::collection::vec(step(), 1..120)) {
        let mut memory = MemoryMap::new(Bytes::mib(128));
        for (at, step) in steps.into_iter().enumerate() {
            let now = Timestamp(at as u64);
            match step {
                Step::Map { model, blocks, pinned } if memory.region(ModelId(model)).is_none() => {
                    let pinned: Vec<_> = pinned.into_iter().map(ModelId).collect();
                    let held: Vec<_> = pinned.iter().filter(|m| memory.region(**m).is_some()).copied().collect();
                    let mapped = memory.map(now, ModelId(model), blocks, blocks, &pinned);
                    prop_assert_eq!(mapped.is_ok(), memory.region(ModelId(model)).is_some());
                    for model in held {
                        prop_assert!(memory.region(model).is_some(), "evicted a pinned model");
                    }
                }
                Step::Map { .. } => {}
                Step::Unmap(model) => { memory.unmap(ModelId(model)); }
                Step::Touch(model) => memory.touch(now, ModelId(model)),
                Step::Clear => memory.clear(),
            }
            check(&memory);
        }
        memory.clear();
        prop_assert_eq!(memory.used_blocks(), 0);
        let whole = memory.fragmentation();
        prop_assert_eq!((whole.longest, whole.stranded), (memory.total_blocks(), 0));
    }
}
