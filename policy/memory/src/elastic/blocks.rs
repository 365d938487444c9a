//! Memory in blocks of 2 MiB behind a single address range. Any block serves any object, so no
//! request that fits by size is refused for fragmentation. This type only records which blocks are
//! backed and which are free; the caller decides.

use millrace_types::Bytes;

use super::protocol::StoreExtent;
use super::slots::BlockSet;
use crate::{BLOCK, BlockRun};

#[derive(Debug)]
pub(super) struct Blocks {
    /// Blocks that are backed and used by no object.
    free: BlockSet,
    unbacked: BlockSet,
    total: u32,
}

fn extents(runs: Vec<BlockRun>) -> Vec<StoreExtent> {
    let extent = |run: BlockRun| StoreExtent { at: u64::from(run.start) * BLOCK.0, len: bytes(run.len) };
    runs.into_iter().map(extent).collect()
}

fn run(extent: StoreExtent) -> BlockRun {
    let blocks = |bytes: u64| u32::try_from(bytes / BLOCK.0).unwrap_or(u32::MAX);
    BlockRun { start: blocks(extent.at), len: blocks(extent.len.0) }
}

/// Returns the bytes of a number of blocks.
pub(super) fn bytes(blocks: u32) -> Bytes {
    Bytes(u64::from(blocks) * BLOCK.0)
}

impl Blocks {
    /// Returns `total` blocks, none of them backed.
    pub(super) fn new(total: u32) -> Self {
        Self { free: BlockSet::empty(total), unbacked: BlockSet::full(total), total }
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
        extents(runs)
    }

    /// Unbacks the highest free blocks.
    pub(super) fn shrink(&mut self, blocks: u32) -> Vec<StoreExtent> {
        let runs = self.free.take_highest(blocks);
        runs.iter().for_each(|&run| self.unbacked.insert(run));
        extents(runs)
    }

    /// Removes the lowest free blocks from the free set for an object.
    pub(super) fn take(&mut self, blocks: u32) -> Vec<StoreExtent> {
        extents(self.free.take_lowest(blocks))
    }

    pub(super) fn give_back(&mut self, extents: &[StoreExtent]) {
        extents.iter().for_each(|&extent| self.free.insert(run(extent)));
    }
}
