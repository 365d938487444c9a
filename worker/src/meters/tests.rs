use std::time::Duration;

use millrace_gpu::SliceUse;
use millrace_nodes::index::{IndexUsage, LookupCounts};
use millrace_scheduling::dispatch::{DispatchStats, PredictionError, TurnKind};
use millrace_transfers::fabric::{FirstBatchWait, GuaranteeCounts};
use millrace_transfers::paths::PerDirection;
use millrace_types::{
    Alphas, Bytes, BytesPerSec, GpuIndex, Incarnation, Permille, Revision, RevisionKey, SliceId, SliceOnGpu,
    TenantName, Terms,
};

use super::*;
use crate::desired_state::PlacedSlices;
use crate::objects::{FetchCounts, ObjectTally};
use crate::snapshot::{FunctionSnapshot, GpuData, GpuSnapshot, LinkSnapshot};

fn function(name: &str) -> FunctionKey {
    FunctionKey {
        tenant: millrace_types::TenantName::default(),
        name: millrace_types::FunctionName::new(name).unwrap(),
    }
}

fn scored(name: &str, completed: u64, in_time: u64) -> FunctionSnapshot {
    FunctionSnapshot {
        key: RevisionKey { function: function(name), revision: Revision::new(2).unwrap() },
        in_flight: 1,
        score: FunctionTotals {
            completed,
            in_time,
            scored: completed,
            billed_ms: 1500,
            ..FunctionTotals::default()
        },
    }
}

fn lines(seen: MetricsSnapshot, about: &str) -> Vec<String> {
    let text = text(seen).unwrap();
    assert!(text.ends_with("# EOF\n"), "{text}");
    text.lines().filter(|line| line.starts_with(about)).map(str::to_owned).collect()
}

fn gpu() -> GpuSnapshot {
    GpuSnapshot {
        index: GpuIndex(1),
        gpu_type: "V100".into(),
        health: GpuHealth::Up,
        memory: Bytes(100),
        used: Bytes(10),
        models: Vec::new(),
        running: Vec::new(),
        sm_violations: 6,
        slices: Vec::new(),
        incarnation: Incarnation(4),
        executor_pid: None,
        executor_pids: Vec::new(),
        restarts: 3,
        swaps: 5,
        peer_swaps: 2,
        evictions: 1,
        data: GpuData { used: Bytes(4), pool: Bytes(6), migrated: 7, refused: 8, reloaded: 9 },
        busy: Duration::from_millis(250),
    }
}

#[test]
fn gpu_metrics_show_memory_swaps_and_evictions() {
    let snapshot = NodeSnapshot { gpus: vec![gpu()], ..NodeSnapshot::default() };
    let expected = [
        r#"millrace_gpu_up{gpu="1",gpu_type="V100"} 1.0"#,
        r#"millrace_gpu_memory_bytes{gpu="1"} 100.0"#,
        r#"millrace_gpu_memory_taken_bytes{gpu="1"} 10.0"#,
        r#"millrace_gpu_objects_memory_bytes{gpu="1"} 4.0"#,
        r#"millrace_gpu_objects_pool_bytes{gpu="1"} 6.0"#,
        r#"millrace_gpu_objects_migrated_total{gpu="1"} 7.0"#,
        r#"millrace_gpu_objects_refused_total{gpu="1"} 8.0"#,
        r#"millrace_gpu_models{gpu="1"} 0.0"#,
        r#"millrace_gpu_busy_seconds_total{gpu="1"} 0.25"#,
        r#"millrace_gpu_swaps_total{gpu="1"} 5.0"#,
        r#"millrace_gpu_peer_swaps_total{gpu="1"} 2.0"#,
        r#"millrace_gpu_sm_violations_total{gpu="1"} 6.0"#,
        r#"millrace_gpu_evictions_total{gpu="1"} 1.0"#,
        r#"millrace_gpu_executor_restarts_total{gpu="1"} 3.0"#,
    ];
    assert_eq!(lines(MetricsSnapshot { snapshot, ..MetricsSnapshot::default() }, "millrace_gpu"), expected);
}

