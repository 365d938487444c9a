//! What a first look at a busy GPU needs, in a few bytes: a model may be on hundreds of GPUs, and what
//! is known of each is far apart in memory. It says from when on a GPU may be through with what it
//! has, so that only those are looked at closely that could be the first.

use millrace_types::{GpuIndex, Timestamp};

use super::gpus::{Expected, Gpu, Held};
use super::models::{Models, Slot};
use super::queue::SizeRank;

/// A request on a GPU.
#[derive(Debug, Clone, Copy)]
struct Work {
    model: Slot,
    rows: u32,
    swap_nanos: u64,
}

impl Work {
    fn of(held: &Held) -> Self {
        let swap_nanos = u64::try_from(held.swap.as_nanos()).unwrap_or(u64::MAX);
        Self { model: held.request.model, rows: held.rows, swap_nanos }
    }

    /// What it takes, on top of another time.
    fn after(self, nanos: u64, models: &Models, kind: u32) -> Option<u64> {
        let run = match self.rows {
            1 => models.run_nanos(self.model, kind)?,
            rows => u64::try_from(models.run_time_of(self.model, kind, rows)?.as_nanos()).unwrap_or(u64::MAX),
        };
        Some(nanos.saturating_add(self.swap_nanos).saturating_add(run))
    }
}

/// One GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Glance {
    since: Timestamp,
    running: Option<Work>,
    /// The first behind it.
    next: Option<Work>,
    kind: u32,
    rank: SizeRank,
    ahead: u8,
    takes_ahead: bool,
}

impl Glance {
    pub(super) fn of(gpu: &Gpu) -> Self {
        Self {
            since: gpu.running.as_ref().map_or(Timestamp::ZERO, |held| held.since),
            running: gpu.running.as_ref().map(Work::of),
            next: gpu.ahead.front().map(Work::of),
            kind: gpu.kind,
            rank: gpu.rank,
            ahead: u8::try_from(gpu.ahead.len()).unwrap_or(u8::MAX),
            takes_ahead: gpu.takes_ahead(),
        }
    }

    /// Whether somebody whose model fits this rank may be next to so many that wait behind what runs.
    pub(super) fn takes(&self, rank: SizeRank, ahead_max: usize) -> bool {
        self.takes_ahead && self.rank >= rank && usize::from(self.ahead) < ahead_max
    }

    pub(super) fn nobody_ahead(&self) -> bool {
        self.ahead == 0
    }

    /// When it is through with what it has at the soonest.
    pub(super) fn soonest(&self, models: &Models, now: Timestamp) -> Expected {
        let and = |nanos: u64, work: Option<Work>| match work {
            Some(work) => work.after(nanos, models, self.kind),
            None => Some(nanos),
        };
        let through = and(self.since.0, self.running).and_then(|ends| and(ends.max(now.0), self.next));
        through.map_or(Expected::Unknown, |through| Expected::At(Timestamp(through)))
    }
}

/// The first of some GPUs, and when, by an `exact` word that is not before a `bound` that costs less;
/// the first in index order of equals.
pub(super) fn first(
    gpus: impl Iterator<Item = GpuIndex>,
    bound: impl Fn(GpuIndex) -> Expected,
    exact: impl Fn(GpuIndex) -> Option<Expected>,
) -> Option<(Expected, GpuIndex)> {
    let mut best: Option<(Expected, GpuIndex)> = None;
    for gpu in gpus {
        if best.is_none_or(|(best, _)| bound(gpu) <= best)
            && let Some(exact) = exact(gpu)
            && best.is_none_or(|best| (exact, gpu) < best)
        {
            best = Some((exact, gpu));
        }
    }
    best
}
