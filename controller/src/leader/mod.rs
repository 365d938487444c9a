//! The leader's duties for the whole cluster, and their results for the other parts of this controller.
//!
//! ```text
//!   fleet: signs of life ──▶ leases ── NodeLost, RegisterNode ──┐
//!   state, telemetry ──▶ reconcile ── Place, Unplace ───────────┤ propose
//!   tallies of runs ───▶ measure ──┘                            ▼
//!                            └── desired state per node   raft::Replica
//! ```
//!
//! Every controller plans placements, so that each can report why a function is not placed and how many
//! nodes are needed; only the leader carries plans out. No request waits for this module: without a
//! leader, gateways and workers continue with the last state.
//!
//! | module | task |
//! |---|---|
//! | [`leases`] | judges which nodes are alive: ends registrations, registers returned workers again |
//! | [`reconcile`] | plans placements, carries the plans out, and publishes the desired state of nodes |
//! | [`view`] | inputs of the planner, from the state and telemetry |
//! | [`load`] | load of functions and nodes |
//! | [`measure`] | collects the traffic between functions from all controllers |
//! | [`scaling`] | computes the number of nodes that the cluster needs |

mod leases;
mod load;
mod measure;
mod reconcile;
mod scaling;
mod view;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_nodes::lease::{self, LeaseState};
use millrace_nodes::placement::{MeasuredTraffic, Unplaced};
use millrace_nodes::scaling::ScalingSignal;
use millrace_types::{FunctionKey, NodeName};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fleet::WorkerFleet;
use crate::fleet::desired::DesiredStates;
use crate::passed::TrafficMatrix;
use crate::raft::Replica;

/// The pause before a new leader tries again to confirm its leadership.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The leadership of this controller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Leadership {
    /// The term of the current or last leadership; 0 if this controller never led.
    pub(crate) term: u64,
    /// Whether this controller leads now, and its state includes everything that was committed before.
    pub(crate) leads: bool,
}

/// The lease state of each live node, while this controller leads.
pub(crate) type Standings = Arc<BTreeMap<NodeName, LeaseState>>;

/// The reason why each function has fewer copies than requested.
pub(crate) type Shortages = Arc<BTreeMap<FunctionKey, Unplaced>>;

/// The results of the leader's duties. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct LeaderStatus {
    leadership: watch::Receiver<Leadership>,
    desired: watch::Receiver<Option<Arc<DesiredStates>>>,
    standings: watch::Receiver<Standings>,
    shortages: watch::Receiver<Shortages>,
    signal: watch::Receiver<Option<ScalingSignal>>,
}

impl LeaderStatus {
    /// Returns the results of a controller that never led and plans nothing.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn of_a_follower() -> Self {
        Self {
            leadership: watch::channel(Leadership::default()).1,
            desired: watch::channel(None).1,
            standings: watch::channel(Standings::default()).1,
            shortages: watch::channel(Shortages::default()).1,
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
    pub(crate) fn standing(&self, node: &NodeName) -> LeaseState {
        self.standings.borrow().get(node).copied().unwrap_or(LeaseState::Unknown)
    }

    /// Returns the lease state of every live node; empty while this controller does not lead.
    #[cfg(feature = "sim")]
    pub(crate) fn standings(&self) -> Standings {
        self.standings.borrow().clone()
    }

    /// Returns the functions with fewer copies than requested.
    pub(crate) fn shortages(&self) -> Shortages {
        self.shortages.borrow().clone()
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

/// The task of the leader's duties.
#[derive(Debug)]
pub(crate) struct Duties {
    replica: Replica,
    fleet: WorkerFleet,
    limits: lease::LeaseLimits,
    /// The traffic of the runs that this controller drives.
    passed: TrafficMatrix,
    /// The traffic of the runs of all controllers, as collected while this controller led.
    measured: watch::Sender<MeasuredTraffic>,
    leadership: watch::Sender<Leadership>,
    desired: watch::Sender<Option<Arc<DesiredStates>>>,
    standings: watch::Sender<Standings>,
    shortages: watch::Sender<Shortages>,
    signal: watch::Sender<Option<ScalingSignal>>,
}

impl Duties {
    pub(crate) fn new(
        replica: Replica,
        fleet: WorkerFleet,
        limits: lease::LeaseLimits,
        passed: TrafficMatrix,
    ) -> Self {
        Self {
            replica,
            fleet,
            limits,
            passed,
            measured: watch::Sender::default(),
            leadership: watch::Sender::default(),
            desired: watch::Sender::default(),
            standings: watch::Sender::default(),
            shortages: watch::Sender::default(),
            signal: watch::Sender::default(),
        }
    }

    pub(crate) fn outlook(&self) -> LeaderStatus {
        LeaderStatus {
            leadership: self.leadership.subscribe(),
            desired: self.desired.subscribe(),
            standings: self.standings.subscribe(),
            shortages: self.shortages.subscribe(),
            signal: self.signal.subscribe(),
        }
    }

    /// Performs the duties until stopped.
    pub(crate) async fn run_until(self, stop: CancellationToken) {
        let duties = async { tokio::join!(self.lead_whenever_elected(), reconcile::run(&self)) };
        // The result is `None` after a stop; both cases end the task.
        stop.run_until_cancelled(duties).await;
    }

    async fn lead_whenever_elected(&self) {
        let mut changes = self.replica.changes();
        loop {
            if let Some(term) = self.replica.leading_term() {
                tokio::select! {
                    () = self.until_over(term) => {}
                    () = self.lead(term) => {}
                }
                self.resign();
            }
            // Return at once if anything changed during the leadership.
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    async fn lead(&self, term: u64) {
        // An elected leader has all committed entries in its log, but the state may still lack some.
        // From an older state the leader would withdraw recent placements.
        while let Err(failure) = self.replica.linearizable().await {
            tracing::debug!(
                term,
                error = failure.message,
                "elected, but no majority has confirmed the leadership yet"
            );
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        self.leadership.send_replace(Leadership { term, leads: true });
        tokio::select! {
            () = leases::keep(self, term) => {}
            () = measure::keep(self) => {}
        }
    }

    async fn until_over(&self, term: u64) {
        let mut changes = self.replica.changes();
        while self.replica.leading_term() == Some(term) && changes.changed().await.is_ok() {}
    }

    fn resign(&self) {
        self.leadership.send_modify(|leadership| leadership.leads = false);
        self.desired.send_replace(None);
        self.standings.send_replace(Standings::default());
    }
}
