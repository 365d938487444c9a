//! Writes and linearizable reads on any controller: done here when this one leads, at the leader
//! otherwise, and tried again for a while when leadership changes on the way.
//!
//! A write that came from another controller is never passed on a second time: if the receiver does
//! not lead any more, the first one asks again. What is known not to have been proposed is tried
//! again; what may have been is only when it carries an idempotency key.

use std::time::Duration;

use millrace_cluster_state::quota::check_sizes;
use millrace_cluster_state::{
    Applied, Caller, Command, IdempotencyKey, KnownRules, Proposal, Refusal, State,
};
use millrace_proto::trace;
use millrace_raft_store::{LogId, Member};
use millrace_types::limits::COMMAND_BYTES_MAX;
use millrace_types::{Failure, Reason};
use openraft::error::{CheckIsLeaderError, RaftError};
use openraft::metrics::RaftServerMetrics;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::peers::Peer;
use super::proposer::{self, Proposed, refused};
use super::replica::{Leader, Replica};

/// Proposals that wait for the batch before theirs. Beyond that, `QUEUE_FULL`.
pub(super) const WAITING_MAX: usize = 4096;
/// Writes on their way to another leader. Beyond that, `QUEUE_FULL`.
pub(super) const FORWARDED_MAX: usize = 4096;
const _: () = assert!(COMMAND_BYTES_MAX < proposer::BATCH_BYTES_MAX, "every command fits a batch");

/// How long a request waits for somebody to lead: an election with one tie, and not much longer, so
/// that a group without a majority says so.
pub(super) const LEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long between two attempts when nothing changed meanwhile.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// How long a proposal may take to be applied. A disk may stall; a majority that is gone for longer
/// leaves the write unknown.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long another controller's answer may take on top.
const FORWARD_TIMEOUT: Duration = WRITE_TIMEOUT.saturating_add(Duration::from_secs(1));
/// How long the leader may take to make sure that it leads.
const READ_INDEX_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a write waits until the controller it was asked of has it too.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(1);
/// A leader that heard nothing from a majority for this long refuses writes at once: they would
/// only be left unknown.
const QUORUM_SILENCE_MAX: Duration = Duration::from_secs(2);

/// A write as it travels to the leader.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Forwarded {
    caller: Caller,
    idempotency: Option<IdempotencyKey>,
    command: Command,
}

impl Forwarded {
    /// Checks each part of the write against its bound, and gives the size of the command.
    fn check_sizes(&self) -> Result<usize, Failure> {
        let Self { caller, idempotency, command } = self;
        let checked = check_sizes(caller, idempotency.as_ref(), command);
        checked.map_err(|error| refused(&Refusal::from(error)))?;
        command_bytes(command)
    }
}

/// What the leader answers to a write.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Done {
    applied: Applied,
    /// A log index that has it.
    index: Option<u64>,
}

impl Replica {
    /// Proposes a command and waits until it is applied: at the leader, and here, so that whoever
    /// wrote reads what it wrote. If this controller lags by more than [`SETTLE_TIMEOUT`] it is not
    /// waited for.
    ///
    /// # Errors
    /// The command's refusal, or why it was not proposed; `may_have_executed` is set when it may
    /// be committed all the same.
    pub(crate) async fn propose(
        &self,
        caller: Caller,
        idempotency: Option<IdempotencyKey>,
        command: Command,
    ) -> Result<Applied, Failure> {
        let write = Forwarded { caller, idempotency, command };
        write.check_sizes()?;
        self.check_disk()?;
        // What nobody asked for, such as a checkpoint each second, is nobody's trace.
        let span = match tracing::Span::current().is_none() {
            true => tracing::Span::none(),
            false => tracing::info_span!("raft.propose", millrace.command = write.command.name()),
        };
        let proposed = self.propose_anywhere(write).instrument(span.clone()).await;
        if let Err(failure) = &proposed {
            trace::fail(&span, &failure.message);
        }
        proposed
    }

    async fn propose_anywhere(&self, write: Forwarded) -> Result<Applied, Failure> {
        let repeatable = write.idempotency.is_some();
        let again = |failure: &Failure| no_leader(failure) && (repeatable || !failure.may_have_executed);
        let mut attempts = self.attempts();
        let mut sent_before = false;
        let Done { applied, index } = loop {
            let tried = match self.leader() {
                Leader::Here => self.propose_here(&write).await,
                Leader::There(leader) => self.forward(&leader, &write).await,
                Leader::Unknown => Err(nobody_leads()),
            };
            match tried {
                Err(failure) if again(&failure) && attempts.another().await => {
                    sent_before |= failure.may_have_executed;
                }
                done => break done.map_err(|failure| ended(failure, sent_before))?,
            }
        };
        if self.caught_up(index, SETTLE_TIMEOUT).await.is_none() {
            tracing::debug!(index, "this controller does not have what was written through it yet");
        }
        Ok(applied)
    }

