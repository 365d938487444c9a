//! What the fabric is told, what it grants, and what it wants done.

use std::ops::Range;

use millrace_types::topology::LinkId;
use millrace_types::{Bytes, GpuIndex, ModelId, Timestamp};

use crate::ids::{BatchId, Generation, TransferId};
use crate::memory::BLOCK;

/// What a transfer carries, for whoever copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cargo {
    /// The model whose weights they are.
    pub model: ModelId,
    /// The mapping they go to.
    pub generation: Generation,
    /// The weights' size.
    pub weights: Bytes,
}

impl Cargo {
    /// Where a range of chunks lies in the weights: offset and size. The last chunk is short.
    #[must_use]
    pub fn span(&self, chunks: &Range<u32>) -> (Bytes, Bytes) {
        let at = |chunk: u32| (u64::from(chunk) * BLOCK.0).min(self.weights.0);
        (Bytes(at(chunks.start)), Bytes(at(chunks.end) - at(chunks.start)))
    }
}

/// Leave to copy one batch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grant {
    /// Of which transfer.
    pub transfer: TransferId,
    /// Which batch of it.
    pub batch: BatchId,
    /// Where to.
    pub gpu: GpuIndex,
    /// What.
    pub cargo: Cargo,
    /// Which chunks.
    pub chunks: Range<u32>,
    /// Not to begin before.
    pub not_before: Timestamp,
    /// Not to begin after.
    pub not_after: Timestamp,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// Bytes want to go to a GPU.
    Start {
        /// A new name for the transfer.
        transfer: TransferId,
        /// Where to.
        gpu: GpuIndex,
        /// What.
        cargo: Cargo,
        /// Which chunks of it, in this order; not empty.
        chunks: Vec<Range<u32>>,
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
    /// A GPU lost everything: its transfers end without another word.
    Down {
        /// Which.
        gpu: GpuIndex,
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
    /// It failed too often; what had arrived is there.
    Failed,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Have the path's first link issue a batch.
    Grant {
        /// That link.
        link: LinkId,
        /// The batch.
        grant: Grant,
    },
    /// Have the path's first link take a batch back, if it has not begun.
    Revoke {
        /// That link.
        link: LinkId,
        /// Where it was to go.
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
        /// How much.
        size: Bytes,
    },
    /// Tell the GPU what has arrived.
    Arrived {
        /// Where.
        gpu: GpuIndex,
        /// What of.
        model: ModelId,
        /// Which mapping.
        generation: Generation,
        /// Which chunks.
        chunks: Range<u32>,
    },
    /// Tell the GPU that a transfer ended; nothing of it is out any more.
    Ended {
        /// Where to.
        gpu: GpuIndex,
        /// Which.
        transfer: TransferId,
        /// How.
        outcome: Outcome,
    },
}
