//! Batches proposals. openraft appends and syncs each `client_write` separately. So all commands that
//! arrived during the writes of earlier batches share a log entry and a sync.

use std::collections::VecDeque;
use std::sync::Arc;

use millrace_cluster_state::{
    CallerName, CommandEffect, CommandOutcome, IdempotencyKey, Proposal, StateCommand, UnixMillis,
};
use millrace_types::{Failure, Reason};
use openraft::ServerState;
use openraft::error::ClientWriteError;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::failures::{nobody_leads, refused, shutting_down, stopped, unconfirmed};
use super::settings::Raft;
use super::time::StampClock;
use super::timing::WRITE_TIMEOUT;

/// Proposals that wait for an earlier batch. Further proposals fail with `QUEUE_FULL`.
pub(super) const WAITING_MAX: usize = 4096;
/// Commands of one log entry: as many as the expected concurrent clients, so that two entries carry all
/// commands in flight.
const BATCH_MAX: usize = 256;
/// Bytes of the commands of one log entry.
pub(super) const BATCH_BYTES_MAX: usize = 512 << 10;
/// The maximum size of a command's stamp, caller and idempotency key, in bytes.
const ENVELOPE_BYTES: usize = 1 << 10;

const _: () = assert!(
    BATCH_BYTES_MAX + BATCH_MAX * ENVELOPE_BYTES < millrace_raft_store::ENTRY_BYTES_MAX,
    "the largest batch fits a log entry"
);

/// Entries proposed and not yet applied: an entry is written while the previous entry is applied. A
/// task that holds all permits blocks writes.
pub(super) const BATCHES_IN_FLIGHT: u32 = 2;

/// A command that waits for a batch.
#[derive(Debug)]
pub(super) struct Proposed {
    pub(super) caller: CallerName,
    pub(super) idempotency: Option<IdempotencyKey>,
    pub(super) command: StateCommand,
    /// The term for which the command was proposed. In a later term the command is refused even if this
    /// controller leads again, and the caller asks the new leader.
    pub(super) term: u64,
    /// The size of the encoded command, in bytes.
    pub(super) bytes: usize,
    pub(super) answer: oneshot::Sender<Result<CommandEffect, Failure>>,
}

type Answers = Vec<oneshot::Sender<Result<CommandEffect, Failure>>>;

/// Proposes commands from the queue until all senders are dropped.
pub(super) async fn run(
    raft: Raft,
    time: StampClock,
    in_flight: Arc<Semaphore>,
    mut queue: mpsc::Receiver<Proposed>,
) {
    // Commands taken from the queue and not yet in a batch: fewer than two batches.
    let mut waiting = VecDeque::new();
    loop {
        fill(&mut waiting, &mut queue).await;
        // The semaphore is never closed. Acquire the permit only with a command at hand, so that an
        // idle proposer holds no permit. Commands that arrive while waiting for the permit join the
        // batch.
        let Ok(permit) = in_flight.clone().acquire_owned().await else { return };
        top_up(&mut waiting, &mut queue);
        let batch = next_batch(&mut waiting);
        if batch.is_empty() {
            return;
        }
        let term = {
            let metrics = raft.server_metrics();
            let metrics = metrics.borrow();
            (metrics.state == ServerState::Leader).then(|| metrics.vote.leader_id().term)
        };
        let (batch, late): (Vec<_>, Vec<_>) = batch.into_iter().partition(|it| Some(it.term) == term);
        answer_all(late.into_iter().map(|it| it.answer).collect(), &nobody_leads());
        if batch.is_empty() {
            continue;
        }
        let (proposals, answers) = stamp(batch, time.stamp());
        let written = match raft.client_write_ff(proposals).await {
            Ok(written) => written,
            Err(error) => {
                answer_all(answers, &stopped(&error));
                continue;
            }
        };
        tokio::spawn(async move {
            match tokio::time::timeout(WRITE_TIMEOUT, written).await {
                Ok(Ok(Ok(response))) => answer_each(answers, response.data),
                // The entry was refused, or appended here and then truncated by another leader. A third
                // controller may still have and commit the entry (Raft paper, figure 8).
                Ok(Ok(Err(ClientWriteError::ForwardToLeader(_)))) => {
                    answer_all(answers, &nobody_leads().after_execution());
                }
                Ok(Ok(Err(ClientWriteError::ChangeMembershipError(error)))) => {
                    answer_all(answers, &Failure::new(Reason::Internal, error.to_string()));
                }
                // The entry may be written, but Raft ended before the answer.
                Ok(Err(_)) => answer_all(answers, &shutting_down().after_execution()),
                Err(_) => answer_all(answers, &unconfirmed()),
            }
            drop(permit);
        });
    }
}

