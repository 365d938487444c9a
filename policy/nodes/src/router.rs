//! Choice of the worker for a request: the worker that is likely to finish first, estimated from
//! live telemetry as queue wait + swap + run. The choice is a pure function of the candidates that
//! the caller describes.

mod runs;

use std::time::Duration;

pub use self::runs::{MachineRunTimes, MachineType};
use millrace_types::{Bytes, BytesPerSec};

/// Assumed run time before the first measurement.
pub const RUN_GUESS: Duration = Duration::from_millis(10);

/// Assumed rate of copies from host memory to a GPU: PCIe 3.0 ×16 in practice. Workers do not
/// report a rate, and only the comparison with run times matters here.
pub const HOST_RATE: BytesPerSec = BytesPerSec::gb(12);

/// Assumed rate at which a worker fetches inputs from another worker: 10 Gbit/s.
pub const PEER_RATE: BytesPerSec = BytesPerSec(1_250_000_000);

/// Needs of a request that are the same on every worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteRequest {
    /// Size of the model's weights.
    pub weights: Bytes,
}

/// Location of a model on a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelResidency {
    /// On a GPU that runs nothing.
    OnIdleGpu,
    /// Only on GPUs that run something.
    OnBusyGpu,
    /// In host memory only.
    InHost,
}

/// Telemetry of a worker that could accept the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerCandidate<W> {
    pub worker: W,
    /// GPUs that serve.
    pub gpus_up: u32,
    /// Serving GPUs that run nothing.
    pub gpus_idle: u32,
    /// GPUs that are about to serve.
    pub gpus_coming: u32,
    /// Requests in the worker's queue.
    pub queued: u32,
    /// Requests sent to the worker that its telemetry cannot include yet.
    pub unseen: u32,
    /// Estimated run time of the request on this worker: see [`MachineRunTimes`].
    pub run: Duration,
    /// Location of the model on this worker.
    pub held: ModelResidency,
    /// Rate at which a model is copied to the worker's GPUs.
    pub host_rate: BytesPerSec,
    /// Bytes of the request's inputs that the worker would have to fetch from other workers first.
    pub missing: Bytes,
}

impl<W> WorkerCandidate<W> {
    /// Returns the estimated time until the request has run on this worker. `None` if no GPU
    /// serves.
    #[must_use]
    pub fn finish(&self, request: &RouteRequest) -> Option<Duration> {
        if self.gpus_up == 0 {
            return None;
        }
        // Earlier requests, without the ones that idle GPUs begin at once.
        let before = u64::from(self.queued) + u64::from(self.unseen);
        let idle = u64::from(self.gpus_idle.min(self.gpus_up));
        let busy = idle <= before;
        let rounds = if busy { 1 + (before - idle) / u64::from(self.gpus_up) } else { 0 };
        let wait = self.run.saturating_mul(u32::try_from(rounds).unwrap_or(u32::MAX));
        let resident = match self.held {
            ModelResidency::OnIdleGpu => true,
            // An idle GPU begins the request at once, with or without the model.
            ModelResidency::OnBusyGpu => busy,
            ModelResidency::InHost => false,
        };
        let swap = if resident { Duration::ZERO } else { self.host_rate.time_for(request.weights) };
        let fetch = PEER_RATE.time_for(self.missing);
        Some(wait.saturating_add(swap).saturating_add(fetch).saturating_add(self.run))
    }
}

/// Chooses the candidate that is likely to finish first; among equals the candidate with fewer
/// requests, then the first. If no candidate has a serving GPU, chooses among the candidates with
/// GPUs about to serve. `None` if there are none.
pub fn choose<W>(
    candidates: impl IntoIterator<Item = WorkerCandidate<W>> + Clone,
    request: &RouteRequest,
) -> Option<W> {
    let soon = |candidate: WorkerCandidate<W>| WorkerCandidate {
        gpus_up: candidate.gpus_coming,
        gpus_idle: 0,
        ..candidate
    };
    first(candidates.clone(), request).or_else(|| first(candidates.into_iter().map(soon), request))
}

