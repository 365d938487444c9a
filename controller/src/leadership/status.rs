//! The results of the leader's duties, as the other parts of this controller read them.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_nodes::lease::LeaseState;
use millrace_nodes::placement::Unplaced;
use millrace_nodes::scaling::ScalingSignal;
use millrace_slices::placing;
use millrace_types::{FunctionKey, NodeName};
use tokio::sync::watch;

use super::desired::DesiredStates;

/// The leadership of this controller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Leadership {
    /// The term of the current or last leadership; 0 if this controller never led.
    pub(crate) term: u64,
    /// Whether this controller leads now, and its state includes everything that was committed before.
    pub(crate) leads: bool,
}

/// The lease state of each live node, while this controller leads.
pub(crate) type LeaseStates = Arc<BTreeMap<NodeName, LeaseState>>;

/// The functions with fewer copies than requested, each with the reason.
pub(crate) type Shortages = Arc<BTreeMap<FunctionKey, Unplaced>>;

/// The slices without a GPU, by function.
pub(crate) type MissingSlices = Arc<BTreeMap<FunctionKey, placing::MissingSlices>>;

/// The results of the leader's duties. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct LeaderStatus {
    pub(crate) leadership: watch::Receiver<Leadership>,
    pub(crate) desired: watch::Receiver<Option<Arc<DesiredStates>>>,
    pub(crate) lease_states: watch::Receiver<LeaseStates>,
    pub(crate) shortages: watch::Receiver<Shortages>,
    pub(crate) missing_slices: watch::Receiver<MissingSlices>,
    pub(crate) signal: watch::Receiver<Option<ScalingSignal>>,
}

impl LeaderStatus {
    /// Returns the results of a controller that never led and plans nothing.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn of_a_follower() -> Self {
        Self {
            leadership: watch::channel(Leadership::default()).1,
            desired: watch::channel(None).1,
            lease_states: watch::channel(LeaseStates::default()).1,
            shortages: watch::channel(Shortages::default()).1,
            missing_slices: watch::channel(MissingSlices::default()).1,
            signal: watch::channel(None).1,
        }
    }

    /// Whether this controller leads now.
    pub(crate) fn leads(&self) -> bool {
        self.leadership.borrow().leads
    }

    pub(crate) fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.clone()
    }

    /// Returns a watch of the desired state of each node; `None` while this controller does not lead.
    pub(crate) fn desired(&self) -> watch::Receiver<Option<Arc<DesiredStates>>> {
        self.desired.clone()
    }

    /// Returns the lease state of a live node; `Unknown` while this controller does not lead.
    pub(crate) fn lease_state(&self, node: &NodeName) -> LeaseState {
        self.lease_states.borrow().get(node).copied().unwrap_or(LeaseState::Unknown)
    }

    /// Returns the lease state of every live node; empty while this controller does not lead.
    #[cfg(feature = "sim")]
    pub(crate) fn lease_states(&self) -> LeaseStates {
        self.lease_states.borrow().clone()
    }

    /// Returns the functions with fewer copies than requested.
    pub(crate) fn shortages(&self) -> Shortages {
        self.shortages.borrow().clone()
    }

    /// Returns the slices without a GPU.
    pub(crate) fn missing_slices(&self) -> MissingSlices {
        self.missing_slices.borrow().clone()
    }

    /// Returns a watch of the functions with fewer copies than requested.
    pub(crate) fn shortage_changes(&self) -> watch::Receiver<Shortages> {
        self.shortages.clone()
    }

    /// Returns the number of nodes that the cluster needs; `None` before the first plan.
    pub(crate) fn signal(&self) -> Option<ScalingSignal> {
        self.signal.borrow().clone()
    }
}
