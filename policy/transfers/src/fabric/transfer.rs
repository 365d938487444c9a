//! The state of one transfer: the chunks that are still to be granted, the batches in flight, and
//! the source.

use std::ops::Range;

use millrace_types::{Bytes, GpuIndex, Timestamp};

use super::host_link_shares::{GrantReason, TransferDeadline};
use super::lanes::{OUT_MAX, TransferRoute};
use super::protocol::{PeerBlocks, TransferCargo, TransferOutcome};
use crate::batch::BATCH_CHUNKS;
use crate::paths::RouteHops;
use crate::rates::RateGuarantee;
use millrace_core::ids::BatchId;

#[derive(Debug)]
pub(super) struct BatchInFlight {
    pub(super) id: BatchId,
    pub(super) chunks: Range<u32>,
    pub(super) route: TransferRoute,
    /// The key of the batch's holds on the lanes.
    pub(super) hold: u64,
    /// Time after which the batch counts as lost.
    pub(super) give_up: Timestamp,
    pub(super) revoked: bool,
    /// Earliest start of the copy.
    pub(super) not_before: Timestamp,
    /// The rule by which the batch was granted.
    pub(super) turn: GrantReason,
    /// The value of [`TransferState::served`] before the grant.
    pub(super) served_before: (Timestamp, u64),
}

/// The source of the chunks that are still to be granted.
#[derive(Debug)]
pub(super) enum TransferSource {
    /// Host memory. For data that goes to the host: the transfer's own GPU.
    Host,
    /// A peer that has not yet reported whether it locked the cargo.
    Asked(GpuIndex),
    /// A peer that locked the cargo.
    Peer(PeerBlocks),
}

impl TransferSource {
    pub(super) fn peer(&self) -> Option<GpuIndex> {
        match self {
            Self::Host => None,
            Self::Asked(gpu) => Some(*gpu),
            Self::Peer(peer) => Some(peer.gpu),
        }
    }
}

#[derive(Debug)]
pub(super) struct TransferState {
    /// The destination GPU, or the source of data for the host.
    pub(super) gpu: GpuIndex,
    pub(super) cargo: TransferCargo,
    pub(super) source: TransferSource,
    /// The peer that keeps the cargo locked for this transfer.
    pub(super) locked: Option<GpuIndex>,
    /// Chunks that are still to be granted, in reverse order.
    pub(super) waiting: Vec<Range<u32>>,
    /// Batches in flight, in the order of their grants. The first batch of each route runs.
    pub(super) out: Vec<BatchInFlight>,
    pub(super) next_batch: BatchId,
    pub(super) failures: u32,
    /// The time of the last grant and the grant's number, which breaks ties.
    pub(super) served: (Timestamp, u64),
    /// The outcome, if it is already decided while batches are still in flight.
    pub(super) ending: Option<TransferOutcome>,
    /// The routes of further batches of an object that comes from another GPU. Empty for every
    /// other transfer, because it has a single route.
    pub(super) routes: Vec<TransferRoute>,
    /// The routes by which batches arrived.
    pub(super) used: Vec<RouteHops>,
    /// Whether other GPUs may forward data between the host and this GPU. False after a forwarded
    /// batch failed.
    pub(super) forwarded: bool,
    /// The deadline of the request that waits for the transfer; `None` if no request waits.
    pub(super) wanted: Option<TransferDeadline>,
    /// The rate guarantee of the transfer while it comes from the host or goes there.
    pub(super) guarantee: RateGuarantee,
    pub(super) began: Timestamp,
    /// Whether the wait for the first batch was counted.
    pub(super) begun: bool,
    /// Time of the last measurement of the transfer's rate.
    pub(super) measured: Timestamp,
    /// Whether a queued batch was revoked for this transfer when the transfer was new. A second
    /// revocation would be useless: the transfer that takes the slot goes first by the rules, so
    /// the batch would be revoked again without end.
    pub(super) took_back: bool,
}

impl TransferState {
    /// Returns the routes that the next batch may take.
    pub(super) fn routes(&self) -> impl Iterator<Item = TransferRoute> {
        let only = match (self.source.peer(), self.cargo) {
            (None, _) => self.host_route(),
            (Some(from), TransferCargo::Weights(_)) => Some(TransferRoute::direct(from, self.gpu)),
            (Some(_), TransferCargo::Object(_) | TransferCargo::ToHost(_)) => None,
        };
        only.into_iter().chain(self.routes.iter().copied())
    }

    /// Whether the transfer's own state allows a grant: chunks are left, and the source is known.
    pub(super) fn wants(&self) -> bool {
        self.ending.is_none() && !self.waiting.is_empty() && !matches!(self.source, TransferSource::Asked(_))
    }

    /// Whether the transfer may have another batch in flight on a route.
    pub(super) fn takes_more(&self, route: &TransferRoute) -> bool {
        match self.cargo {
            TransferCargo::Weights(_) | TransferCargo::ToHost(_) => {
                self.out_unforwarded(self.out.len()) < OUT_MAX
            }
            TransferCargo::Object(_) => {
                self.out.iter().filter(|batch| batch.route == *route).count() < OUT_MAX
            }
        }
    }

    /// Returns the positions in `out` of batches that wait behind other batches of this transfer.
    pub(super) fn queued(&self) -> impl Iterator<Item = usize> {
        let behind = |place: &usize| {
            let route = self.out[*place].route;
            match self.cargo {
                TransferCargo::Weights(_) | TransferCargo::ToHost(_) => {
                    route.forwarded().is_none() && self.out_unforwarded(*place) > 0
                }
                TransferCargo::Object(_) => self.out[..*place].iter().any(|batch| batch.route == route),
            }
        };
        (1..self.out.len()).filter(behind)
    }

    /// Returns how many of the first `first` batches in flight are not forwarded by another GPU.
    fn out_unforwarded(&self, first: usize) -> usize {
        self.out[..first].iter().filter(|batch| batch.route.forwarded().is_none()).count()
    }

    /// Whether other GPUs may forward the next batch.
    pub(super) fn may_be_forwarded(&self) -> bool {
        self.forwarded && matches!(self.source, TransferSource::Host) && self.wants()
    }

    /// Returns the size of the next batch; zero if no chunks are left.
    pub(super) fn next_size(&self) -> Bytes {
        let next = self.waiting.last();
        next.map_or(Bytes::ZERO, |next| {
            self.cargo.span(&(next.start..next.end.min(next.start + BATCH_CHUNKS.get()))).1
        })
    }

    /// Returns the size of the chunks that are still to be granted.
    pub(super) fn left(&self) -> Bytes {
        self.waiting.iter().map(|chunks| self.cargo.span(chunks).1).sum()
    }

    /// Returns the route between the host and the GPU, unless the transfer copies from a peer.
    pub(super) fn host_route(&self) -> Option<TransferRoute> {
        matches!(self.source, TransferSource::Host)
            .then(|| TransferRoute::Host(self.cargo.direction(), self.gpu))
    }

    /// Whether the transfer copies an object from another GPU. No other place has these bytes.
    pub(super) fn is_of_peers_object(&self) -> bool {
        matches!(self.cargo, TransferCargo::Object(_)) && self.source.peer().is_some()
    }
}
