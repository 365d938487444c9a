//! Writes and linearizable reads on any controller. The leader handles both itself, and another
//! controller forwards both. Both try again for a while if leadership changes.
//!
//! A forwarded write is never forwarded a second time: if the receiver no longer leads, the first
//! controller asks again. A write that was certainly not proposed is tried again. A write that may have
//! been proposed is tried again only with an idempotency key.

use std::time::Duration;

use millrace_cluster_state::quota::check_sizes;
use millrace_cluster_state::{
    CallerName, CommandEffect, CommandRefusal, IdempotencyKey, KnownRules, Proposal, State, StateCommand,
};
use millrace_proto::trace;
use millrace_raft_store::{GroupMember, LogId};
use millrace_types::limits::COMMAND_BYTES_MAX;
use millrace_types::{Failure, Reason};
use openraft::error::{CheckIsLeaderError, RaftError};
use openraft::metrics::RaftServerMetrics;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::failures::{nobody_leads, refused, shutting_down, stopped, unconfirmed};
use super::peers::PeerClient;
use super::proposer::{BATCH_BYTES_MAX, Proposed, WAITING_MAX};
use super::replica::{FORWARDED_MAX, KnownLeader, Replica};
use super::timing::WRITE_TIMEOUT;

const _: () = assert!(COMMAND_BYTES_MAX < BATCH_BYTES_MAX, "every command fits a batch");

/// The longest wait of a request for a leader: an election with a tie, and not much longer, so that
/// a group without a majority reports its state.
const LEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two attempts if leadership does not change.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The timeout of another controller's answer: [`WRITE_TIMEOUT`] and the network's share.
const FORWARD_TIMEOUT: Duration = WRITE_TIMEOUT.saturating_add(Duration::from_secs(1));
/// The timeout of the confirmation of leadership.
const READ_INDEX_TIMEOUT: Duration = Duration::from_millis(500);
/// The longest wait of a write until the receiving controller has applied the write too.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);
/// The time since a majority's last answer after which a leader refuses writes at once, because the
/// outcome would only be unknown.
const QUORUM_SILENCE_MAX: Duration = Duration::from_secs(2);

/// A write as forwarded to the leader.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ForwardedWrite {
    caller: CallerName,
    idempotency: Option<IdempotencyKey>,
    command: StateCommand,
}

impl ForwardedWrite {
    /// Checks the bounds of each part of the write.
    pub(super) fn checked(self) -> Result<CheckedWrite, Failure> {
        let Self { caller, idempotency, command } = &self;
        let checked = check_sizes(caller, idempotency.as_ref(), command);
        checked.map_err(|error| refused(&CommandRefusal::from(error)))?;
        Ok(CheckedWrite { bytes: command_bytes(command)?, forwarded: self })
    }
}

/// A write within the bounds on sizes.
#[derive(Debug)]
pub(super) struct CheckedWrite {
    forwarded: ForwardedWrite,
    /// The size of the encoded command, in bytes.
    bytes: usize,
}

/// The leader's answer to a write.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct WriteResult {
    applied: CommandEffect,
    /// The index of a log entry at or after the write.
    index: Option<u64>,
}

impl Replica {
    /// Proposes a command and waits until the leader and this controller have applied the command, so
    /// that the caller can read the result. If this controller lags by more than [`SETTLE_TIMEOUT`],
    /// the call does not wait longer.
    ///
    /// # Errors
    /// The command's refusal, or the reason why the command was not proposed. `may_have_executed` is
    /// set if the command may still be committed.
    pub(crate) async fn propose(
        &self,
        caller: CallerName,
        idempotency: Option<IdempotencyKey>,
        command: StateCommand,
    ) -> Result<CommandEffect, Failure> {
        let write = ForwardedWrite { caller, idempotency, command }.checked()?;
        self.check_disk()?;
        // Commands without a client's trace, such as the checkpoint each second, start no trace.
        let span = match tracing::Span::current().is_none() {
            true => tracing::Span::none(),
            false => tracing::info_span!("raft.propose", millrace.command = write.forwarded.command.name()),
        };
        let proposed = self.propose_anywhere(write).instrument(span.clone()).await;
        if let Err(failure) = &proposed {
            trace::fail(&span, &failure.message);
        }
        proposed
    }