#[test]
fn slices_are_shown_with_their_functions() {
    let used = SliceUse {
        busy: Duration::from_millis(800),
        sm: Duration::from_millis(100),
        starved: 2,
        ..SliceUse::default()
    };
    let slices = vec![(SliceId(7), used), (SliceId(8), used)];
    let snapshot = NodeSnapshot { gpus: vec![GpuSnapshot { slices, ..gpu() }], ..NodeSnapshot::default() };
    let all = Permille::ALL;
    let terms = Terms::new(all, all, all, all).unwrap();
    let placed = PlacedSlices { terms, on: vec![SliceOnGpu::unmeasured(SliceId(7), GpuIndex(1))] };
    let function = FunctionKey { tenant: TenantName::default(), name: "f".parse().unwrap() };
    let key = RevisionKey { function, revision: Revision::FIRST };
    let slices = Arc::new([(key, placed)].into());
    let expected = [
        r#"millrace_slice_busy_seconds_total{tenant="default",function="f",slice="7",gpu="1"} 0.8"#,
        r#"millrace_slice_sm_seconds_total{tenant="default",function="f",slice="7",gpu="1"} 0.1"#,
        r#"millrace_slice_starved_total{tenant="default",function="f",slice="7",gpu="1"} 2.0"#,
    ];
    let seen = MetricsSnapshot { snapshot, slices, ..MetricsSnapshot::default() };
    assert_eq!(lines(seen, "millrace_slice"), expected, "slice 8 was taken away");
}

#[test]
fn prediction_errors_are_shown_by_gpu_type_and_kind_of_turn() {
    let gpu =
        |index, gpu_type: &str| GpuSnapshot { index: GpuIndex(index), gpu_type: gpu_type.into(), ..gpu() };
    let error =
        |kind, turn, predictions, thousandths| PredictionError { kind, turn, predictions, thousandths };
    let errors = vec![error(0, TurnKind::Run, 4, 1000), error(1, TurnKind::Load, 1, 1)];
    let dispatch = DispatchStats { errors, held_out: Some(2.5), ..DispatchStats::default() };
    let gpus = vec![gpu(0, "V100"), gpu(1, "A100")];
    let snapshot = NodeSnapshot { gpus, dispatch, ..NodeSnapshot::default() };
    let seen = || MetricsSnapshot { snapshot: snapshot.clone(), ..MetricsSnapshot::default() };
    let expected = [
        r#"millrace_dispatch_predictions_total{gpu_type="A100",turn="run"} 4.0"#,
        r#"millrace_dispatch_predictions_total{gpu_type="V100",turn="load"} 1.0"#,
        r#"millrace_dispatch_prediction_errors_total{gpu_type="A100",turn="run"} 1.0"#,
        r#"millrace_dispatch_prediction_errors_total{gpu_type="V100",turn="load"} 0.001"#,
    ];
    assert_eq!(lines(seen(), "millrace_dispatch_prediction"), expected);
    assert_eq!(lines(seen(), "millrace_batch_prediction"), ["millrace_batch_prediction_error_ratio 0.025"]);
}

