//! A cluster for the tests of `top`.

use std::time::Duration;

use millrace_client::messages as wire;
use millrace_proto::activity::{FunctionActivity, LatencyBucket, LinkActivity};

use super::sample::tests::sample;
use super::sample::{EventLog, SampleHistory};
use crate::clock::now;

fn gpu(swaps: u64, busy: i64) -> wire::Gpu {
    wire::Gpu {
        index: 1,
        gpu_type: "V100".into(),
        health: "Up".into(),
        memory_bytes: 1 << 30,
        used_bytes: 1 << 29,
        models: vec![wire::ResidentModel {
            functions: vec!["default/digits@1".into()],
            bytes: 1 << 29,
            loaded_bytes: 1 << 29,
            ..Default::default()
        }],
        running: vec![wire::RunningRequest { function: "default/digits@1".into(), ..Default::default() }],
        swaps,
        restarts: 1,
        busy: Some(prost_types::Duration { seconds: busy, nanos: 0 }),
        ..Default::default()
    }
}

fn digits(answered: u64, failed: u64) -> FunctionActivity {
    FunctionActivity {
        tenant: "default".into(),
        function: "digits".into(),
        answered,
        failed,
        latencies: vec![LatencyBucket { up_to_seconds: 0.01, count: answered }],
        in_flight: 2,
        slo_requests: answered,
        slo_in_time: answered / 2,
        gpu_time: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
    }
}

/// Returns two samples of a cluster two seconds apart, in which one function's requests take 10 ms
/// and half of them miss the deadline.
pub(super) fn history() -> (SampleHistory, EventLog) {
    let start = now();
    let at = |second: u64, swaps, busy, function: FunctionActivity, carried: (u64, u64)| {
        let mut it = sample(start + Duration::from_secs(second), &["w"]);
        it.status = wire::ClusterStatus {
            cluster_id: "c".into(),
            leader: 1,
            term: 4,
            quorum: true,
            controllers: vec![wire::Controller { id: 1, reachable: true, ..Default::default() }],
            ..Default::default()
        };
        it.nodes = vec![wire::Node {
            name: "worker-1".into(),
            connected: true,
            gpus: vec![gpu(swaps, busy)],
            queued: 3,
            ..Default::default()
        }];
        let spec = |name: &str, slo| wire::FunctionSpec {
            tenant: "default".into(),
            name: name.into(),
            slo,
            ..Default::default()
        };
        let deadline = Some(prost_types::Duration { seconds: 0, nanos: 80_000_000 });
        let slo = Some(wire::Slo { deadline, percentile: 0.98 });
        it.functions = [spec("digits", slo), spec("quiet", None)]
            .map(|spec| wire::Function { spec: Some(spec), ..Default::default() })
            .into();
        let step = |name: &str, function: &str| wire::WorkflowStep {
            name: name.into(),
            run: Some(wire::workflow_step::Run::Function(function.into())),
            ..Default::default()
        };
        let workflow = wire::WorkflowSpec {
            tenant: "default".into(),
            name: "reader".into(),
            slo,
            steps: vec![step("read", "digits"), step("say", "quiet")],
            ..Default::default()
        };
        it.workflows = vec![wire::Workflow { spec: Some(workflow), generation: 3, ..Default::default() }];
        let reader = FunctionActivity { function: "reader".into(), in_flight: 0, ..function.clone() };
        it.activity.functions = vec![function, reader];
        it.activity.links = vec![LinkActivity {
            node: "worker-1".into(),
            link: 0,
            name: "pcie 1".into(),
            bytes_per_second: 1 << 30,
            measured_bytes_per_second: 0,
            carried_bytes: carried.0,
            outstanding: 1,
            measured_to_host_bytes_per_second: 1 << 29,
            carried_to_host_bytes: carried.1,
        }];
        it
    };
    let mut history = SampleHistory::default();
    let window = Duration::from_secs(10);
    history.add(at(0, 10, 5, digits(100, 0), (0, 0)), window);
    history.add(at(2, 14, 6, digits(200, 4), (1 << 30, 1 << 29)), window);
    let event = |seconds, severity: wire::EventSeverity, reason: &str| wire::Event {
        time: Some(prost_types::Timestamp { seconds, nanos: 0 }),
        severity: severity.into(),
        reason: reason.into(),
        object: "gpu/worker-1/1".into(),
        message: "its executor died".into(),
    };
    let mut events = EventLog::default();
    events.kept.push_back(event(1_700_000_000, wire::EventSeverity::Normal, "GpuUp"));
    events.kept.push_back(event(1_700_000_001, wire::EventSeverity::Warning, "ExecutorRestarted"));
    (history, events)
}
