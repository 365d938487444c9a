//! Tests of the fault service, and of the effects of clock jumps and disk stalls.

use std::sync::Arc;
use std::time::Duration;

use millrace_proto::admin as api;
use millrace_proto::fault::fault_client::FaultClient;
use millrace_proto::fault::{
    ClearRequest, Faults, GetFaultsRequest, SetClockOffsetRequest, StallDiskRequest,
};
use millrace_types::{Digest, Reason};
use tonic::Code;
use tonic::transport::Channel;

use crate::support::{
    Cluster, ManualClock, apply, apply_request, channel, cnn, get, mlp, reason, soon, until, upload,
};

const DAY: Duration = Duration::from_secs(24 * 3600);

fn faults(cluster: &Cluster) -> FaultClient<Channel> {
    FaultClient::new(channel(cluster.controller.internal_addr().to_string()))
}

async fn with_faults() -> Cluster {
    Cluster::start_with(|config| config.fault_injection = true).await
}

async fn warnings(cluster: &Cluster) -> Vec<String> {
    let status = cluster.admin().get_cluster_status(api::GetClusterStatusRequest {}).await.unwrap();
    status.into_inner().warnings
}

#[tokio::test]
async fn a_controller_without_fault_injection_does_not_serve_the_fault_service() {
    let cluster = Cluster::start_with(|config| config.allow_faults = true).await;
    let unknown = faults(&cluster).get_faults(GetFaultsRequest {}).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);
    let stall = StallDiskRequest { each_sync_ms: 1, for_ms: 1 };
    assert_eq!(faults(&cluster).stall_disk(stall).await.unwrap_err().code(), Code::Unimplemented);
    // The client port does not serve the fault service in any case.
    let cluster = with_faults().await;
    let mut front = FaultClient::new(channel(cluster.controller.client_addr().to_string()));
    assert_eq!(front.get_faults(GetFaultsRequest {}).await.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test]
async fn faults_are_set_reported_and_cleared_and_invalid_ones_are_refused() {
    let cluster = with_faults().await;
    let mut faults = faults(&cluster);
    let none = faults.get_faults(GetFaultsRequest {}).await.unwrap().into_inner();
    assert_eq!(none, Faults::default());

    let moved = SetClockOffsetRequest { offset_ms: -90_000 };
    assert_eq!(faults.set_clock_offset(moved).await.unwrap().into_inner().clock_offset_ms, -90_000);
    let stall = StallDiskRequest { each_sync_ms: 1, for_ms: 600_000 };
    let told = faults.stall_disk(stall).await.unwrap().into_inner();
    assert_eq!((told.clock_offset_ms, told.each_sync_ms), (-90_000, 1));
    assert!((1..=600_000).contains(&told.stall_left_ms), "{told:?}");

    let refused = faults.set_clock_offset(SetClockOffsetRequest { offset_ms: i64::MIN }).await.unwrap_err();
    assert_eq!((reason(&refused), refused.code()), (Reason::MalformedRequest, Code::InvalidArgument));
    let endless = StallDiskRequest { each_sync_ms: 1, for_ms: u64::MAX };
    assert_eq!(reason(&faults.stall_disk(endless).await.unwrap_err()), Reason::MalformedRequest);
    let still = faults.get_faults(GetFaultsRequest {}).await.unwrap().into_inner();
    assert_eq!((still.clock_offset_ms, still.each_sync_ms), (-90_000, 1), "a refused fault changes nothing");

    assert_eq!(faults.clear(ClearRequest {}).await.unwrap().into_inner(), Faults::default());
}

/// Returns the resource version of a function.
async fn version(cluster: &Cluster, name: &str) -> u64 {
    get(&mut cluster.admin(), name).await.unwrap().resource_version
}

#[tokio::test]
async fn a_write_repeated_across_a_clock_jump_runs_once() {
    let cluster = with_faults().await;
    let mut admin = cluster.admin();
    for model in [mlp(), cnn()] {
        upload(&mut admin, &model).await.unwrap();
    }
    let keyed = || api::ApplyFunctionRequest { idempotency_key: "k".into(), ..apply_request("f", &mlp()) };
    admin.apply_function(keyed()).await.unwrap();
    apply(&mut admin, "f", &cnn()).await.unwrap();
    let after = version(&cluster, "f").await;

    let day = i64::try_from(DAY.as_millis()).unwrap();
    let mut faults = faults(&cluster);
    for (name, offset_ms) in [("forward", day), ("back", -day), ("right", 0)] {
        faults.set_clock_offset(SetClockOffsetRequest { offset_ms }).await.unwrap();
        // This write advances the cluster's time.
        apply(&mut admin, name, &mlp()).await.unwrap();
        admin.apply_function(keyed()).await.unwrap();
        assert_eq!(
            version(&cluster, "f").await,
            after,
            "{name}: the repeated write does not restore the first model"
        );
        if name == "forward" {
            let warnings = warnings(&cluster).await;
            assert!(warnings.iter().any(|it| it.contains("ahead of the cluster's time")), "{warnings:?}");
        }
    }
}

#[tokio::test]
async fn a_clock_jump_collects_no_model_file() {
    let clock = Arc::new(ManualClock::default());
    let cluster = Cluster::start_with(|config| {
        config.clock = clock.clone();
        config.limits.collect_every = Duration::from_millis(1);
    })
    .await;
    let mut admin = cluster.admin();
    // The model is uploaded, but not used yet.
    upload(&mut admin, &mlp()).await.unwrap();
    // The file is held for another controller, which has not recorded the file yet, and the timestamp
    // is from another clock.
    let held = cluster.dir.path().join("artifacts").join(Digest::of(b"held").hex());
    std::fs::write(&held, b"held").unwrap();
    clock.advance(10 * DAY);
    for _ in 0..20 {
        // Each write stamps the time, and lasts several rounds of the collector.
        upload(&mut admin, &cnn()).await.unwrap();
    }
    assert!(held.exists());
    apply(&mut admin, "f", &mlp()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_disk_slows_writes_and_yields_a_warning() {
    let cluster = with_faults().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    let mut faults = faults(&cluster);
    faults.stall_disk(StallDiskRequest { each_sync_ms: 300, for_ms: 600_000 }).await.unwrap();
    apply(&mut admin, "slow", &mlp()).await.unwrap();
    let told = warnings(&cluster).await;
    assert!(told.iter().any(|it| it.contains("the disk of controller 1 is slow")), "{told:?}");

    // The disk hangs: the write waits, and continues as soon as the disk does.
    faults.stall_disk(StallDiskRequest { each_sync_ms: 60_000, for_ms: 600_000 }).await.unwrap();
    let mut writer = cluster.admin();
    let write = tokio::spawn(async move { apply(&mut writer, "hung", &mlp()).await });
    until("the sync to hang", async || {
        let told = warnings(&cluster).await;
        told.iter().any(|it| it.contains("is slow")).then_some(())
    })
    .await;
    faults.clear(ClearRequest {}).await.unwrap();
    soon("the write", write).await.unwrap().unwrap();
    until("the disk to be fast again", async || {
        apply(&mut admin, "fast", &mlp()).await.unwrap();
        apply(&mut admin, "fast", &mlp()).await.unwrap();
        warnings(&cluster).await.is_empty().then_some(())
    })
    .await;
}
