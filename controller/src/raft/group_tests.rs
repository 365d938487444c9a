//! Tests of several Raft nodes over a real network, with the states compared byte for byte.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::operations::OperationResult;
use millrace_cluster_state::{
    CLUSTER_VERSION, CallerName, CommandEffect, ControllerId, IdempotencyKey, Proposal, RulesVersion, State,
    StateCommand, UnixMillis,
};
use millrace_proto::raft::raft_client::RaftClient;
use millrace_proto::raft::raft_server::Raft as _;
use millrace_proto::raft::{JoinIntent, JoinRequest};
use millrace_proto::status::from_status;
use millrace_raft_store::{DataDir, DirectoryOwner, Entry, GroupMember, LogId, RaftStore};
use millrace_types::{Bytes, ClusterId, Digest, Reason, Revision};
use openraft::storage::RaftLogStorageExt as _;
use openraft::{CommittedLeaderId, EntryPayload, Membership};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::Request;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};

use super::bootstrap::{self, OpenOptions};
use super::codec::{self, MessageReceiver};
use super::runtime::RaftSpawner;
use super::world::{HostEnvironment, RaftEnvironment, SnapshotSchedule};
use super::{Error, MembershipRequest, Replica, TrafficClass, elections, versions};
use crate::artifacts::ArtifactService;
use crate::clock::WallClock;
use crate::config::{ClusterStart, ControllerLimits, Inspection, JoinAs};
use crate::fixtures::{chain, functions, key};
use crate::passed::{RunTraffic, TrafficMatrix, TrafficReport};
use crate::peers::{PeerService, ReadableParts};
use millrace_storage::FileStore;

const WAIT: Option<Duration> = Some(Duration::from_secs(20));

#[derive(Debug)]
struct Standing;

impl WallClock for Standing {
    fn now(&self) -> UnixMillis {
        UnixMillis(1_000)
    }
}

pub(crate) struct Node {
    pub(crate) replica: Replica,
    service: PeerService,
    pub(crate) passed: TrafficMatrix,
    address: String,
    server: JoinHandle<()>,
    _stop: tokio_util::sync::DropGuard,
    _dir: TempDir,
}

impl Node {
    pub(crate) async fn start(number: u64, start: ClusterStart) -> Self {
        Self::start_seeded(number, start, 7).await.unwrap()
    }

    async fn start_seeded(number: u64, start: ClusterStart, seed: u64) -> Result<Self, Error> {
        Self::start_in(Arc::new(HostEnvironment), number, start, seed).await
    }

    async fn start_in(
        world: Arc<dyn RaftEnvironment>,
        number: u64,
        start: ClusterStart,
        seed: u64,
    ) -> Result<Self, Error> {
        let dir = tempfile::tempdir().unwrap();
        let replica = Self::open(dir.path(), world, number, start.clone(), seed).await?;
        let store = FileStore::open(&dir.path().join("artifacts")).unwrap();
        let artifacts = ArtifactService::new(
            store,
            None,
            replica.clone(),
            ControllerLimits::default(),
            Inspection::InProcess,
        );
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let passed = TrafficMatrix::default();
        let shown = ReadableParts { passed: passed.clone(), ..ReadableParts::default() };
        let service = PeerService::new(replica.clone(), Arc::new(artifacts)).showing(shown);
        let served = service.clone().server();
        let server = tokio::spawn(async move {
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            Server::builder().add_service(served).serve_with_incoming(incoming).await.unwrap();
        });
        let stop = CancellationToken::new();
        tokio::spawn(elections::run_until(stop.clone(), replica.clone(), seed));
        bootstrap::enter(&replica, &start, &address, &stop).await?;
        Ok(Self { replica, service, passed, address, server, _stop: stop.drop_guard(), _dir: dir })
    }

    /// Opens a directory, and starts Raft over it.
    async fn open(
        dir: &Path,
        world: Arc<dyn RaftEnvironment>,
        number: u64,
        start: ClusterStart,
        seed: u64,
    ) -> Result<Replica, Error> {
        let opening = OpenOptions {
            data_dir: dir.to_owned(),
            id: ControllerId(number),
            start,
            now: Standing.now(),
            seed,
            snapshots: SnapshotSchedule::every(crate::config::SNAPSHOT_EVERY),
            world,
        };
        let opened = bootstrap::open(opening, std::future::pending()).await?;
        bootstrap::replica(opened, String::new(), Arc::new(Standing), RaftSpawner::current()).await
    }

    pub(crate) fn joining(&self, role: JoinAs) -> ClusterStart {
        ClusterStart::Join { at: vec![self.address.clone()], role }
    }

    async fn write(&self, model: &str) -> CommandEffect {
        add_model(&self.replica, model).await
    }

