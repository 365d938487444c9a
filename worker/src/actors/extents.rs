//! Blocks of device memory as extents in the executor protocol.

use millrace_memory::{BlockRun, BlockSize};
use millrace_proto::executor::{Extent, PeerSource};
use millrace_transfers::fabric::PeerBlocks;
use millrace_types::Bytes;

/// Returns the blocks of a program or an object as consecutive extents of its address range. Extents are
/// whole blocks, because a device maps a block as a whole. So the last extent may end behind the weights
/// or the object, and the executor reserves its address ranges in whole blocks too. Memory for runs is not
/// among the blocks and has no addresses in the range.
pub(super) fn of_blocks(blocks: &[BlockRun], block: BlockSize) -> Vec<Extent> {
    let mut range_offset = 0;
    let extent = |run: &BlockRun| {
        let bytes = block.bytes(run.len).get();
        let extent = Extent { range_offset, device_offset: block.bytes(run.start).get(), bytes };
        range_offset += bytes;
        extent
    };
    blocks.iter().map(extent).collect()
}

/// Returns the extents on another GPU that a copy reads. The first extent holds the bytes from `offset` of
/// the weights, or of the object. The last extent ends with its block, behind the bytes of the copy.
pub(super) fn of_peer(peer: &PeerBlocks, offset: Bytes) -> PeerSource {
    let mut range_offset = offset.0;
    let mut skip = peer.skip.0;
    let extent = |run: &BlockRun| {
        let skipped = std::mem::take(&mut skip);
        let device_offset = peer.block.bytes(run.start).get() + skipped;
        let bytes = peer.block.bytes(run.len).get() - skipped;
        let extent = Extent { range_offset, device_offset, bytes };
        range_offset += bytes;
        extent
    };
    let extents = peer.blocks.iter().map(extent).collect();
    PeerSource { gpu: peer.gpu.0, incarnation: peer.incarnation.0, extents }
}

#[cfg(test)]
mod tests {
    use millrace_types::{GpuIndex, Incarnation};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn extent(range_offset: u64, device_offset: u64, bytes: u64) -> Extent {
        Extent { range_offset: range_offset * MIB, device_offset: device_offset * MIB, bytes: bytes * MIB }
    }

    fn runs() -> Vec<BlockRun> {
        vec![BlockRun { start: 3, len: 1 }, BlockRun { start: 7, len: 2 }]
    }

    #[test]
    fn extents_are_whole_blocks_of_the_gpu() {
        let default = [extent(0, 6, 2), extent(2, 14, 4)];
        assert_eq!(of_blocks(&runs(), BlockSize::DEFAULT), default);
        let block = BlockSize::new(Bytes::mib(16)).unwrap();
        assert_eq!(of_blocks(&runs(), block), [extent(0, 48, 16), extent(16, 112, 32)]);
    }

    #[test]
    fn a_batch_from_a_peer_may_begin_inside_a_block() {
        let block = BlockSize::new(Bytes::mib(16)).unwrap();
        let peer = PeerBlocks {
            gpu: GpuIndex(1),
            incarnation: Incarnation(5),
            blocks: runs(),
            block,
            skip: Bytes::ZERO,
        };
        let source = of_peer(&peer.of(&(5..10)), Bytes::mib(10));
        let extents = vec![extent(10, 58, 6), extent(16, 112, 16)];
        assert_eq!(source, PeerSource { gpu: 1, incarnation: 5, extents });
    }
}
