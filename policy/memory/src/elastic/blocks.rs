//! Memory in blocks behind a single address range. Any block serves any object, so no
//! request that fits by size is refused for fragmentation. This type only records which blocks are
//! backed and which are free; the caller decides.

use millrace_types::Bytes;

use super::protocol::StoreExtent;
use super::slots::BlockSet;
use crate::{BlockRun, BlockSize};

#[derive(Debug)]
pub(super) struct Blocks {
    block: BlockSize,
    /// Blocks that are backed and used by no object.
    free: BlockSet,
    unbacked: BlockSet,
    total: u32,
}

impl Blocks {
    /// Returns `total` blocks, none of them backed.
    pub(super) fn new(block: BlockSize, total: u32) -> Self {
        Self { block, free: BlockSet::empty(total), unbacked: BlockSet::full(total), total }
    }

    pub(super) fn backed(&self) -> u32 {
        self.total - self.unbacked.len()
    }

    pub(super) fn free(&self) -> u32 {
        self.free.len()
    }

    /// Backs the lowest unbacked blocks and adds them to the free ones.
    pub(super) fn grow(&mut self, blocks: u32) -> Vec<StoreExtent> {
        let runs = self.unbacked.take_lowest(blocks);
        runs.iter().for_each(|&run| self.free.insert(run));
        self.extents(runs)
    }

    /// Unbacks the highest free blocks.
    pub(super) fn shrink(&mut self, blocks: u32) -> Vec<StoreExtent> {
        let runs = self.free.take_highest(blocks);
        runs.iter().for_each(|&run| self.unbacked.insert(run));
        self.extents(runs)
    }

    /// Removes the lowest free blocks from the free set for an object.
    pub(super) fn take(&mut self, blocks: u32) -> Vec<StoreExtent> {
        let runs = self.free.take_lowest(blocks);
        self.extents(runs)
    }

    pub(super) fn give_back(&mut self, extents: &[StoreExtent]) {
        for extent in extents {
            let start = self.block.blocks_in(Bytes(extent.at));
            self.free.insert(BlockRun { start, len: self.block.blocks_in(extent.len) });
        }
    }

    fn extents(&self, runs: Vec<BlockRun>) -> Vec<StoreExtent> {
        let extent =
            |run: BlockRun| StoreExtent { at: self.block.bytes(run.start).0, len: self.block.bytes(run.len) };
        runs.into_iter().map(extent).collect()
    }
}
