//! The controller's handle on Raft: the local state, the members of the group, and the leader.
//! [`super::route`] has linearizable reads, and writes.

use std::sync::{Arc, OnceLock};

use millrace_cluster_state::{ControllerId, State};
use millrace_raft_store::{DirectoryOwner, GroupMember, LogDisk, LogId, SnapshotReceiver, StateReader};
use openraft::metrics::RaftServerMetrics;
use openraft::{Membership, ServerState};
use tokio::sync::{Semaphore, mpsc, watch};

use super::peers::{PeerClient, RaftPeerConnections, TrafficClass};
use super::proposer::{self, BATCHES_IN_FLIGHT, Proposed, WAITING_MAX};
use super::settings::Raft;
use super::time::StampClock;
use crate::halt_error::HaltError;

/// Writes in flight to another leader. Further writes fail with `QUEUE_FULL`.
pub(super) const FORWARDED_MAX: usize = 4096;

/// A handle on the replicated state. Clones share it.
#[derive(Clone)]
pub(crate) struct Replica {
    pub(crate) raft: Raft,
    pub(crate) reader: StateReader<State>,
    pub(super) proposals: mpsc::Sender<Proposed>,
    /// Permits of log entries in flight.
    pub(super) in_flight: Arc<Semaphore>,
    /// Permits of writes in flight to another leader.
    pub(super) forwarded: Arc<Semaphore>,
    pub(super) peers: RaftPeerConnections,
    /// The address at which clients reach this controller.
    pub(super) client_address: Arc<str>,
    pub(super) time: StampClock,
    /// The disk of the log.
    pub(crate) disk: LogDisk,
    /// The last log entry of this controller when the controller started.
    pub(super) last_at_start: Option<LogId>,
    /// Creates the files into which snapshots of other controllers are received.
    pub(super) snapshots: SnapshotReceiver,
    /// The object store for model files that this controller shares with the others; unset until
    /// [`Self::shares_models_at`].
    shared_models: Arc<OnceLock<String>>,
    /// The log entry after which this controller's state was found to differ from a majority's.
    pub(crate) diverged: Arc<OnceLock<u64>>,
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Replica").field(&self.id().0).finish()
    }
}

/// A watch of state changes and of changes of leadership.
#[derive(Debug)]
pub(crate) struct ReplicaWatch {
    state: watch::Receiver<Arc<millrace_raft_store::AppliedState<State>>>,
    server: watch::Receiver<RaftServerMetrics<u64, GroupMember>>,
}

impl ReplicaWatch {
    /// Waits for the next change.
    pub(crate) async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        tokio::select! {
            changed = self.state.changed() => changed,
            changed = self.server.changed() => changed,
        }
    }
}

/// The leader as far as this controller knows. A dead leader counts as the leader until another leader
/// is elected.
#[derive(Debug)]
pub(super) enum KnownLeader {
    Here,
    There(Box<PeerClient>),
    Unknown,
}

/// The log as this controller opened it.
#[derive(Debug)]
pub(super) struct OpenedLog {
    pub(super) disk: LogDisk,
    /// The last entry.
    pub(super) last: Option<LogId>,
}

impl Replica {
    /// Returns a handle over a running Raft node. Spawns the proposer, which ends with the last handle.
    pub(super) fn new(
        raft: Raft,
        reader: StateReader<State>,
        peers: RaftPeerConnections,
        client_address: String,
        time: StampClock,
        log: OpenedLog,
        snapshots: SnapshotReceiver,
    ) -> Self {
        let OpenedLog { disk, last: last_at_start } = log;
        let (proposals, waiting) = mpsc::channel(WAITING_MAX);
        let in_flight = Arc::new(Semaphore::new(BATCHES_IN_FLIGHT as usize));
        peers.spawner.spawn(proposer::run(raft.clone(), time.clone(), in_flight.clone(), waiting));
        let forwarded = Arc::new(Semaphore::new(FORWARDED_MAX));
        let client_address = client_address.into();
        let shared_models = Arc::default();
        let diverged = Arc::default();
        Self {
            raft,
            reader,
            proposals,
            in_flight,
            forwarded,
            peers,
            client_address,
            time,
            disk,
            last_at_start,
            snapshots,
            shared_models,
            diverged,
        }
    }

    /// Returns the identity of this controller.
    pub(crate) fn own(&self) -> &DirectoryOwner {
        self.peers.own()
    }