    /// Waits until this node has applied as much as `other`, and compares the states.
    async fn agrees_with(&self, other: &Self) {
        let wanted = other.replica.reader.latest().last.map(|last| last.index);
        self.replica.raft.wait(WAIT).applied_index_at_least(wanted, "caught up").await.unwrap();
        let state = |node: &Self| node.replica.state().encode();
        assert_eq!(state(self), state(other));
    }

    /// Ends the node like kill -9, as far as the others can observe.
    async fn kill(&self) {
        self.server.abort();
        self.replica.raft.shutdown().await.unwrap();
    }
}

async fn add_model(replica: &Replica, model: &str) -> CommandEffect {
    let command = StateCommand::AddArtifact {
        digest: Digest::of(model.as_bytes()),
        bytes: Bytes(1),
        model: crate::fixtures::bare_model(),
        holder: ControllerId(1),
    };
    // The write has a key like clients' writes: an unanswered write is retried at the next leader.
    let key = IdempotencyKey { client: model.into(), seq: 1 };
    replica.propose(CallerName("test".into()), Some(key), command).await.unwrap()
}

/// Returns a copy of a node's files, as kill -9 would leave them now.
fn copied(files: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_files(files, copy.path());
    copy
}

fn copy_files(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let copy = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&copy).unwrap();
            copy_files(&entry.path(), &copy);
        } else {
            std::fs::copy(entry.path(), copy).unwrap();
        }
    }
}

/// Waits until a node's state meets a condition.
pub(crate) async fn until(node: &Node, wanted: impl Fn(&State) -> bool) {
    let mut changes = node.replica.changes();
    while !wanted(&node.replica.state()) {
        changes.changed().await.unwrap();
    }
}

