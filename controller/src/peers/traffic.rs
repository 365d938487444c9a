//! The traffic counts of another controller.

use super::fanout::ASK_TIMEOUT;
use crate::passed::TrafficReport;
use crate::raft::PeerClient;

/// Asks a controller for traffic counts. Returns the controller's id, and `None` without an answer. A
/// missing answer loses nothing: the next answer includes the same counts.
pub(crate) async fn ask(peer: PeerClient) -> (u64, Option<Vec<TrafficReport>>) {
    let told = peer.call(ASK_TIMEOUT, &(), async |mut it, message| it.get_passed(message).await).await;
    let id = peer.id();
    match told {
        Ok(told) => (id, Some(told)),
        Err(failure) => {
            tracing::debug!(
                controller = id,
                error = failure.message,
                "cannot get the workflow traffic of a controller"
            );
            (id, None)
        }
    }
}
