//! Compact load summary of each busy seat. A model may be on hundreds of GPUs, and their full
//! records are far apart in memory. A summary bounds the time at which the seat can be free, so that
//! a search examines in full only seats that could be the first.

use std::time::Duration;

use millrace_types::Timestamp;

use super::gpus::GpuRecord;
use super::models::{ModelSlot, ModelTable};
use super::seats::{Assignment, ExpectedFinish, Seat};
use super::size_rank::SizeRank;
use millrace_core::ids::SeatIndex;

/// Model and rows of a request on a seat.
#[derive(Debug, Clone, Copy)]
struct Work {
    model: ModelSlot,
    /// Number of rows; 0 if there is no request.
    rows: u32,
}

impl Work {
    const NOTHING: Self = Self { model: ModelSlot::FIRST, rows: 0 };

    fn of(held: Option<&Assignment>) -> Self {
        held.map_or(Self::NOTHING, |held| Self { model: held.request.model, rows: held.rows.max(1) })
    }

    /// Returns the run time in nanoseconds, if known.
    fn run(self, models: &ModelTable, kind: u32) -> Option<u64> {
        match self.rows {
            0 => Some(0),
            1 => models.run_nanos(self.model, kind),
            rows => models.run_time_of(self.model, kind, rows).map(nanos),
        }
    }
}

/// Load summary of a seat.
#[derive(Debug, Clone, Copy)]
pub(super) struct SeatLoadSummary {
    /// Start of the running request's turn plus its expected swap, in nanoseconds.
    loaded: u64,
    /// Expected swap of the first next request, in nanoseconds.
    next_swap: u64,
    running: Work,
    /// First next request.
    next: Work,
    kind: u32,
    rank: u16,
    nobody_ahead: bool,
    has_room: bool,
    accepts_queued: bool,
}

impl SeatLoadSummary {
    /// Returns the summary of a seat; `index` is the number of the seat.
    pub(super) fn of(gpu: &GpuRecord, index: SeatIndex, seat: &Seat) -> Self {
        let running = seat.running.as_ref();
        let next = seat.ahead.front();
        Self {
            loaded: running.map_or(0, |held| held.since.0.saturating_add(nanos(held.swap))),
            next_swap: next.map_or(0, |held| nanos(held.swap)),
            running: Work::of(running),
            next: Work::of(next),
            kind: gpu.kind,
            rank: u16::try_from(gpu.rank.0).unwrap_or(u16::MAX),
            nobody_ahead: seat.ahead.is_empty(),
            has_room: seat.ahead.len() < seat.ahead_max,
            accepts_queued: gpu.may_take(index) && seat.accepts_queued(),
        }
    }

    /// Returns whether the seat is busy and accepts a next request.
    pub(super) fn accepts_queued(&self) -> bool {
        self.accepts_queued
    }

    /// Returns whether the seat is busy, fits this rank, and has room for a next request.
    pub(super) fn takes(&self, rank: SizeRank) -> bool {
        self.accepts_queued && usize::from(self.rank) >= rank.0 && self.has_room
    }

    pub(super) fn rank(&self) -> SizeRank {
        SizeRank(self.rank.into())
    }

    pub(super) fn nobody_ahead(&self) -> bool {
        self.nobody_ahead
    }

    /// Returns the earliest time at which the seat can finish its running and its first next
    /// request.
    pub(super) fn soonest(&self, models: &ModelTable, now: Timestamp) -> ExpectedFinish {
        let through = || {
            let ends = self.loaded.saturating_add(self.running.run(models, self.kind)?);
            let next = self.next_swap.saturating_add(self.next.run(models, self.kind)?);
            Some(Timestamp(ends.max(now.0).saturating_add(next)))
        };
        through().map_or(ExpectedFinish::Unknown, ExpectedFinish::At)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the seat with the least `exact` value, with that value; the first by index among equals.
/// Each seat comes with a cheap lower bound of its exact value, which saves most calls of `exact`.
pub(super) fn first<K: Ord + Copy>(
    seats: impl Iterator<Item = (K, SeatIndex)>,
    exact: impl Fn(SeatIndex) -> Option<K>,
) -> Option<(K, SeatIndex)> {
    let mut best: Option<(K, SeatIndex)> = None;
    for (bound, seat) in seats {
        if best.is_none_or(|(best, _)| bound <= best)
            && let Some(exact) = exact(seat)
            && best.is_none_or(|best| (exact, seat) < best)
        {
            best = Some((exact, seat));
        }
    }
    best
}

/// Returns the same as [`first`] for seats with tight bounds: the seat with the least bound is
/// evaluated first, so that hardly another evaluation is needed.
pub(super) fn first_of_close(
    seats: impl Iterator<Item = (ExpectedFinish, SeatIndex)>,
    exact: impl Fn(SeatIndex) -> Option<ExpectedFinish>,
) -> Option<(ExpectedFinish, SeatIndex)> {
    let mut all: Vec<_> = seats.collect();
    let (least, _) = all.iter().enumerate().min_by_key(|(_, it)| **it)?;
    all.swap(0, least);
    first(all.into_iter(), exact)
}
