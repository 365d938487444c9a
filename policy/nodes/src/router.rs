//! Choice of the worker for a request: the worker that is likely to finish first, estimated from
//! live telemetry as queue wait + swap + run. The choice is a pure function of the candidates that
//! the caller describes.

mod runs;

use std::time::Duration;

pub use self::runs::{MachineRunTimes, MachineType};
use millrace_types::{Bytes, BytesPerSec};

/// Assumed run time before the first measurement.
pub const RUN_GUESS: Duration = Duration::from_millis(10);

/// Assumed rate of copies from host memory to a GPU before the first measurement: PCIe 3.0 ×16 in
/// practice.
const HOST_RATE: BytesPerSec = BytesPerSec::gb(12);

/// Assumed rate at which a worker fetches inputs from another worker: 10 Gbit/s.
pub const PEER_RATE: BytesPerSec = BytesPerSec(1_250_000_000);

/// Charge for a load into free memory, in percent of the load: a load also takes GPU time from other
/// requests.
const LOAD_PERCENT: u32 = 105;
/// Charge for a load that evicts another model, in percent: that model will be loaded again.
const EVICTING_PERCENT: u32 = 180;
/// Charge for a wait until a GPU that holds the model is free, in percent: a wait takes no GPU time
/// from other requests, and a load elsewhere does. Fitted to LALB's workload (ROUTED) on seeds 11 to
/// 13 and 21 to 25; the figures are judged on seeds 1 to 10.
const WAIT_PERCENT: u32 = 50;

/// Measured loads of models, in total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MeasuredLoads {
    /// Weights of the models.
    pub weights: Bytes,
    /// Times of the loads.
    pub loads: Duration,
}

impl MeasuredLoads {
    /// Adds the load of a model.
    pub fn add(&mut self, weights: Bytes, load: Duration) {
        self.weights = Bytes(self.weights.get().saturating_add(weights.get()));
        self.loads = self.loads.saturating_add(load);
    }
}

/// Needs of a request that are the same on every worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteRequest {
    /// Size of the model's weights.
    pub weights: Bytes,
    /// GPU memory that the model occupies.
    pub memory: Bytes,
}

impl RouteRequest {
    /// Returns the assumed time of a load of this model, which no worker has measured: as long as
    /// the measured loads of other models, in proportion to their weights.
    #[must_use]
    pub fn assumed_load(&self, measured: MeasuredLoads) -> Duration {
        let nanos = measured.loads.as_nanos().saturating_mul(u128::from(self.weights.get()));
        let nanos = nanos.checked_div(u128::from(measured.weights.get()));
        nanos.map_or_else(
            || HOST_RATE.time_for(self.weights),
            |nanos| Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)),
        )
    }
}

/// Location of a model on a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelResidency {
    /// On a GPU that runs nothing.
    OnIdleGpu,
    /// Only on GPUs that run something.
    OnBusyGpu {
        /// Time until the first of these GPUs has finished its requests.
        free_in: Duration,
    },
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
    /// GPU time of the requests that were assigned to the worker's GPUs, of all GPUs together.
    pub assigned: Duration,
    /// GPU time of the requests in the worker's queue.
    pub waiting: Duration,
    /// Estimated run time of the request on this worker: see [`MachineRunTimes`].
    pub run: Duration,
    /// Location of the model on this worker.
    pub held: ModelResidency,
    /// Time that bringing the model to a GPU of the worker adds to the run.
    pub load: Duration,
    /// Whether a GPU has free memory for the model.
    pub has_room: bool,
    /// Bytes of the request's inputs that the worker would have to fetch from other workers first.
    pub missing: Bytes,
}

impl<W> WorkerCandidate<W> {
    /// Returns the estimated time until the request has run on this worker. `None` if no GPU
    /// serves.
    #[must_use]
    pub fn finish(&self) -> Option<Duration> {
        if self.gpus_up == 0 {
            return None;
        }
        // Earlier requests, without the ones that idle GPUs begin at once.
        let before = u64::from(self.queued) + u64::from(self.unseen);
        let idle = u64::from(self.gpus_idle.min(self.gpus_up));
        // The worker does not know how long models run that never ran there.
        let unknown = if self.waiting.is_zero() { self.queued } else { 0 };
        let unknown = self.run.saturating_mul(self.unseen.saturating_add(unknown));
        let queue = self.waiting.saturating_add(unknown) / self.gpus_up;
        let turn =
            if before < idle { Duration::ZERO } else { queue.saturating_add(self.assigned / self.gpus_up) };
        let percent = if self.has_room { LOAD_PERCENT } else { EVICTING_PERCENT };
        let loaded = turn.saturating_add(self.load.saturating_mul(percent) / 100);
        let begins = match self.held {
            ModelResidency::OnIdleGpu => turn,
            ModelResidency::OnBusyGpu { free_in } => {
                (free_in.saturating_mul(WAIT_PERCENT) / 100).saturating_add(queue).min(loaded)
            }
            ModelResidency::InHost => loaded,
        };
        let fetch = PEER_RATE.time_for(self.missing);
        Some(begins.saturating_add(fetch).saturating_add(self.run))
    }
}

/// Chooses the candidate that is likely to finish first; among equals the candidate with fewer
/// requests, then the first. If no candidate has a serving GPU, chooses among the candidates with
/// GPUs about to serve. `None` if there are none.
pub fn choose<W>(candidates: impl IntoIterator<Item = WorkerCandidate<W>> + Clone) -> Option<W> {
    let soon = |candidate: WorkerCandidate<W>| WorkerCandidate {
        gpus_up: candidate.gpus_coming,
        gpus_idle: 0,
        ..candidate
    };
    first(candidates.clone()).or_else(|| first(candidates.into_iter().map(soon)))
}