/// Moves commands from the queue to `waiting`. If `waiting` is empty, waits for the first command.
async fn fill(waiting: &mut VecDeque<Proposed>, queue: &mut mpsc::Receiver<Proposed>) {
    if waiting.is_empty() {
        let mut fresh = Vec::new();
        queue.recv_many(&mut fresh, BATCH_MAX).await;
        waiting.extend(fresh);
    }
    top_up(waiting, queue);
}

fn top_up(waiting: &mut VecDeque<Proposed>, queue: &mut mpsc::Receiver<Proposed>) {
    while waiting.len() < BATCH_MAX
        && let Ok(proposed) = queue.try_recv()
    {
        waiting.push_back(proposed);
    }
}

/// Takes the longest prefix that fits a log entry.
fn next_batch(waiting: &mut VecDeque<Proposed>) -> Vec<Proposed> {
    let mut bytes = 0;
    let fits = waiting.iter().take(BATCH_MAX).take_while(|proposed| {
        bytes += proposed.bytes;
        bytes <= BATCH_BYTES_MAX
    });
    let fits = fits.count();
    waiting.drain(..fits).collect()
}

fn stamp(batch: Vec<Proposed>, stamp: UnixMillis) -> (Vec<Proposal>, Answers) {
    let split = |it: Proposed| {
        let proposal =
            Proposal { stamp, caller: it.caller, idempotency: it.idempotency, command: it.command };
        (proposal, it.answer)
    };
    batch.into_iter().map(split).unzip()
}

fn answer_each(answers: Answers, outcomes: Vec<CommandOutcome>) {
    for (answer, outcome) in answers.into_iter().zip(outcomes) {
        send(answer, outcome.map_err(|refusal| refused(&refusal)));
    }
}

fn answer_all(answers: Answers, failure: &Failure) {
    for answer in answers {
        send(answer, Err(failure.clone()));
    }
}

/// Sends an answer. The caller may be gone; the write stays in effect.
fn send(answer: oneshot::Sender<Result<CommandEffect, Failure>>, result: Result<CommandEffect, Failure>) {
    if let Err(result) = answer.send(result) {
        tracing::debug!(?result, "the caller of a write has gone");
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{Epoch, NodeName};

    use super::*;

    fn waiting(sizes: &[usize]) -> VecDeque<Proposed> {
        let proposed = |&bytes: &usize| Proposed {
            caller: CallerName("test".into()),
            idempotency: None,
            command: StateCommand::NodeLost { name: NodeName::new("n1").unwrap(), epoch: Epoch(1) },
            term: 1,
            bytes,
            answer: oneshot::channel().0,
        };
        sizes.iter().map(proposed).collect()
    }

    fn batches(sizes: &[usize]) -> Vec<usize> {
        let mut waiting = waiting(sizes);
        let next = || Some(next_batch(&mut waiting).len()).filter(|&len| len > 0);
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn batches_are_bounded_by_commands_and_by_bytes_and_lose_no_command() {
        assert_eq!(batches(&[]), Vec::<usize>::new());
        assert_eq!(batches(&[1; 3]), vec![3]);
        assert_eq!(batches(&[1; BATCH_MAX + 1]), vec![BATCH_MAX, 1]);
        assert_eq!(batches(&[BATCH_BYTES_MAX / 2; 5]), vec![2, 2, 1]);
        assert_eq!(batches(&[BATCH_BYTES_MAX, 1, BATCH_BYTES_MAX]), vec![1, 1, 1]);
    }
}
