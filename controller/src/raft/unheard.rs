//! A leader that hears no majority stops speaking as one.
//!
//! Where its messages arrive and the answers do not, its followers go on believing it while it commits
//! nothing: openraft's leader leads until it hears of a later term, which is what it cannot hear. So
//! once no majority has answered it for [`UNHEARD_MAX`] it sends no log and no heartbeats, and the
//! followers elect another after their usual silence. It goes on asking whether it is heard, and speaks
//! again when a majority answers: after an outage of the others it may be the only one that can lead.
//!
//! ```text
//!  no majority for UNHEARD_MAX ─► silent ─► how are you? ─ a majority answers ─► speaks
//!                                    ▲         └─ no ─┐
//!                                    └────────────────┘
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use millrace_types::Reason;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::peers::{Lane, Peer};
use super::replica::Replica;
use super::status::PeerStatus;
use super::timing::{HEARTBEAT, LEASE};

/// How long a leader goes on that no majority answers: longer than its followers believe one that they
/// do not hear, so that a late answer costs nothing.
const UNHEARD_MAX: Duration = Duration::from_millis(600);
/// How long it waits for answers when it asks whether it is heard: what an append may take, as who
/// answers later than that acknowledges none.
const ASK_TIMEOUT: Duration = HEARTBEAT;

const _: () = assert!(UNHEARD_MAX.as_millis() > LEASE.as_millis(), "a leader that is late for once leads on");

/// Whether this controller sends what only a leader sends. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Voice(Arc<AtomicBool>);

impl Voice {
    pub(super) fn is_silent(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set_silent(&self, silent: bool) {
        self.0.store(silent, Ordering::Relaxed);
    }
}

/// Looks after that until stopped.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica) {
    // `None` when stopped.
    stop.run_until_cancelled(run(replica)).await;
}

async fn run(replica: Replica) {
    let voice = replica.peers.voice.clone();
    // Somebody whose disk stalls is heard, and its log is not: that is nothing to tell of.
    let mut told = false;
    let mut leads: Option<(u64, Instant)> = None;
    loop {
        tokio::time::sleep(HEARTBEAT).await;
        let since = |term| leads.filter(|&(of, _)| of == term).map_or_else(Instant::now, |(_, since)| since);
        leads = replica.leading_term().map(|term| (term, since(term)));
        if !leads.is_some_and(|(_, since)| is_unheard(&replica, since.elapsed())) {
            voice.set_silent(false);
            told = false;
            continue;
        }
        voice.set_silent(true);
        if majority_answers(&replica).await {
            voice.set_silent(false);
            if std::mem::take(&mut told) {
                tracing::info!("a majority answers again: this controller speaks as the leader that it is");
            }
            // Until it has been heard of in the log as well.
            tokio::time::sleep(UNHEARD_MAX).await;
        } else if !std::mem::replace(&mut told, true) {
            tracing::warn!(
                "this controller leads and no majority has answered for {UNHEARD_MAX:?}: it keeps quiet, so that another may lead"
            );
        }
    }
}

/// Whether others that this controller leads for so long have not answered for too long. A majority may
/// never have: a leader that was started again leads on in its term.
fn is_unheard(replica: &Replica, leads_for: Duration) -> bool {
    let silence = replica.raft.data_metrics().borrow().millis_since_quorum_ack.map(Duration::from_millis);
    let alone = replica.membership().voter_ids().count() < 2;
    !alone && silence.unwrap_or(leads_for) > UNHEARD_MAX
}

/// Whether a majority of the voters, this one among them, can be heard; of both sets of them while they
/// are changed.
async fn majority_answers(replica: &Replica) -> bool {
    let membership = replica.membership();
    let answered = join_all(replica.others(Lane::Requests).into_iter().map(answers)).await;
    let heard: BTreeSet<u64> = answered.into_iter().flatten().chain([replica.id().0]).collect();
    let majority = |voters: &BTreeSet<u64>| 2 * voters.intersection(&heard).count() > voters.len();
    membership.get_joint_config().iter().all(majority)
}

/// A member that says anything, a refusal included.
async fn answers(peer: Peer) -> Option<u64> {
    let asked = peer.call::<_, PeerStatus>(ASK_TIMEOUT, &(), async |mut client, message| {
        client.get_status(message).await
    });
    let heard = asked.await.map_or_else(|failure| failure.reason != Reason::NoLeader, |_| true);
    heard.then(|| peer.id())
}
