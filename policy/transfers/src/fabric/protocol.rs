//! The events that the fabric handles, the grants that it gives, and the actions that it returns.

use std::ops::Range;

use millrace_types::topology::LinkId;
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Timestamp};

use crate::paths::{HostDirection, HostLinks, RouteHops};
use crate::rates::{TransferObjective, TransferSharing};
use millrace_core::ids::ObjectKey;
use millrace_core::ids::{BatchId, Generation, TransferId};
use millrace_memory::{BlockRun, BlockSize, CHUNK};

/// Weights of a model, as the copying executor is told about them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightsCargo {
    pub model: ModelId,
    /// The mapping of GPU memory that the weights are copied into.
    pub generation: Generation,
    pub bytes: Bytes,
}

impl WeightsCargo {
    /// Returns the offset and the size of a range of chunks within the weights. The last chunk is
    /// short.
    #[must_use]
    pub fn span(&self, chunks: &Range<u32>) -> (Bytes, Bytes) {
        span(self.bytes, chunks)
    }
}

/// A part of an object that fills an object of its own on the destination GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ObjectPiece {
    /// The object on the destination GPU that the bytes fill.
    pub object: ObjectKey,
    /// The object that the bytes are a part of.
    pub of: ObjectKey,
    /// Offset of the first byte in the source object.
    pub offset: Bytes,
    /// Number of bytes.
    pub bytes: Bytes,
}

/// Intermediate data that a GPU's executor copies to host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OutgoingCopy {
    /// The name of this copy at that executor.
    pub copy: u64,
    pub bytes: Bytes,
}

/// The data that a transfer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransferCargo {
    /// A model's weights, copied to a GPU.
    Weights(WeightsCargo),
    /// Intermediate data, copied to a GPU.
    Object(ObjectPiece),
    /// Intermediate data, copied from a GPU to the host.
    ToHost(OutgoingCopy),
}

impl TransferCargo {
    /// Returns the offset and the size of a range of chunks within the cargo. The last chunk is
    /// short.
    #[must_use]
    pub fn span(&self, chunks: &Range<u32>) -> (Bytes, Bytes) {
        span(self.bytes(), chunks)
    }

    /// Returns the size of the whole cargo.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::Weights(weights) => weights.bytes,
            Self::Object(piece) => piece.bytes,
            Self::ToHost(leaving) => leaving.bytes,
        }
    }

    /// Returns the direction in which the cargo crosses host links.
    #[must_use]
    pub fn direction(&self) -> HostDirection {
        match self {
            Self::Weights(_) | Self::Object(_) => HostDirection::ToGpu,
            Self::ToHost(_) => HostDirection::FromGpu,
        }
    }
}

fn span(size: Bytes, chunks: &Range<u32>) -> (Bytes, Bytes) {
    let at = |chunk: u32| (u64::from(chunk) * CHUNK.0).min(size.0);
    (Bytes(at(chunks.start)), Bytes(at(chunks.end) - at(chunks.start)))
}

/// The blocks of a cargo on the GPU that it is copied from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerBlocks {
    pub gpu: GpuIndex,
    /// The executor process that owns the memory. A later incarnation holds other data in these
    /// blocks.
    pub incarnation: Incarnation,
    /// The blocks, in the order of the weights' or the object's bytes.
    pub blocks: Vec<BlockRun>,
    /// Size of a block on that GPU.
    pub block: BlockSize,
    /// Offset of the cargo in the first block: a part of an object may begin anywhere in a block.
    pub skip: Bytes,
}

impl PeerBlocks {
    /// Returns the blocks that hold the given chunks.
    #[must_use]
    pub fn of(&self, chunks: &Range<u32>) -> Self {
        let at = |chunk: u32| CHUNK.0 * u64::from(chunk);
        self.part(at(chunks.start)..at(chunks.end))
    }

    /// Returns the blocks that hold the cargo from `offset` to its end.
    #[must_use]
    pub fn after(&self, offset: Bytes) -> Self {
        self.part(offset.0..u64::MAX)
    }

    /// Returns the blocks that hold these bytes of the cargo.
    fn part(&self, bytes: Range<u64>) -> Self {
        let block = self.block.get().0;
        let first = bytes.start.saturating_add(self.skip.0);
        // A part that begins inside a block may end in the following block.
        let end = bytes.end.saturating_add(self.skip.0).div_ceil(block);
        let skip = Bytes(first % block);
        let first = first / block;
        let mut at = 0;
        let part = |run: &BlockRun| {
            let len = u64::from(run.len);
            let from = first.saturating_sub(at).min(len) as u32;
            let to = end.saturating_sub(at).min(len) as u32;
            at += len;
            (from < to).then(|| BlockRun { start: run.start + from, len: to - from })
        };
        Self { blocks: self.blocks.iter().filter_map(part).collect(), skip, ..*self }
    }
}

