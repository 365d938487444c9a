//! One transfer, as the fabric keeps it: what is still to be granted, what is out, and where it comes
//! from.

use std::ops::Range;

use millrace_types::{GpuIndex, Timestamp};

use super::lanes::Route;
use super::protocol::{Cargo, Outcome, PeerBlocks};
use crate::ids::BatchId;

/// Batches that a transfer has out: one runs, one is queued.
pub(super) const OUT_MAX: usize = 2;

#[derive(Debug)]
pub(super) struct Batch {
    pub(super) id: BatchId,
    pub(super) chunks: Range<u32>,
    pub(super) route: Route,
    /// Its name on the lanes.
    pub(super) hold: u64,
    /// When it counts as lost.
    pub(super) give_up: Timestamp,
    pub(super) revoked: bool,
}

/// Where what is still to be granted comes from.
#[derive(Debug)]
pub(super) enum Source {
    Host,
    /// A peer that has not said yet whether it locked the model.
    Asked(GpuIndex),
    Peer(PeerBlocks),
}

impl Source {
    pub(super) fn peer(&self) -> Option<GpuIndex> {
        match self {
            Self::Host => None,
            Self::Asked(gpu) => Some(*gpu),
            Self::Peer(peer) => Some(peer.gpu),
        }
    }
}

#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) gpu: GpuIndex,
    pub(super) cargo: Cargo,
    pub(super) source: Source,
    /// The peer that keeps the model for it.
    pub(super) locked: Option<GpuIndex>,
    /// What is still to be granted, last first.
    pub(super) waiting: Vec<Range<u32>>,
    /// What is out, in the order granted: the first runs.
    pub(super) out: Vec<Batch>,
    pub(super) next_batch: BatchId,
    pub(super) failures: u32,
    /// When it was served last, and the grant's number to tell equals apart.
    pub(super) served: (Timestamp, u64),
    /// How it ends once nothing is out, where that is decided already.
    pub(super) ending: Option<Outcome>,
}

impl Transfer {
    /// The route of its next batch.
    pub(super) fn route(&self) -> Route {
        Route { to: self.gpu, from: self.source.peer() }
    }

    /// Whether a batch of it can be granted, as far as it is concerned.
    pub(super) fn wants(&self) -> bool {
        self.ending.is_none() && !self.waiting.is_empty() && !matches!(self.source, Source::Asked(_))
    }
}
