//! Memory in blocks of 2 MiB behind one address range: any block serves any object, so nothing that
//! fits by size is refused for its shape. Keeps the books of which blocks are backed and which free;
//! it decides nothing.

use millrace_types::Bytes;

use super::protocol::Extent;
use super::slots::Slots;
use crate::memory::{BLOCK, Run};

/// The blocks of a store.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Backed, and in no object.
    free: Slots,
    unbacked: Slots,
    total: u32,
}

fn extents(runs: Vec<Run>) -> Vec<Extent> {
    let extent = |run: Run| Extent { at: u64::from(run.start) * BLOCK.0, len: bytes(run.len) };
    runs.into_iter().map(extent).collect()
}

fn run(extent: Extent) -> Run {
    let blocks = |bytes: u64| u32::try_from(bytes / BLOCK.0).unwrap_or(u32::MAX);
    Run { start: blocks(extent.at), len: blocks(extent.len.0) }
}

/// What blocks hold.
pub(super) fn bytes(blocks: u32) -> Bytes {
    Bytes(u64::from(blocks) * BLOCK.0)
}

impl Blocks {
    /// `total` blocks, none of them backed.
    pub(super) fn new(total: u32) -> Self {
        Self { free: Slots::empty(total), unbacked: Slots::full(total), total }
    }

    pub(super) fn backed(&self) -> u32 {
        self.total - self.unbacked.len()
    }

    pub(super) fn free(&self) -> u32 {
        self.free.len()
    }

    /// Backs the lowest blocks that are not, which are free then.
    pub(super) fn grow(&mut self, blocks: u32) -> Vec<Extent> {
        let runs = self.unbacked.take_lowest(blocks);
        runs.iter().for_each(|&run| self.free.insert(run));
        extents(runs)
    }

    /// Gives up the highest free blocks.
    pub(super) fn shrink(&mut self, blocks: u32) -> Vec<Extent> {
        let runs = self.free.take_highest(blocks);
        runs.iter().for_each(|&run| self.unbacked.insert(run));
        extents(runs)
    }

    /// Takes the lowest free blocks.
    pub(super) fn take(&mut self, blocks: u32) -> Vec<Extent> {
        extents(self.free.take_lowest(blocks))
    }

    pub(super) fn give_back(&mut self, extents: &[Extent]) {
        extents.iter().for_each(|&extent| self.free.insert(run(extent)));
    }
}
