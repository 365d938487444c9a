//! What the rates are told, and what they answer.

use std::time::Duration;

use millrace_types::topology::LinkId;
use millrace_types::{Bytes, BytesPerSec};

use crate::ids::FlowId;

/// By when a flow is wanted. A request's time, of which its inference takes a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Objective {
    /// The function's objective (`L_slo`), from when the flow begins.
    pub slo: Duration,
    /// What its inference takes (`L_infer`), as profiled.
    pub infer: Duration,
}

impl Objective {
    /// What is left for the flow; `None` where there is nothing.
    #[must_use]
    pub fn slack(&self) -> Option<Duration> {
        self.slo.checked_sub(self.infer).filter(|slack| !slack.is_zero())
    }
}

/// Bytes that are to cross.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Flow {
    /// A new name for it.
    pub id: FlowId,
    /// How many.
    pub bytes: Bytes,
    /// The links it may enter by, side by side, those it should rather take first. What enters by
    /// a GPU's own link crosses all of that GPU's host path.
    pub links: Vec<LinkId>,
    /// By when it is wanted; `None` is best effort.
    pub objective: Option<Objective>,
}

/// What a flow can count on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// Nothing: it has no objective, or the sharing knows none.
    Unpromised,
    /// At least this rate.
    Admitted {
        /// `Rate_least`.
        least: BytesPerSec,
    },
    /// What those leave that are wanted earlier: its rate does not fit beside theirs.
    Crowded {
        /// `Rate_least`.
        least: BytesPerSec,
    },
    /// It cannot be in time any more. It keeps the rate it had where that fits beside all who can.
    Late {
        /// The rate it had last.
        least: BytesPerSec,
    },
    /// What is left: it could not have been in time with all its links to itself.
    Infeasible(Infeasible),
}

/// Why a flow cannot be in time even alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Infeasible {
    /// Inference alone takes as long as the objective allows, or longer.
    NoSlack,
    /// Its links cannot carry it in time.
    BeyondLinks {
        /// The rate it needs.
        least: BytesPerSec,
        /// What its links carry together.
        links: BytesPerSec,
    },
}

/// How fast a flow may go.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Allocation {
    /// Which flow.
    pub flow: FlowId,
    /// Its rate by each link it enters by. Those that give it none are left out.
    pub rates: Vec<(LinkId, BytesPerSec)>,
}

/// What became different.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Change {
    /// Flows whose rates changed, by id.
    pub allocations: Vec<Allocation>,
    /// Flows that can count on something else now, by id.
    pub standings: Vec<(FlowId, Standing)>,
}

/// What may cross a link next, without interruption (D13). Not to be copied: it is given back once.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    /// Of which flow.
    pub flow: FlowId,
    /// By which link it enters.
    pub link: LinkId,
    /// How much: five chunks of 2 MiB, less at a flow's end.
    pub bytes: Bytes,
    /// Which of the flows of that name it is.
    pub(super) arrival: u64,
    /// Whether another was given out before it that may be crossing.
    pub(super) follows: bool,
    /// What it changed.
    pub(super) dues: Vec<Due>,
}

/// What one flow paid for a batch, or was credited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Due {
    pub(super) flow: FlowId,
    pub(super) arrival: u64,
    pub(super) part: usize,
    pub(super) lead: i128,
}

/// Why nothing was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is a flow of that name.
    #[error("{0} has begun already")]
    Begun(FlowId),
    /// There is none.
    #[error("{0} is not known")]
    Unknown(FlowId),
    /// It has nothing to carry.
    #[error("{0} has no bytes")]
    Empty(FlowId),
    /// It names no link, or one that the topology does not have.
    #[error("{0} can cross no link that there is")]
    NoLink(FlowId),
    /// A host path names a link that the topology does not have.
    #[error("there is no link {}", .0.0)]
    UnknownLink(LinkId),
    /// Two host paths share a link and part after it.
    #[error("host paths part after link {}", .0.0)]
    Apart(LinkId),
    /// A host path comes back to a link.
    #[error("the host path of link {} has no end", .0.0)]
    Circle(LinkId),
    /// There are as many flows as can be.
    #[error("{max} flows are under way, no more are taken", max = super::FLOWS_MAX)]
    Full,
}
