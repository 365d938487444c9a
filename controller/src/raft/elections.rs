//! Decides when this controller calls an election.
//!
//! openraft 0.9 calls elections after a timeout that each process draws once. Equal draws tie again and
//! again (openraft#1838). A follower that was away, or whose log is behind, raises the term and deposes
//! a leader that the other voters hear well. So openraft's own elections are off, and this module calls
//! elections instead: in turn, after silence of the leader, and only if a majority would vote for this
//! controller (the pre-vote of Ongaro's dissertation, §9.6). openraft still runs the election and
//! decides the outcome.
//!
//! ```text
//!  leader silent for SILENCE + turn ─► pre-vote of all voters ─ majority ─► call the election
//!                                                        └─ no ─► ask again a little later
//! ```
//!
//! The wait also grows with elections that this controller lost and with a slow disk, and has a random part.

use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use millrace_raft_store::LogId;
use millrace_types::Failure;
use openraft::ServerState;
use openraft::error::Fatal;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::disks::handicap;
use super::failures::stopped;
use super::peers::{PeerClient, TrafficClass};
use super::replica::Replica;
use super::timing::{LEASE, SILENCE, TURN};

/// The timeout of a voter's answer to a pre-vote.
const ASK_TIMEOUT: Duration = Duration::from_millis(200);
/// The random addition to each wait, in milliseconds, so that two controllers that collided once do not
/// collide again.
const JITTER_MS: std::ops::Range<u64> = 0..50;
/// Consecutive lost elections after which the wait no longer grows. With 4 losses, silence and penalty
/// together are 2³ election timeouts.
const LOST_MAX: u32 = 4;

/// The local Raft state that an election depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ElectionState {
    state: ServerState,
    voters: Vec<u64>,
    /// The last time that a leader was heard or a vote was given; `None` if neither happened since the
    /// start.
    heard: Option<Instant>,
    /// The followed leader, or the candidate that got the vote.
    vote_for: Option<u64>,
    /// Whether `vote_for` was elected.
    elected: bool,
    last_log: Option<LogId>,
}

/// A pre-vote request: would the voter vote for a log that ends here?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PreVoteRequest {
    last_log: Option<LogId>,
}

/// Returns how long the leader must be silent before this controller calls an election. `None` while
/// the controller never calls an election.
fn patience(look: &ElectionState, own: u64) -> Option<Duration> {
    if look.state == ServerState::Leader || !look.voters.contains(&own) {
        return None;
    }
    if look.voters == [own] {
        return Some(Duration::ZERO);
    }
    // Voters take turns in the order of ids. The silent leader is skipped, and all other voters count
    // the same.
    let before = |&&voter: &&u64| voter < own && !(look.elected && look.vote_for == Some(voter));
    let turn = u32::try_from(look.voters.iter().filter(before).count()).unwrap_or(u32::MAX);
    Some(SILENCE + TURN * turn)
}

/// Returns the extra wait after elections without a winner. On slow disks, the same wait again would
/// never end in a win.
fn penalty(lost: u32) -> Duration {
    SILENCE * (2u32.pow(lost.saturating_sub(1)) - 1)
}

/// Whether a voter in this state would vote for a log that ends at `last_log`.
fn would_vote(look: &ElectionState, last_log: Option<LogId>, now: Instant) -> bool {
    let leased = look.elected && look.heard.is_some_and(|heard| now < heard + LEASE);
    look.state != ServerState::Leader && !leased && last_log >= look.last_log
}

/// Calls elections when due, until stopped.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica, seed: u64) {
    // Mix in the id: controllers with the same seed must not draw the same jitter.
    let rng = StdRng::seed_from_u64(seed ^ replica.id().0.rotate_left(32));
    if let Some(Err(error)) = stop.run_until_cancelled(run(replica, rng)).await {
        tracing::debug!(%error, "elections end with raft");
    }
}

async fn run(replica: Replica, mut rng: StdRng) -> Result<(), Fatal<u64>> {
    let started = Instant::now();
    let own = replica.id().0;
    let mut jitter = || Duration::from_millis(rng.random_range(JITTER_MS));
    let mut extra = jitter();
    let mut lost = 0;
    loop {
        let look = replica.look().await?;
        if look.elected {
            lost = 0;
        }
        let Some(patience) = patience(&look, own) else {
            replica.until_not_leading().await?;
            continue;
        };
        let due = look.heard.unwrap_or(started)
            + patience
            + penalty(lost)
            + handicap(replica.disk.health())
            + extra;
        if Instant::now() < due {
            tokio::time::sleep_until(due).await;
            continue;
        }
        extra = jitter();
        if !replica.majority_would_vote(&look).await {
            tokio::time::sleep(TURN / 2 + jitter()).await;
            continue;
        }
        tracing::info!("the leader is silent and a majority would vote: calling an election");
        replica.raft.trigger().elect().await?;
        lost = (lost + 1).min(LOST_MAX);
    }
}

