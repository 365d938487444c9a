//! What this controller does for the whole cluster while it leads, and what the rest of it reads of
//! that.
//!
//! ```text
//!   fleet: signs of life ──▶ leases ── NodeLost, RegisterNode ──┐
//!   state, telemetry ──▶ reconcile ── Place, Unplace ───────────┤ propose
//!   tallies of runs ───▶ measure ──┘                            ▼
//!                            └── desired state per node   raft::Replica
//! ```
//!
//! Every controller plans placements, so that any of them can say why a function is not placed and
//! how many nodes are needed; only the leader carries plans out. Nothing here is on the way of a request: with no leader,
//! gateways and workers go on with what they have.
//!
//! | module | holds |
//! |---|---|
//! | [`leases`] | who is believed alive: ends registrations, takes returned workers in again |
//! | [`reconcile`] | plans placements, carries them out, and says what each node should serve |
//! | [`view`] | what the planner is told, from the state and telemetry |
//! | [`load`] | how busy functions and nodes are |
//! | [`measure`] | asks the controllers how much functions pass to each other |
//! | [`scaling`] | how many nodes the cluster needs |

mod leases;
mod load;
mod measure;
mod reconcile;
mod scaling;
mod view;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_policy::lease::{self, Standing};
use millrace_policy::placement::{Measured, Unplaced};
use millrace_policy::scaling::Signal;
use millrace_types::{FunctionKey, NodeName};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fleet::Fleet;
use crate::fleet::desired::Desired;
use crate::passed::Passed;
use crate::raft::Replica;

/// How long a new leader that cannot make sure of it waits before it tries again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Whether this controller leads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Leadership {
    /// The term in which it leads or last led; 0 before it did.
    pub(crate) term: u64,
    /// Whether it leads now, and has everything that was committed before.
    pub(crate) leads: bool,
}

/// What is believed of each live node, while this controller leads.
pub(crate) type Standings = Arc<BTreeMap<NodeName, Standing>>;

/// Why functions have fewer copies than they should.
pub(crate) type Shortages = Arc<BTreeMap<FunctionKey, Unplaced>>;

/// What the duties come to. Cloning shares it.
#[derive(Debug, Clone)]
pub(crate) struct Outlook {
    leadership: watch::Receiver<Leadership>,
    desired: watch::Receiver<Option<Arc<Desired>>>,
    standings: watch::Receiver<Standings>,
    shortages: watch::Receiver<Shortages>,
    signal: watch::Receiver<Option<Signal>>,
}

impl Outlook {
    /// What a controller sees that never led and plans nothing.
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

    /// What each node should serve; `None` while this controller does not lead.
    pub(crate) fn desired(&self) -> watch::Receiver<Option<Arc<Desired>>> {
        self.desired.clone()
    }

    /// What is believed of a live node; unknown while this controller does not lead.
    pub(crate) fn standing(&self, node: &NodeName) -> Standing {
        self.standings.borrow().get(node).copied().unwrap_or(Standing::Unknown)
    }

    /// What is believed of every live node; empty while this controller does not lead.
    #[cfg(feature = "sim")]
    pub(crate) fn standings(&self) -> Standings {
        self.standings.borrow().clone()
    }

    /// Why functions are not placed as they should be.
    pub(crate) fn shortages(&self) -> Shortages {
        self.shortages.borrow().clone()
    }

    /// The same, as they change.
    pub(crate) fn shortage_changes(&self) -> watch::Receiver<Shortages> {
        self.shortages.clone()
    }

    /// How many nodes the cluster needs; `None` before the first plan.
    pub(crate) fn signal(&self) -> Option<Signal> {
        self.signal.borrow().clone()
    }
}

/// The duties.
#[derive(Debug)]
pub(crate) struct Duties {
    replica: Replica,
    fleet: Fleet,
    limits: lease::Limits,
    /// What the runs that this controller drives passed.
    passed: Passed,
    /// What those of all controllers did, as far as this one led.
    measured: watch::Sender<Measured>,
    leadership: watch::Sender<Leadership>,
    desired: watch::Sender<Option<Arc<Desired>>>,
    standings: watch::Sender<Standings>,
    shortages: watch::Sender<Shortages>,
    signal: watch::Sender<Option<Signal>>,
}

impl Duties {
    pub(crate) fn new(replica: Replica, fleet: Fleet, limits: lease::Limits, passed: Passed) -> Self {
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

    pub(crate) fn outlook(&self) -> Outlook {
        Outlook {
            leadership: self.leadership.subscribe(),
            desired: self.desired.subscribe(),
            standings: self.standings.subscribe(),
            shortages: self.shortages.subscribe(),
            signal: self.signal.subscribe(),
        }
    }

    /// Does them until stopped.
    pub(crate) async fn run_until(self, stop: CancellationToken) {
        let duties = async { tokio::join!(self.lead_whenever_elected(), reconcile::run(&self)) };
        // `None` when stopped: nothing is left to do either way.
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
            // At once, if anything changed while it led.
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    async fn lead(&self, term: u64) {
        // An elected leader has everything that was committed in its log, and not yet in its state:
        // from that state it would withdraw what was just applied.
        while let Err(failure) = self.replica.linearizable().await {
            tracing::debug!(term, error = failure.message, "elected, and not sure of a majority yet");
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