    /// Proposes what only the leader of a term may say, for it goes by what that leader alone knows.
    /// Never passed on, and tried once.
    ///
    /// # Errors
    /// As [`Self::propose`].
    pub(crate) async fn propose_leading(
        &self,
        term: u64,
        caller: Caller,
        command: Command,
    ) -> Result<Applied, Failure> {
        if self.leading_term() != Some(term) {
            return Err(nobody_leads());
        }
        let write = Forwarded { caller, idempotency: None, command };
        self.propose_here(&write).await.map(|done| done.applied)
    }

    /// The state as soon as it has an entry; `None` when that takes too long.
    async fn caught_up(&self, index: Option<u64>, timeout: Duration) -> Option<State> {
        let mut applied = self.reader.watch();
        let has = applied.wait_for(|applied| applied.last.map(|last| last.index) >= index);
        match tokio::time::timeout(timeout, has).await {
            Ok(Ok(applied)) => Some(applied.state.clone()),
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// The state with every write that was acknowledged before this call.
    ///
    /// # Errors
    /// `NO_LEADER` when that cannot be known here now.
    pub(crate) async fn linearizable(&self) -> Result<State, Failure> {
        self.check_disk()?;
        let mut attempts = self.attempts();
        let index = loop {
            let tried = match self.leader() {
                Leader::Here => self.read_index_here().await,
                Leader::There(leader) => read_index(&leader).await,
                Leader::Unknown => Err(nobody_leads()),
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

    /// Attempts at something that only the leader does, from now on.
    pub(super) fn attempts(&self) -> Attempts<'_> {
        let mut changes = self.raft.server_metrics();
        changes.mark_unchanged();
        Attempts { replica: self, until: Instant::now() + LEADER_TIMEOUT, changes }
    }

    async fn forward(&self, leader: &Peer, write: &Forwarded) -> Result<Done, Failure> {
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

    /// Waits until another than this one is known to lead: a leader that vanished without a word
    /// does not answer any more.
    async fn another_leads(&self, than: u64) {
        let mut metrics = self.raft.server_metrics();
        let changed = metrics.wait_for(|metrics| metrics.current_leader.is_some_and(|leader| leader != than));
        if changed.await.is_err() {
            // Raft has ended here: the answer still comes, or the time is up.
            std::future::pending::<()>().await;
        }
    }

    /// Proposes what this controller was asked for, or another one was.
    pub(super) async fn propose_here(&self, write: &Forwarded) -> Result<Done, Failure> {
        let bytes = write.check_sizes()?;
        let term = self.check_leads()?;
        self.check_space(&write.command)?;
        let Forwarded { caller, idempotency, command } = write.clone();
        // The stamp is the batch's: this one is for the trial alone.
        let proposal = Proposal { stamp: self.time.now(), caller, idempotency, command };
        let state = &self.reader.latest().state;
        // In the log, a command that no build can apply would end every controller.
        state
            .check_rules(KnownRules::THIS_BUILD, &proposal)
            .map_err(|unknown| Failure::malformed(unknown.to_string()))?;
        state.admit(&proposal).map_err(|refusal| refused(&refusal))?;
        let Proposal { caller, idempotency, command, .. } = proposal;
        let (answer, answered) = oneshot::channel();
        let proposed = Proposed { caller, idempotency, command, term, bytes, answer };
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
                answer.map(|applied| Done { applied, index })
            }
            Ok(Err(_)) => Err(shutting_down().after_execution()),
            Err(_) => Err(unconfirmed()),
        }
    }

    /// The term in which this controller leads. Refuses when it does not, or leads nobody any more.
    fn check_leads(&self) -> Result<u64, Failure> {
        let term = self.leading_term().ok_or_else(nobody_leads)?;
        let silence = self.raft.data_metrics().borrow().millis_since_quorum_ack.map(Duration::from_millis);
        match silence {
            Some(silence) if silence > QUORUM_SILENCE_MAX => Err(Failure::new(
                Reason::NoLeader,
                format!("no majority of controllers has been heard of for {silence:?}: writes are refused"),
            )),
            _ => Ok(term),
        }
    }

    /// The log index that a read must have applied. Makes sure that this controller leads.
    pub(super) async fn read_index_here(&self) -> Result<Option<u64>, Failure> {
        let asked = tokio::time::timeout(READ_INDEX_TIMEOUT, self.raft.get_read_log_id()).await;
        let no_majority = |why: &dyn std::fmt::Display| {
            Failure::new(Reason::NoLeader, format!("no majority of controllers can be reached: {why}"))
        };
        match asked {
            Err(_) => Err(no_majority(&format_args!("no answer within {READ_INDEX_TIMEOUT:?}"))),
            Ok(Ok((read, _applied))) => Ok(read.map(|read: LogId| read.index)),
            Ok(Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(_)))) => Err(nobody_leads()),
            Ok(Err(RaftError::APIError(CheckIsLeaderError::QuorumNotEnough(error)))) => {
                Err(no_majority(&error))
            }
            Ok(Err(RaftError::Fatal(error))) => Err(stopped(&error)),
        }
    }
}

async fn read_index(leader: &Peer) -> Result<Option<u64>, Failure> {
    let asked =
        leader.call(READ_INDEX_TIMEOUT, &(), async |mut client, message| client.read_index(message).await);
    asked.await.map_err(|failure| leads_no_more(leader, failure))
}

/// What a leader that goes down says of itself is not what the one that asked says of itself.
pub(super) fn leads_no_more(leader: &Peer, failure: Failure) -> Failure {
    if failure.reason != Reason::ShuttingDown {
        return failure;
    }
    let message = format!("controller {}, the last known leader, is going down: try again soon", leader.id());
    Failure { may_have_executed: failure.may_have_executed, ..Failure::new(Reason::NoLeader, message) }
}

/// Attempts at the leader while leadership changes.
pub(super) struct Attempts<'a> {
    replica: &'a Replica,
    until: Instant,
    changes: watch::Receiver<RaftServerMetrics<u64, Member>>,
}

