//! The leader's duties for the whole cluster.
//!
//! ```text
//!   fleet: signs of life ──▶ leases ── NodeLost, RegisterNode ──┐
//!   state, telemetry ──▶ reconcile ── Place, Unplace, SetSlices ┤ propose
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
//! | [`duties`] | the inputs, and the publication of the results in [`crate::leadership`] |
//! | [`leases`] | judges which nodes are alive: ends registrations, registers returned workers again |
//! | [`reconcile`] | plans placements, carries the plans out, and publishes the desired state of nodes |
//! | [`view`] | inputs of the planner, from the state and telemetry |
//! | [`load`] | load of functions and nodes |
//! | [`measure`] | collects the traffic between functions from all controllers |
//! | [`slices`] | plans the slices of GPUs |
//! | [`slice_scaling`] | computes the number of slices of functions whose number follows the load |
//! | [`profiling`] | carries out the trials of profiles |
//! | [`scaling`] | computes the number of nodes that the cluster needs |

mod duties;
mod leases;
mod load;
mod measure;
mod profiling;
mod reconcile;
mod scaling;
mod slice_scaling;
mod slices;
mod view;

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::leadership::{Leadership, LeaseStates};

pub(crate) use duties::Duties;

/// The pause before a new leader tries again to confirm its leadership.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

impl Duties {
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
                tracing::info!(term, "this controller leads no longer");
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
        tracing::info!(term, "this controller leads");
        self.leadership.send_replace(Leadership { term, leads: true });
        tokio::select! {
            () = leases::keep(self, term) => {}
            () = measure::keep(self) => {}
            () = profiling::keep(self) => {}
        }
    }

    async fn until_over(&self, term: u64) {
        let mut changes = self.replica.changes();
        while self.replica.leading_term() == Some(term) && changes.changed().await.is_ok() {}
    }

    fn resign(&self) {
        self.leadership.send_modify(|leadership| leadership.leads = false);
        self.desired.send_replace(None);
        self.lease_states.send_replace(LeaseStates::default());
    }
}
