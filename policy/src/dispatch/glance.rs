//! What a first look at a busy GPU needs, in a few bytes: a model may be on hundreds of GPUs, and what
//! is known of each is far apart in memory. It says from when on a GPU may be through with what it
//! has, so that only those are looked at closely that could be the first.

use std::time::Duration;

use millrace_types::{GpuIndex, Timestamp};

use super::gpus::{Expected, Gpu, Held};
use super::models::{Models, Slot};
use super::queue::SizeRank;

/// A request on a GPU.
#[derive(Debug, Clone, Copy)]
struct Work {
    model: Slot,
    /// None: there is no request.
    rows: u32,
}

impl Work {
    const NOTHING: Self = Self { model: Slot::FIRST, rows: 0 };

    fn of(held: Option<&Held>) -> Self {
        held.map_or(Self::NOTHING, |held| Self { model: held.request.model, rows: held.rows.max(1) })
    }

    /// How long it runs.
    fn run(self, models: &Models, kind: u32) -> Option<u64> {
        match self.rows {
            0 => Some(0),
            1 => models.run_nanos(self.model, kind),
            rows => models.run_time_of(self.model, kind, rows).map(nanos),
        }
    }
}

/// One GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Glance {
    /// When what runs began, if its model had been there.
    loaded: u64,
    /// What the swap of the first behind it takes.
    next_swap: u64,
    running: Work,
    /// The first behind it.
    next: Work,
    kind: u32,
    rank: u16,
    ahead: u8,
    takes_ahead: bool,
}

impl Glance {
    pub(super) fn of(gpu: &Gpu) -> Self {
        let (running, next) = (gpu.running.as_ref(), gpu.ahead.front());
        Self {
            loaded: running.map_or(0, |held| held.since.0.saturating_add(nanos(held.swap))),
            next_swap: next.map_or(0, |held| nanos(held.swap)),
            running: Work::of(running),
            next: Work::of(next),
            kind: gpu.kind,
            rank: u16::try_from(gpu.rank.0).unwrap_or(u16::MAX),
            ahead: u8::try_from(gpu.ahead.len()).unwrap_or(u8::MAX),
            takes_ahead: gpu.takes_ahead(),
        }
    }

    /// Whether somebody whose model fits this rank may be next to so many that wait behind what runs.
    pub(super) fn takes(&self, rank: SizeRank, ahead_max: usize) -> bool {
        self.takes_ahead && usize::from(self.rank) >= rank.0 && usize::from(self.ahead) < ahead_max
    }

    pub(super) fn rank(&self) -> SizeRank {
        SizeRank(self.rank.into())
    }

    pub(super) fn nobody_ahead(&self) -> bool {
        self.ahead == 0
    }

    /// When it is through with what it has at the soonest.
    pub(super) fn soonest(&self, models: &Models, now: Timestamp) -> Expected {
        let through = || {
            let ends = self.loaded.saturating_add(self.running.run(models, self.kind)?);
            let next = self.next_swap.saturating_add(self.next.run(models, self.kind)?);
            Some(Timestamp(ends.max(now.0).saturating_add(next)))
        };
        through().map_or(Expected::Unknown, Expected::At)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The first of some GPUs, and when, by an `exact` word that is not before the bound that comes with
/// each and costs less; the first in index order of equals.
pub(super) fn first<K: Ord + Copy>(
    gpus: impl Iterator<Item = (K, GpuIndex)>,
    exact: impl Fn(GpuIndex) -> Option<K>,
) -> Option<(K, GpuIndex)> {
    let mut best: Option<(K, GpuIndex)> = None;
    for (bound, gpu) in gpus {
        if best.is_none_or(|(best, _)| bound <= best)
            && let Some(exact) = exact(gpu)
            && best.is_none_or(|best| (exact, gpu) < best)
        {
            best = Some((exact, gpu));
        }
    }
    best
}

/// The same where most of them are as good as their bounds: the one with the least is asked first, so
/// that hardly another one has to be.
pub(super) fn first_of_close(
    gpus: impl Iterator<Item = (Expected, GpuIndex)>,
    exact: impl Fn(GpuIndex) -> Option<Expected>,
) -> Option<(Expected, GpuIndex)> {
    let mut all: Vec<_> = gpus.collect();
    let (least, _) = all.iter().enumerate().min_by_key(|(_, it)| **it)?;
    all.swap(0, least);
    first(all.into_iter(), exact)
}
