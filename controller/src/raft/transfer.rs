//! Leadership transfer. openraft 0.9 has no call for this. So the leader holds writes, sends the whole
//! log to the successor, and asks the successor to call an election. The first vote request is refused
//! while the leader's lease lasts, but shows the leader a later term, so the leader steps down. The
//! next vote request is granted.

use std::time::Duration;

use millrace_raft_store::GroupMember;
use millrace_types::{Failure, Reason};
use openraft::{RaftMetrics, ServerState};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::failures::{nobody_leads, stopped};
use super::peers::{PeerClient, TrafficClass};
use super::proposer::BATCHES_IN_FLIGHT;
use super::replica::{KnownLeader, Replica};

/// The timeout for the successor to receive the end of the log.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout of the successor's election.
const ELECTION_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between the successor's attempts: a vote made durable twice, and a round trip.
const ELECTION_PAUSE: Duration = Duration::from_millis(100);
/// The timeout of the successor's answer: [`ELECTION_TIMEOUT`] and the network's share.
const ANSWER_TIMEOUT: Duration = ELECTION_TIMEOUT.saturating_add(Duration::from_secs(1));
/// The largest lag of a successor, in entries, because the missing entries are sent while writes wait.
const SUCCESSOR_LAG_MAX: u64 = 10_000;

/// The timeout of another controller's answer to a forwarded transfer.
const FORWARD_TIMEOUT: Duration =
    CATCH_UP_TIMEOUT.saturating_add(ANSWER_TIMEOUT).saturating_add(ANSWER_TIMEOUT);

/// The leader after a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeadershipTransfer {
    pub(crate) leader: u64,
    pub(crate) term: u64,
}

impl Replica {
    /// Transfers leadership to a voter; 0 chooses the voter with the smallest lag.
    ///
    /// # Errors
    /// The same as [`Self::transfer_here`].
    pub(crate) async fn transfer(&self, successor: u64) -> Result<LeadershipTransfer, Failure> {
        let again = |failure: &Failure| failure.reason == Reason::NoLeader && !failure.may_have_executed;
        let mut attempts = self.attempts();
        loop {
            let tried = match self.leader() {
                KnownLeader::Here => self.transfer_here(successor).await,
                KnownLeader::There(leader) => forward(&leader, successor).await,
                KnownLeader::Unknown => Err(nobody_leads()),
            };
            match tried {
                Err(failure) if again(&failure) && attempts.another().await => {}
                led => return led,
            }
        }
    }

    /// Transfers this controller's leadership to a voter; 0 chooses the voter with the smallest lag.
    ///
    /// # Errors
    /// `MEMBERSHIP_REFUSED` if the voter cannot lead. `NO_LEADER` if the voter was not elected in time;
    /// another controller may lead then, or none yet.
    pub(crate) async fn transfer_here(&self, successor: u64) -> Result<LeadershipTransfer, Failure> {
        let successor = self.successor(successor).await?;
        if successor == self.id().0 {
            return Ok(self.led());
        }
        let membership = self.membership();
        let member = membership.get_node(&successor).ok_or_else(nobody_leads)?;
        let peer = self.peers.peer(successor, member, TrafficClass::Requests);
        tracing::info!(successor, "handing leadership over");
        // No entry may follow the last entry that the successor receives. With all permits taken no
        // entry is in flight, and writes wait until the transfer ends or fails.
        let held = tokio::time::timeout(CATCH_UP_TIMEOUT, self.in_flight.acquire_many(BATCHES_IN_FLIGHT));
        let _held = held.await.map_err(|_| {
            let message = format!(
                "the writes in progress did not end within {CATCH_UP_TIMEOUT:?}, so leadership stays: try again"
            );
            Failure { retryable: true, ..Failure::new(Reason::MembershipRefused, message) }
        })?;
        self.send_all(successor).await?;
        let led = tokio::select! {
            taken = take_over(&peer) => taken?,
            never = self.step_down() => match never {},
        };
        tracing::info!(leader = led.leader, term = led.term, "leadership handed over");
        Ok(led)
    }

    fn led(&self) -> LeadershipTransfer {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow();
        LeadershipTransfer { leader: metrics.current_leader.unwrap_or(0), term: metrics.current_term }
    }

