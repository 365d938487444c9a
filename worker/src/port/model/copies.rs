//! The copies of a modelled executor on each of its ways: one copy at a time, in the order in which they
//! are due. Copies begin and end at exact times of their own, and not when the process wakes. So
//! back-to-back copies take exactly as long as their rate implies, however coarse the grid of the wakes
//! is.

use std::collections::{BTreeMap, VecDeque};

use millrace_transfers::paths::{HostDirection, PerDirection, RouteHops};
use millrace_types::{Bytes, BytesPerSec, Timestamp};

use super::{CopyCommand, CopyPath};

/// The copies on all ways of a GPU.
#[derive(Debug)]
pub(super) struct CopyPaths {
    own: PerDirection<CopyQueue>,
    /// The copies that other GPUs forward, for each route that was ever used.
    forwarded: BTreeMap<(HostDirection, RouteHops), CopyQueue>,
    rate: BytesPerSec,
}

impl CopyPaths {
    /// Returns idle ways, each with this rate.
    pub(super) fn new(rate: BytesPerSec) -> Self {
        let own = PerDirection { to_gpu: CopyQueue::new(rate), from_gpu: CopyQueue::new(rate) };
        Self { own, forwarded: BTreeMap::new(), rate }
    }

    /// Returns the copies on a way, or `None` if the way was never used.
    pub(super) fn of(&self, way: CopyPath) -> Option<&CopyQueue> {
        match way {
            CopyPath::Own(direction) => Some(&self.own[direction]),
            CopyPath::Forwarded(direction, hops) => self.forwarded.get(&(direction, hops)),
        }
    }

    pub(super) fn of_mut(&mut self, way: CopyPath) -> &mut CopyQueue {
        match way {
            CopyPath::Own(direction) => &mut self.own[direction],
            CopyPath::Forwarded(direction, hops) => {
                let copies = self.forwarded.entry((direction, hops));
                copies.or_insert_with(|| CopyQueue::new(self.rate))
            }
        }
    }

    /// Returns the GPU's own ways and every forwarded way that was ever used.
    pub(super) fn each(&self) -> impl Iterator<Item = (CopyPath, &CopyQueue)> {
        let own = HostDirection::BOTH.into_iter().map(move |way| (CopyPath::Own(way), &self.own[way]));
        let forwarded = self.forwarded.iter();
        own.chain(
            forwarded.map(|(&(direction, hops), copies)| (CopyPath::Forwarded(direction, hops), copies)),
        )
    }

    pub(super) fn clear(&mut self) {
        self.each_mut().for_each(CopyQueue::clear);
    }

    /// Drops a batch whose copy has not begun. Returns false if there is no such batch.
    pub(super) fn revoke(&mut self, transfer: u64, batch: u64) -> bool {
        self.each_mut().any(|copies| copies.revoke(transfer, batch))
    }

    fn each_mut(&mut self) -> impl Iterator<Item = &mut CopyQueue> {
        let PerDirection { to_gpu, from_gpu } = &mut self.own;
        [to_gpu, from_gpu].into_iter().chain(self.forwarded.values_mut())
    }
}

/// A copy under way, at a rate that may change.
#[derive(Debug)]
struct RunningCopy {
    order: CopyCommand,
    started: Timestamp,
    /// The time of the last change of the rate.
    since: Timestamp,
    /// The bytes that were left at that time.
    left: Bytes,
    rate: BytesPerSec,
    ends: Timestamp,
}

/// A waiting copy.
#[derive(Debug)]
struct WaitingCopy {
    order: CopyCommand,
    /// The earliest time at which the order lets the copy begin.
    ready: Timestamp,
}

/// The copies on one way.
#[derive(Debug)]
pub(super) struct CopyQueue {
    /// The waiting copies.
    jobs: VecDeque<WaitingCopy>,
    copying: Option<RunningCopy>,
    /// The end of the last copy.
    ended: Timestamp,
    /// The rate that was set last. A copy begins with this rate, and the caller sets the copy's own rate at
    /// the same time.
    rate: BytesPerSec,
}

impl CopyQueue {
    fn new(rate: BytesPerSec) -> Self {
        Self { jobs: VecDeque::new(), copying: None, ended: Timestamp::ZERO, rate }
    }

    pub(super) fn push(&mut self, now: Timestamp, order: CopyCommand) {
        let ready = order.not_before.max(now);
        self.jobs.push_back(WaitingCopy { order, ready });
    }

    fn clear(&mut self) {
        self.jobs.clear();
        self.copying = None;
    }

    /// Returns the position of the job that begins next, and the time of the begin.
    fn first(&self) -> Option<(usize, Timestamp)> {
        let begins = self.jobs.iter().map(|job| job.ready.max(self.ended)).enumerate();
        begins.min_by_key(|&(place, at)| (at, place))
    }

    /// Returns the end of the copy under way, or else the begin of the next copy.
    pub(super) fn next(&self) -> Option<Timestamp> {
        match &self.copying {
            Some(copying) => Some(copying.ends),
            None => self.first().map(|(_, at)| at),
        }
    }

