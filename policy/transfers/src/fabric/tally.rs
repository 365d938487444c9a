//! The counts of transfers between the host and GPUs.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::topology::LinkId;

use crate::paths::{HostDirection, PerDirection};
use crate::rates::RateGuarantee;

/// Numbers of ended transfers between the host and GPUs, by the rate guarantee at the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GuaranteeCounts {
    /// Transfers that no request waited for, or on links that are not shared by objective.
    pub unpromised: u64,
    /// Transfers that had the rate that they needed.
    pub admitted: u64,
    /// Transfers with a rate that did not fit beside transfers with earlier deadlines.
    pub crowded: u64,
    /// Transfers that could meet the deadline at the start and no longer could at the end.
    pub late: u64,
    /// Transfers that would have missed the deadline even alone on all links.
    pub infeasible: u64,
}

impl GuaranteeCounts {
    pub(super) fn add(&mut self, guarantee: RateGuarantee) {
        let count = match guarantee {
            RateGuarantee::Unpromised => &mut self.unpromised,
            RateGuarantee::Admitted { .. } => &mut self.admitted,
            RateGuarantee::Crowded { .. } => &mut self.crowded,
            RateGuarantee::Late { .. } => &mut self.late,
            RateGuarantee::Infeasible(_) => &mut self.infeasible,
        };
        *count += 1;
    }

    /// Returns each count with its name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 5] {
        let Self { unpromised, admitted, crowded, late, infeasible } = *self;
        [
            ("unpromised", unpromised),
            ("admitted", admitted),
            ("crowded", crowded),
            ("late", late),
            ("infeasible", infeasible),
        ]
    }
}

/// The time that transfers waited for their first batch on a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FirstBatchWait {
    /// Number of transfers with a first batch that this link issued.
    pub transfers: u64,
    /// Total time from the start of a transfer until the first batch could begin.
    pub waited: Duration,
}

/// The counts of the fabric.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransferCounts {
    /// Ended transfers between the host and GPUs, by direction.
    pub ended: PerDirection<GuaranteeCounts>,
    /// Waits for the first batch, by the link that issued it and by direction.
    pub waits: BTreeMap<(LinkId, HostDirection), FirstBatchWait>,
}
