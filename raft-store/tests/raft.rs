//! Tests of the store under openraft itself: a member that proposes, snapshots and restarts, and a
//! member that installs the first one's snapshot.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use millrace_cluster_state::{CallerName, ControllerId, Proposal, State, StateCommand, UnixMillis};
use millrace_raft_store::{
    AppliedState, ClusterConfig, DataDir, DirectoryOwner, GroupMember as Controller, RaftId, StateReader,
    Vote, open,
};
use millrace_types::{ClusterId, FunctionKey, FunctionName, TenantName};
use openraft::error::{Fatal, RPCError, RaftError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};
use openraft::{Config, Raft, ServerState, Snapshot, SnapshotPolicy};

/// A network without other members.
struct Alone;

type Failed = RPCError<RaftId, Controller, RaftError<RaftId>>;

fn nobody() -> std::io::Error {
    std::io::Error::other("there is no other member")
}

fn unreachable() -> Failed {
    RPCError::Unreachable(Unreachable::new(&nobody()))
}

impl RaftNetworkFactory<ClusterConfig> for Alone {
    type Network = Self;

    async fn new_client(&mut self, _: RaftId, _: &Controller) -> Self {
        Self
    }
}

impl RaftNetwork<ClusterConfig> for Alone {
    async fn append_entries(
        &mut self,
        _: AppendEntriesRequest<ClusterConfig>,
        _: RPCOption,
    ) -> Result<AppendEntriesResponse<RaftId>, Failed> {
        Err(unreachable())
    }

    async fn vote(&mut self, _: VoteRequest<RaftId>, _: RPCOption) -> Result<VoteResponse<RaftId>, Failed> {
        Err(unreachable())
    }

    async fn full_snapshot(
        &mut self,
        _: Vote,
        _: Snapshot<ClusterConfig>,
        _: impl Future<Output = ReplicationClosed> + Send + 'static,
        _: RPCOption,
    ) -> Result<SnapshotResponse<RaftId>, StreamingError<ClusterConfig, Fatal<RaftId>>> {
        Err(StreamingError::Unreachable(Unreachable::new(&nobody())))
    }
}

struct Member {
    raft: Raft<ClusterConfig>,
    reader: StateReader<State>,
}

impl Member {
    async fn start(dir: &Path, id: RaftId) -> Self {
        let identity = DirectoryOwner {
            cluster: ClusterId(Arc::from("group")),
            controller: ControllerId(id),
            directory: format!("d{id}"),
        };
        let store = open::<State>(DataDir::open(dir).unwrap(), &identity).unwrap();
        let reader = store.machine.reader();
        let config = Config {
            snapshot_policy: SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: 2,
            purge_batch_size: 1,
            ..Config::default()
        };
        let config = Arc::new(config.validate().unwrap());
        let raft = Raft::new(id, config, Alone, store.log, store.machine).await.unwrap();
        Self { raft, reader }
    }

    async fn lead(&self) {
        self.raft.wait(None).state(ServerState::Leader, "the only member leads").await.unwrap();
    }

    async fn stop(self) {
        self.raft.shutdown().await.unwrap();
    }

    /// Takes a snapshot, and waits until the log before it is purged.
    async fn snapshot(&self) {
        let applied = self.reader.latest().last.unwrap();
        self.raft.trigger().snapshot().await.unwrap();
        self.raft.wait(None).snapshot(applied, "taken").await.unwrap();
        let kept = applied.index - 2;
        self.raft
            .wait(None)
            .metrics(|metrics| metrics.purged.is_some_and(|purged| purged.index >= kept), "purged")
            .await
            .unwrap();
    }
}

fn proposal(stamp: u64, command: StateCommand) -> Proposal {
    Proposal { stamp: UnixMillis(stamp), caller: CallerName(Arc::from("test")), idempotency: None, command }
}

fn batch(stamp: u64) -> Vec<Proposal> {
    let key = FunctionKey { tenant: TenantName::default(), name: FunctionName::new("absent").unwrap() };
    vec![
        proposal(stamp, StateCommand::InitCluster { cluster_id: ClusterId(Arc::from("group")) }),
        proposal(stamp, StateCommand::SetFunctionEnabled { key, enabled: true }),
    ]
}

async fn init(member: &Member, id: RaftId) {
    member.raft.initialize(BTreeMap::from([(id, Controller::default())])).await.unwrap();
    member.lead().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_restarted_member_recovers_from_its_snapshot_and_log() {
    let dir = tempfile::tempdir().unwrap();
    let member = Member::start(dir.path(), 1).await;
    init(&member, 1).await;
    for stamp in 1..=20 {
        let outcomes = member.raft.client_write(batch(stamp)).await.unwrap().data;
        assert_eq!(outcomes.len(), 2, "one outcome per command");
        assert_eq!(outcomes[0].is_ok(), outcomes[1].is_err(), "{outcomes:?}");
        if stamp == 12 {
            member.snapshot().await;
        }
    }
    let AppliedState { state, last, .. } = (*member.reader.latest()).clone();
    member.stop().await;

    let member = Member::start(dir.path(), 1).await;
    member.lead().await;
    member.raft.wait(None).applied_index_at_least(last.map(|last| last.index), "caught up").await.unwrap();
    assert_eq!(member.reader.latest().state, state);
    assert_eq!(state.clock(), UnixMillis(20));
    member.raft.client_write(batch(21)).await.unwrap();
    member.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_lagging_member_installs_a_snapshot_and_recovers_from_it() {
    let leader_dir = tempfile::tempdir().unwrap();
    let learner_dir = tempfile::tempdir().unwrap();
    let leader = Member::start(leader_dir.path(), 1).await;
    init(&leader, 1).await;
    for stamp in 1..=20 {
        leader.raft.client_write(batch(stamp)).await.unwrap();
    }
    leader.snapshot().await;
    let sent = leader.raft.get_snapshot().await.unwrap().unwrap();
    let covered = sent.meta.last_log_id;

    let learner = Member::start(learner_dir.path(), 2).await;
    let mut received = learner.raft.begin_receiving_snapshot().await.unwrap();
    let mut bytes = vec![0; usize::try_from(sent.snapshot.size().unwrap()).unwrap()];
    assert_eq!(sent.snapshot.read_at(0, &mut bytes).unwrap(), bytes.len());
    received.append(&bytes).unwrap();
    received.verify().unwrap();
    let snapshot = Snapshot { meta: sent.meta, snapshot: received };
    // openraft purges the learner's log up to the snapshot right after the installation.
    learner.raft.install_full_snapshot(Vote::new_committed(1, 1), snapshot).await.unwrap();
    learner.raft.wait(None).metrics(|metrics| metrics.purged == covered, "purged").await.unwrap();
    let state = leader.reader.latest().state.clone();
    assert_eq!(learner.reader.latest().state, state);
    learner.stop().await;

    let learner = Member::start(learner_dir.path(), 2).await;
    assert_eq!(learner.reader.latest().last, covered);
    assert_eq!(learner.reader.latest().state, state);
    learner.stop().await;
    leader.stop().await;
}
