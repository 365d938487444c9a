//! Blocks of device memory as extents in the executor protocol.

use millrace_memory::{BLOCK, BlockRun};
use millrace_proto::executor::{Extent, PeerSource};
use millrace_transfers::fabric::PeerBlocks;
use millrace_types::Bytes;

/// Returns a program's blocks as consecutive extents of its address range. The range is as long as the
/// weights, rounded up to whole pages. Memory beyond the weights (the rest of the last block, blocks for
/// runs) has no addresses in the range.
pub(super) fn of_program(blocks: &[BlockRun], weights: Bytes) -> Vec<Extent> {
    let range = weights.0.next_multiple_of(rustix::param::page_size() as u64);
    let mut range_offset = 0;
    let extent = |run: &BlockRun| {
        let bytes = (BLOCK.0 * u64::from(run.len)).min(range - range_offset);
        let extent = Extent { range_offset, device_offset: BLOCK.0 * u64::from(run.start), bytes };
        range_offset += bytes;
        (bytes > 0).then_some(extent)
    };
    blocks.iter().filter_map(extent).collect()
}

/// Returns the extents on another GPU that a copy reads. The first extent holds the bytes from `offset` of
/// the weights, or of the object.
pub(super) fn of_peer(peer: &PeerBlocks, offset: Bytes) -> PeerSource {
    let mut range_offset = offset.0;
    let mut skip = peer.skip.0;
    let extent = |run: &BlockRun| {
        let skipped = std::mem::take(&mut skip);
        let device_offset = BLOCK.0 * u64::from(run.start) + skipped;
        let bytes = BLOCK.0 * u64::from(run.len) - skipped;
        let extent = Extent { range_offset, device_offset, bytes };
        range_offset += bytes;
        extent
    };
    let extents = peer.blocks.iter().map(extent).collect();
    PeerSource { gpu: peer.gpu.0, incarnation: peer.incarnation.0, extents }
}
