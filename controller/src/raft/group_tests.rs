//! Several Raft nodes over their real network, with the state compared byte for byte.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{Applied, Caller, Command, ControllerId, State, UnixMillis};
use millrace_proto::raft::raft_client::RaftClient;
use millrace_proto::status::from_status;
use millrace_raft_store::{DataDir, Identity, StateReader};
use millrace_types::{Bytes, ClusterId, Digest, Reason};
use openraft::BasicNode;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};

use super::service::Service;
use super::{Raft, Replica, bootstrap, codec};
use crate::clock::WallClock;

const WAIT: Option<Duration> = Some(Duration::from_secs(20));

#[derive(Debug)]
struct Standing;

impl WallClock for Standing {
    fn now(&self) -> UnixMillis {
        UnixMillis(1_000)
    }
}

struct Node {
    raft: Raft,
    reader: StateReader<State>,
    replica: Replica,
    address: String,
    server: JoinHandle<()>,
    _dir: TempDir,
}

impl Node {
    async fn start(number: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity { cluster: ClusterId("group".into()), controller: ControllerId(number) };
        let path = dir.path().to_owned();
        let opening = identity.clone();
        let open = move || millrace_raft_store::open(DataDir::open(path).unwrap(), &opening).unwrap();
        let store = tokio::task::spawn_blocking(open).await.unwrap();
        let (raft, reader) = bootstrap::run(&identity, store).await.unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let service = Service::server(raft.clone(), identity.cluster);
        let server = tokio::spawn(async move {
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        let replica = Replica::new(raft.clone(), reader.clone(), Arc::new(Standing));
        Self { raft, reader, replica, address, server, _dir: dir }
    }

    fn member(&self) -> BasicNode {
        BasicNode::new(&self.address)
    }

    async fn write(&self, model: &str) -> Applied {
        let command = Command::AddArtifact {
            digest: Digest::of(model.as_bytes()),
            bytes: Bytes(1),
            model: millrace_cluster_state::ModelSummary {
                weights: Bytes(1),
                parameters: 1,
                launches: 1,
                inputs: vec![],
                outputs: vec![],
            },
            holder: ControllerId(1),
        };
        self.replica.propose(Caller("test".into()), None, command).await.unwrap()
    }

    /// Waits until this node has applied as much as `other`, and compares.
    async fn agrees_with(&self, other: &Self) {
        let wanted = other.reader.latest().last;
        self.raft
            .wait(WAIT)
            .applied_index_at_least(wanted.map(|last| last.index), "caught up")
            .await
            .unwrap();
        assert_eq!(self.reader.latest().state.encode(), other.reader.latest().state.encode());
    }
}

/// A group of one, initialized.
async fn first() -> Node {
    let node = Node::start(1).await;
    node.raft.initialize(BTreeMap::from([(1, node.member())])).await.unwrap();
    node.raft.wait(WAIT).current_leader(1, "leads").await.unwrap();
    let init = Command::InitCluster { cluster_id: ClusterId("group".into()) };
    node.replica.propose(Caller("test".into()), None, init).await.unwrap();
    node
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_join_agree_and_elect_another_leader_when_theirs_is_gone() {
    let (a, b, c) = (first().await, Node::start(2).await, Node::start(3).await);
    a.write("before").await;
    a.raft.add_learner(2, b.member(), true).await.unwrap();
    a.raft.add_learner(3, c.member(), true).await.unwrap();
    a.raft.change_membership(BTreeSet::from([1, 2, 3]), false).await.unwrap();
    a.write("after").await;
    b.agrees_with(&a).await;
    c.agrees_with(&a).await;

    let refused = b.replica.linearizable().await.unwrap_err();
    assert_eq!(refused.reason, Reason::NoLeader);
    assert!(refused.message.contains(&a.address), "it names the leader: {}", refused.message);

    a.raft.shutdown().await.unwrap();
    a.server.abort();
    let wait = b.raft.wait(WAIT);
    let elected =
        wait.metrics(|metrics| metrics.current_leader.is_some_and(|leader| leader != 1), "a new leader");
    let elected = elected.await.unwrap().current_leader;
    let (leader, follower) = if elected == Some(2) { (&b, &c) } else { (&c, &b) };
    leader.raft.wait(WAIT).state(openraft::ServerState::Leader, "leads").await.unwrap();
    assert!(leader.write("under the new leader").await.changed());
    follower.agrees_with(leader).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_comes_after_the_log_was_cut_gets_a_snapshot() {
    let a = first().await;
    for n in 0..20 {
        a.write(&format!("model {n}")).await;
    }
    a.raft.trigger().snapshot().await.unwrap();
    let last = a.reader.latest().last.unwrap();
    a.raft.wait(WAIT).snapshot(last, "a snapshot").await.unwrap();
    a.raft.trigger().purge_log(last.index).await.unwrap();
    a.raft.wait(WAIT).purged(Some(last), "the log cut").await.unwrap();

    let b = Node::start(2).await;
    a.raft.add_learner(2, b.member(), true).await.unwrap();
    b.raft.wait(WAIT).snapshot(last, "received").await.unwrap();
    a.write("one more").await;
    b.agrees_with(&a).await;
}

#[tokio::test]
async fn a_controller_of_another_cluster_is_refused() {
    let a = first().await;
    let channel = Channel::from_shared(format!("http://{}", a.address)).unwrap().connect_lazy();
    let stranger = codec::encode(&ClusterId("another".into()), &()).unwrap();
    let refused = RaftClient::new(channel).vote(stranger).await.unwrap_err();
    assert_eq!(from_status(&refused).reason, Reason::PeerMismatch);
}
