//! What a worker checkpoints is committed, acknowledged, and there to be asked for.

use millrace_proto::admin as api;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use millrace_types::{Bytes, DataId, Epoch, NodeDelta, NodeName, Portion, SyncBatch, SyncPart};

use crate::support::{Cluster, Stub, nodes, short_lease, soon, until};

const FULL: SyncPart = SyncPart::Full(Portion::Only);

fn data(epoch: u64, counter: u64) -> DataId {
    DataId { home: NodeName::new("n1").unwrap(), epoch: Epoch(epoch), counter }
}

/// A batch that says that the node holds one more piece of data, numbered as the batch.
fn batch(epoch: u64, seq: u64, part: SyncPart) -> SyncBatch {
    let delta = NodeDelta { entries: vec![(data(epoch, seq), Bytes(100 + seq))], ..NodeDelta::default() };
    SyncBatch { epoch: Epoch(epoch), seq, part, delta }
}

async fn send(stub: &Stub, batch: &SyncBatch) {
    let batch = rmp_serde::to_vec_named(batch).unwrap().into();
    stub.send(Message::Checkpoint(wire::Checkpoint { batch })).await;
}

async fn answer(stub: &mut Stub, batch: &SyncBatch) -> wire::CheckpointAck {
    send(stub, batch).await;
    soon("an answer", stub.acks.recv()).await.unwrap()
}

/// A worker that knows that this controller leads.
async fn attached(cluster: &Cluster) -> Stub {
    let mut stub = Stub::start(cluster, "n1").await;
    soon("its leadership", stub.leadership.wait_for(|it| it.leads)).await.unwrap();
    stub
}

fn ack(seq: u64, full_wanted: bool) -> wire::CheckpointAck {
    wire::CheckpointAck { epoch: 1, seq, full_wanted }
}

async fn lookup(cluster: &Cluster, counter: u64) -> api::LookupDataResponse {
    let id = api::DataId { home: "n1".into(), epoch: 1, counter };
    let request = api::LookupDataRequest { id: Some(id), ..Default::default() };
    cluster.admin().lookup_data(request).await.unwrap().into_inner()
}

#[tokio::test]
async fn a_checkpoint_is_acknowledged_once_more_when_repeated_and_a_gap_wants_everything() {
    let cluster = Cluster::start().await;
    let mut worker = attached(&cluster).await;
    assert_eq!(answer(&mut worker, &batch(1, 1, SyncPart::Delta)).await, ack(0, true), "nothing was before");
    assert_eq!(answer(&mut worker, &batch(1, 2, FULL)).await, ack(2, false));
    assert_eq!(answer(&mut worker, &batch(1, 3, SyncPart::Delta)).await, ack(3, false));
    assert_eq!(answer(&mut worker, &batch(1, 3, SyncPart::Delta)).await, ack(3, false), "again");
    assert_eq!(answer(&mut worker, &batch(1, 5, SyncPart::Delta)).await, ack(3, true), "a gap");
    assert_eq!(answer(&mut worker, &batch(1, 6, FULL)).await, ack(6, false));
    let node = nodes(&mut cluster.admin()).await.remove(0);
    assert_eq!((node.checkpoint_seq, node.index_entries), (6, 1));
    let held = api::LookupDataResponse {
        state: api::DataState::Held.into(),
        home: "n1".into(),
        holders: vec!["n1".into()],
        bytes: 106,
    };
    assert_eq!(lookup(&cluster, 6).await, held);
    assert_eq!(lookup(&cluster, 3).await.state(), api::DataState::Unspecified, "not in the full sync");
}

#[tokio::test]
async fn what_belongs_to_a_registration_that_is_over_is_not_taken_and_its_data_is_lost() {
    let cluster = Cluster::start_with(short_lease).await;
    let mut worker = attached(&cluster).await;
    assert_eq!(answer(&mut worker, &batch(1, 1, FULL)).await, ack(1, false));
    worker.alive.send_replace(false);
    until("the loss", async || (lookup(&cluster, 1).await.state() == api::DataState::Lost).then_some(()))
        .await;
    assert_eq!(lookup(&cluster, 1).await.bytes, 101);
    worker.alive.send_replace(true);
    soon("the new epoch", worker.epoch.wait_for(|epoch| *epoch == 2)).await.unwrap();
    send(&worker, &batch(1, 2, FULL)).await;
    // Answers come in order: the one before got none.
    let fresh = answer(&mut worker, &batch(2, 1, FULL)).await;
    assert_eq!(fresh, wire::CheckpointAck { epoch: 2, seq: 1, full_wanted: false });
    assert_eq!(lookup(&cluster, 1).await.state(), api::DataState::Lost, "nobody has named it since");
}

#[tokio::test]
async fn a_worker_that_sends_what_is_no_checkpoint_loses_its_stream() {
    let cluster = Cluster::start().await;
    let worker = attached(&cluster).await;
    worker.send(Message::Checkpoint(wire::Checkpoint { batch: vec![1, 2, 3].into() })).await;
    let mut admin = cluster.admin();
    until("its stream's end", async || (!nodes(&mut admin).await[0].connected).then_some(())).await;
}
