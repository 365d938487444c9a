//! Completes a membership change that an earlier leader left in its joint phase, while this controller leads.

use std::time::Duration;

use millrace_raft_store::GroupMember;
use openraft::metrics::RaftServerMetrics;
use openraft::{Membership, ServerState};
use tokio_util::sync::CancellationToken;

use super::replica::Replica;

/// The time that a membership change may stay joint before the leader steps in, because the
/// initiator may still be at work.
const HALF_DONE_MAX: Duration = Duration::from_secs(12);

/// Whether the voters are being changed: during the change, majorities of two sets must agree.
pub(super) fn is_joint(membership: &Membership<u64, GroupMember>) -> bool {
    membership.get_joint_config().len() > 1
}

/// Returns the log index of a joint membership while this controller leads.
fn half_done(metrics: &RaftServerMetrics<u64, GroupMember>) -> Option<u64> {
    let membership = &metrics.membership_config;
    let leads = metrics.state == ServerState::Leader;
    let index = membership.log_id().map_or(0, |log| log.index);
    (leads && is_joint(membership.membership())).then_some(index)
}

/// Completes such changes until stopped.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica) {
    // The result is `None` after a stop.
    stop.run_until_cancelled(run(replica)).await;
}

async fn run(replica: Replica) {
    let mut metrics = replica.raft.server_metrics();
    loop {
        let current = half_done(&metrics.borrow_and_update());
        let changed = async { metrics.wait_for(|it| half_done(it) != current).await.map(|_| ()) };
        let Some(index) = current else {
            match changed.await {
                Ok(()) => continue,
                Err(_) => return,
            }
        };
        match tokio::time::timeout(HALF_DONE_MAX, changed).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => {
                tracing::info!(
                    index,
                    "completing a membership change that an earlier leader left unfinished"
                );
                if let Err(failure) = replica.finish_change().await {
                    tracing::warn!(
                        error = failure.message,
                        "cannot complete an unfinished membership change yet"
                    );
                }
            }
        }
    }
}
