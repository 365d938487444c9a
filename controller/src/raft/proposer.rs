//! Batches proposals. openraft appends and syncs each `client_write` by itself, so whatever waited
//! while the batches before were being written goes into one log entry, with one sync.

use std::sync::Arc;

use millrace_cluster_state::{Applied, Caller, Command, IdempotencyKey, Outcome, Proposal, Refusal};
use millrace_types::{Failure, Reason};
use openraft::error::ClientWriteError;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::Raft;
use super::replica::{not_leader, shutting_down, stopped};
use crate::clock::WallClock;

/// Commands of one log entry.
pub(super) const BATCH_MAX: usize = 64;
/// Entries proposed and not yet applied: one is written while the one before is applied.
const BATCHES_IN_FLIGHT: usize = 2;

/// A command that waits for its batch.
#[derive(Debug)]
pub(super) struct Proposed {
    pub(super) caller: Caller,
    pub(super) idempotency: Option<IdempotencyKey>,
    pub(super) command: Command,
    pub(super) answer: oneshot::Sender<Result<Applied, Failure>>,
}

type Answers = Vec<oneshot::Sender<Result<Applied, Failure>>>;

/// Proposes what comes, until nobody can send any more.
pub(super) async fn run(raft: Raft, clock: Arc<dyn WallClock>, mut waiting: mpsc::Receiver<Proposed>) {
    let in_flight = Arc::new(Semaphore::new(BATCHES_IN_FLIGHT));
    loop {
        // Never closed.
        let Ok(permit) = in_flight.clone().acquire_owned().await else { return };
        let mut batch = Vec::new();
        if waiting.recv_many(&mut batch, BATCH_MAX).await == 0 {
            return;
        }
        let (proposals, answers) = stamp(batch, clock.as_ref());
        let written = match raft.client_write_ff(proposals).await {
            Ok(written) => written,
            Err(error) => {
                answer_all(answers, &stopped(&error));
                continue;
            }
        };
        tokio::spawn(async move {
            match written.await {
                Ok(Ok(response)) => answer_each(answers, response.data),
                Ok(Err(ClientWriteError::ForwardToLeader(forward))) => {
                    answer_all(answers, &not_leader(&forward))
                }
                Ok(Err(ClientWriteError::ChangeMembershipError(error))) => {
                    answer_all(answers, &Failure::new(Reason::Internal, error.to_string()));
                }
                // Written, perhaps, and no longer there to answer.
                Err(_) => answer_all(answers, &shutting_down().after_execution()),
            }
            drop(permit);
        });
    }
}

fn stamp(batch: Vec<Proposed>, clock: &dyn WallClock) -> (Vec<Proposal>, Answers) {
    let stamp = clock.now();
    let split = |it: Proposed| {
        let proposal =
            Proposal { stamp, caller: it.caller, idempotency: it.idempotency, command: it.command };
        (proposal, it.answer)
    };
    batch.into_iter().map(split).unzip()
}

fn answer_each(answers: Answers, outcomes: Vec<Outcome>) {
    for (answer, outcome) in answers.into_iter().zip(outcomes) {
        send(answer, outcome.map_err(|refusal| refused(&refusal)));
    }
}

fn answer_all(answers: Answers, failure: &Failure) {
    for answer in answers {
        send(answer, Err(failure.clone()));
    }
}

/// Whoever asked may have gone away: the write stands all the same.
fn send(answer: oneshot::Sender<Result<Applied, Failure>>, result: Result<Applied, Failure>) {
    if let Err(result) = answer.send(result) {
        tracing::debug!(?result, "nobody waits for this write any more");
    }
}

/// A refusal as every interface reports it.
pub(crate) fn refused(refusal: &Refusal) -> Failure {
    Failure::new(refusal.reason(), refusal.to_string())
}
