//! Tests that checkpoints of workers are committed, acknowledged and readable.

use millrace_proto::admin as api;
use millrace_proto::convert::{data_id_wire, duration_wire};
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use millrace_types::{
    Bytes, DataId, Epoch, FunctionKey, FunctionName, NodeDelta, NodeName, Reason, SyncBatch, SyncPart,
    SyncPortion, TenantName, Usage,
};

use crate::stub::Stub;
use crate::support::{Cluster, apply, mlp, nodes, reason, short_lease, soon, until, upload};

const FULL: SyncPart = SyncPart::Full(SyncPortion::Only);

fn data(epoch: u64, counter: u64) -> DataId {
    DataId { home: NodeName::new("n1").unwrap(), epoch: Epoch(epoch), counter }
}

/// Returns a batch that adds a piece of data to the node, with the batch's number.
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

/// Starts a worker and waits until the worker knows that this controller leads.
async fn attached(cluster: &Cluster) -> Stub {
    attached_as(cluster, "n1").await
}

async fn attached_as(cluster: &Cluster, name: &str) -> Stub {
    let mut stub = Stub::start(cluster, name).await;
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
async fn a_repeated_checkpoint_is_acknowledged_again_and_a_gap_requests_a_full_one() {
    let cluster = Cluster::start().await;
    let mut worker = attached(&cluster).await;
    assert_eq!(
        answer(&mut worker, &batch(1, 1, SyncPart::Delta)).await,
        ack(0, true),
        "no batch came before"
    );
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
async fn checkpoints_of_an_ended_registration_are_refused_and_its_data_is_lost() {
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
    // Acknowledgements arrive in order, so the previous batch got none.
    let fresh = answer(&mut worker, &batch(2, 1, FULL)).await;
    assert_eq!(fresh, wire::CheckpointAck { epoch: 2, seq: 1, full_wanted: false });
    assert_eq!(lookup(&cluster, 1).await.state(), api::DataState::Lost, "no node has named the data since");
}

fn named(name: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: FunctionName::new(name).unwrap() }
}

async fn bills(cluster: &Cluster, request: api::ListBillingRequest) -> (Vec<api::Bill>, String) {
    let answer = cluster.admin().list_billing(request).await.unwrap().into_inner();
    (answer.bills, answer.next_page_token)
}

#[tokio::test]
async fn usage_of_a_worker_is_billed_by_function_and_page() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    for name in ["a", "b", "c"] {
        apply(&mut admin, name, &mlp()).await.unwrap();
    }
    let mut worker = attached(&cluster).await;
    let usage = |ms: u64, requests, idle_ms| Usage { gpu_ns: ms * 1_000_000, requests, idle_ms };
    let told = [("a", usage(7, 2, 30)), ("b", usage(1, 1, 5)), ("c", usage(0, 0, 10_000))];
    let delta = NodeDelta {
        usage: told.iter().map(|(name, usage)| (named(name), *usage)).collect(),
        ..NodeDelta::default()
    };
    let batch = SyncBatch { epoch: Epoch(1), seq: 1, part: FULL, delta };
    for _ in 0..2 {
        assert_eq!(answer(&mut worker, &batch).await, ack(1, false), "reported twice, charged once");
    }
    admin
        .delete_function(api::DeleteFunctionRequest { name: "b".into(), ..Default::default() })
        .await
        .unwrap();
    let bill = |at: usize| {
        let (name, usage) = told[at];
        api::Bill {
            tenant: "default".into(),
            function: name.into(),
            requests: usage.requests,
            busy: Some(duration_wire(usage.busy())),
            idle: Some(duration_wire(usage.idle())),
            charge: Some(duration_wire(usage.charge())),
            deleted: name == "b",
        }
    };
    let whole = api::ListBillingRequest::default();
    assert_eq!(bills(&cluster, whole.clone()).await, (vec![bill(0), bill(1), bill(2)], String::new()));
    let first = api::ListBillingRequest { page_size: 2, ..whole.clone() };
    assert_eq!(bills(&cluster, first.clone()).await, (vec![bill(0), bill(1)], "default/b".into()));
    let second = api::ListBillingRequest { page_token: "default/b".into(), ..first };
    assert_eq!(bills(&cluster, second).await, (vec![bill(2)], String::new()));
    let one = api::ListBillingRequest { tenant: "default".into(), function: "b".into(), ..whole.clone() };
    assert_eq!(bills(&cluster, one).await.0, [bill(1)]);
    let others = api::ListBillingRequest { tenant: "acme".into(), ..whole.clone() };
    assert_eq!(bills(&cluster, others).await.0, []);
    for bad in [
        api::ListBillingRequest { page_token: "b".into(), ..whole.clone() },
        api::ListBillingRequest { tenant: "No".into(), ..whole.clone() },
        api::ListBillingRequest { function: "No".into(), ..whole },
    ] {
        let refused = reason(&cluster.admin().list_billing(bad).await.unwrap_err());
        assert!(matches!(refused, Reason::MalformedRequest | Reason::InvalidSpec), "{refused:?}");
    }
}

