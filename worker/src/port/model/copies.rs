//! The copies of a modelled executor in one direction: one at a time, in order. They begin and end at
//! moments of their own, not when the process wakes: what is copied back to back takes what its rate
//! says, however coarse the grid of the wakes.

use std::collections::VecDeque;

use millrace_types::{Bytes, BytesPerSec, Timestamp};

use super::CopyOrder;

/// A copy under way, at a rate that may change.
#[derive(Debug, Clone, Copy)]
struct Copying {
    started: Timestamp,
    /// When its rate was set, and what was left then.
    since: Timestamp,
    left: Bytes,
    rate: BytesPerSec,
    ends: Timestamp,
}

/// One that waits, and from when on it can begin as far as its order goes.
#[derive(Debug)]
struct Job {
    order: CopyOrder,
    ready: Timestamp,
}

#[derive(Debug)]
pub(super) struct Copies {
    /// The first is under way where `copying` says so.
    jobs: VecDeque<Job>,
    copying: Option<Copying>,
    /// When the last one ended.
    ended: Timestamp,
    /// The rate of the last one: who begins one says its own at once.
    rate: BytesPerSec,
}

impl Copies {
    pub(super) fn new(rate: BytesPerSec) -> Self {
        Self { jobs: VecDeque::new(), copying: None, ended: Timestamp::ZERO, rate }
    }

    pub(super) fn push(&mut self, now: Timestamp, order: CopyOrder) {
        let ready = order.not_before.max(now);
        self.jobs.push_back(Job { order, ready });
    }

    pub(super) fn clear(&mut self) {
        self.jobs.clear();
        self.copying = None;
    }

    /// When the first one begins, or ends where it is under way.
    pub(super) fn next(&self) -> Option<Timestamp> {
        let first = self.jobs.front()?;
        Some(self.copying.map_or(first.ready.max(self.ended), |copying| copying.ends))
    }

    pub(super) fn under_way(&self) -> Option<&CopyOrder> {
        self.jobs.front().filter(|_| self.copying.is_some()).map(|job| &job.order)
    }

    /// The first one, where it is not under way.
    pub(super) fn waiting(&self) -> Option<&CopyOrder> {
        self.jobs.front().filter(|_| self.copying.is_none()).map(|job| &job.order)
    }

    pub(super) fn begin(&mut self, at: Timestamp) {
        let Some(order) = self.waiting() else { return };
        let (rate, left) = (self.rate, order.size);
        let ends = at + rate.time_for(left);
        self.copying = Some(Copying { started: at, since: at, left, rate, ends });
    }

    /// Drops the first one, which cannot begin.
    pub(super) fn refuse(&mut self) {
        if self.copying.is_none() {
            self.jobs.pop_front();
        }
    }

    /// Ends the one under way; gives it and when it began.
    pub(super) fn end(&mut self) -> Option<(CopyOrder, Timestamp)> {
        let Copying { started, ends, .. } = self.copying.take()?;
        self.ended = ends;
        self.jobs.pop_front().map(|job| (job.order, started))
    }

    /// Drops a batch that has not begun. False where there is none.
    pub(super) fn revoke(&mut self, transfer: u64, batch: u64) -> bool {
        let first = usize::from(self.copying.is_some());
        let its = |job: &Job| job.order.transfer == transfer && job.order.batch == batch;
        let place = self.jobs.iter().skip(first).position(its);
        place.is_some_and(|place| self.jobs.remove(first + place).is_some())
    }

    /// Lets the one under way, and those after it, go on at another rate.
    pub(super) fn set_rate(&mut self, now: Timestamp, rate: BytesPerSec) {
        self.rate = rate;
        let Some(copying) = self.copying.as_mut().filter(|copying| copying.rate != rate) else { return };
        let moved = u128::from(copying.rate.0) * now.since(copying.since).as_nanos() / 1_000_000_000;
        copying.left = Bytes(copying.left.0.saturating_sub(u64::try_from(moved).unwrap_or(u64::MAX)));
        (copying.since, copying.rate) = (now, rate);
        copying.ends = now + rate.time_for(copying.left);
    }
}