    async fn propose_anywhere(&self, write: CheckedWrite) -> Result<CommandEffect, Failure> {
        let repeatable = write.forwarded.idempotency.is_some();
        let again = |failure: &Failure| no_leader(failure) && (repeatable || !failure.may_have_executed);
        let mut attempts = self.attempts();
        let mut sent_before = false;
        let WriteResult { applied, index } = loop {
            let tried = match self.leader() {
                KnownLeader::Here => self.propose_here(&write).await,
                KnownLeader::There(leader) => self.forward(&leader, &write.forwarded).await,
                KnownLeader::Unknown => Err(nobody_leads()),
            };
            match tried {
                Err(failure) if again(&failure) && attempts.another().await => {
                    sent_before |= failure.may_have_executed;
                }
                done => break done.map_err(|failure| ended(failure, sent_before))?,
            }
        };
        if self.caught_up(index, SETTLE_TIMEOUT).await.is_none() {
            tracing::debug!(index, "this controller has not applied its own write yet");
        }
        Ok(applied)
    }

    /// Proposes a command that depends on knowledge that only the leader of `term` has. The command is
    /// never forwarded, and is tried once.
    ///
    /// # Errors
    /// The same as [`Self::propose`].
    pub(crate) async fn propose_leading(
        &self,
        term: u64,
        caller: CallerName,
        command: StateCommand,
    ) -> Result<CommandEffect, Failure> {
        if self.leading_term() != Some(term) {
            return Err(nobody_leads());
        }
        let write = ForwardedWrite { caller, idempotency: None, command }.checked()?;
        self.propose_here(&write).await.map(|done| done.applied)
    }