#[test]
fn transfers_are_shown_by_rate_guarantee_and_waits_by_link() {
    let from_host = GuaranteeCounts { admitted: 7, late: 1, infeasible: 2, ..GuaranteeCounts::default() };
    let to_host = GuaranteeCounts { unpromised: 3, ..GuaranteeCounts::default() };
    let wait = FirstBatchWait { transfers: 10, waited: Duration::from_millis(1500) };
    let waits = [((LinkId(3), HostDirection::FromGpu), wait)].into();
    let transfers =
        fabric::TransferCounts { ended: PerDirection { to_gpu: from_host, from_gpu: to_host }, waits };
    let seen = || MetricsSnapshot {
        snapshot: NodeSnapshot { transfers: transfers.clone(), ..<_>::default() },
        ..<_>::default()
    };
    let waits = [
        r#"millrace_link_waits_total{link="3",direction="to_host"} 10.0"#,
        r#"millrace_link_wait_seconds_total{link="3",direction="to_host"} 1.5"#,
    ];
    assert_eq!(lines(seen(), "millrace_link_wait"), waits);
    let standings = [
        r#"millrace_transfers_total{direction="to_gpu",standing="unpromised"} 0.0"#,
        r#"millrace_transfers_total{direction="to_gpu",standing="admitted"} 7.0"#,
        r#"millrace_transfers_total{direction="to_gpu",standing="crowded"} 0.0"#,
        r#"millrace_transfers_total{direction="to_gpu",standing="late"} 1.0"#,
        r#"millrace_transfers_total{direction="to_gpu",standing="infeasible"} 2.0"#,
        r#"millrace_transfers_total{direction="to_host",standing="unpromised"} 3.0"#,
        r#"millrace_transfers_total{direction="to_host",standing="admitted"} 0.0"#,
        r#"millrace_transfers_total{direction="to_host",standing="crowded"} 0.0"#,
        r#"millrace_transfers_total{direction="to_host",standing="late"} 0.0"#,
        r#"millrace_transfers_total{direction="to_host",standing="infeasible"} 0.0"#,
    ];
    assert_eq!(lines(seen(), "millrace_transfers"), standings);
}

