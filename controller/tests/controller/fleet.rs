//! Tests of workers that attach, get the desired state, fetch models, and leave.

use millrace_proto::admin as api;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message;
use millrace_types::{Digest, Reason};

use crate::stub::{Prepares, Stub, hello};
use crate::support::{
    Cluster, apply, apply_request, cnn, mlp, nodes, reason, short_lease, soon, until, upload,
};

#[tokio::test]
async fn a_worker_gets_a_hello_and_every_change_of_its_desired_state() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    assert_eq!(worker.hello.cluster_id, cluster.controller.cluster_id().to_string());
    assert_eq!(worker.hello.epoch, 1);
    worker.told(&["f@1"]).await;
    let first = worker.desired.borrow().clone();
    assert_eq!(first.functions[0].digest, Digest::of(&mlp()).to_string());
    assert_eq!(first.functions[0].artifact_bytes, mlp().len() as u64);

    upload(&mut admin, &cnn()).await.unwrap();
    apply(&mut admin, "f", &cnn()).await.unwrap();
    worker.told(&["f@1", "f@2"]).await;
    let mut third = apply_request("f", &cnn());
    third.spec.as_mut().unwrap().labels.insert("a".into(), "b".into());
    admin.apply_function(third).await.unwrap();
    worker.told(&["f@2", "f@3"]).await;
    apply(&mut admin, "g", &cnn()).await.unwrap();
    worker.told(&["f@2", "f@3", "g@1"]).await;
    admin
        .delete_function(api::DeleteFunctionRequest { name: "f".into(), ..Default::default() })
        .await
        .unwrap();
    worker.told(&["g@1"]).await;
    let last = worker.desired.borrow().clone();
    assert!((first.term, first.index) < (last.term, last.index));
}

#[tokio::test]
async fn a_worker_of_another_cluster_or_protocol_is_refused() {
    let cluster = Cluster::start().await;
    let good = hello("n1", "a", "127.0.0.1:1");
    for (what, hello, expected) in [
        ("cluster", wire::WorkerHello { cluster_id: "other".into(), ..good.clone() }, Reason::PeerMismatch),
        ("protocol", wire::WorkerHello { protocol_version: 99, ..good.clone() }, Reason::PeerMismatch),
        ("name", wire::WorkerHello { node: "N 1".into(), ..good.clone() }, Reason::InvalidSpec),
        (
            "address",
            wire::WorkerHello { address: "no address".into(), ..good.clone() },
            Reason::MalformedRequest,
        ),
    ] {
        let message = wire::WorkerMessage { message: Some(worker_message::Message::Hello(hello)) };
        let refused = cluster.control().attach(futures::stream::iter([message])).await.unwrap_err();
        assert_eq!(reason(&refused), expected, "{what}: {refused}");
    }
    let telemetry = worker_message::Message::Telemetry(wire::Telemetry::default());
    let message = wire::WorkerMessage { message: Some(telemetry) };
    let refused = cluster.control().attach(futures::stream::iter([message])).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::MalformedRequest);
    assert_eq!(nodes(&mut cluster.admin()).await, vec![]);

    let right = wire::WorkerHello { cluster_id: cluster.controller.cluster_id().to_string(), ..good };
    let message = wire::WorkerMessage { message: Some(worker_message::Message::Hello(right)) };
    assert!(cluster.control().attach(futures::stream::iter([message])).await.is_ok());
}

#[tokio::test]
async fn the_name_of_a_live_worker_is_taken_until_the_worker_is_lost() {
    let cluster = Cluster::start_with(short_lease).await;
    let mut admin = cluster.admin();
    let first = Stub::start(&cluster, "n1").await;
    let refused = Stub::start_as(&cluster, "n1", "second", Prepares::AtOnce).await.err().unwrap();
    assert_eq!(reason(&refused), Reason::NodeNameTaken);
    first.kill();
    let second = Stub::start_when_free(&cluster, "n1", "second").await;
    assert_eq!(second.hello.epoch, 2);
    let nodes = nodes(&mut admin).await;
    assert_eq!((nodes.len(), nodes[0].epoch, nodes[0].connected), (1, 2, true));
}