fn first<W>(candidates: impl IntoIterator<Item = WorkerCandidate<W>>) -> Option<W> {
    let mut best: Option<((Duration, u64), W)> = None;
    for candidate in candidates {
        let Some(finish) = candidate.finish() else { continue };
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

    /// A worker with two idle GPUs and the model in host memory, 10 ms from either GPU.
    const IDLE: WorkerCandidate<&str> = WorkerCandidate {
        worker: "idle",
        gpus_up: 2,
        gpus_idle: 2,
        gpus_coming: 0,
        queued: 0,
        unseen: 0,
        assigned: Duration::ZERO,
        waiting: Duration::ZERO,
        run: Duration::from_millis(4),
        held: ModelResidency::InHost,
        load: Duration::from_millis(10),
        has_room: true,
        missing: Bytes::ZERO,
    };
    const HOLDER: WorkerCandidate<&str> =
        WorkerCandidate { worker: "holder", held: ModelResidency::OnIdleGpu, ..IDLE };

    fn check(candidates: &[WorkerCandidate<&'static str>], expected: Option<&'static str>) {
        assert_eq!(choose(candidates.iter().copied()), expected);
    }

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// Returns the holder without an idle GPU, and with this work.
    fn busy(free_in_us: u64, assigned_us: u64, waiting_us: u64) -> WorkerCandidate<&'static str> {
        WorkerCandidate {
            gpus_idle: 0,
            queued: u32::from(waiting_us > 0),
            held: ModelResidency::OnBusyGpu { free_in: us(free_in_us) },
            assigned: us(assigned_us),
            waiting: us(waiting_us),
            ..HOLDER
        }
    }

    #[test]
    fn finish_is_the_sum_of_wait_swap_and_run() {
        assert_eq!(HOLDER.finish(), Some(us(4_000)));
        assert_eq!(IDLE.finish(), Some(us(10_500 + 4_000)));
        let full = WorkerCandidate { has_room: false, ..IDLE };
        assert_eq!(full.finish(), Some(us(18_000 + 4_000)), "a load that evicts costs more");
        assert_eq!(busy(3_000, 7_000, 0).finish(), Some(us(1_500 + 4_000)));
        assert_eq!(busy(3_000, 7_000, 6_000).finish(), Some(us(1_500 + 6_000 / 2 + 4_000)));
        let unknown = WorkerCandidate { queued: 3, ..busy(0, 0, 0) };
        assert_eq!(unknown.finish(), Some(us(3 * 4_000 / 2 + 4_000)), "runs like this request's");
        let slow = WorkerCandidate { held: ModelResidency::InHost, ..busy(0, 8_000, 0) };
        assert_eq!(slow.finish(), Some(us(8_000 / 2 + 10_500 + 4_000)));
        assert_eq!(WorkerCandidate { gpus_up: 0, ..HOLDER }.finish(), None);
    }

    #[test]
    fn a_holder_wins_over_a_short_wait_but_not_over_a_long_one() {
        check(&[IDLE, busy(20_000, 20_000, 0)], Some("holder"));
        check(&[IDLE, busy(22_000, 22_000, 0)], Some("idle"));
    }

    #[test]
    fn an_unmeasured_load_takes_as_long_as_other_loads_for_the_weights() {
        let request = RouteRequest { weights: Bytes(120_000_000), memory: Bytes::gib(1) };
        assert_eq!(request.assumed_load(MeasuredLoads::default()), us(10_000), "at 12 GB/s");
        let mut measured = MeasuredLoads::default();
        measured.add(Bytes(40_000_000), us(500_000));
        measured.add(Bytes(20_000_000), us(400_000));
        assert_eq!(request.assumed_load(measured), us(1_800_000));
    }

    /// Workers report any number, and a panic would end the request.
    #[test]
    fn the_largest_reported_times_are_compared_too() {
        let most = Duration::MAX;
        let held = ModelResidency::OnBusyGpu { free_in: most };
        let worst = WorkerCandidate {
            gpus_idle: 0,
            queued: u32::MAX,
            unseen: u32::MAX,
            assigned: most,
            waiting: most,
            run: most,
            load: most,
            held,
            ..HOLDER
        };
        check(&[worst, IDLE], Some("idle"));
        let request = RouteRequest { weights: Bytes(u64::MAX), memory: Bytes::ZERO };
        let measured = MeasuredLoads { weights: Bytes(1), loads: most };
        assert_eq!(request.assumed_load(measured), Duration::from_nanos(u64::MAX));
    }

    /// A cold model goes to a worker with free memory.
    #[test]
    fn a_load_goes_to_a_worker_with_room() {
        let full = WorkerCandidate { worker: "full", has_room: false, ..IDLE };
        check(&[full, IDLE], Some("idle"));
        let waits = WorkerCandidate { gpus_idle: 0, assigned: us(20_000), ..IDLE };
        check(&[full, waits], Some("full"));
    }

    #[test]
    fn a_faster_machine_wins_if_it_saves_more_than_a_swap() {
        let slow = |ms| WorkerCandidate { run: Duration::from_millis(ms), ..HOLDER };
        check(&[IDLE, slow(14)], Some("holder"));
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