fn first<W>(candidates: impl IntoIterator<Item = WorkerCandidate<W>>, request: &RouteRequest) -> Option<W> {
    let mut best: Option<((Duration, u64), W)> = None;
    for candidate in candidates {
        let Some(finish) = candidate.finish(request) else { continue };
        let busy = candidate.gpus_up.saturating_sub(candidate.gpus_idle);
        let rank = (finish, u64::from(candidate.queued) + u64::from(candidate.unseen) + u64::from(busy));
        if best.as_ref().is_none_or(|(best, _)| rank < *best) {
            best = Some((rank, candidate.worker));
        }
    }
    best.map(|(_, worker)| worker)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: RouteRequest = RouteRequest { weights: Bytes(120_000_000) };

    /// A worker with two idle GPUs and the model in host memory, 10 ms from either GPU.
    const IDLE: WorkerCandidate<&str> = WorkerCandidate {
        worker: "idle",
        gpus_up: 2,
        gpus_idle: 2,
        gpus_coming: 0,
        queued: 0,
        unseen: 0,
        run: Duration::from_millis(4),
        held: ModelResidency::InHost,
        host_rate: HOST_RATE,
        missing: Bytes::ZERO,
    };
    const HOLDER: WorkerCandidate<&str> =
        WorkerCandidate { worker: "holder", held: ModelResidency::OnIdleGpu, ..IDLE };

    fn check(candidates: &[WorkerCandidate<&'static str>], expected: Option<&'static str>) {
        assert_eq!(choose(candidates.iter().copied(), &REQUEST), expected);
    }

    #[test]
    fn finish_is_the_sum_of_wait_swap_and_run() {
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(IDLE.finish(&REQUEST), ms(14));
        assert_eq!(HOLDER.finish(&REQUEST), ms(4));
        let full = WorkerCandidate { gpus_idle: 0, queued: 3, held: ModelResidency::OnBusyGpu, ..HOLDER };
        assert_eq!(full.finish(&REQUEST), ms(4 + 2 * 4));
        let other_gpu_is_idle = WorkerCandidate { gpus_idle: 1, held: ModelResidency::OnBusyGpu, ..HOLDER };
        assert_eq!(other_gpu_is_idle.finish(&REQUEST), ms(14));
        assert_eq!(WorkerCandidate { gpus_up: 0, ..HOLDER }.finish(&REQUEST), None);
    }

    #[test]
    fn a_holder_wins_over_a_short_wait_but_not_over_a_long_one() {
        let busy =
            |queued| WorkerCandidate { gpus_idle: 0, queued, held: ModelResidency::OnBusyGpu, ..HOLDER };
        check(&[IDLE, busy(0)], Some("holder"));
        check(&[IDLE, busy(10)], Some("idle"));
    }

    #[test]
    fn a_faster_machine_wins_if_it_saves_more_than_a_swap() {
        let slow = |ms| WorkerCandidate { run: Duration::from_millis(ms), ..HOLDER };
        check(&[IDLE, slow(13)], Some("holder"));
        check(&[IDLE, slow(15)], Some("idle"));
    }

    #[test]
    fn requests_not_yet_in_telemetry_count() {
        let sent = WorkerCandidate { unseen: 9, ..HOLDER };
        check(&[sent, IDLE], Some("idle"));
    }

    #[test]
    fn ties_go_to_the_less_loaded_worker_then_to_the_first() {
        let other = WorkerCandidate { worker: "other", ..IDLE };
        check(&[IDLE, other], Some("idle"));
        check(&[WorkerCandidate { gpus_idle: 1, ..IDLE }, other], Some("other"));
    }

    #[test]
    fn workers_without_gpus_are_left_out() {
        check(&[WorkerCandidate { gpus_up: 0, ..HOLDER }, IDLE], Some("idle"));
        check(&[WorkerCandidate { gpus_up: 0, ..HOLDER }], None);
        check(&[], None);
    }

    #[test]
    fn a_worker_about_to_serve_is_chosen_only_if_none_serves() {
        let coming =
            |worker, gpus_coming| WorkerCandidate { worker, gpus_up: 0, gpus_idle: 0, gpus_coming, ..HOLDER };
        check(&[coming("none", 0), coming("soon", 1)], Some("soon"));
        check(&[coming("soon", 1), WorkerCandidate { queued: 9, ..IDLE }], Some("idle"));
        let queued = WorkerCandidate { queued: 4, ..coming("queued", 1) };
        check(&[queued, coming("soon", 1)], Some("soon"));
    }
}
