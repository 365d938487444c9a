//! Properties of both placements: no block has two owners, no block is lost, pinned models stay,
//! and a shortage evicts nothing.

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Step {
    Map { model: u32, pieces: Vec<u32>, pinned: Vec<u32> },
    Unmap(u32),
    Touch(u32),
    Rank(u32, u8),
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let pieces = prop::collection::vec(0..40u32, 0..12);
    let pinned = prop::collection::vec(0..16u32, 0..3);
    prop_oneof![
        12 => (0..16u32, pieces, pinned).prop_map(|(model, pieces, pinned)| Step::Map { model, pieces, pinned }),
        6 => (0..16u32).prop_map(Step::Unmap),
        3 => (0..16u32).prop_map(Step::Touch),
        6 => (0..16u32, 0..3u8).prop_map(|(model, rank)| Step::Rank(model, rank)),
        1 => Just(Step::Clear),
    ]
}

fn placement() -> impl Strategy<Value = BlockPlacement> {
    prop_oneof![Just(BlockPlacement::Scattered), Just(BlockPlacement::Contiguous)]
}

/// A memory map, and the pieces that each model asked for.
struct Checked {
    memory: MemoryMap,
    /// The GPU's memory.
    bytes: Bytes,
    asked: BTreeMap<ModelId, Vec<u32>>,
}

impl Checked {
    fn map(&mut self, now: Timestamp, model: ModelId, pieces: &[u32], pinned: &[ModelId]) {
        let blocks: u32 = pieces.iter().sum();
        let pinned_once: BTreeSet<_> = pinned.iter().copied().collect();
        let held = self.memory.blocks_of(&pinned_once);
        let ranks: BTreeMap<_, _> =
            self.memory.regions().map(|(model, region)| (model, region.rank)).collect();
        match self.memory.map_pieces(now, model, pieces, blocks, pinned) {
            Ok(evicted) => {
                assert!(evicted.iter().all(|evicted| !pinned.contains(&evicted.model)));
                let highest = evicted.iter().map(|evicted| ranks[&evicted.model]).max();
                let stayed = ranks.iter().filter(|(model, _)| {
                    !pinned.contains(model) && evicted.iter().all(|evicted| evicted.model != **model)
                });
                // T24: no model is evicted while a model of a lower rank stays.
                assert!(stayed.map(|(_, rank)| Some(*rank)).all(|rank| rank >= highest));
                evicted.iter().for_each(|evicted| drop(self.asked.remove(&evicted.model)));
                self.asked.insert(model, pieces.to_vec());
            }
            Err(shortage) => {
                assert!(self.memory.regions().map(|(model, _)| model).eq(ranks.keys().copied()));
                if self.memory.gives_any_block() {
                    let total = self.memory.total_blocks();
                    assert!(blocks > total - held, "{shortage:?}: {blocks} of {total} with {held} pinned");
                }
            }
        }
    }

    fn check(&self) {
        let memory = &self.memory;
        let mut owned: Vec<BlockRun> = Vec::new();
        for (model, region) in memory.regions() {
            let asked = self.asked[&model].iter().copied().filter(|&len| len > 0);
            assert_eq!(region.blocks(), asked.clone().sum::<u32>());
            assert_eq!(region.blocks(), region.runs().iter().map(|run| run.len).sum::<u32>());
            if memory.placement == BlockPlacement::Contiguous {
                // Each piece lies within one run, and runs join only whole pieces.
                let mut pieces = asked;
                for run in region.runs() {
                    let mut left = run.len;
                    while left > 0 {
                        left = left.checked_sub(pieces.next().unwrap()).expect("a piece is in two runs");
                    }
                }
            }
            owned.extend(region.runs());
        }
        assert_eq!(self.asked.len(), memory.regions().count());
        owned.sort_unstable();
        assert!(owned.windows(2).all(|pair| pair[0].end() <= pair[1].start), "a block has two owners");
        assert_eq!(memory.used_blocks(), owned.iter().map(|run| run.len).sum::<u32>());
        // Every block is whole: none ends behind the GPU's memory.
        let ends = owned.iter().map(|run| memory.block().bytes(run.end()));
        assert!(ends.max() <= Some(self.bytes), "a block is partly outside of the memory");
        assert_eq!(memory.order.len(), memory.regions.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_block_has_a_single_owner(
        placement in placement(),
        blocks in prop_oneof![Just(192u32), Just(200)],
        block in prop_oneof![Just(2u64), Just(16)],
        rest in 0..2u64 << 20,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let block = BlockSize::new(Bytes::mib(block)).unwrap();
        // A rest that is smaller than a block is not given out.
        let bytes = block.bytes(blocks) + Bytes(rest);
        let memory = MemoryMap::with(bytes, block, placement);
        let mut checked = Checked { memory, bytes, asked: BTreeMap::new() };
        let ids = |models: Vec<u32>| models.into_iter().map(ModelId).collect::<Vec<_>>();
        for (at, step) in steps.into_iter().enumerate() {
            let now = Timestamp(at as u64);
            match step {
                Step::Map { model, pieces, pinned } => {
                    if checked.memory.region(ModelId(model)).is_none() {
                        checked.map(now, ModelId(model), &pieces, &ids(pinned));
                    }
                }
                Step::Unmap(model) => {
                    checked.memory.unmap(ModelId(model));
                    checked.asked.remove(&ModelId(model));
                }
                Step::Touch(model) => checked.memory.touch(now, ModelId(model)),
                Step::Rank(model, rank) => checked.memory.rank(ModelId(model), EvictionRank(rank)),
                Step::Clear => {
                    checked.memory.clear();
                    checked.asked.clear();
                }
            }
            checked.check();
        }
        for model in (0..16).map(ModelId) {
            checked.memory.unmap(model);
        }
        let all = checked.memory.map(Timestamp(1_000), ModelId(99), blocks, 0, &[]);
        prop_assert_eq!(all, Ok(vec![]), "the freed blocks join into one run");
    }

    /// Scattered placement needs no consolidation.
    #[test]
    fn scattered_placement_fails_only_for_lack_of_blocks(
        sizes in prop::collection::vec(0..40u32, 1..40),
        gone in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        asked in 1..200u32,
    ) {
        let mut memory = MemoryMap::new(BlockSize::DEFAULT.bytes(200), BlockSize::DEFAULT);
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
        let free = memory.total_blocks() - memory.used_blocks();
        let held: Vec<_> = memory.regions().map(|(model, _)| model).collect();
        let mapped = memory.map(Timestamp(1), ModelId(1000), asked, asked, &held);
        prop_assert_eq!(mapped.is_ok(), asked <= free, "{} asked for, {} free", asked, free);
    }
}