    pub(super) fn under_way(&self) -> Option<&CopyCommand> {
        self.copying.as_ref().map(|copying| &copying.order)
    }

    /// Returns the copy that begins next, if no copy is under way.
    pub(super) fn waiting(&self) -> Option<&CopyCommand> {
        self.waits_at().map(|place| &self.jobs[place].order)
    }

    fn waits_at(&self) -> Option<usize> {
        let (place, _) = self.first().filter(|_| self.copying.is_none())?;
        Some(place)
    }

    pub(super) fn begin(&mut self, at: Timestamp) {
        let Some(WaitingCopy { order, .. }) = self.waits_at().and_then(|place| self.jobs.remove(place))
        else {
            return;
        };
        let rate = self.rate;
        let left = order.size;
        let ends = at + rate.time_for(left) + order.fill;
        self.copying = Some(RunningCopy { order, started: at, since: at, left, rate, ends });
    }

    /// Drops the next copy, which cannot begin.
    pub(super) fn refuse(&mut self) {
        if let Some(place) = self.waits_at() {
            self.jobs.remove(place);
        }
    }

    /// Ends the copy under way and returns the order and the time of the begin.
    pub(super) fn end(&mut self) -> Option<(CopyCommand, Timestamp)> {
        let RunningCopy { order, started, ends, .. } = self.copying.take()?;
        self.ended = ends;
        Some((order, started))
    }

    fn revoke(&mut self, transfer: u64, batch: u64) -> bool {
        let its = |job: &WaitingCopy| job.order.transfer == transfer && job.order.batch == batch;
        let place = self.jobs.iter().position(its);
        place.is_some_and(|place| self.jobs.remove(place).is_some())
    }

    /// Changes the rate of the copy under way and of later copies.
    pub(super) fn set_rate(&mut self, now: Timestamp, rate: BytesPerSec) {
        self.rate = rate;
        let Some(copying) = self.copying.as_mut().filter(|copying| copying.rate != rate) else { return };
        let fill = copying.order.fill;
        // In the last `fill` of a copy its bytes have left the first link, and only cross the links beyond.
        // The rate no longer matters.
        if !fill.is_zero() && now + fill >= copying.ends {
            return;
        }
        let moved = u128::from(copying.rate.0) * now.since(copying.since).as_nanos() / 1_000_000_000;
        copying.left = Bytes(copying.left.0.saturating_sub(u64::try_from(moved).unwrap_or(u64::MAX)));
        copying.since = now;
        copying.rate = rate;
        copying.ends = now + rate.time_for(copying.left) + fill;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::GpuIndex;

    use super::*;
    use crate::port::model::CopiedObject;

    #[test]
    fn a_due_copy_overtakes_copies_that_are_not_due_and_ties_go_to_the_first() {
        let rate = BytesPerSec::gb(1);
        let mut copies = CopyQueue::new(rate);
        let at = |ms: u64| Timestamp(ms * 1_000_000);
        // The earliest begin of each batch, in ms. The copy of a batch lasts 1 ms.
        for (batch, ms) in (0..).zip([10, 0, 12, 1, 1]) {
            let order = CopyCommand {
                transfer: 1,
                batch,
                of: CopiedObject::Object(1),
                from: None,
                via: None,
                fill: Duration::ZERO,
                size: Bytes(1_000_000),
                not_before: at(ms),
                not_after: at(1_000),
            };
            copies.push(at(0), order);
        }
        let mut begun = Vec::new();
        while let Some(begins) = copies.next() {
            begun.push((copies.waiting().unwrap().batch, begins));
            copies.begin(begins);
            assert_eq!(copies.waiting(), None);
            assert_eq!(copies.next(), Some(begins + Duration::from_millis(1)));
            copies.end().unwrap();
        }
        assert_eq!(begun, [(1, at(0)), (3, at(1)), (4, at(2)), (0, at(10)), (2, at(12))]);
    }

    #[test]
    fn a_slower_rate_does_not_delay_bytes_that_have_left_the_first_link() {
        let us = |us: u64| Timestamp(us * 1_000);
        let ends = |slowed: Timestamp| {
            let mut copies = CopyQueue::new(BytesPerSec::gb(1));
            let order = CopyCommand {
                transfer: 1,
                batch: 1,
                of: CopiedObject::Object(1),
                from: None,
                via: Some(RouteHops::of([GpuIndex(1), GpuIndex(0)])),
                fill: Duration::from_micros(200),
                size: Bytes(1_000_000),
                not_before: us(0),
                not_after: us(9),
            };
            copies.push(us(0), order);
            copies.begin(us(0));
            copies.set_rate(slowed, BytesPerSec(500_000_000));
            copies.next()
        };
        assert_eq!(ends(us(0)), Some(us(2_200)));
        assert_eq!(ends(us(600)), Some(us(1_600)));
        assert_eq!(ends(us(1_000)), Some(us(1_200)));
        assert_eq!(ends(us(1_100)), Some(us(1_200)));
    }
}
