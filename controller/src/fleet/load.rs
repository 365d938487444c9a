//! The part of a worker's telemetry that routing reads, extracted once per report, and the requests
//! that no report includes yet.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_nodes::router::{MeasuredLoads, ModelResidency};
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Digest};

/// The load of a worker, and the location of each model there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WorkerLoad {
    /// GPUs that serve.
    pub(crate) gpus_up: u32,
    /// Serving GPUs that run nothing.
    pub(crate) gpus_idle: u32,
    /// GPUs with a starting executor.
    pub(crate) gpus_coming: u32,
    /// Requests in the worker's queue.
    pub(crate) queued: u32,
    /// GPU time of the requests that were assigned to GPUs.
    pub(crate) assigned: Duration,
    /// GPU time of the requests in the worker's queue.
    pub(crate) waiting: Duration,
    /// Free memory of the serving GPU that has the most.
    pub(crate) room: Bytes,
    /// Measured load times of models.
    pub(crate) loads: BTreeMap<Digest, Duration>,
    /// The loads together, for models that were not measured.
    pub(crate) measured: MeasuredLoads,
    /// Models on GPUs or in transit to a GPU. Models absent from the map are in host memory.
    pub(crate) held: BTreeMap<Digest, ModelResidency>,
}

impl WorkerLoad {
    /// Returns the assumed load before the first report, which arrives within 100 ms: all GPUs serve
    /// and are idle.
    pub(super) fn unknown(gpus: u32) -> Self {
        Self { gpus_up: gpus, gpus_idle: gpus, room: Bytes(u64::MAX), ..Self::default() }
    }

    pub(super) fn of(telemetry: &wire::Telemetry) -> Self {
        let measured = telemetry.host_models.iter().filter(|model| model.load_ns > 0);
        let mut load = Self {
            queued: telemetry.queued,
            waiting: Duration::from_nanos(telemetry.waiting_ns),
            ..Self::default()
        };
        for model in measured {
            let time = Duration::from_nanos(model.load_ns);
            load.measured.add(Bytes(model.bytes), time);
            load.loads.extend(model.digest.parse().ok().map(|digest| (digest, time)));
        }
        for gpu in &telemetry.gpus {
            match gpu.health() {
                wire::GpuHealth::Up => load.count_up(gpu),
                wire::GpuHealth::Starting | wire::GpuHealth::Restarting => load.gpus_coming += 1,
                wire::GpuHealth::Unhealthy | wire::GpuHealth::Unspecified => {}
            }
        }
        load
    }

    fn count_up(&mut self, gpu: &wire::GpuTelemetry) {
        let idle = gpu.running.is_empty();
        self.gpus_up += 1;
        self.gpus_idle += u32::from(idle);
        let free_in = Duration::from_nanos(gpu.assigned_ns);
        self.assigned = self.assigned.saturating_add(free_in);
        self.room = self.room.max(Bytes(gpu.memory_bytes.saturating_sub(gpu.used_bytes)));
        let here = if idle { ModelResidency::OnIdleGpu } else { ModelResidency::OnBusyGpu { free_in } };
        // A digest that does not parse names a model that no request can ask for.
        for digest in gpu.models.iter().filter_map(|model| model.digest.parse().ok()) {
            let held = self.held.entry(digest).or_insert(here);
            *held = here.min(*held);
        }
    }
}

/// Requests sent since the last report and not answered. The upper half of the word is the report's
/// number and the lower half the count, so that both change atomically.
#[derive(Debug, Default)]
pub(super) struct Unseen(AtomicU64);

const COUNT: u64 = u32::MAX as u64;

impl Unseen {
    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.0.load(Ordering::Relaxed) & COUNT).unwrap_or(u32::MAX)
    }

    /// Counts a sent request. Returns the number of the previous report.
    pub(super) fn sent(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) & !COUNT
    }

    /// Uncounts a request sent after the report `after`.
    pub(super) fn answered(&self, after: u64) {
        let forget = |now: u64| (now & !COUNT == after && now & COUNT > 0).then(|| now - 1);
        // An error means that a newer report includes the request already.
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, forget).ok();
    }

    /// Resets the count for a new report, which includes all earlier requests.
    pub(super) fn reported(&self) {
        let next = |now: u64| Some((now & !COUNT).wrapping_add(COUNT + 1));
        // The closure always returns `Some`, so the update succeeds.
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the running request of a function; none for an empty name.
    fn one_running(function: &str) -> Vec<wire::RunningRequest> {
        let request = wire::RunningRequest { function: function.into(), ..Default::default() };
        Some(request).filter(|it| !it.function.is_empty()).into_iter().collect()
    }

    fn gpu(health: wire::GpuHealth, running: &str, models: &[&[u8]]) -> wire::GpuTelemetry {
        let resident = |model: &&[u8]| wire::ResidentModel {
            digest: Digest::of(model).to_string(),
            ..wire::ResidentModel::default()
        };
        wire::GpuTelemetry {
            health: health.into(),
            running: one_running(running),
            models: models.iter().map(resident).collect(),
            ..wire::GpuTelemetry::default()
        }
    }

    #[test]
    fn a_report_yields_the_serving_gpus_and_the_location_of_each_model() {
        let load = |model: &[u8], load_ns| {
            let digest = Digest::of(model).to_string();
            wire::HostModel { digest, load_ns, bytes: 2 }
        };
        let telemetry = wire::Telemetry {
            queued: 5,
            waiting_ns: 9_000,
            host_models: vec![load(b"a", 3_000), load(b"d", 0)],
            gpus: vec![
                wire::GpuTelemetry {
                    assigned_ns: 7_000,
                    memory_bytes: 9,
                    used_bytes: 4,
                    ..gpu(wire::GpuHealth::Up, "default/f@1", &[b"a", b"b"])
                },
                gpu(wire::GpuHealth::Up, "", &[b"b", b"c"]),
                gpu(wire::GpuHealth::Restarting, "", &[b"d"]),
                gpu(wire::GpuHealth::Unhealthy, "", &[b"d"]),
            ],
            ..wire::Telemetry::default()
        };
        let held = [
            (b"a", ModelResidency::OnBusyGpu { free_in: Duration::from_micros(7) }),
            (b"b", ModelResidency::OnIdleGpu),
            (b"c", ModelResidency::OnIdleGpu),
        ];
        let expected = WorkerLoad {
            gpus_up: 2,
            gpus_idle: 1,
            gpus_coming: 1,
            queued: 5,
            assigned: Duration::from_micros(7),
            waiting: Duration::from_micros(9),
            room: Bytes(5),
            loads: [(Digest::of(b"a"), Duration::from_micros(3))].into(),
            measured: MeasuredLoads { weights: Bytes(2), loads: Duration::from_micros(3) },
            held: held.into_iter().map(|(model, held)| (Digest::of(model), held)).collect(),
        };
        assert_eq!(WorkerLoad::of(&telemetry), expected);
    }

    #[test]
    fn a_request_is_unseen_until_its_answer_or_the_next_report() {
        let unseen = Unseen::default();
        let first = unseen.sent();
        let _second = unseen.sent();
        assert_eq!(unseen.count(), 2);
        unseen.answered(first);
        assert_eq!(unseen.count(), 1);
        unseen.reported();
        assert_eq!(unseen.count(), 0);
        let third = unseen.sent();
        unseen.answered(first);
        assert_eq!(unseen.count(), 1, "the report counted the first request already");
        unseen.answered(third);
        assert_eq!(unseen.count(), 0);
    }
}
