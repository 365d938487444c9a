//! Which worker gets a request: the one that is likely to finish it first, judged by live
//! telemetry as queue wait + swap + run. Pure: the gateway says what it knows of each candidate.

mod runs;

use std::time::Duration;

pub use self::runs::{MachineType, Runs};
use millrace_types::{Bytes, BytesPerSec};

/// How long a run is taken to last before one was seen.
pub const RUN_GUESS: Duration = Duration::from_millis(10);

/// How fast a model is taken to come onto a GPU: PCIe 3.0 ×16 in practice. Workers do not say, and
/// only how it compares with a run matters here.
pub const HOST_RATE: BytesPerSec = BytesPerSec::gb(12);

/// How fast a worker is taken to fetch what it takes from another: 10 Gbit/s.
pub const PEER_RATE: BytesPerSec = BytesPerSec(1_250_000_000);

/// What a request needs, wherever it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Its model's weights.
    pub weights: Bytes,
}

/// Where a worker has a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Held {
    /// On a GPU that runs nothing.
    OnIdleGpu,
    /// Only on GPUs that run something.
    OnBusyGpu,
    /// In host memory.
    InHost,
}

/// What is known of a worker that could take the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate<W> {
    /// Which.
    pub worker: W,
    /// GPUs that serve.
    pub gpus_up: u32,
    /// Of those, how many run nothing.
    pub gpus_idle: u32,
    /// GPUs that are about to serve.
    pub gpus_coming: u32,
    /// Requests in its queue.
    pub queued: u32,
    /// Requests sent to it that its telemetry cannot count yet.
    pub unseen: u32,
    /// How long the request runs there, by what was seen so far: see [`Runs`].
    pub run: Duration,
    /// Where it has the model.
    pub held: Held,
    /// How fast a model comes onto its GPUs.
    pub host_rate: BytesPerSec,
    /// What of the request's inputs it would have to fetch from other workers first.
    pub missing: Bytes,
}

impl<W> Candidate<W> {
    /// How long the request would take there until it has run. `None` where no GPU serves.
    #[must_use]
    pub fn finish(&self, request: &Request) -> Option<Duration> {
        if self.gpus_up == 0 {
            return None;
        }
        // Those before it, less those that idle GPUs take at once.
        let before = u64::from(self.queued) + u64::from(self.unseen);
        let idle = u64::from(self.gpus_idle.min(self.gpus_up));
        let busy = idle <= before;
        let rounds = if busy { 1 + (before - idle) / u64::from(self.gpus_up) } else { 0 };
        let wait = self.run.saturating_mul(u32::try_from(rounds).unwrap_or(u32::MAX));
        let resident = match self.held {
            Held::OnIdleGpu => true,
            // An idle GPU takes the request at once, with or without the model.
            Held::OnBusyGpu => busy,
            Held::InHost => false,
        };
        let swap = if resident { Duration::ZERO } else { self.host_rate.time_for(request.weights) };
        let fetch = PEER_RATE.time_for(self.missing);
        Some(wait.saturating_add(swap).saturating_add(fetch).saturating_add(self.run))
    }
}

/// Chooses the candidate that is likely to finish first; of equals the one with fewer requests,
/// then the first. While no GPU serves anywhere, of those that are about to. `None` where none is.
pub fn choose<W>(candidates: impl IntoIterator<Item = Candidate<W>> + Clone, request: &Request) -> Option<W> {
    let soon =
        |candidate: Candidate<W>| Candidate { gpus_up: candidate.gpus_coming, gpus_idle: 0, ..candidate };
    first(candidates.clone(), request).or_else(|| first(candidates.into_iter().map(soon), request))
}

fn first<W>(candidates: impl IntoIterator<Item = Candidate<W>>, request: &Request) -> Option<W> {
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

    const REQUEST: Request = Request { weights: Bytes(120_000_000) };

    /// A worker of two idle GPUs with the model in host memory, 10 ms from either.
    const IDLE: Candidate<&str> = Candidate {
        worker: "idle",
        gpus_up: 2,
        gpus_idle: 2,
        gpus_coming: 0,
        queued: 0,
        unseen: 0,
        run: Duration::from_millis(4),
        held: Held::InHost,
        host_rate: HOST_RATE,
        missing: Bytes::ZERO,
    };
    const HOLDER: Candidate<&str> = Candidate { worker: "holder", held: Held::OnIdleGpu, ..IDLE };

    fn check(candidates: &[Candidate<&'static str>], expected: Option<&'static str>) {
        assert_eq!(choose(candidates.iter().copied(), &REQUEST), expected);
    }

    #[test]
    fn finish_is_wait_and_swap_and_run() {
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(IDLE.finish(&REQUEST), ms(14));
        assert_eq!(HOLDER.finish(&REQUEST), ms(4));
        let full = Candidate { gpus_idle: 0, queued: 3, held: Held::OnBusyGpu, ..HOLDER };
        assert_eq!(full.finish(&REQUEST), ms(4 + 2 * 4));
        let other_gpu_is_idle = Candidate { gpus_idle: 1, held: Held::OnBusyGpu, ..HOLDER };
        assert_eq!(other_gpu_is_idle.finish(&REQUEST), ms(14));
        assert_eq!(Candidate { gpus_up: 0, ..HOLDER }.finish(&REQUEST), None);
    }

    #[test]
    fn a_holder_is_worth_a_short_wait_and_not_a_long_one() {
        let busy = |queued| Candidate { gpus_idle: 0, queued, held: Held::OnBusyGpu, ..HOLDER };
        check(&[IDLE, busy(0)], Some("holder"));
        check(&[IDLE, busy(10)], Some("idle"));
    }

    #[test]
    fn a_faster_machine_is_worth_a_swap_where_it_gains_more() {
        let slow = |ms| Candidate { run: Duration::from_millis(ms), ..HOLDER };
        check(&[IDLE, slow(13)], Some("holder"));
        check(&[IDLE, slow(15)], Some("idle"));
    }

    #[test]
    fn what_telemetry_cannot_know_yet_counts() {
        let sent = Candidate { unseen: 9, ..HOLDER };
        check(&[sent, IDLE], Some("idle"));
    }

    #[test]
    fn of_equals_the_less_loaded_then_the_first() {
        let other = Candidate { worker: "other", ..IDLE };
        check(&[IDLE, other], Some("idle"));
        check(&[Candidate { gpus_idle: 1, ..IDLE }, other], Some("other"));
    }

    #[test]
    fn workers_without_gpus_are_left_out() {
        check(&[Candidate { gpus_up: 0, ..HOLDER }, IDLE], Some("idle"));
        check(&[Candidate { gpus_up: 0, ..HOLDER }], None);
        check(&[], None);
    }

    #[test]
    fn where_none_serves_one_that_is_about_to_is_next_best() {
        let coming =
            |worker, gpus_coming| Candidate { worker, gpus_up: 0, gpus_idle: 0, gpus_coming, ..HOLDER };
        check(&[coming("none", 0), coming("soon", 1)], Some("soon"));
        check(&[coming("soon", 1), Candidate { queued: 9, ..IDLE }], Some("idle"));
        let queued = Candidate { queued: 4, ..coming("queued", 1) };
        check(&[queued, coming("soon", 1)], Some("soon"));
    }
}
