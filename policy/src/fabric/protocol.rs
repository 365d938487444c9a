//! What the fabric is told, what it grants, and what it wants done.

use std::ops::Range;

use millrace_types::topology::LinkId;
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Timestamp};

use crate::elastic::ObjectKey;
use crate::ids::{BatchId, Generation, TransferId};
use crate::memory::{BLOCK, Run as BlockRun};
use crate::paths::{Direction, Hops, HostLinks};
use crate::rates::{Objective, Sharing};

/// Weights of a model, for whoever copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Weights {
    /// The model.
    pub model: ModelId,
    /// The mapping they go to.
    pub generation: Generation,
    /// Their size.
    pub bytes: Bytes,
}

impl Weights {
    /// Where a range of chunks lies in the weights: offset and size. The last chunk is short.
    #[must_use]
    pub fn span(&self, chunks: &Range<u32>) -> (Bytes, Bytes) {
        span(self.bytes, chunks)
    }
}

/// Bytes of an object, which become one of their own where they go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Piece {
    /// The object that they fill.
    pub object: ObjectKey,
    /// The one that they are of.
    pub of: ObjectKey,
    /// From where on.
    pub offset: Bytes,
    /// How many.
    pub bytes: Bytes,
}

/// Intermediate data that a GPU's executor copies to host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Leaving {
    /// The copy of it, as that executor knows it.
    pub copy: u64,
    /// How many bytes.
    pub bytes: Bytes,
}

/// What a transfer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cargo {
    /// A model's weights, to a GPU.
    Weights(Weights),
    /// Intermediate data, to a GPU.
    Object(Piece),
    /// Intermediate data, from a GPU to the host.
    ToHost(Leaving),
}

impl Cargo {
    /// Where a range of chunks lies in what is carried: offset and size. The last chunk is short.
    #[must_use]
    pub fn span(&self, chunks: &Range<u32>) -> (Bytes, Bytes) {
        span(self.bytes(), chunks)
    }

    /// The size of it all.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::Weights(weights) => weights.bytes,
            Self::Object(piece) => piece.bytes,
            Self::ToHost(leaving) => leaving.bytes,
        }
    }

    /// Which way it goes.
    #[must_use]
    pub fn direction(&self) -> Direction {
        match self {
            Self::Weights(_) | Self::Object(_) => Direction::ToGpu,
            Self::ToHost(_) => Direction::FromGpu,
        }
    }
}

fn span(size: Bytes, chunks: &Range<u32>) -> (Bytes, Bytes) {
    let at = |chunk: u32| (u64::from(chunk) * BLOCK.0).min(size.0);
    (Bytes(at(chunks.start)), Bytes(at(chunks.end) - at(chunks.start)))
}

/// Where a cargo lies on the GPU that it is copied from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerBlocks {
    /// Which GPU.
    pub gpu: GpuIndex,
    /// The executor whose memory it is: that of a later one holds something else.
    pub incarnation: Incarnation,
    /// In the order of the weights, or of the object.
    pub blocks: Vec<BlockRun>,
    /// Where it begins in the first block: part of an object may begin anywhere.
    pub skip: Bytes,
}

impl PeerBlocks {
    /// Those of some chunks.
    #[must_use]
    pub fn of(&self, chunks: &Range<u32>) -> Self {
        // Chunks that begin within blocks end in the one after.
        let end = chunks.end + u32::from(self.skip > Bytes::ZERO);
        let mut at = 0;
        let part = |run: &BlockRun| {
            let first = chunks.start.max(at) - at;
            let last = end.min(at + run.len).saturating_sub(at);
            at += run.len;
            (first < last).then(|| BlockRun { start: run.start + first, len: last - first })
        };
        Self { blocks: self.blocks.iter().filter_map(part).collect(), ..*self }
    }
}