    /// Checks the named successor, or chooses a successor.
    async fn successor(&self, named: u64) -> Result<u64, Failure> {
        let refused = |message: String| Err(Failure::new(Reason::MembershipRefused, message));
        if self.leading_term().is_none() {
            return Err(nobody_leads());
        }
        let own = self.id().0;
        if named == own {
            return Ok(own);
        }
        let statuses = self.statuses().await;
        let answers = |id: u64| matches!(statuses.get(&id), Some(Ok(_)));
        let membership = self.membership();
        let status = self.own_status();
        let others = || membership.voter_ids().filter(|&id| id != own);
        if named == 0 {
            let best = others().filter(|&id| answers(id)).filter_map(|id| Some((status.lag(id)?, id))).min();
            return match best {
                Some((_, id)) => Ok(id),
                None => {
                    refused("no other voter that could lead answers: start or add a voter first".to_owned())
                }
            };
        }
        if !others().any(|id| id == named) {
            return refused(format!("controller {named} is not a voter: only a voter can lead"));
        }
        if !answers(named) {
            return refused(format!("controller {named} does not answer: start that controller first"));
        }
        match status.lag(named) {
            Some(lag) if lag <= SUCCESSOR_LAG_MAX => Ok(named),
            _ => {
                refused(format!("controller {named} is too far behind to lead: wait until it has caught up"))
            }
        }
    }

    /// Waits until a member has the whole log.
    async fn send_all(&self, id: u64) -> Result<(), Failure> {
        let all = |metrics: &RaftMetrics<u64, GroupMember>| {
            let matched = metrics.replication.as_ref().and_then(|it| it.get(&id).copied().flatten());
            matched.map(|matched| matched.index) >= metrics.last_log_index
        };
        let sent = self.raft.wait(Some(CATCH_UP_TIMEOUT)).metrics(all, "the successor has the log").await;
        sent.map(|_| ()).map_err(|_| {
            let message = format!(
                "controller {id} did not receive the end of the log within {CATCH_UP_TIMEOUT:?}, so leadership stays: try again after it has caught up"
            );
            Failure { retryable: true, ..Failure::new(Reason::MembershipRefused, message) }
        })
    }

    /// Sends heartbeats until an answer shows a later term, which ends this leadership.
    async fn step_down(&self) -> std::convert::Infallible {
        while self.leading_term().is_some() && self.raft.trigger().heartbeat().await.is_ok() {
            tokio::time::sleep(ELECTION_PAUSE / 4).await;
        }
        std::future::pending().await
    }

    /// Transfers leadership before a shutdown, if this controller leads and another voter can, so that
    /// the followers need not wait for the election timeout.
    pub(crate) async fn give_up_leadership(&self) {
        if self.leading_term().is_none() || self.membership().voter_ids().count() < 2 {
            return;
        }
        if let Err(failure) = self.transfer_here(0).await {
            tracing::info!(
                error = failure.message,
                "cannot hand leadership over before the shutdown: the others elect a leader"
            );
        }
    }

    /// Calls elections until this controller leads, at the leader's request.
    pub(super) async fn take_over_here(&self) -> Result<LeadershipTransfer, Failure> {
        let until = Instant::now() + ELECTION_TIMEOUT;
        while Instant::now() < until {
            self.raft.trigger().elect().await.map_err(|error| stopped(&error))?;
            let leads = self.raft.wait(Some(ELECTION_PAUSE)).state(ServerState::Leader, "leads").await;
            if leads.is_ok() {
                return Ok(self.led());
            }
        }
        let message = format!(
            "controller {} was not elected within {ELECTION_TIMEOUT:?}: see 'millrace cluster status' for who leads",
            self.id().0
        );
        Err(Failure::new(Reason::NoLeader, message).after_execution())
    }
}

async fn forward(leader: &PeerClient, successor: u64) -> Result<LeadershipTransfer, Failure> {
    let asked =
        leader.call(FORWARD_TIMEOUT, &successor, async |mut client, message| client.transfer(message).await);
    asked.await
}

async fn take_over(peer: &PeerClient) -> Result<LeadershipTransfer, Failure> {
    peer.call(ANSWER_TIMEOUT, &(), async |mut client, message| client.take_over(message).await).await
}
