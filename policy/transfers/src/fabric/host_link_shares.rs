//! The shares of the host's links, and the rules by which batches are granted there.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::topology::{LinkId, Topology};
use millrace_types::{BytesPerSec, Timestamp};

use super::tally::TransferCounts;
use crate::paths::PerDirection;
use crate::rates::{Config, RateAllocator, RatedBatch, TransferObjective, TransferSharing};
use millrace_core::ids::{FlowId, TransferId};

/// While a transfer without a rate waits at a link, one batch of this many there goes to such a transfer. This
/// share is ours: in the paper such transfers just wait.
pub const SPARE_EVERY: u32 = 16;
/// Batches that may pass a transfer without a rate before the transfer's turn.
pub(super) const SPARE_DUE: u32 = SPARE_EVERY - 1;
/// Batches that may pass before a transfer without a rate goes even before a new transfer, and before its
/// batch can no longer be revoked for one.
pub(super) const SPARE_FIRM: u32 = 2 * SPARE_EVERY - 1;

/// The deadline of the answer, and the time of the inference after the transfer.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferDeadline {
    pub(super) by: Timestamp,
    pub(super) infer: Duration,
}

impl TransferDeadline {
    pub(super) fn new(now: Timestamp, objective: TransferObjective) -> Self {
        Self { by: now + objective.slo, infer: objective.infer }
    }

    /// Returns the time at which the bytes must have arrived.
    pub(super) fn there_by(self) -> Timestamp {
        Timestamp(self.by.0.saturating_sub(u64::try_from(self.infer.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// The rule by which a batch was granted.
#[derive(Debug)]
pub(super) enum GrantReason {
    /// The transfer had no rate and was served longest ago. `passed` is the number of batches that
    /// had passed transfers without a rate.
    Longest { passed: u32, spare: Option<RatedBatch> },
    /// The batch was due by the transfer's rate.
    Due(RatedBatch),
    /// The transfer's own route had no room, and a forwarding route was idle. `promised` is false
    /// if the batch was granted before the transfer had a rate guarantee; the batch is then not
    /// part of the measured rate.
    Forwarded { promised: bool },
}

impl GrantReason {
    /// Whether a batch with this turn may be revoked for a new transfer. `newcomer` and `other` are the
    /// deadlines of the new transfer and of the batch's transfer.
    pub(super) fn makes_way_for(
        &self,
        newcomer: Option<TransferDeadline>,
        other: Option<TransferDeadline>,
    ) -> bool {
        match self {
            Self::Longest { passed, .. } => *passed < SPARE_FIRM,
            Self::Forwarded { .. } => true,
            Self::Due(_) => match (newcomer, other) {
                (Some(newcomer), Some(other)) => newcomer.there_by() < other.there_by(),
                _ => false,
            },
        }
    }
}

/// The shares of the host's links.
#[derive(Debug)]
pub(super) struct HostLinkShares {
    pub(super) sharing: TransferSharing,
    pub(super) ways: PerDirection<HostDirectionState>,
    /// The time of the event that is being handled.
    pub(super) now: Timestamp,
    pub(super) tally: TransferCounts,
}

/// The state of the host's links in one direction.
#[derive(Debug)]
pub(super) struct HostDirectionState {
    /// The transfers that requests wait for; `None` unless links are shared by objective.
    pub(super) rates: Option<RateAllocator>,
    /// By meter: batches that passed transfers without a rate since a batch of theirs was granted.
    pub(super) passed: BTreeMap<LinkId, u32>,
}

impl HostDirectionState {
    pub(super) fn meter(&self, link: LinkId) -> LinkId {
        self.rates.as_ref().map_or(link, |rates| rates.meter(link))
    }

    /// Whether the transfer has a rate, and bytes that are not granted.
    pub(super) fn sends(&self, transfer: TransferId) -> bool {
        self.rates.as_ref().is_some_and(|rates| rates.sends(FlowId(transfer.0)))
    }
}

impl HostLinkShares {
    pub(super) fn new(topology: &Topology, sharing: TransferSharing) -> Self {
        let of_rates = |rate: BytesPerSec| {
            let rate = u128::from(rate.0) * u128::from(SPARE_DUE) / u128::from(SPARE_EVERY);
            BytesPerSec(u64::try_from(rate).unwrap_or(u64::MAX))
        };
        let mut without_spare = topology.clone();
        without_spare.links.iter_mut().for_each(|link| link.rate = of_rates(link.rate));
        let rates = || RateAllocator::new(&without_spare, Config { sharing }).ok();
        let way = || HostDirectionState {
            rates: if sharing == TransferSharing::FaasTube { rates() } else { None },
            passed: BTreeMap::new(),
        };
        let ways = PerDirection { to_gpu: way(), from_gpu: way() };
        Self { sharing, ways, now: Timestamp::ZERO, tally: TransferCounts::default() }
    }
}