    /// Sets the object store that this controller's status reports. Only the first call has an effect.
    pub(crate) fn shares_models_at(&self, place: String) {
        self.shared_models.get_or_init(|| place);
    }

    /// Returns the reported object store; empty if this controller stores model files on the local
    /// disk.
    pub(super) fn shared_models(&self) -> &str {
        self.shared_models.get().map_or("", String::as_str)
    }

    /// Returns this controller's number.
    pub(crate) fn id(&self) -> ControllerId {
        self.own().controller
    }

    /// Returns this controller's copy of the state, which lags a little behind the leader's.
    pub(crate) fn state(&self) -> State {
        self.reader.latest().state.clone()
    }

    /// Returns a watch of every change from now on.
    pub(crate) fn changes(&self) -> ReplicaWatch {
        ReplicaWatch { state: self.reader.watch(), server: self.raft.server_metrics() }
    }

    /// Returns the term in which this controller leads, if any.
    pub(crate) fn leading_term(&self) -> Option<u64> {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow();
        (metrics.state == ServerState::Leader).then(|| metrics.vote.leader_id().term)
    }

    /// Returns the leader and the term as far as this controller knows.
    pub(crate) fn leading(&self) -> Option<(u64, u64)> {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow();
        metrics.current_leader.map(|leader| (leader, metrics.vote.leader_id().term))
    }

    /// Returns this controller's term.
    pub(crate) fn term(&self) -> u64 {
        self.raft.server_metrics().borrow().vote.leader_id().term
    }

    /// Returns the group as known to this controller.
    pub(crate) fn membership(&self) -> Membership<u64, GroupMember> {
        self.raft.server_metrics().borrow().membership_config.membership().clone()
    }

    /// Returns clients of the other members.
    pub(crate) fn others(&self, lane: TrafficClass) -> Vec<PeerClient> {
        let own = self.id().0;
        let membership = self.membership();
        let others = membership.nodes().filter(|&(&id, _)| id != own);
        others.map(|(&id, member)| self.peers.peer(id, member, lane)).collect()
    }

    pub(super) fn leader(&self) -> KnownLeader {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow();
        match metrics.current_leader {
            Some(id) if id == self.id().0 => match metrics.state {
                ServerState::Leader => KnownLeader::Here,
                _ => KnownLeader::Unknown,
            },
            Some(id) => match metrics.membership_config.membership().get_node(&id) {
                Some(member) => {
                    KnownLeader::There(Box::new(self.peers.peer(id, member, TrafficClass::Requests)))
                }
                None => KnownLeader::Unknown,
            },
            None => KnownLeader::Unknown,
        }
    }

    /// Returns the time that a proposal made now would carry.
    pub(crate) fn now(&self) -> millrace_cluster_state::UnixMillis {
        self.time.now()
    }

    /// Stops permanently, because a majority has another state after this log entry. The local state
    /// must not be read, used for votes, or put into snapshots.
    pub(super) async fn stop_diverged(&self, index: u64) {
        self.diverged.get_or_init(|| index);
        self.shutdown().await;
    }

    /// Returns the halt error if this controller's state differs from that of a majority.
    pub(super) fn diverged(&self) -> Option<HaltError> {
        self.diverged.get().map(|&index| HaltError::Diverged { id: self.id(), index })
    }

    /// Waits until Raft ends by itself, and returns the reason. A halt is permanent: only a new process
    /// can continue.
    pub(crate) async fn halted(&self) -> HaltError {
        let mut metrics = self.raft.metrics();
        let ended = metrics.wait_for(|metrics| metrics.running_state.is_err()).await;
        if let Some(diverged) = self.diverged() {
            return diverged;
        }
        let reason = match ended.as_deref().map(|metrics| &metrics.running_state) {
            Ok(Err(error)) => error.to_string(),
            // Raft's task ended without reporting an error.
            Ok(Ok(())) | Err(_) => "raft panicked: see the log".to_owned(),
        };
        HaltError::Raft { reason }
    }

    /// Stops taking part in Raft. All acknowledged writes are on disk already.
    pub(crate) async fn shutdown(&self) {
        // Raft ends after the log has answered, and a log on a full disk waits for space. So end that
        // wait first.
        self.disk.give_up_waiting();
        if let Err(error) = self.raft.shutdown().await {
            tracing::error!(%error, "raft did not shut down cleanly: acknowledged writes are on disk");
        }
    }
}
