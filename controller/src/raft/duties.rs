//! What a leader does of itself for its group: it ends a change of the members that was left half
//! done, because the leader that made it is gone.

use std::time::Duration;

use millrace_raft_store::Member;
use openraft::metrics::RaftServerMetrics;
use openraft::{Membership, ServerState};
use tokio_util::sync::CancellationToken;

use super::replica::Replica;

/// How long a change may be half done before the leader ends it: whoever made it may still be at it.
const HALF_DONE_MAX: Duration = Duration::from_secs(12);

/// Whether the voters are being changed: two sets of them must agree meanwhile.
pub(super) fn is_joint(membership: &Membership<u64, Member>) -> bool {
    membership.get_joint_config().len() > 1
}

/// The log index of a half done change that this controller leads; `None` when there is none.
fn half_done(metrics: &RaftServerMetrics<u64, Member>) -> Option<u64> {
    let membership = &metrics.membership_config;
    let leads = metrics.state == ServerState::Leader;
    let index = membership.log_id().map_or(0, |log| log.index);
    (leads && is_joint(membership.membership())).then_some(index)
}

/// Ends such changes until stopped.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica) {
    // `None` when stopped.
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
                tracing::info!(index, "ending a change of the group that was left half done");
                if let Err(failure) = replica.finish_change().await {
                    tracing::warn!(error = failure.message, "a change of the group stays half done for now");
                }
            }
        }
    }
}
