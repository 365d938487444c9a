//! Blocks of intermediate data on a GPU. Data takes blocks of the same memory as models, because a
//! GPU's memory has a single authority. Data has no rank: the owner decides when the blocks are
//! given back.

use std::collections::BTreeSet;

use millrace_types::ModelId;

use super::{BlockRun, EvictedModel, MemoryMap, MemoryShortage};

impl MemoryMap {
    /// Takes `blocks` blocks for data, one run for each block, and evicts models that are not in
    /// `pinned` until there is room. A shortage evicts no model.
    ///
    /// # Errors
    /// [`MemoryShortage`].
    pub fn take_blocks(
        &mut self,
        blocks: u32,
        pinned: &[ModelId],
    ) -> Result<(Vec<BlockRun>, Vec<EvictedModel>), MemoryShortage> {
        let (taken, evicted) = self.take(&vec![1; blocks as usize], pinned)?;
        let single = |run: BlockRun| (run.start..run.end()).map(|start| BlockRun { start, len: 1 });
        let runs: Vec<_> = taken.into_iter().flat_map(single).collect();
        self.data.extend(&runs);
        Ok((runs, evicted))
    }

    /// Whether an allocation fails only for lack of blocks, regardless of their positions.
    #[must_use]
    pub fn gives_any_block(&self) -> bool {
        self.allocator.takes_any()
    }

    /// Gives back a run of [`Self::take_blocks`].
    ///
    /// # Panics
    /// If the run is not taken: a bug of the caller.
    pub fn give_back_block(&mut self, run: BlockRun) {
        assert!(self.data.remove(&run), "{run:?} holds no data");
        self.allocator.give_back(&[run]);
    }

    /// Returns the number of blocks that data holds.
    #[must_use]
    pub fn data_blocks(&self) -> u32 {
        self.data.iter().map(|run| run.len).sum()
    }

    /// Returns the number of blocks that these models hold.
    #[must_use]
    pub fn blocks_of(&self, models: &BTreeSet<ModelId>) -> u32 {
        models.iter().filter_map(|model| self.regions.get(model)).map(|region| region.blocks).sum()
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{Bytes, Timestamp};
    use proptest::prelude::*;

    use super::*;
    use crate::{BlockPlacement, BlockSize};

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Map(u32, u32),
        Unmap(u32),
        Take(u32),
        GiveBack(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..6u32, 1..40u32).prop_map(|(model, blocks)| Step::Map(model, blocks)),
            (0..6u32).prop_map(Step::Unmap),
            (1..20u32).prop_map(Step::Take),
            any::<usize>().prop_map(Step::GiveBack),
        ]
    }

    proptest! {
        /// No block has two owners, no block is lost, and data is never evicted.
        #[test]
        fn models_and_data_share_the_blocks(
            placement in prop_oneof![Just(BlockPlacement::Scattered), Just(BlockPlacement::Contiguous)],
            mib in prop_oneof![Just(2u64), Just(16)],
            steps in proptest::collection::vec(step(), 1..60),
        ) {
            let total = 160;
            let block = BlockSize::new(Bytes::mib(mib)).unwrap();
            let mut map = MemoryMap::with(block.bytes(total), block, placement);
            let mut data: Vec<BlockRun> = Vec::new();
            for (now, step) in steps.into_iter().enumerate() {
                let now = Timestamp(now as u64);
                match step {
                    Step::Map(model, blocks) if map.region(ModelId(model)).is_none() => {
                        drop(map.map(now, ModelId(model), blocks, blocks, &[]));
                    }
                    Step::Unmap(model) => {
                        map.unmap(ModelId(model));
                    }
                    Step::Take(blocks) => {
                        let before = map.used_blocks();
                        match map.take_blocks(blocks, &[]) {
                            Ok((runs, _)) => {
                                prop_assert_eq!(runs.len(), blocks as usize);
                                data.extend(runs);
                            }
                            Err(_) => prop_assert_eq!(map.used_blocks(), before, "nothing half done"),
                        }
                    }
                    Step::GiveBack(place) if !data.is_empty() => {
                        map.give_back_block(data.swap_remove(place % data.len()));
                    }
                    Step::Map(..) | Step::GiveBack(_) => {}
                }
                let models = map.regions().flat_map(|(_, region)| region.runs().iter().copied());
                let mut taken: Vec<_> = models.chain(data.iter().copied()).collect();
                taken.sort();
                prop_assert!(taken.windows(2).all(|pair| pair[0].end() <= pair[1].start), "{:?}", taken);
                prop_assert_eq!(map.data_blocks(), data.iter().map(|run| run.len).sum::<u32>());
            }
            let models: Vec<_> = map.regions().map(|(model, _)| model).collect();
            for model in models {
                map.unmap(model);
            }
            data.into_iter().for_each(|run| map.give_back_block(run));
            prop_assert_eq!(map.used_blocks(), 0);
        }
    }

    #[test]
    fn data_evicts_idle_models_and_no_model_in_use() {
        let mut map = MemoryMap::new(BlockSize::DEFAULT.bytes(10), BlockSize::DEFAULT);
        map.map(Timestamp(1), ModelId(1), 4, 4, &[]).unwrap();
        map.map(Timestamp(2), ModelId(2), 4, 4, &[]).unwrap();
        let (runs, evicted) = map.take_blocks(5, &[ModelId(1)]).unwrap();
        assert_eq!((runs.len(), evicted[0].model), (5, ModelId(2)));
        assert_eq!(map.take_blocks(2, &[ModelId(1)]), Err(MemoryShortage::Pinned));
        assert_eq!(map.take_blocks(11, &[]), Err(MemoryShortage::TooLarge));
        assert_eq!(map.blocks_of(&[ModelId(1), ModelId(2)].into()), 4);
        map.clear();
        assert_eq!((map.used_blocks(), map.data_blocks()), (0, 0));
    }
}