/// Leave to copy one batch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The link that issues it: the first of the path.
    pub link: LinkId,
    /// Of which transfer.
    pub transfer: TransferId,
    /// Which batch of it.
    pub batch: BatchId,
    /// Whose executor copies: where to, or what it leaves for the host.
    pub gpu: GpuIndex,
    /// What.
    pub cargo: Cargo,
    /// Which chunks.
    pub chunks: Range<u32>,
    /// Where they lie on another GPU, where they come from there.
    pub peer: Option<PeerBlocks>,
    /// The GPUs by which they come from the host or go there, and the one they are for or of, where others
    /// forward them.
    pub via: Option<Hops>,
    /// Not to begin before.
    pub not_before: Timestamp,
    /// Not to begin after.
    pub not_after: Timestamp,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// Bytes want to go to a GPU, or from one to the host.
    Start {
        /// A new name for the transfer.
        transfer: TransferId,
        /// Where to, or what they leave for the host.
        gpu: GpuIndex,
        /// What.
        cargo: Cargo,
        /// Which chunks of it, in this order; not empty.
        chunks: Vec<Range<u32>>,
        /// The GPU to copy them from, where not from the host. An object that no route leads for, or
        /// that is not kept there, fails. It means nothing for what goes to the host.
        from: Option<GpuIndex>,
        /// By when the bytes are wanted, from now on; `None` where nobody waits for them. It counts for
        /// what comes from the host or goes there.
        objective: Option<Objective>,
    },
    /// Somebody waits for a transfer that nobody waited for when it began.
    Hasten {
        /// Which.
        transfer: TransferId,
        /// By when the bytes are wanted, from now on.
        objective: Objective,
    },
    /// A GPU keeps the cargo of a transfer where it is (T25).
    Locked {
        /// For which transfer.
        transfer: TransferId,
        /// Where it is.
        peer: PeerBlocks,
    },
    /// A GPU has not all of it, or cannot keep it.
    NotLocked {
        /// For which transfer.
        transfer: TransferId,
    },
    /// A GPU would rather not have it copied from there any more. It keeps it until it is unlocked.
    LockLost {
        /// By which transfer.
        transfer: TransferId,
    },
    /// They are not wanted any more.
    Cancel {
        /// Which transfer.
        transfer: TransferId,
    },
    /// A batch was copied.
    Done {
        /// Of which transfer.
        transfer: TransferId,
        /// Which.
        batch: BatchId,
    },
    /// A batch was not copied.
    Failed {
        /// Of which transfer.
        transfer: TransferId,
        /// Which.
        batch: BatchId,
        /// Why.
        why: BatchFailure,
    },
    /// A GPU lost everything: transfers to it, and from it to the host, end without another word; those of
    /// weights from it to other GPUs go on from the host, those of objects fail.
    Down {
        /// Which.
        gpu: GpuIndex,
    },
    /// An operator changed how the links between the host and GPUs are used.
    Change {
        /// How transfers share the links.
        sharing: Sharing,
        /// The links that data crosses.
        host_links: HostLinks,
    },
    /// Time passed.
    Tick,
}

/// Why a batch was not copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BatchFailure {
    /// It was taken back, or could not begin in time: nothing is wrong with it.
    NotBegun,
    /// The copy failed.
    Faulty,
}

/// How a transfer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Everything has arrived.
    Complete,
    /// It was cancelled; what had arrived is there.
    Cancelled,
    /// It failed too often, or an object can no longer be had from where it was; what had arrived is
    /// there.
    Failed,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Have the path's first link issue a batch.
    Grant {
        /// The batch.
        grant: Grant,
    },
    /// Ask a GPU to keep what a transfer carries until it is unlocked, and where it is.
    Lock {
        /// Which GPU.
        gpu: GpuIndex,
        /// For which transfer.
        transfer: TransferId,
        /// What.
        cargo: Cargo,
    },
    /// Nothing of a transfer is copied from a GPU any more.
    Unlock {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which transfer.
        transfer: TransferId,
    },
    /// Have the path's first link take a batch back, if it has not begun.
    Revoke {
        /// That link.
        link: LinkId,
        /// Whose executor was to copy it.
        gpu: GpuIndex,
        /// Of which transfer.
        transfer: TransferId,
        /// Which batch.
        batch: BatchId,
    },
    /// Tell another link of the path what crossed it.
    Carried {
        /// That link.
        link: LinkId,
        /// Which way.
        direction: Direction,
        /// How much.
        size: Bytes,
    },
    /// Tell the GPU what has arrived there, or at the host.
    Arrived {
        /// Which GPU.
        gpu: GpuIndex,
        /// What of.
        cargo: Cargo,
        /// Which chunks.
        chunks: Range<u32>,
    },
    /// Tell the GPU that a transfer ended; nothing of it is out any more.
    Ended {
        /// Which GPU: as it was started.
        gpu: GpuIndex,
        /// Which.
        transfer: TransferId,
        /// How.
        outcome: Outcome,
        /// The GPU it came from to the end, where not from the host.
        from: Option<GpuIndex>,
        /// The routes that an object took from another GPU.
        routes: Vec<Hops>,
    },
}