pub(crate) async fn first() -> Node {
    Node::start(1, ClusterStart::Bootstrap).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_join_agree_and_elect_another_leader_when_theirs_dies() {
    let a = first().await;
    a.write("before").await;
    let b = Node::start(2, a.joining(JoinAs::Voter)).await;
    // Any member accepts the call and redirects to the leader.
    let c = Node::start(3, b.joining(JoinAs::Voter)).await;
    let voters: BTreeSet<u64> = a.replica.membership().voter_ids().collect();
    assert_eq!(voters, BTreeSet::from([1, 2, 3]));
    assert!(b.write("through a follower").await.changed());
    b.agrees_with(&a).await;
    c.agrees_with(&a).await;

    a.kill().await;
    let wait = b.replica.raft.wait(WAIT);
    let elected =
        wait.metrics(|metrics| metrics.current_leader.is_some_and(|leader| leader != 1), "a new leader");
    let elected = elected.await.unwrap().current_leader;
    let (leader, follower) = if elected == Some(2) { (&b, &c) } else { (&c, &b) };
    assert!(follower.write("under the new leader").await.changed());
    follower.agrees_with(leader).await;
}

/// A machine on which a build of rules 9 began a cluster, with a log that has no rules entry.
#[derive(Debug)]
struct BegunByVersion9;

impl RaftEnvironment for BegunByVersion9 {
    fn dial(&self, endpoint: &Endpoint) -> Channel {
        HostEnvironment.dial(endpoint)
    }

    fn open(
        &self,
        dir: DataDir,
        identity: &DirectoryOwner,
    ) -> Result<RaftStore<State>, millrace_raft_store::Error> {
        let mut store = HostEnvironment.open(dir, identity)?;
        let member = GroupMember { address: String::new(), directory: identity.directory.clone() };
        let members = BTreeMap::from([(identity.controller.0, member)]);
        let init = Proposal {
            stamp: UnixMillis(1_000),
            caller: CallerName("controller".into()),
            idempotency: None,
            command: StateCommand::InitCluster { cluster_id: identity.cluster.clone() },
        };
        let voters = vec![members.keys().copied().collect()];
        let payloads =
            [EntryPayload::Membership(Membership::new(voters, members)), EntryPayload::Normal(vec![init])];
        let entry = |(index, payload)| Entry::<State> {
            log_id: LogId::new(CommittedLeaderId::new(0, 0), index),
            payload,
        };
        let entries: Vec<_> = (0..).zip(payloads).map(entry).collect();
        futures::executor::block_on(store.log.blocking_append(entries)).unwrap();
        Ok(store)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_switches_rules_9_to_the_next_once_all_voters_know_them() {
    let a = Node::start_in(Arc::new(BegunByVersion9), 1, ClusterStart::Bootstrap, 7).await.unwrap();
    let b = Node::start(2, a.joining(JoinAs::Voter)).await;
    assert_eq!([&a, &b].map(|node| node.replica.state().rules()), [RulesVersion(9); 2]);
    let stop = CancellationToken::new();
    tokio::spawn(versions::run_until(stop.clone(), a.replica.clone()));
    for node in [&a, &b] {
        until(node, |state| state.rules() == RulesVersion::NEWEST).await;
    }
    b.agrees_with(&a).await;
    assert_eq!(a.replica.cluster_status().await.cluster_version, CLUSTER_VERSION);
    stop.cancel();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_with_unknown_rules_is_refused() {
    let first = first().await;
    let version = RulesVersion::NEWEST.next();
    let unknown = StateCommand::SetClusterVersion { version };
    let refused = first.replica.propose(CallerName("test".into()), None, unknown).await.unwrap_err();
    assert_eq!(refused.reason, Reason::MalformedRequest, "{refused}");
    first.write("after the refusal").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_joins_after_a_log_purge_gets_a_snapshot() {
    let a = first().await;
    for n in 0..20 {
        a.write(&format!("model {n}")).await;
    }
    a.replica.raft.trigger().snapshot().await.unwrap();
    let last = a.replica.reader.latest().last.unwrap();
    a.replica.raft.wait(WAIT).snapshot(last, "a snapshot").await.unwrap();
    a.replica.raft.trigger().purge_log(last.index).await.unwrap();
    a.replica.raft.wait(WAIT).purged(Some(last), "the log cut").await.unwrap();

    let b = Node::start(2, a.joining(JoinAs::Learner)).await;
    b.replica.raft.wait(WAIT).snapshot(last, "received").await.unwrap();
    a.write("one more").await;
    b.agrees_with(&a).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_voter_that_lost_its_directory_neither_rejoins_nor_answers_under_its_old_id() {
    let a = first().await;
    let b = Node::start(2, a.joining(JoinAs::Voter)).await;
    let c = Node::start(3, a.joining(JoinAs::Voter)).await;
    let directory = b.replica.own().directory.clone();
    b.kill().await;

    let refused = Node::start_seeded(2, a.joining(JoinAs::Voter), 8).await.err().unwrap();
    assert!(refused.to_string().contains("millrace cluster remove 2"), "{refused}");

    // Each side refuses the other's messages.
    let wiped = DirectoryOwner { directory: "new".into(), ..b.replica.own().clone() };
    let to = MessageReceiver { id: 3, directory: c.replica.own().directory.clone() };
    let sent = codec::encode(&wiped, &to, &()).unwrap();
    let mut client = RaftClient::connect(format!("http://{}", c.address)).await.unwrap();
    let unheard = client.vote(sent).await.unwrap_err();
    assert_eq!(from_status(&unheard).reason, Reason::PeerMismatch);
    let known = MessageReceiver { id: 2, directory };
    let sent = codec::encode(a.replica.own(), &known, &()).unwrap();
    assert_eq!(codec::check(&wiped, &sent).unwrap_err().reason, Reason::PeerMismatch);

    a.replica.change_group(MembershipRequest::Remove(2), CallerName("test".into())).await.unwrap();
    let d = Node::start_seeded(4, a.joining(JoinAs::Voter), 9).await.unwrap();
    assert!(d.write("with its replacement").await.changed());
    d.agrees_with(&a).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leadership_transfer_loses_no_write() {
    let a = first().await;
    let b = Node::start(2, a.joining(JoinAs::Voter)).await;
    let c = Node::start(3, a.joining(JoinAs::Voter)).await;
    let writes = async {
        for n in 0..50 {
            assert!(c.write(&format!("model {n}")).await.changed(), "each once");
        }
    };
    let (led, ()) = tokio::join!(c.replica.transfer(2), writes);
    assert_eq!(led.unwrap().leader, 2);
    assert!(b.replica.leading_term().is_some());
    let refused =
        b.replica.change_group(MembershipRequest::Remove(2), CallerName("test".into())).await.unwrap_err();
    assert_eq!(refused.reason, Reason::MembershipRefused);
    let state = b.replica.linearizable().await.unwrap();
    assert_eq!(state.artifacts_len(), 50);
    a.agrees_with(&b).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_restarts_within_its_term_reads_all_acknowledged_writes() {
    let a = first().await;
    let b = Node::start(2, a.joining(JoinAs::Voter)).await;
    let c = Node::start(3, a.joining(JoinAs::Voter)).await;
    let term = a.replica.term();
    let mut files = copied(a._dir.path());
    let mut leader = a.replica.clone();
    a.server.abort();
    // The read competes with the first replication after the restart, so one round is not enough.
    for round in 0..6 {
        add_model(&leader, &format!("model {round}")).await;
        let left = copied(if round == 0 { a._dir.path() } else { files.path() });
        leader.raft.shutdown().await.unwrap();
        files = left;
        let world = Arc::new(HostEnvironment);
        leader = Node::open(files.path(), world, 1, ClusterStart::Reopen, 7).await.unwrap();
        let state = leader.linearizable().await.unwrap();
        assert_eq!(state.artifacts_len(), round + 1);
        if leader.term() > term {
            eprintln!("another controller was elected in round {round}: the rest would test nothing");
            break;
        }
    }
    drop((b, c));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_membership_change_records_its_outcome_after_its_caller_has_gone() {
    let a = first().await;
    let b = Node::start(2, a.joining(JoinAs::Voter)).await;
    let known = a.replica.state().operations().count();
    let to = MessageReceiver { id: 1, directory: a.replica.own().directory.clone() };
    let change = (MembershipRequest::Remove(2), CallerName("test".into()));
    let sent = codec::encode(b.replica.own(), &to, &change).unwrap();
    tokio::select! {
        biased;
        () = until(&a, |state| state.operations().count() > known) => {}
        answer = a.service.change_group(Request::new(sent)) => panic!("before it had begun: {answer:?}"),
    }
    let ended = until(&a, |state| state.operations().all(|it| !it.is_running()));
    tokio::time::timeout(WAIT.unwrap(), ended).await.expect("the operation records its outcome");
    let last = a.replica.state().operations().next_back().unwrap().ended.clone();
    assert_eq!(last.map(|(_, end)| end), Some(OperationResult::Succeeded));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_and_writes_without_a_majority_are_refused_and_stale_reads_are_served() {
    let a = first().await;
    a.write("before").await;
    let b = Node::start(2, a.joining(JoinAs::Voter)).await;
    a.kill().await;
    assert_eq!(b.replica.linearizable().await.unwrap_err().reason, Reason::NoLeader);
    let command = StateCommand::InitCluster { cluster_id: ClusterId("x".into()) };
    let refused = b.replica.propose(CallerName("test".into()), None, command).await.unwrap_err();
    assert_eq!((refused.reason, refused.retryable), (Reason::NoLeader, true));
    assert_eq!(b.replica.state().artifacts_len(), 1);
    let status = b.replica.cluster_status().await;
    assert!(!status.quorum);
    assert!(status.warnings.iter().any(|warning| warning.contains("1 of 2 voters")), "{status:?}");
}

/// D19: the leader places functions by the traffic that other controllers count.
#[tokio::test]
async fn a_controller_gets_the_traffic_of_runs_on_another_controller() {
    let a = first().await;
    let b = Node::start(2, a.joining(JoinAs::Voter)).await;
    let workflow = StateCommand::ApplyWorkflow { spec: chain(&[("s", "f")]), expected: None };
    for command in functions(&["f"]).into_iter().chain([workflow]) {
        a.replica.propose(CallerName("test".into()), None, command).await.unwrap();
    }
    until(&b, |state| state.workflow(&key("w")).is_some()).await;

    for workflow in ["w", "gone"] {
        let passing = RunTraffic::default();
        passing.took(key("f").name, &key("g").name, 7);
        b.passed.ran(&key(workflow), Revision::FIRST, passing);
    }
    let others = a.replica.others(TrafficClass::Requests);
    let [peer] = &others[..] else { panic!("{others:?}") };
    let asked = peer.call(Duration::from_secs(5), &(), async |mut it, message| it.get_passed(message).await);
    let told: Vec<TrafficReport> = asked.await.unwrap();
    assert_eq!((told.len(), &told), (1, &b.passed.told(&b.replica.state())));
}

#[tokio::test]
async fn a_controller_of_another_cluster_or_cluster_version_is_refused() {
    let a = first().await;
    let own = a.replica.own();
    let channel = Channel::from_shared(format!("http://{}", a.address)).unwrap().connect_lazy();
    let mut client = RaftClient::new(channel);
    let stranger = DirectoryOwner { cluster: ClusterId("another".into()), ..own.clone() };
    let to = MessageReceiver { id: 1, directory: own.directory.clone() };
    let refused = client.vote(codec::encode(&stranger, &to, &()).unwrap()).await.unwrap_err();
    assert_eq!(from_status(&refused).reason, Reason::PeerMismatch);
    let join = JoinRequest {
        protocol_version: millrace_proto::PROTOCOL_VERSION,
        cluster_version: CLUSTER_VERSION,
        cluster_id: "another".into(),
        id: 2,
        intent: JoinIntent::Join.into(),
        ..JoinRequest::default()
    };
    let refused = client.join(join.clone()).await.unwrap_err();
    assert_eq!(from_status(&refused).reason, Reason::PeerMismatch);
    assert!(refused.message().contains("belongs to cluster another"), "{}", refused.message());
    let newer =
        JoinRequest { cluster_version: CLUSTER_VERSION + 2, cluster_id: own.cluster.to_string(), ..join };
    let refused = client.join(newer).await.unwrap_err();
    assert_eq!(from_status(&refused).reason, Reason::PeerMismatch);
    assert!(refused.message().contains("upgrade one version at a time"), "{}", refused.message());
}
