//! What the rest of the controller has of Raft: the state as it is here, the state as the whole
//! cluster has it, and a way to propose changes.

use std::sync::Arc;

use millrace_cluster_state::{Applied, Caller, Command, IdempotencyKey, State};
use millrace_raft_store::StateReader;
use millrace_types::{Failure, Reason};
use openraft::ServerState;
use openraft::error::{CheckIsLeaderError, RaftError};
use openraft::metrics::RaftServerMetrics;
use tokio::sync::{mpsc, oneshot, watch};

use super::Raft;
pub(crate) use super::proposer::refused;
use super::proposer::{self, Proposed};
use crate::clock::WallClock;

/// Proposals that wait for the batch before theirs. Beyond that, `QUEUE_FULL`.
const WAITING_MAX: usize = 4096;
/// The largest command, encoded.
const COMMAND_BYTES_MAX: usize = 128 << 10;

const _: () = assert!(COMMAND_BYTES_MAX < proposer::BATCH_BYTES_MAX, "every command fits a batch");

/// A handle on the replicated state. Cloning shares it.
#[derive(Clone)]
pub(crate) struct Replica {
    raft: Raft,
    reader: StateReader<State>,
    proposals: mpsc::Sender<Proposed>,
    clock: Arc<dyn WallClock>,
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Replica")
    }
}

/// Moves on with every change of the state, and when this controller begins or ends to lead.
#[derive(Debug)]
pub(crate) struct Changes {
    state: watch::Receiver<Arc<millrace_raft_store::Applied<State>>>,
    server: watch::Receiver<RaftServerMetrics<u64, openraft::BasicNode>>,
}

impl Changes {
    /// Waits for the next change.
    pub(crate) async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        tokio::select! {
            changed = self.state.changed() => changed,
            changed = self.server.changed() => changed,
        }
    }
}

impl Replica {
    /// A handle over a running Raft node. Spawns the proposer, which ends with the last handle.
    pub(crate) fn new(raft: Raft, reader: StateReader<State>, clock: Arc<dyn WallClock>) -> Self {
        let (proposals, waiting) = mpsc::channel(WAITING_MAX);
        tokio::spawn(proposer::run(raft.clone(), clock.clone(), waiting));
        Self { raft, reader, proposals, clock }
    }

    /// The state as this controller has it: at most a little behind the leader's.
    pub(crate) fn state(&self) -> State {
        self.reader.latest().state.clone()
    }

    /// Every change from now on.
    pub(crate) fn changes(&self) -> Changes {
        Changes { state: self.reader.watch(), server: self.raft.server_metrics() }
    }

    /// The term in which this controller leads, if it does.
    pub(crate) fn leading_term(&self) -> Option<u64> {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow();
        (metrics.state == ServerState::Leader).then(|| metrics.vote.leader_id().term)
    }

    /// The state with every write that was acknowledged before this call.
    ///
    /// # Errors
    /// `NO_LEADER` when that cannot be known here now.
    pub(crate) async fn linearizable(&self) -> Result<State, Failure> {
        match self.raft.ensure_linearizable().await {
            Ok(_) => Ok(self.state()),
            Err(RaftError::APIError(CheckIsLeaderError::ForwardToLeader(forward))) => {
                Err(not_leader(&forward))
            }
            Err(RaftError::APIError(CheckIsLeaderError::QuorumNotEnough(error))) => Err(Failure::new(
                Reason::NoLeader,
                format!("no majority of controllers can be reached: {error}"),
            )),
            Err(RaftError::Fatal(error)) => Err(stopped(&error)),
        }
    }

    /// Proposes a command and waits until it is applied.
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
        let bytes = check_size(&command)?;
        let (answer, answered) = oneshot::channel();
        let proposed = Proposed { caller, idempotency, command, bytes, answer };
        self.proposals.try_send(proposed).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Failure::new(
                Reason::QueueFull,
                format!("{WAITING_MAX} changes are waiting already: try again soon"),
            ),
            mpsc::error::TrySendError::Closed(_) => shutting_down(),
        })?;
        answered.await.unwrap_or_else(|_| Err(shutting_down().after_execution()))
    }

    /// The time that a proposal made now would be stamped with.
    pub(crate) fn now(&self) -> millrace_cluster_state::UnixMillis {
        self.clock.now()
    }

    /// Stops taking part in Raft. What was acknowledged is on disk already.
    pub(crate) async fn shutdown(&self) {
        if let Err(error) = self.raft.shutdown().await {
            tracing::error!(%error, "raft did not stop in order; what was acknowledged is on disk");
        }
    }
}

/// The size of a command, if the log takes it.
fn check_size(command: &Command) -> Result<usize, Failure> {
    let encoded = rmp_serde::to_vec_named(command)
        .map_err(|error| Failure::new(Reason::Internal, format!("a command cannot be encoded: {error}")))?;
    if encoded.len() > COMMAND_BYTES_MAX {
        let message = format!(
            "the change takes {} bytes and the log at most {COMMAND_BYTES_MAX} of one: shorten its labels, or declare fewer tensors",
            encoded.len()
        );
        return Err(Failure::new(Reason::InvalidSpec, message));
    }
    Ok(encoded.len())
}

pub(super) fn not_leader(forward: &openraft::error::ForwardToLeader<u64, openraft::BasicNode>) -> Failure {
    let message = match &forward.leader_node {
        Some(leader) => {
            format!("this controller does not lead: the leader's internal address is {}", leader.addr)
        }
        None => "no leader is known now: try again soon".to_owned(),
    };
    Failure::new(Reason::NoLeader, message)
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