/// Permission to copy one batch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BatchGrant {
    /// The link that issues the grant: the first link of the path.
    pub link: LinkId,
    pub transfer: TransferId,
    /// The batch's number within its transfer.
    pub batch: BatchId,
    /// The GPU whose executor copies: the destination, or the source of data for the host.
    pub gpu: GpuIndex,
    pub cargo: TransferCargo,
    /// The chunks of the cargo that the batch carries.
    pub chunks: Range<u32>,
    /// The blocks of these chunks on the peer GPU; `None` if the chunks do not come from a peer.
    pub peer: Option<PeerBlocks>,
    /// The GPUs that forward the batch between the host and a GPU, including that GPU; `None` if no
    /// GPU forwards it.
    pub via: Option<RouteHops>,
    /// Earliest start of the copy.
    pub not_before: Timestamp,
    /// Latest start of the copy.
    pub not_after: Timestamp,
}

/// An event that the fabric handles.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A transfer is requested, to a GPU or from a GPU to the host.
    Start {
        /// A new name for the transfer.
        transfer: TransferId,
        /// The destination GPU, or the source of data for the host.
        gpu: GpuIndex,
        cargo: TransferCargo,
        /// The chunks of the cargo, in the order to copy them; not empty.
        chunks: Vec<Range<u32>>,
        /// The GPU to copy from; `None` for the host. A transfer of an object fails if no route
        /// leads from that GPU or the GPU does not keep the object. Ignored for data that goes to
        /// the host.
        from: Option<GpuIndex>,
        /// The deadline, counted from now; `None` if no request waits. Used only for transfers
        /// between the host and a GPU.
        objective: Option<TransferObjective>,
    },
    /// A request now waits for a transfer that no request waited for when it began.
    Hasten {
        transfer: TransferId,
        /// The deadline, counted from now.
        objective: TransferObjective,
    },
    /// A GPU has locked the cargo of a transfer in its memory (T25).
    Locked {
        transfer: TransferId,
        /// The blocks of the cargo on that GPU.
        peer: PeerBlocks,
    },
    /// A GPU lacks part of the cargo, or cannot lock it.
    NotLocked { transfer: TransferId },
    /// A GPU withdraws the offer to be a source. The GPU keeps the cargo until the cargo is
    /// unlocked.
    LockLost {
        /// The transfer that copies from that GPU.
        transfer: TransferId,
    },
    /// The bytes of a transfer are no longer needed.
    Cancel { transfer: TransferId },
    /// A batch was copied.
    Done { transfer: TransferId, batch: BatchId },
    /// A batch was not copied.
    Failed { transfer: TransferId, batch: BatchId, why: BatchFailure },
    /// A GPU lost all memory. Transfers to this GPU, and from this GPU to the host, end without a
    /// report. Transfers of weights from this GPU to other GPUs continue from the host; transfers
    /// of objects from this GPU fail.
    Down { gpu: GpuIndex },
    /// An operator changed how the links between the host and GPUs are used.
    Change {
        /// The rule by which transfers share the links.
        sharing: TransferSharing,
        /// The links that data crosses.
        host_links: HostLinks,
    },
    /// Time has passed; no other event happened.
    Tick,
}

/// The reason why a batch was not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BatchFailure {
    /// The batch was revoked, or could not begin in time. Nothing is broken.
    NotBegun,
    /// The copy failed.
    Faulty,
}

/// The outcome of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransferOutcome {
    /// All bytes have arrived.
    Complete,
    /// The transfer was cancelled. Bytes that arrived before remain.
    Cancelled,
    /// The transfer failed too often, or the object is no longer available at the source. Bytes
    /// that arrived before remain.
    Failed,
}

/// An action that the fabric asks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Have the path's first link issue a batch.
    Grant { grant: BatchGrant },
    /// Ask a GPU to lock the cargo of a transfer until the fabric unlocks it, and to report the
    /// cargo's blocks.
    Lock {
        gpu: GpuIndex,
        /// The transfer that needs the lock.
        transfer: TransferId,
        cargo: TransferCargo,
    },
    /// Tell a GPU that a transfer copies nothing from it any longer.
    Unlock {
        /// The GPU that holds the lock.
        gpu: GpuIndex,
        transfer: TransferId,
    },
    /// Have the path's first link revoke a batch that has not begun.
    Revoke {
        /// The first link of the path.
        link: LinkId,
        /// The GPU whose executor was to copy the batch.
        gpu: GpuIndex,
        transfer: TransferId,
        batch: BatchId,
    },
    /// Report bytes that crossed the path to another link of the path.
    Carried {
        /// The link that the bytes crossed.
        link: LinkId,
        /// The direction of the bytes.
        direction: HostDirection,
        size: Bytes,
    },
    /// Tell the GPU which chunks have arrived in its memory, or at the host.
    Arrived { gpu: GpuIndex, cargo: TransferCargo, chunks: Range<u32> },
    /// Tell the GPU that a transfer ended. None of its batches is in flight.
    Ended {
        /// The GPU that the transfer was started for.
        gpu: GpuIndex,
        transfer: TransferId,
        outcome: TransferOutcome,
        /// The GPU that the transfer copied from until its end; `None` for the host.
        from: Option<GpuIndex>,
        /// The routes that the object took from another GPU.
        routes: Vec<RouteHops>,
    },
}