#[tokio::test]
async fn a_second_stream_of_the_same_process_ends_the_first() {
    let cluster = Cluster::start().await;
    let first = Stub::start(&cluster, "n1").await;
    let mut old = first.desired.clone();
    let again = Stub::start(&cluster, "n1").await;
    assert_eq!(again.hello.epoch, first.hello.epoch, "the same registration");
    // The old stream ends for the reader, and the watch channel closes.
    soon("the old stream's end", async { while old.changed().await.is_ok() {} }).await;
    assert!(nodes(&mut cluster.admin()).await[0].connected);
}

#[tokio::test]
async fn the_gpus_of_a_lost_worker_stop_counting_when_its_lease_expires() {
    let cluster = Cluster::start_with(short_lease).await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    let mut huge = apply_request("f", &mlp());
    huge.dry_run = true;
    huge.spec.as_mut().unwrap().resources = Some(api::Resources { gpu_memory_bytes: 2 << 30 });
    let worker = Stub::start(&cluster, "n1").await;
    assert_eq!(reason(&admin.apply_function(huge.clone()).await.unwrap_err()), Reason::ModelTooLarge);
    worker.kill();
    until("the loss to be committed", async || admin.apply_function(huge.clone()).await.ok()).await;
}

#[tokio::test]
async fn telemetry_appears_in_listings_while_its_worker_is_attached() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    let worker = Stub::start(&cluster, "n1").await;
    let before = nodes(&mut admin).await.remove(0);
    assert_eq!((before.connected, before.gpus[0].health.as_str()), (true, "Unknown"));
    let gpu = wire::GpuTelemetry {
        health: wire::GpuHealth::Up.into(),
        memory_bytes: 1 << 30,
        used_bytes: 5,
        running: vec![wire::RunningRequest { function: "default/f@1".into(), first_unit: 8, units: 4 }],
        gpu_type: "stub".into(),
        swaps: 3,
        ..Default::default()
    };
    let telemetry = wire::Telemetry {
        epoch: worker.hello.epoch,
        seq: 1,
        gpus: vec![gpu],
        queued: 4,
        ..Default::default()
    };
    worker.report(telemetry).await;
    let node =
        until("telemetry", async || nodes(&mut admin).await.into_iter().find(|it| it.queued == 4)).await;
    let gpu = &node.gpus[0];
    assert_eq!((gpu.health.as_str(), gpu.used_bytes, gpu.swaps), ("Up", 5, 3));
    let running = api::RunningRequest { function: "default/f@1".into(), first_unit: 8, units: 4 };
    assert_eq!(gpu.running, [running]);
    worker.kill();
    let gone =
        until("the worker to go", async || nodes(&mut admin).await.into_iter().find(|it| !it.connected))
            .await;
    assert_eq!((gone.queued, gone.gpus[0].used_bytes), (0, 0));
}

#[tokio::test]
async fn a_worker_fetches_a_model_and_gets_an_error_if_it_is_damaged() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &cnn()).await;
    let digest = Digest::of(&cnn());
    let fetch = async |digest: Digest| {
        let request = wire::FetchArtifactRequest { digest: digest.to_string() };
        let mut chunks = cluster.control().fetch_artifact(request).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.message().await? {
            bytes.extend_from_slice(&chunk.data);
        }
        Ok::<_, tonic::Status>(bytes)
    };
    assert_eq!(fetch(digest).await.unwrap(), cnn());
    assert_eq!(reason(&fetch(Digest::of(b"x")).await.unwrap_err()), Reason::ArtifactNotFound);

    let path = cluster.dir.path().join("artifacts").join(digest.hex());
    let mut damaged = cnn();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    std::fs::write(&path, damaged).unwrap();
    let failure = from_status(&fetch(digest).await.unwrap_err());
    assert_eq!(failure.reason, Reason::DigestMismatch, "{}", failure.message);
}

#[tokio::test]
async fn a_worker_gets_the_address_of_another_while_that_one_is_attached() {
    let cluster = Cluster::start().await;
    let worker = Stub::start(&cluster, "n1").await;
    let find =
        async |node: &str| cluster.control().find_node(wire::FindNodeRequest { node: node.into() }).await;
    let shown = nodes(&mut cluster.admin()).await.remove(0).address;
    assert!(!shown.is_empty());
    assert_eq!(find("n1").await.unwrap().into_inner().address, shown);
    assert_eq!(find("n2").await.unwrap().into_inner().address, "");
    assert_eq!(reason(&find("N 1").await.unwrap_err()), Reason::MalformedRequest);
    worker.kill();
    until("its end", async || find("n1").await.unwrap().into_inner().address.is_empty().then_some(())).await;
}
