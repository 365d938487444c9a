//! Quorum loss: a leader without answers from a majority stops acting as leader.
//!
//! If the leader's messages arrive but the answers do not, the followers keep following a leader that
//! commits nothing. openraft's leader leads until a later term arrives, and that message cannot arrive.
//! So after [`UNHEARD_MAX`] without a majority's answer, the leader sends no log entries and no
//! heartbeats, and the followers elect another leader after the election timeout. The silent leader
//! keeps probing the members, and acts as leader again when a majority answers: after an outage of the
//! others, perhaps no other controller can lead.
//!
//! ```text
//!  no majority for UNHEARD_MAX ─► silent ─► probe ─ a majority answers ─► acts as leader
//!                                    ▲      └─ no ─┐
//!                                    └─────────────┘
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::join_all;
use millrace_types::Reason;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::peers::{PeerClient, TrafficClass};
use super::replica::Replica;
use super::status::PeerStatus;
use super::timing::{HEARTBEAT, LEASE};

/// The time that a leader continues without answers from a majority. This exceeds the followers'
/// lease, so a single late answer costs nothing.
const UNHEARD_MAX: Duration = Duration::from_millis(600);
/// The timeout of the answers to a silent leader's probe. This equals the time of an append,
/// because a slower member acknowledges no entries.
const ASK_TIMEOUT: Duration = HEARTBEAT;

const _: () = assert!(UNHEARD_MAX.as_millis() > LEASE.as_millis(), "a leader that is late for once leads on");

/// Watches for quorum loss until stopped.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica) {
    // The result is `None` after a stop.
    stop.run_until_cancelled(run(replica)).await;
}

async fn run(replica: Replica) {
    let voice = replica.peers.voice.clone();
    // Log only if the probe fails too: a member with a stalled disk answers the probe but acknowledges
    // no entries.
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
                tracing::info!("a majority answers again: this controller acts as leader again");
            }
            // Keep sending until a majority has acknowledged entries as well.
            tokio::time::sleep(UNHEARD_MAX).await;
        } else if !std::mem::replace(&mut told, true) {
            tracing::warn!(
                "no majority has answered this leader for {UNHEARD_MAX:?}: it sends no heartbeats, so that another controller can lead"
            );
        }
    }
}

/// Whether no majority has answered this leader for too long. If no majority ever answered, the time
/// since the beginning of the leadership (`leads_for`) counts, because a restarted leader continues in
/// the same term.
fn is_unheard(replica: &Replica, leads_for: Duration) -> bool {
    let silence = replica.raft.data_metrics().borrow().millis_since_quorum_ack.map(Duration::from_millis);
    let alone = replica.membership().voter_ids().count() < 2;
    !alone && silence.unwrap_or(leads_for) > UNHEARD_MAX
}

/// Whether a majority of the voters, including this controller, answers. During a membership change, a
/// majority of both sets must answer.
async fn majority_answers(replica: &Replica) -> bool {
    let membership = replica.membership();
    let answered = join_all(replica.others(TrafficClass::Requests).into_iter().map(answers)).await;
    let heard: BTreeSet<u64> = answered.into_iter().flatten().chain([replica.id().0]).collect();
    let majority = |voters: &BTreeSet<u64>| 2 * voters.intersection(&heard).count() > voters.len();
    membership.get_joint_config().iter().all(majority)
}

/// Returns the member's id after any answer, including a refusal.
async fn answers(peer: PeerClient) -> Option<u64> {
    let asked = peer.call::<_, PeerStatus>(ASK_TIMEOUT, &(), async |mut client, message| {
        client.get_status(message).await
    });
    let heard = asked.await.map_or_else(|failure| failure.reason != Reason::NoLeader, |_| true);
    heard.then(|| peer.id())
}
