//! Tests of checkpoints: the soft state of a worker that reaches its controllers.

use millrace_proto::worker as wire;
use millrace_types::{
    Digest, FunctionKey, FunctionName, GpuIndex, MemoryTier, ModelCopy, SloCounts, SyncPart, SyncPortion,
    TenantName,
};
use millrace_worker::start::{RunningWorker, start};
use tokio::sync::watch;

use crate::controller::Controller;
use crate::ledger::Ledger;
use crate::support::{all_up, client, config, index_data, invoke, row, serving_mlp, within, worker};

fn mlp() -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: FunctionName::new("mlp").unwrap() }
}

fn copies() -> [ModelCopy; 2] {
    let digest = Digest::of(&millrace_model::synth::mlp());
    [ModelCopy { digest, tier: MemoryTier::Host }, ModelCopy { digest, tier: MemoryTier::Gpu(GpuIndex(0)) }]
}

fn requests(ledger: &Ledger) -> u64 {
    ledger.kept.usage.get(&mlp()).map_or(0, |usage| usage.requests)
}

/// Asserts that the batches of an epoch are numbered 1, 2, 3, …, and that the first batch is full.
fn in_order(ledger: &Ledger, epoch: u64) {
    let applied: Vec<_> = ledger.applied.iter().filter(|(of, ..)| *of == epoch).collect();
    assert!(!applied.is_empty(), "{ledger:?}");
    for (expected, (_, seq, part)) in (1..).zip(&applied) {
        assert_eq!(*seq, expected, "{applied:?}");
        assert_eq!(matches!(part, SyncPart::Full(_)), expected == 1, "{applied:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn models_scores_and_usage_reach_the_leader_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    controller.lead(1);
    let digest = controller.publish(&millrace_model::synth::mlp());
    controller.desire_with(&[("mlp", digest)], |state| {
        let function = &mut state.functions[0];
        function.slo_deadline = Some(prost_types::Duration { seconds: 60, nanos: 0 });
        function.slo_percentile = 0.9;
        function.slo_base_m = 5;
        function.slo_base_n = 7;
    });
    controller.ready("mlp").await;
    for id in 0..3 {
        invoke(&mut client(&worker), "mlp", id, &row(1)).await.unwrap();
    }
    let known = |ledger: &Ledger| {
        requests(ledger) == 3 && copies().iter().all(|copy| ledger.kept.models.contains_key(copy))
    };
    let ledger = controller.committed("everything it did", known).await;
    in_order(&ledger, 1);
    assert_eq!(ledger.kept.slo[&mlp()], SloCounts { m: 3, n: 3 });
    let gpu_ns = ledger.kept.usage[&mlp()].gpu_ns;
    assert!(
        gpu_ns > 0 && gpu_ns % 1_000_000 == 0,
        "each run is charged in whole milliseconds, rounded up: {gpu_ns}"
    );
    let mut scores = worker.control().scores();
    let effective = SloCounts { m: 8, n: 10 };
    within("the base added to the counts", scores.wait_for(|scores| scores.get(&mlp()) == Some(&effective)))
        .await
        .unwrap();
    controller.desire(&[]);
    let gone = |ledger: &Ledger| ledger.kept.models.is_empty();
    let ledger = controller.committed("the models gone", gone).await;
    assert_eq!(requests(&ledger), 3, "the usage stays");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_that_is_deleted_and_created_again_starts_with_new_scores() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    controller.lead(1);
    let digest = controller.publish(&millrace_model::synth::mlp());
    let desire = |created| {
        controller.desire_with(&[("mlp", digest)], move |state| {
            let function = &mut state.functions[0];
            function.slo_deadline = Some(prost_types::Duration { seconds: 60, nanos: 0 });
            function.slo_percentile = 0.9;
            function.created_at_ms = created;
        });
    };
    desire(1_000);
    controller.ready("mlp").await;
    for id in 0..3 {
        invoke(&mut client(&worker), "mlp", id, &row(1)).await.unwrap();
    }
    controller.committed("its scores", |ledger| requests(ledger) == 3).await;
    let mut scores = worker.control().scores();
    desire(2_000);
    let none = |scores: &millrace_worker::control::checkpoint::SloScores| {
        scores.get(&mlp()) == Some(&SloCounts::default())
    };
    within("no score", scores.wait_for(none)).await.unwrap();
    invoke(&mut client(&worker), "mlp", 4, &row(1)).await.unwrap();
    let one = |ledger: &Ledger| ledger.kept.slo.get(&mlp()) == Some(&SloCounts { m: 1, n: 1 });
    controller.committed("the new one's score", one).await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_group_that_lost_its_state_gets_a_full_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    controller.lead(1);
    index_data(&worker, 2_500).await;
    let before = controller.committed("the index", |ledger| ledger.kept.entries.len() == 2_500).await;
    controller.ledger().send_modify(Ledger::lose);
    invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap();
    let again = |ledger: &Ledger| ledger.kept.entries.len() == 2_500 && requests(ledger) == 1;
    let after = controller.committed("everything again", again).await;
    assert_eq!(after.kept.entries, before.kept.entries);
    let fresh = &after.applied[before.applied.len()..];
    assert!(matches!(fresh[0].2, SyncPart::Full(SyncPortion::First)), "{fresh:?}");
    worker.shutdown().await;
}

/// Starts a worker with two controllers of one group, the first of which leads in term 1.
async fn with_two(dir: &std::path::Path) -> (RunningWorker, Controller, Controller) {
    let ledger = watch::Sender::new(Ledger::default());
    let first = Controller::start_in("test-cluster", 1, ledger.clone()).await;
    let second = Controller::start_in("test-cluster", 1, ledger).await;
    first.lead(1);
    let worker = start(config(dir, &[first.addr, second.addr], 1)).await.unwrap();
    all_up(&first).await;
    (worker, first, second)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_without_an_acknowledgement_is_sent_to_the_next_leader() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, first, second) = with_two(dir.path()).await;
    first.commit(false);
    index_data(&worker, 10).await;
    first.offered_another().await;
    assert_eq!(second.offered(), 0, "only the leader gets checkpoints");
    // The first controller still claims to lead: the higher term wins.
    second.lead(2);
    let ledger = second.committed("the index", |ledger| ledger.kept.entries.len() == 10).await;
    in_order(&ledger, 1);
    first.follow(2);
    first.commit(true);
    let digest = first.publish(&millrace_model::synth::mlp());
    first.desire(&[("mlp", digest)]);
    second.committed("the model", |ledger| ledger.kept.models.contains_key(&copies()[0])).await;
    // A batch that was in transit to the first controller may have been sent again.
    let last = second.ledger().borrow().seq;
    assert!(first.last_offered() < last, "later batches went to the new leader alone");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_newest_registration_holds_on_every_stream_and_restarts_the_counts() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, first, second) = with_two(dir.path()).await;
    let digest = first.publish(&millrace_model::synth::mlp());
    first.desire(&[("mlp", digest)]);
    second.ready("mlp").await;
    invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap();
    first.committed("the first request", |ledger| requests(ledger) == 1).await;
    // A controller that does not lead registers the worker again.
    second.register_again(4);
    for controller in [&first, &second] {
        controller.telemetry("the new epoch", |telemetry| telemetry.epoch == 4).await;
    }
    let again = |ledger: &Ledger| ledger.epoch == 4 && ledger.kept.models.contains_key(&copies()[0]);
    let ledger = first.committed("everything under the new epoch", again).await;
    in_order(&ledger, 4);
    assert_eq!(requests(&ledger), 0, "the request was reported under the epoch before");
    // The other controller lags behind.
    first.register_again(3);
    invoke(&mut client(&worker), "mlp", 2, &row(1)).await.unwrap();
    let ledger = first.committed("the second request", |ledger| requests(ledger) == 1).await;
    assert_eq!((ledger.epoch, first.latest_telemetry().epoch), (4, 4));
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_drains_sends_its_last_checkpoint_and_every_goodbye() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, first, second) = with_two(dir.path()).await;
    let digest = first.publish(&millrace_model::synth::mlp());
    first.desire(&[("mlp", digest)]);
    first.ready("mlp").await;
    first.committed("the model", |ledger| ledger.kept.models.contains_key(&copies()[0])).await;
    for id in 0..5 {
        invoke(&mut client(&worker), "mlp", id, &row(1)).await.unwrap();
    }
    worker.drain(std::time::Duration::from_secs(10)).await;
    // The drain waited for the goodbyes, but only briefly: on a stalled machine a goodbye arrives a
    // little later.
    first.said_goodbye().await;
    second.said_goodbye().await;
    assert_eq!((first.goodbyes(), second.goodbyes()), (1, 1));
    assert_eq!(requests(&first.ledger().borrow()), 5, "all usage was reported");
    worker.shutdown().await;
    assert_eq!((first.goodbyes(), second.goodbyes()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_learns_of_a_hundred_thousand_stored_and_dropped_objects() {
    const ENTRIES: usize = 100_000;
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    controller.lead(1);
    index_data(&worker, ENTRIES as u64).await;
    let ledger = controller.committed("the index", |ledger| ledger.kept.entries.len() == ENTRIES).await;
    let index = worker.control().index();
    for id in ledger.kept.entries {
        index.reserve().await.unwrap().dropped(id);
    }
    controller.committed("an empty index", |ledger| ledger.kept.entries.is_empty()).await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rebuilt_controller_group_learns_the_highest_epoch_of_the_worker() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    assert_eq!(controller.hello().await.seen_epoch, 0);
    controller.register_again(7);
    controller.telemetry("the epoch", |telemetry| telemetry.epoch == 7).await;
    let addr = controller.addr;
    drop(controller);
    let rebuilt = Controller::start_at(addr, "test-cluster", 8).await;
    assert_eq!(rebuilt.hello().await.seen_epoch, 7);
    rebuilt.telemetry("the next epoch", |telemetry| telemetry.epoch == 8).await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn telemetry_shows_the_scheduling_setting_and_a_draining_worker_serves_on() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let digest = Digest::of(&millrace_model::synth::mlp());
    let scheduled = |wanted| move |telemetry: &wire::Telemetry| telemetry.scheduling() == wanted;
    controller.telemetry("schedulable", scheduled(wire::NodeScheduling::Schedulable)).await;
    controller.desire_with(&[("mlp", digest)], |state| {
        state.set_scheduling(wire::NodeScheduling::Draining);
    });
    controller.telemetry("draining", scheduled(wire::NodeScheduling::Draining)).await;
    invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap();
    worker.shutdown().await;
}