#[test]
fn carried_bytes_of_a_link_are_shown_by_direction() {
    let link = LinkSnapshot {
        link: LinkId(2),
        rate: BytesPerSec(100),
        measured: Some(BytesPerSec(90)),
        carried: Bytes(7),
        measured_to_host: None,
        carried_to_host: Bytes(5),
        outstanding: 1,
    };
    let seen = || MetricsSnapshot {
        snapshot: NodeSnapshot { links: vec![link.clone()], ..<_>::default() },
        ..<_>::default()
    };
    let carried = [
        r#"millrace_link_carried_bytes_total{link="2",direction="to_gpu"} 7.0"#,
        r#"millrace_link_carried_bytes_total{link="2",direction="to_host"} 5.0"#,
    ];
    assert_eq!(lines(seen(), "millrace_link_carried"), carried);
    let measured = [r#"millrace_link_measured_bytes_per_second{link="2",direction="to_gpu"} 90.0"#];
    assert_eq!(lines(seen(), "millrace_link_measured"), measured);
}

#[test]
fn function_metrics_show_the_score_and_the_required_requests() {
    let past = FunctionTotals { completed: 10, in_time: 5, scored: 10, ..FunctionTotals::default() };
    let snapshot = NodeSnapshot {
        functions: vec![scored("a", 90, 84)],
        past: [(function("a"), past)].into(),
        ..NodeSnapshot::default()
    };
    let slo = Slo { deadline: Duration::from_millis(50), percentile: 0.9 };
    let seen =
        MetricsSnapshot { snapshot, objectives: [(function("a"), slo)].into(), ..MetricsSnapshot::default() };
    let lines = lines(seen, "millrace_function_");
    let has = |line: &str| assert!(lines.iter().any(|it| it == line), "{line} in {lines:#?}");
    has(r#"millrace_function_requests_total{tenant="default",function="a",outcome="completed"} 100.0"#);
    has(r#"millrace_function_slo_in_time_total{tenant="default",function="a"} 89.0"#);
    has(r#"millrace_function_gpu_seconds_total{tenant="default",function="a"} 1.5"#);
    let required = lines.iter().find(|it| it.starts_with("millrace_function_required_requests{")).unwrap();
    let value: f64 = required.rsplit_once(' ').unwrap().1.parse().unwrap();
    assert!((value - 10.0).abs() < 1e-9, "(0.9 * 100 - 89) / 0.1: {required}");
}

/// The metric shows the count by which the node schedules: earlier placements count too.
#[test]
fn required_requests_include_the_counts_of_earlier_placements() {
    let snapshot = NodeSnapshot { functions: vec![scored("a", 90, 84)], ..NodeSnapshot::default() };
    let seen = MetricsSnapshot {
        snapshot,
        objectives: [(function("a"), Slo { deadline: Duration::from_millis(50), percentile: 0.5 })].into(),
        scores: Arc::new([(function("a"), SloCounts { m: 84, n: 200 })].into()),
        ..MetricsSnapshot::default()
    };
    let required = r#"millrace_function_required_requests{tenant="default",function="a"} 32.0"#;
    assert_eq!(lines(seen, "millrace_function_required_requests"), [required]);
}

#[test]
fn functions_beyond_the_bound_are_shown_as_one() {
    let functions = (0..FUNCTIONS_MAX as u64 + 3).map(|i| scored(&format!("f{i:04}"), i, 0)).collect();
    let snapshot = NodeSnapshot { functions, ..NodeSnapshot::default() };
    let lines = lines(
        MetricsSnapshot { snapshot, ..MetricsSnapshot::default() },
        "millrace_function_slo_requests_total{",
    );
    assert_eq!(lines.len(), FUNCTIONS_MAX + 1);
    let other = r#"millrace_function_slo_requests_total{tenant="_other",function="_other"} 3003.0"#;
    assert_eq!(lines.last().unwrap(), other, "the sum of the last three by name: 1000, 1001 and 1002");
}

#[test]
fn restarts_of_processes_are_shown_only_for_programs() {
    let snapshot = NodeSnapshot {
        functions: vec![scored("model", 1, 0), scored("steady", 1, 0)],
        past: [(function("gone"), FunctionTotals::default())].into(),
        ..NodeSnapshot::default()
    };
    let restarts = [(function("steady"), 0), (function("gone"), 3)].into();
    let expected = [
        r#"millrace_function_process_restarts_total{tenant="default",function="gone"} 3.0"#,
        r#"millrace_function_process_restarts_total{tenant="default",function="steady"} 0.0"#,
    ];
    let seen = MetricsSnapshot { snapshot, restarts, ..MetricsSnapshot::default() };
    assert_eq!(lines(seen, "millrace_function_process_restarts"), expected);
}

#[test]
fn restarts_of_functions_beyond_the_bound_are_shown_as_one() {
    let names: Vec<_> = (0..FUNCTIONS_MAX + 3).map(|i| format!("f{i:04}")).collect();
    let functions = names.iter().map(|name| scored(name, 1, 0)).collect();
    let snapshot = NodeSnapshot { functions, ..NodeSnapshot::default() };
    // The last function by name is a model.
    let restarts = names[..names.len() - 1].iter().map(|name| (function(name), 2)).collect();
    let lines = lines(
        MetricsSnapshot { snapshot, restarts, ..MetricsSnapshot::default() },
        "millrace_function_process_restarts_total{",
    );
    assert_eq!(lines.len(), FUNCTIONS_MAX + 1);
    let other = r#"millrace_function_process_restarts_total{tenant="_other",function="_other"} 4.0"#;
    assert_eq!(lines.last().unwrap(), other);
}

#[test]
fn sequences_are_shown_only_for_functions_that_keep_state() {
    let snapshot = NodeSnapshot {
        functions: vec![scored("model", 1, 0), scored("counter", 1, 0)],
        ..NodeSnapshot::default()
    };
    let ended = millrace_scheduling::sequences::SequenceTotals { idle: 2, lost: 1 };
    let sequences = [(function("counter"), crate::sequences::SequenceTally { live: 3, ended })].into();
    let expected = [
        r#"millrace_function_sequences{tenant="default",function="counter"} 3.0"#,
        r#"millrace_function_sequences_ended_total{tenant="default",function="counter",reason="idle"} 2.0"#,
        r#"millrace_function_sequences_ended_total{tenant="default",function="counter",reason="lost"} 1.0"#,
    ];
    assert_eq!(
        lines(
            MetricsSnapshot { snapshot, sequences, ..MetricsSnapshot::default() },
            "millrace_function_sequences"
        ),
        expected
    );
}

#[test]
fn alpha_is_shown_if_the_policy_has_one() {
    let with = |alphas| {
        let dispatch = DispatchStats { alphas, ..DispatchStats::default() };
        MetricsSnapshot {
            snapshot: NodeSnapshot { dispatch, ..NodeSnapshot::default() },
            ..MetricsSnapshot::default()
        }
    };
    let level = |level, ppm| (Priority::new(level).unwrap(), Alpha::from_ppm(ppm).unwrap());
    let expected =
        [r#"millrace_dispatch_alpha{priority="4"} 0.25"#, r#"millrace_dispatch_alpha{priority="8"} 1.0"#];
    let alphas = Alphas::from([level(4, 250_000), level(8, 1_000_000)]);
    assert_eq!(lines(with(alphas), "millrace_dispatch_alpha"), expected);
    assert_eq!(lines(with(Alphas::new()), "millrace_dispatch_alpha"), [""; 0]);
}

#[test]
fn object_metrics_show_stored_objects_lookups_and_fetches() {
    let objects = ObjectTally {
        usage: IndexUsage {
            objects: 2,
            bytes: Bytes(4096),
            kept: 9,
            expired: 1,
            refused: 3,
            copies: 4,
            copied: Bytes(512),
        },
        fetched: [(7, 700), (0, 0), (5, 640), (1, 64)].map(|(fetches, bytes)| FetchCounts { fetches, bytes }),
        asked: LookupCounts { home: 3, tier2: 2, holders: 1 },
        addresses: 1,
    };
    let expected = [
        "millrace_objects 2.0",
        "millrace_objects_memory_bytes 4096.0",
        "millrace_objects_kept_total 9",
        "millrace_objects_expired_total 1",
        "millrace_objects_refused_total 3",
        "millrace_objects_copies 4.0",
        "millrace_objects_copies_memory_bytes 512.0",
        r#"millrace_objects_lookups_total{asked="address"} 1.0"#,
        r#"millrace_objects_lookups_total{asked="home"} 3.0"#,
        r#"millrace_objects_lookups_total{asked="tier2"} 2.0"#,
        r#"millrace_objects_lookups_total{asked="holder"} 1.0"#,
        r#"millrace_objects_fetches_total{method="intra-gpu"} 7.0"#,
        r#"millrace_objects_fetches_total{method="inter-gpu"} 0.0"#,
        r#"millrace_objects_fetches_total{method="host"} 5.0"#,
        r#"millrace_objects_fetches_total{method="inter-node"} 1.0"#,
        r#"millrace_objects_fetched_bytes_total{method="intra-gpu"} 700.0"#,
        r#"millrace_objects_fetched_bytes_total{method="inter-gpu"} 0.0"#,
        r#"millrace_objects_fetched_bytes_total{method="host"} 640.0"#,
        r#"millrace_objects_fetched_bytes_total{method="inter-node"} 64.0"#,
    ];
    assert_eq!(
        lines(MetricsSnapshot { objects, ..MetricsSnapshot::default() }, "millrace_objects"),
        expected
    );
}

#[test]
fn prewarming_hints_are_counted_by_outcome() {
    let prewarms = millrace_scheduling::dispatch::PrewarmCounts { brought: 3, there: 2, busy: 1 };
    let dispatch = DispatchStats { prewarms, ..DispatchStats::default() };
    let snapshot = NodeSnapshot { dispatch, ..NodeSnapshot::default() };
    let followed = HintOutcomes { host: 4, there: 10, busy: 20 };
    let expected = [
        r#"millrace_prewarms_total{outcome="gpu"} 3.0"#,
        r#"millrace_prewarms_total{outcome="host"} 4.0"#,
        r#"millrace_prewarms_total{outcome="there"} 12.0"#,
        r#"millrace_prewarms_total{outcome="busy"} 21.0"#,
    ];
    assert_eq!(
        lines(MetricsSnapshot { snapshot, followed, ..MetricsSnapshot::default() }, "millrace_prewarms"),
        expected
    );
}