    /// Returns the state once an entry is applied; `None` after the timeout.
    async fn caught_up(&self, index: Option<u64>, timeout: Duration) -> Option<State> {
        let mut applied = self.reader.watch();
        let has = applied.wait_for(|applied| applied.last.map(|last| last.index) >= index);
        match tokio::time::timeout(timeout, has).await {
            Ok(Ok(applied)) => Some(applied.state.clone()),
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// Returns a state that includes every write acknowledged before this call.
    ///
    /// # Errors
    /// `NO_LEADER` if this controller cannot obtain such a state now.
    pub(crate) async fn linearizable(&self) -> Result<State, Failure> {
        self.check_disk()?;
        let mut attempts = self.attempts();
        let index = loop {
            let tried = match self.leader() {
                KnownLeader::Here => self.read_index_here().await,
                KnownLeader::There(leader) => read_index(&leader).await,
                KnownLeader::Unknown => Err(nobody_leads()),
            };
            match tried {
                Err(failure) if no_leader(&failure) && attempts.another().await => {}
                index => break index?,
            }
        };
        self.caught_up(index, LEADER_TIMEOUT).await.ok_or_else(|| {
            let message =
                format!("this controller is more than {LEADER_TIMEOUT:?} behind: ask another, or read stale");
            Failure::new(Reason::NoLeader, message)
        })
    }

    /// Returns the attempts at an action that only the leader can do. The time limit starts now.
    pub(super) fn attempts(&self) -> LeaderAttempts<'_> {
        let mut changes = self.raft.server_metrics();
        changes.mark_unchanged();
        LeaderAttempts { replica: self, until: Instant::now() + LEADER_TIMEOUT, changes }
    }

    async fn forward(&self, leader: &PeerClient, write: &ForwardedWrite) -> Result<WriteResult, Failure> {
        let Ok(_permit) = self.forwarded.try_acquire() else {
            let message = format!("{FORWARDED_MAX} changes are on their way to the leader: try again soon");
            return Err(Failure::new(Reason::QueueFull, message));
        };
        let sent =
            leader.call(FORWARD_TIMEOUT, write, async |mut client, message| client.propose(message).await);
        tokio::select! {
            answer = sent => answer.map_err(|failure| leads_no_more(leader, failure)),
            () = self.another_leads(leader.id()) => Err(deposed(leader)),
        }
    }

    /// Waits until a controller other than `than` is known to lead, because a leader that vanished
    /// silently never answers.
    async fn another_leads(&self, than: u64) {
        let mut metrics = self.raft.server_metrics();
        let changed = metrics.wait_for(|metrics| metrics.current_leader.is_some_and(|leader| leader != than));
        if changed.await.is_err() {
            // Raft has ended on this controller, but the answer may still arrive before the timeout.
            std::future::pending::<()>().await;
        }
    }

    /// Proposes a command of this controller, or a command that another controller forwarded.
    pub(super) async fn propose_here(&self, write: &CheckedWrite) -> Result<WriteResult, Failure> {
        let CheckedWrite { forwarded, bytes } = write;
        let term = self.check_leads()?;
        self.check_space(&forwarded.command)?;
        let ForwardedWrite { caller, idempotency, command } = forwarded.clone();
        // This stamp serves the trial only: the batch gets another.
        let proposal = Proposal { stamp: self.time.now(), caller, idempotency, command };
        let state = &self.reader.latest().state;
        // A command in the log that no build can apply would halt every controller.
        state
            .check_rules(KnownRules::THIS_BUILD, &proposal)
            .map_err(|unknown| Failure::malformed(unknown.to_string()))?;
        state.admit(&proposal).map_err(|refusal| refused(&refusal))?;
        let Proposal { caller, idempotency, command, .. } = proposal;
        let (answer, answered) = oneshot::channel();
        let proposed = Proposed { caller, idempotency, command, term, bytes: *bytes, answer };
        self.proposals.try_send(proposed).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Failure::new(
                Reason::QueueFull,
                format!("{WAITING_MAX} changes are waiting already: try again soon"),
            ),
            mpsc::error::TrySendError::Closed(_) => shutting_down(),
        })?;
        match tokio::time::timeout(WRITE_TIMEOUT, answered).await {
            Ok(Ok(answer)) => {
                let index = self.reader.latest().last.map(|last| last.index);
                answer.map(|applied| WriteResult { applied, index })
            }
            Ok(Err(_)) => Err(shutting_down().after_execution()),
            Err(_) => Err(unconfirmed()),
        }
    }

    /// Returns the term in which this controller leads. Refuses if the controller does not lead, or no
    /// majority has answered recently.
    fn check_leads(&self) -> Result<u64, Failure> {
        let term = self.leading_term().ok_or_else(nobody_leads)?;
        let silence = self.raft.data_metrics().borrow().millis_since_quorum_ack.map(Duration::from_millis);
        match silence {
            Some(silence) if silence > QUORUM_SILENCE_MAX => Err(Failure::new(
                Reason::NoLeader,
                format!(
                    "no majority of controllers has answered for {silence:?}: writes are refused until a majority answers; see 'millrace cluster status'"
                ),
            )),
            _ => Ok(term),
        }
    }

    /// Returns the log index that a linearizable read must have applied, after a majority confirmed
    /// this leadership.
    pub(super) async fn read_index_here(&self) -> Result<Option<u64>, Failure> {
        let restored = self.last_of_restored_leader();
        let asked = tokio::time::timeout(READ_INDEX_TIMEOUT, self.raft.get_read_log_id()).await;
        let no_majority = |why: &dyn std::fmt::Display| {
            Failure::new(Reason::NoLeader, format!("cannot reach a majority of controllers: {why}"))
        };
        match asked {
            Err(_) => Err(no_majority(&format_args!("no answer within {READ_INDEX_TIMEOUT:?}"))),
            Ok(Ok((read, _applied))) => Ok(read.map(|read: LogId| read.index).max(restored)),
            Ok(Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(_)))) => Err(nobody_leads()),
            Ok(Err(RaftError::APIError(CheckIsLeaderError::QuorumNotEnough(error)))) => {
                Err(no_majority(&error))
            }
            Ok(Err(RaftError::Fatal(error))) => Err(stopped(&error)),
        }
    }
}

