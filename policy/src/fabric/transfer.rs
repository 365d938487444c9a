//! One transfer, as the fabric keeps it: what is still to be granted, what is out, and where it comes
//! from.

use std::ops::Range;

use millrace_types::{Bytes, GpuIndex, Timestamp};

use super::BATCH_CHUNKS;
use super::lanes::Route;
use super::protocol::{Cargo, Outcome, PeerBlocks};
use super::sharing::{Turn, Wanted};
use crate::ids::BatchId;
use crate::paths::Hops;
use crate::rates::Standing;

/// Batches that a transfer has out on one route: one runs, one is queued.
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
    /// Not to begin before.
    pub(super) not_before: Timestamp,
    /// Why it was its turn.
    pub(super) turn: Turn,
}

/// Where what is still to be granted comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// The host, or, of what goes there, the transfer's own GPU.
    Host,
    /// A peer that has not said yet whether it locked the cargo.
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
    /// Where to, or what it leaves for the host.
    pub(super) gpu: GpuIndex,
    pub(super) cargo: Cargo,
    pub(super) source: Source,
    /// The peer that keeps the cargo for it.
    pub(super) locked: Option<GpuIndex>,
    /// What is still to be granted, last first.
    pub(super) waiting: Vec<Range<u32>>,
    /// What is out, in the order granted: the first runs, and the first of each route.
    pub(super) out: Vec<Batch>,
    pub(super) next_batch: BatchId,
    pub(super) failures: u32,
    /// When it was served last, and the grant's number to tell equals apart.
    pub(super) served: (Timestamp, u64),
    /// How it ends once nothing is out, where that is decided already.
    pub(super) ending: Option<Outcome>,
    /// Where new batches of an object may go that comes from a GPU. Others have one route.
    pub(super) routes: Vec<Route>,
    /// Those by which some came.
    pub(super) used: Vec<Hops>,
    /// Whether other GPUs may forward what comes from the host or goes there: until a batch of theirs fails.
    pub(super) forwarded: bool,
    /// By when somebody wants it.
    pub(super) wanted: Option<Wanted>,
    /// What it could count on, once it comes from the host or goes there.
    pub(super) standing: Standing,
    pub(super) began: Timestamp,
    /// Whether the wait for its first batch was counted.
    pub(super) begun: bool,
    /// When its rate was measured last.
    pub(super) measured: Timestamp,
    /// Whether a queued batch was taken back for it, as a newcomer. Once is enough: who takes the place
    /// then goes before it by the rules, and would be taken back again for ever.
    pub(super) took_back: bool,
}

impl Transfer {
    /// The routes of its next batch.
    pub(super) fn routes(&self) -> impl Iterator<Item = Route> {
        let only = match (self.source.peer(), self.cargo) {
            (None, _) => self.host_route(),
            (Some(from), Cargo::Weights(_)) => Some(Route::direct(from, self.gpu)),
            (Some(_), Cargo::Object(_) | Cargo::ToHost(_)) => None,
        };
        only.into_iter().chain(self.routes.iter().copied())
    }

    /// Whether a batch of it can be granted, as far as it is concerned.
    pub(super) fn wants(&self) -> bool {
        self.ending.is_none() && !self.waiting.is_empty() && !matches!(self.source, Source::Asked(_))
    }

    /// Whether it may have another batch out on a route.
    pub(super) fn takes_more(&self, route: &Route) -> bool {
        match self.cargo {
            Cargo::Weights(_) | Cargo::ToHost(_) => self.out_unforwarded(self.out.len()) < OUT_MAX,
            Cargo::Object(_) => self.out.iter().filter(|batch| batch.route == *route).count() < OUT_MAX,
        }
    }

    /// The batches that are out behind others of its own, by place.
    pub(super) fn queued(&self) -> impl Iterator<Item = usize> {
        let behind = |place: &usize| {
            let route = self.out[*place].route;
            match self.cargo {
                Cargo::Weights(_) | Cargo::ToHost(_) => {
                    route.forwarded().is_none() && self.out_unforwarded(*place) > 0
                }
                Cargo::Object(_) => self.out[..*place].iter().any(|batch| batch.route == route),
            }
        };
        (1..self.out.len()).filter(behind)
    }

    /// How many of the first batches that are out come by a way of its own.
    fn out_unforwarded(&self, first: usize) -> usize {
        self.out[..first].iter().filter(|batch| batch.route.forwarded().is_none()).count()
    }

    /// Whether other GPUs may forward its next batch.
    pub(super) fn may_be_forwarded(&self) -> bool {
        self.forwarded && matches!(self.source, Source::Host) && self.wants()
    }

    /// The size of its next batch.
    pub(super) fn next_size(&self) -> Bytes {
        let next = self.waiting.last();
        next.map_or(Bytes::ZERO, |next| {
            self.cargo.span(&(next.start..next.end.min(next.start + BATCH_CHUNKS.get()))).1
        })
    }

    /// What was not granted of it.
    pub(super) fn left(&self) -> Bytes {
        self.waiting.iter().map(|chunks| self.cargo.span(chunks).1).sum()
    }

    /// The way that it takes between the host and its GPU, where it does.
    pub(super) fn host_route(&self) -> Option<Route> {
        matches!(self.source, Source::Host).then(|| Route::Host(self.cargo.direction(), self.gpu))
    }

    /// Whether its bytes are of an object that another GPU has: nowhere else may have them.
    pub(super) fn is_of_peers_object(&self) -> bool {
        matches!(self.cargo, Cargo::Object(_)) && self.source.peer().is_some()
    }
}