impl Attempts<'_> {
    /// Waits for news of who leads, and not for long. Says whether to try once more.
    pub(super) async fn another(&mut self) -> bool {
        if Instant::now() >= self.until || self.replica.raft.metrics().borrow().running_state.is_err() {
            return false;
        }
        // Whether it changed or the time ran out: the next attempt says.
        match tokio::time::timeout(RETRY_PAUSE, self.changes.changed()).await {
            Ok(changed) => changed.is_ok(),
            Err(_) => true,
        }
    }
}

/// Whether a failure is about who leads, so that it may be over soon.
fn no_leader(failure: &Failure) -> bool {
    failure.reason == Reason::NoLeader
}

/// The failure of a write's last attempt, as that of all of them: one that asked nobody says nothing
/// of one before that was sent and not answered. What the state refuses is refused: it answers every
/// attempt of one write the same.
fn ended(last: Failure, sent_before: bool) -> Failure {
    let asked_nobody = matches!(last.reason, Reason::NoLeader | Reason::QueueFull | Reason::ShuttingDown);
    if sent_before && asked_nobody { last.after_execution() } else { last }
}

/// The size of a command, if the log takes it.
fn command_bytes(command: &Command) -> Result<usize, Failure> {
    let encoded = rmp_serde::to_vec_named(command)
        .map_err(|error| Failure::new(Reason::Internal, format!("a command cannot be encoded: {error}")))?;
    if encoded.len() > COMMAND_BYTES_MAX {
        let message = format!(
            "the change takes {} bytes, and COMMAND_BYTES_MAX is {COMMAND_BYTES_MAX}: shorten its labels, or declare fewer tensors",
            encoded.len()
        );
        return Err(Failure::new(Reason::InvalidSpec, message));
    }
    Ok(encoded.len())
}

pub(super) fn nobody_leads() -> Failure {
    let message =
        "no controller is known to lead now: a majority of them must be up; try again soon, or read stale";
    Failure::new(Reason::NoLeader, message)
}

fn deposed(leader: &Peer) -> Failure {
    let message = format!(
        "controller {} stopped leading before it answered: the change may have come into force",
        leader.id()
    );
    Failure::new(Reason::NoLeader, message).after_execution()
}

/// A write that was made and that no majority has, as far as is known.
pub(super) fn unconfirmed() -> Failure {
    let message = format!(
        "no majority of controllers confirmed the change within {WRITE_TIMEOUT:?}: it may still come into force"
    );
    Failure::new(Reason::NoLeader, message).after_execution()
}

pub(super) fn stopped(error: &openraft::error::Fatal<u64>) -> Failure {
    match error {
        openraft::error::Fatal::Stopped => shutting_down(),
        other => Failure::new(Reason::NoLeader, format!("this controller's log has halted: {other}")),
    }
}

pub(super) fn shutting_down() -> Failure {
    Failure::new(Reason::ShuttingDown, "this controller is going down")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_was_sent_stays_unknown_when_its_last_attempt_reaches_nobody() {
        let unknown = |reason, sent_before| ended(Failure::new(reason, "why"), sent_before).may_have_executed;
        for reason in [Reason::NoLeader, Reason::QueueFull, Reason::ShuttingDown] {
            assert!(unknown(reason, true) && !unknown(reason, false), "{reason}");
        }
        assert!(!unknown(Reason::FunctionNotFound, true), "the state was asked");
        let sent = ended(nobody_leads().after_execution(), false);
        assert!(sent.may_have_executed);
    }
}
