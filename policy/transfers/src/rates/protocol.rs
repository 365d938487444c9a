//! The inputs of the rates, and the results that they return.

use std::time::Duration;

use millrace_types::topology::LinkId;
use millrace_types::{Bytes, BytesPerSec};

use millrace_core::ids::FlowId;

/// The objective of a flow: the time of the whole request, including its inference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransferObjective {
    /// The function's objective (`L_slo`), counted from the start of the flow.
    pub slo: Duration,
    /// The profiled time of the inference (`L_infer`).
    pub infer: Duration,
}

impl TransferObjective {
    /// Returns the time that is left for the flow; `None` if none is left.
    #[must_use]
    pub fn slack(&self) -> Option<Duration> {
        self.slo.checked_sub(self.infer).filter(|slack| !slack.is_zero())
    }
}

/// Bytes that are to cross.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RatedFlow {
    /// A new name for the flow.
    pub id: FlowId,
    pub bytes: Bytes,
    /// The links that the flow may enter by, side by side, in the order of preference. A flow that
    /// enters by a GPU's own link crosses all of that GPU's host path.
    pub links: Vec<LinkId>,
    /// The objective; `None` for best effort.
    pub objective: Option<TransferObjective>,
}

/// The rate guarantee of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RateGuarantee {
    /// No guarantee: the flow has no objective, or the sharing ignores objectives.
    Unpromised,
    /// The flow has at least its least rate.
    Admitted {
        /// `Rate_least`.
        least: BytesPerSec,
    },
    /// The flow's least rate does not fit beside flows with earlier deadlines. The flow gets the
    /// bandwidth that the others leave.
    Crowded {
        /// `Rate_least`.
        least: BytesPerSec,
    },
    /// The flow can no longer meet the deadline. The flow keeps the last rate if that rate fits
    /// beside all flows that can be in time.
    Late {
        /// The last least rate.
        least: BytesPerSec,
    },
    /// The flow would miss the deadline even alone on all links. The flow gets the bandwidth that
    /// is left over.
    Infeasible(Infeasible),
}

/// The reason why a flow would miss its deadline even alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Infeasible {
    /// The inference takes as long as the objective allows, or longer.
    NoSlack,
    /// The flow's links cannot carry it in time.
    BeyondLinks {
        /// The rate that the flow needs.
        least: BytesPerSec,
        /// The rate of all the flow's links together.
        links: BytesPerSec,
    },
}

/// The rates of a flow.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RateAllocation {
    pub flow: FlowId,
    /// The flow's rate by each link that it enters by. Links without a rate are left out.
    pub rates: Vec<(LinkId, BytesPerSec)>,
}

/// The changes of rates and guarantees.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct RateChange {
    /// Flows with changed rates, by id.
    pub allocations: Vec<RateAllocation>,
    /// Flows with a changed guarantee, by id.
    pub guarantees: Vec<(FlowId, RateGuarantee)>,
}

/// The bytes that may cross a link next, without interruption (D13). A batch cannot be cloned,
/// because it may be given back only once.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct RatedBatch {
    pub flow: FlowId,
    /// The link that the batch enters by.
    pub link: LinkId,
    /// Size: five chunks of 2 MiB, less at the end of a flow.
    pub bytes: Bytes,
    /// The arrival number of the flow, which tells flows of the same name apart.
    pub(super) arrival: u64,
    /// Whether a batch that was given out before may still be crossing.
    pub(super) follows: bool,
    /// The changes of leads that the batch caused.
    pub(super) dues: Vec<LeadChange>,
}

/// The bytes that a flow paid for a batch, or was credited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct LeadChange {
    pub(super) flow: FlowId,
    pub(super) arrival: u64,
    pub(super) part: usize,
    pub(super) lead: i128,
}

/// The reason why an operation was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A flow of this name has already begun.
    #[error("{0} has already begun: end it first, or use another name")]
    Begun(FlowId),
    /// No flow has this name.
    #[error("{0} is unknown")]
    Unknown(FlowId),
    /// The flow has nothing to carry.
    #[error("{0} has no bytes")]
    Empty(FlowId),
    /// The flow names no link, or a link that the topology does not have.
    #[error("{0} names no link, or a link that the topology does not have")]
    NoLink(FlowId),
    /// A host path names a link that the topology does not have.
    #[error("a host path names link {}, which the topology does not have", .0.0)]
    UnknownLink(LinkId),
    /// Two host paths share a link and part after it.
    #[error("host paths part after link {}: paths that share a link must share all links after it", .0.0)]
    Apart(LinkId),
    /// A host path returns to a link that it has crossed.
    #[error("the host path of link {} is a loop", .0.0)]
    Circle(LinkId),
    /// The number of flows is at its limit.
    #[error("the limit of {max} flows is reached: wait until a flow ends", max = super::FLOWS_MAX)]
    Full,
}
