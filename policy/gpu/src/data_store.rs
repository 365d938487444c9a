//! The store of intermediate data, with the GPU blocks under the store's range.

use std::collections::BTreeMap;

use millrace_types::Timestamp;

use millrace_core::Core as _;
use millrace_memory::elastic::{self, ElasticStore, ObjectCounts, StoreExtent};
use millrace_memory::{BlockRun, BlockSize};

/// The intermediate data on a GPU.
#[derive(Debug)]
pub(super) struct GpuDataStore {
    pub(super) config: elastic::Config,
    pub(super) store: Option<ElasticStore>,
    /// The GPU block under each block of the store.
    pub(super) backing: BTreeMap<u64, BlockRun>,
    /// The counts of earlier stores, which ended with their executors.
    before: ObjectCounts,
}

impl GpuDataStore {
    /// Returns an empty store on a GPU with blocks of this size.
    pub(super) fn new(config: elastic::Config, block: BlockSize) -> Self {
        // The store rounds its cap down in the same way.
        let config = elastic::Config { cap: block.round_down(config.cap), block, ..config };
        Self { config, store: None, backing: BTreeMap::new(), before: ObjectCounts::default() }
    }

    /// Drops the store after the memory that held it is lost.
    pub(super) fn clear(&mut self) {
        self.before = self.counts();
        self.store = None;
        self.backing = BTreeMap::new();
    }

    pub(super) fn counts(&self) -> ObjectCounts {
        let now = self.store.as_ref().map(ElasticStore::counts).unwrap_or_default();
        ObjectCounts {
            migrated: self.before.migrated + now.migrated,
            reloaded: self.before.reloaded + now.reloaded,
            refused: self.before.refused + now.refused,
            host_reads: self.before.host_reads + now.host_reads,
        }
    }

    pub(super) fn next_wake(&self) -> Option<Timestamp> {
        self.store.as_ref()?.next_wake()
    }

    /// Returns the GPU blocks of some extents; `None` if any of them has none.
    pub(super) fn blocks(&self, extents: &[StoreExtent]) -> Option<Vec<BlockRun>> {
        let mut runs: Vec<BlockRun> = Vec::new();
        for block in self.blocks_of(extents) {
            let BlockRun { start, .. } = *self.backing.get(&block)?;
            match runs.last_mut() {
                Some(last) if last.end() == start => last.len += 1,
                _ => runs.push(BlockRun { start, len: 1 }),
            }
        }
        Some(runs)
    }

    /// Returns the blocks of the store's range that some extents cover. Extents of a store of blocks
    /// cover whole blocks.
    pub(super) fn blocks_of(&self, extents: &[StoreExtent]) -> Vec<u64> {
        let block = self.config.block.get().0;
        let covered = |extent: &StoreExtent| extent.at / block..(extent.at + extent.len.0).div_ceil(block);
        extents.iter().flat_map(covered).collect()
    }
}