#[tokio::test]
async fn a_malformed_checkpoint_ends_the_workers_stream() {
    let cluster = Cluster::start().await;
    let worker = attached(&cluster).await;
    worker.send(Message::Checkpoint(wire::Checkpoint { batch: vec![1, 2, 3].into() })).await;
    let mut admin = cluster.admin();
    until("its stream's end", async || (!nodes(&mut admin).await[0].connected).then_some(())).await;
}

/// Sends a full checkpoint with the given data ids.
async fn hold(stub: &mut Stub, ids: &[&DataId]) {
    let entries = ids.iter().map(|id| ((*id).clone(), Bytes(100))).collect();
    let delta = NodeDelta { entries, ..NodeDelta::default() };
    let epoch = *stub.epoch.borrow();
    let answered = answer(stub, &SyncBatch { epoch: Epoch(epoch), seq: 1, part: FULL, delta }).await;
    assert_eq!(answered, wire::CheckpointAck { epoch, seq: 1, full_wanted: false });
}

/// Returns the response to workers about a piece of data: the holders, and whether the data is lost.
async fn located(cluster: &Cluster, id: &DataId) -> (Vec<String>, bool) {
    let request = wire::LocateDataRequest { id: Some(data_id_wire(id)) };
    let answer = cluster.control().locate_data(request).await.unwrap().into_inner();
    (answer.holders, answer.lost)
}

/// Returns data of n9, the last node by name.
fn of_the_last(counter: u64) -> DataId {
    DataId { home: NodeName::new("n9").unwrap(), ..data(1, counter) }
}

#[tokio::test]
async fn a_worker_gets_the_holders_of_data_and_the_loss_of_the_last_holder() {
    let cluster = Cluster::start_with(short_lease).await;
    let mut other = attached_as(&cluster, "n1").await;
    let mut home = attached_as(&cluster, "n9").await;
    let shared = of_the_last(1);
    let own = of_the_last(2);
    hold(&mut home, &[&shared, &own]).await;
    hold(&mut other, &[&shared]).await;
    let held_by = |names: &[&str]| (names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), false);
    until("both", async || (located(&cluster, &shared).await == held_by(&["n9", "n1"])).then_some(())).await;
    assert_eq!(located(&cluster, &own).await, held_by(&["n9"]));
    assert_eq!(located(&cluster, &of_the_last(3)).await, held_by(&[]), "no node has named the data");
    home.kill();
    until("the loss", async || (located(&cluster, &own).await == (Vec::new(), true)).then_some(())).await;
    assert_eq!(located(&cluster, &shared).await, held_by(&["n1"]));
}

#[tokio::test]
async fn a_worker_gets_at_most_eight_holders_including_the_home() {
    let cluster = Cluster::start().await;
    let shared = of_the_last(1);
    let mut stubs = Vec::new();
    for node in 1..=9 {
        let mut stub = attached_as(&cluster, &format!("n{node}")).await;
        hold(&mut stub, &[&shared]).await;
        stubs.push(stub);
    }
    let first_eight = ["n9", "n1", "n2", "n3", "n4", "n5", "n6", "n7"].map(str::to_owned).to_vec();
    until("all of them", async || {
        (located(&cluster, &shared).await == (first_eight.clone(), false)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_look_up_without_a_valid_data_id_is_refused() {
    let cluster = Cluster::start().await;
    let nameless = wire::DataId { home: "N 1".into(), epoch: 1, counter: 1 };
    for id in [None, Some(nameless)] {
        let refused = cluster.control().locate_data(wire::LocateDataRequest { id }).await.unwrap_err();
        assert_eq!(reason(&refused), Reason::MalformedRequest, "{refused}");
    }
}