impl Replica {
    /// Returns the state after openraft has handled all pending work. Heartbeats that a stalled disk
    /// kept waiting count before the election timer is checked.
    async fn look(&self) -> Result<ElectionState, Fatal<u64>> {
        let asked = self.raft.with_raft_state(|state| {
            let vote = state.vote_ref();
            (state.server_state, state.vote_last_modified(), vote.leader_id().voted_for, vote.is_committed())
        });
        let (state, heard, vote_for, elected) = asked.await?;
        let mut voters: Vec<u64> = self.membership().voter_ids().collect();
        voters.sort_unstable();
        let last_log = self.raft.data_metrics().borrow().last_log;
        Ok(ElectionState { state, voters, heard, vote_for, elected, last_log })
    }

    /// Waits until this controller may have to call an election: it no longer leads, or became a voter.
    async fn until_not_leading(&self) -> Result<(), Fatal<u64>> {
        let mut metrics = self.raft.server_metrics();
        let (state, log) = {
            let metrics = metrics.borrow();
            (metrics.state, *metrics.membership_config.log_id())
        };
        let changed = metrics.wait_for(|it| it.state != state || *it.membership_config.log_id() != log);
        changed.await.map(|_| ()).map_err(|_| Fatal::Stopped)
    }

    /// Asks every other voter for a pre-vote, and returns as soon as a majority agrees.
    async fn majority_would_vote(&self, look: &ElectionState) -> bool {
        let needed = look.voters.len() / 2 + 1;
        let mut others = self.others(TrafficClass::Requests);
        others.retain(|peer| look.voters.contains(&peer.id()));
        let question = PreVoteRequest { last_log: look.last_log };
        let mut asked: FuturesUnordered<_> = others.into_iter().map(|peer| ask(peer, question)).collect();
        let mut would = 1;
        while would < needed {
            match asked.next().await {
                Some(answer) => would += usize::from(answer),
                None => return false,
            }
        }
        true
    }

    /// Whether this controller would vote for the sender.
    pub(super) async fn would_vote_here(&self, question: PreVoteRequest) -> Result<bool, Failure> {
        let look = self.look().await.map_err(|error| stopped(&error))?;
        Ok(would_vote(&look, question.last_log, Instant::now()))
    }
}

async fn ask(peer: PeerClient, question: PreVoteRequest) -> bool {
    let asked = peer.call(ASK_TIMEOUT, &question, async |mut client, message| client.pre_vote(message).await);
    let answer: Result<bool, Failure> = asked.await;
    answer.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use openraft::CommittedLeaderId;

    use super::*;

    fn log(term: u64, index: u64) -> Option<LogId> {
        Some(LogId::new(CommittedLeaderId::new(term, 1), index))
    }

    fn follower(voters: &[u64], leader: u64) -> ElectionState {
        ElectionState {
            state: ServerState::Follower,
            voters: voters.to_vec(),
            heard: None,
            vote_for: Some(leader),
            elected: true,
            last_log: log(2, 10),
        }
    }

    #[test]
    fn followers_call_elections_in_turn_and_other_members_never() {
        let three = |leader, own| patience(&follower(&[1, 2, 3], leader), own);
        assert_eq!([three(1, 2), three(1, 3)], [Some(SILENCE), Some(SILENCE + TURN)]);
        assert_eq!([three(2, 1), three(2, 3)], [Some(SILENCE), Some(SILENCE + TURN)]);
        assert_eq!([three(3, 1), three(3, 2)], [Some(SILENCE), Some(SILENCE + TURN)]);
        assert_eq!(three(1, 4), None, "a learner");
        assert_eq!(patience(&follower(&[1], 1), 1), Some(Duration::ZERO), "no other voter to wait for");
        let leader = ElectionState { state: ServerState::Leader, ..follower(&[1, 2, 3], 1) };
        assert_eq!(patience(&leader, 1), None);
        let penalties = [0, 1, 2, 3, LOST_MAX].map(penalty);
        assert_eq!(penalties, [0, 0, 1, 3, 7].map(|times| SILENCE * times));
    }

    #[test]
    fn a_voter_that_hears_its_leader_or_has_more_of_the_log_denies_the_pre_vote() {
        let now = Instant::now();
        let silent = ElectionState { heard: Some(now), ..follower(&[1, 2, 3], 1) };
        assert!(!would_vote(&silent, log(2, 10), now + LEASE - Duration::from_millis(1)));
        assert!(would_vote(&silent, log(2, 10), now + LEASE));
        assert!(!would_vote(&silent, log(2, 9), now + LEASE));
        assert!(!would_vote(&silent, log(1, 99), now + LEASE), "an earlier term's log is older");
        let voted = ElectionState { elected: false, ..silent.clone() };
        assert!(would_vote(&voted, log(2, 10), now), "the candidate may never win");
        let leader = ElectionState { state: ServerState::Leader, ..silent };
        assert!(!would_vote(&leader, log(9, 99), now + LEASE));
    }
}