impl Replica {
    /// Returns the index of the last log entry at the start, as long as this controller may lead in the term
    /// of that entry.
    ///
    /// A leader that restarts before its followers elect another leads on in the same term. openraft then
    /// knows which entries were committed only up to a position that was saved without a sync, and reads at
    /// that position. So a read could miss a write that was acknowledged before the restart. Every such
    /// write is at or before the last entry of this log. In a later term, reads are at or after the leader's
    /// first entry of that term, which follows all acknowledged writes.
    fn last_of_restored_leader(&self) -> Option<u64> {
        let last = self.last_at_start?;
        (self.term() <= last.leader_id.term).then_some(last.index)
    }
}

async fn read_index(leader: &PeerClient) -> Result<Option<u64>, Failure> {
    let asked =
        leader.call(READ_INDEX_TIMEOUT, &(), async |mut client, message| client.read_index(message).await);
    asked.await.map_err(|failure| leads_no_more(leader, failure))
}

/// Rewrites a `SHUTTING_DOWN` failure of the leader: the leader shuts down, not this controller.
pub(super) fn leads_no_more(leader: &PeerClient, failure: Failure) -> Failure {
    if failure.reason != Reason::ShuttingDown {
        return failure;
    }
    let message =
        format!("controller {}, the last known leader, is shutting down: try again soon", leader.id());
    Failure { may_have_executed: failure.may_have_executed, ..Failure::new(Reason::NoLeader, message) }
}

/// Attempts at the leader, while leadership may change.
pub(super) struct LeaderAttempts<'a> {
    replica: &'a Replica,
    until: Instant,
    changes: watch::Receiver<RaftServerMetrics<u64, GroupMember>>,
}

impl LeaderAttempts<'_> {
    /// Waits for a change of leadership or a short pause, and returns whether to try again.
    pub(super) async fn another(&mut self) -> bool {
        if Instant::now() >= self.until || self.replica.raft.metrics().borrow().running_state.is_err() {
            return false;
        }
        // The pause and a change of leadership both lead to another attempt.
        match tokio::time::timeout(RETRY_PAUSE, self.changes.changed()).await {
            Ok(changed) => changed.is_ok(),
            Err(_) => true,
        }
    }
}

/// Whether a failure is about leadership, and so may be temporary.
fn no_leader(failure: &Failure) -> bool {
    failure.reason == Reason::NoLeader
}

/// Merges the failure of the last attempt with the history of the write. A last attempt that reached no
/// leader says nothing about an earlier attempt without an answer. A refusal by the state is final: the
/// state refuses every attempt of the same write.
fn ended(last: Failure, sent_before: bool) -> Failure {
    let asked_nobody = matches!(last.reason, Reason::NoLeader | Reason::QueueFull | Reason::ShuttingDown);
    if sent_before && asked_nobody { last.after_execution() } else { last }
}

/// Returns the encoded size of a command, if the log accepts that size.
fn command_bytes(command: &StateCommand) -> Result<usize, Failure> {
    let bytes = command.encoded_len();
    match usize::try_from(bytes) {
        Ok(bytes) if bytes <= COMMAND_BYTES_MAX => Ok(bytes),
        _ => Err(Failure::new(
            Reason::InvalidSpec,
            format!(
                "the change takes {bytes} bytes, and COMMAND_BYTES_MAX is {COMMAND_BYTES_MAX}: shorten its labels, or declare fewer tensors"
            ),
        )),
    }
}

fn deposed(leader: &PeerClient) -> Failure {
    let message = format!(
        "controller {} stopped leading before it answered: the change may have taken effect: read it back before you try again",
        leader.id()
    );
    Failure::new(Reason::NoLeader, message).after_execution()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sent_write_stays_unknown_if_its_last_attempt_reaches_no_leader() {
        let unknown = |reason, sent_before| ended(Failure::new(reason, "why"), sent_before).may_have_executed;
        for reason in [Reason::NoLeader, Reason::QueueFull, Reason::ShuttingDown] {
            assert!(unknown(reason, true) && !unknown(reason, false), "{reason}");
        }
        assert!(!unknown(Reason::FunctionNotFound, true), "the state refused the write");
        let sent = ended(nobody_leads().after_execution(), false);
        assert!(sent.may_have_executed);
    }
}
