//! The GPUs of a worker that have had no executor for a while, by the worker's reports. Such a GPU counts
//! as lost until its executor is back: its slices go to other GPUs. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_proto::worker::{GpuHealth, GpuTelemetry};
use millrace_types::{GpuIndex, Timestamp};

/// Time without an executor after which a GPU counts as lost. An executor that is replaced is back within a
/// second on an emulated GPU, and within a few seconds on a large CUDA GPU.
pub(crate) const LOST_AFTER: Duration = Duration::from_secs(15);

/// The absence of a worker's GPUs.
#[derive(Debug, Default)]
pub(super) struct GpuAbsence {
    /// The time of the first report without an executor, by GPU.
    since: BTreeMap<GpuIndex, Timestamp>,
    lost: BTreeSet<GpuIndex>,
}

impl GpuAbsence {
    /// Takes a report. Returns whether other GPUs are lost than before.
    pub(super) fn report(&mut self, now: Timestamp, gpus: &[GpuTelemetry]) -> bool {
        let absent = gpus.iter().filter(|gpu| gpu.health() != GpuHealth::Up).map(|gpu| GpuIndex(gpu.index));
        let since = |gpu: GpuIndex| (gpu, self.since.get(&gpu).copied().unwrap_or(now));
        self.since = absent.map(since).collect();
        let lost = self.since.iter().filter(|&(_, &since)| now.since(since) >= LOST_AFTER);
        let lost = lost.map(|(&gpu, _)| gpu).collect();
        let before = std::mem::replace(&mut self.lost, lost);
        before != self.lost
    }

    /// Returns the GPUs that count as lost.
    pub(super) fn lost(&self) -> &BTreeSet<GpuIndex> {
        &self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32, health: GpuHealth) -> GpuTelemetry {
        GpuTelemetry { index, health: health.into(), ..GpuTelemetry::default() }
    }

    #[test]
    fn a_gpu_is_lost_after_a_while_without_an_executor_and_until_the_executor_is_back() {
        let mut absence = GpuAbsence::default();
        let at = |after: Duration| Timestamp::ZERO + Duration::from_secs(100) + after;
        let second = Duration::from_secs(1);
        let down = [gpu(0, GpuHealth::Up), gpu(1, GpuHealth::Restarting)];
        assert!(!absence.report(at(Duration::ZERO), &down));
        assert!(!absence.report(at(LOST_AFTER - second), &down));
        assert!(absence.report(at(LOST_AFTER), &down));
        assert_eq!(absence.lost(), &[GpuIndex(1)].into());
        assert!(
            !absence.report(at(LOST_AFTER + second), &[gpu(0, GpuHealth::Up), gpu(1, GpuHealth::Unhealthy)])
        );
        let up = [gpu(0, GpuHealth::Up), gpu(1, GpuHealth::Up)];
        assert!(absence.report(at(LOST_AFTER + 2 * second), &up));
        assert!(absence.lost().is_empty());
        assert!(!absence.report(at(LOST_AFTER + 3 * second), &down), "the wait begins anew");
        assert!(!absence.report(at(2 * LOST_AFTER), &down));
    }
}
