//! The copies of a modelled executor on one way: one at a time, in the order in which they are due.
//! They begin and end at moments of their own, not when the process wakes: what is copied back to back takes
//! what its rate says, however coarse the grid of the wakes.

use std::collections::{BTreeMap, VecDeque};

use millrace_policy::paths::{Direction, Each, Hops};
use millrace_types::{Bytes, BytesPerSec, Timestamp};

use super::{CopyOrder, Way};

/// Those of all ways.
#[derive(Debug)]
pub(super) struct Ways {
    own: Each<Copies>,
    /// By the GPUs that forward: those that ever did.
    forwarded: BTreeMap<(Direction, Hops), Copies>,
    rate: BytesPerSec,
}

impl Ways {
    /// Idle ones, each of this rate.
    pub(super) fn new(rate: BytesPerSec) -> Self {
        let own = Each { to_gpu: Copies::new(rate), from_gpu: Copies::new(rate) };
        Self { own, forwarded: BTreeMap::new(), rate }
    }

    /// Those of a way; `None` where nothing was ever ordered on it.
    pub(super) fn of(&self, way: Way) -> Option<&Copies> {
        match way {
            Way::Own(direction) => Some(&self.own[direction]),
            Way::Forwarded(direction, hops) => self.forwarded.get(&(direction, hops)),
        }
    }

    pub(super) fn of_mut(&mut self, way: Way) -> &mut Copies {
        match way {
            Way::Own(direction) => &mut self.own[direction],
            Way::Forwarded(direction, hops) => {
                let copies = self.forwarded.entry((direction, hops));
                copies.or_insert_with(|| Copies::new(self.rate))
            }
        }
    }

    /// Each way on which something was ordered, and those of the GPU's own.
    pub(super) fn each(&self) -> impl Iterator<Item = (Way, &Copies)> {
        let own = Direction::BOTH.into_iter().map(move |way| (Way::Own(way), &self.own[way]));
        let forwarded = self.forwarded.iter();
        own.chain(forwarded.map(|(&(direction, hops), copies)| (Way::Forwarded(direction, hops), copies)))
    }

    pub(super) fn clear(&mut self) {
        self.each_mut().for_each(Copies::clear);
    }

    /// Drops a batch that has not begun. False where there is none.
    pub(super) fn revoke(&mut self, transfer: u64, batch: u64) -> bool {
        self.each_mut().any(|copies| copies.revoke(transfer, batch))
    }

    fn each_mut(&mut self) -> impl Iterator<Item = &mut Copies> {
        let Each { to_gpu, from_gpu } = &mut self.own;
        [to_gpu, from_gpu].into_iter().chain(self.forwarded.values_mut())
    }
}

/// A copy under way, at a rate that may change.
#[derive(Debug)]
struct Copying {
    order: CopyOrder,
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
    /// Those that are not under way.
    jobs: VecDeque<Job>,
    copying: Option<Copying>,
    /// When the last one ended.
    ended: Timestamp,
    /// The rate of the last one: who begins one says its own at once.
    rate: BytesPerSec,
}

impl Copies {
    fn new(rate: BytesPerSec) -> Self {
        Self { jobs: VecDeque::new(), copying: None, ended: Timestamp::ZERO, rate }
    }

    pub(super) fn push(&mut self, now: Timestamp, order: CopyOrder) {
        let ready = order.not_before.max(now);
        self.jobs.push_back(Job { order, ready });
    }

    fn clear(&mut self) {
        self.jobs.clear();
        self.copying = None;
    }

    /// The one that begins next, by its place, and when.
    fn first(&self) -> Option<(usize, Timestamp)> {
        let begins = self.jobs.iter().map(|job| job.ready.max(self.ended)).enumerate();
        begins.min_by_key(|&(place, at)| (at, place))
    }

    /// When the next one begins, or the one under way ends.
    pub(super) fn next(&self) -> Option<Timestamp> {
        match &self.copying {
            Some(copying) => Some(copying.ends),
            None => self.first().map(|(_, at)| at),
        }
    }

    pub(super) fn under_way(&self) -> Option<&CopyOrder> {
        self.copying.as_ref().map(|copying| &copying.order)
    }

    /// The next one, where none is under way.
    pub(super) fn waiting(&self) -> Option<&CopyOrder> {
        self.waits_at().map(|place| &self.jobs[place].order)
    }

    fn waits_at(&self) -> Option<usize> {
        let (place, _) = self.first().filter(|_| self.copying.is_none())?;
        Some(place)
    }

    pub(super) fn begin(&mut self, at: Timestamp) {
        let Some(Job { order, .. }) = self.waits_at().and_then(|place| self.jobs.remove(place)) else {
            return;
        };
        let (rate, left) = (self.rate, order.size);
        let ends = at + rate.time_for(left) + order.fill;
        self.copying = Some(Copying { order, started: at, since: at, left, rate, ends });
    }

    /// Drops the next one, which cannot begin.
    pub(super) fn refuse(&mut self) {
        if let Some(place) = self.waits_at() {
            self.jobs.remove(place);
        }
    }

    /// Ends the one under way; gives it and when it began.
    pub(super) fn end(&mut self) -> Option<(CopyOrder, Timestamp)> {
        let Copying { order, started, ends, .. } = self.copying.take()?;
        self.ended = ends;
        Some((order, started))
    }

    fn revoke(&mut self, transfer: u64, batch: u64) -> bool {
        let its = |job: &Job| job.order.transfer == transfer && job.order.batch == batch;
        let place = self.jobs.iter().position(its);
        place.is_some_and(|place| self.jobs.remove(place).is_some())
    }

    /// Lets the one under way, and those after it, go on at another rate.
    pub(super) fn set_rate(&mut self, now: Timestamp, rate: BytesPerSec) {
        self.rate = rate;
        let Some(copying) = self.copying.as_mut().filter(|copying| copying.rate != rate) else { return };
        let fill = copying.order.fill;
        // The last of it is on its way over the links beyond: no rate of the first matters to it.
        if !fill.is_zero() && now + fill >= copying.ends {
            return;
        }
        let moved = u128::from(copying.rate.0) * now.since(copying.since).as_nanos() / 1_000_000_000;
        copying.left = Bytes(copying.left.0.saturating_sub(u64::try_from(moved).unwrap_or(u64::MAX)));
        (copying.since, copying.rate) = (now, rate);
        copying.ends = now + rate.time_for(copying.left) + fill;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::GpuIndex;

    use super::*;
    use crate::port::model::Of;

    #[test]
    fn what_is_due_passes_what_is_not_and_the_first_goes_first() {
        let rate = BytesPerSec::gb(1);
        let mut copies = Copies::new(rate);
        let at = |ms: u64| Timestamp(ms * 1_000_000);
        // When each may begin. It takes a millisecond.
        for (batch, ms) in (0..).zip([10, 0, 12, 1, 1]) {
            let (transfer, of, size, fill) = (1, Of::Object(1), Bytes(1_000_000), Duration::ZERO);
            let (from, via, not_before, not_after) = (None, None, at(ms), at(1_000));
            copies
                .push(at(0), CopyOrder { transfer, batch, of, from, via, fill, size, not_before, not_after });
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
    fn what_is_left_on_the_links_beyond_takes_no_longer_at_another_rate() {
        let us = |us: u64| Timestamp(us * 1_000);
        let ends = |slowed: Timestamp| {
            let mut copies = Copies::new(BytesPerSec::gb(1));
            let (of, size, fill) = (Of::Object(1), Bytes(1_000_000), Duration::from_micros(200));
            let via = Some(Hops::of([GpuIndex(1), GpuIndex(0)]));
            let (transfer, batch, from, not_before, not_after) = (1, 1, None, us(0), us(9));
            let order = CopyOrder { transfer, batch, of, from, via, fill, size, not_before, not_after };
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
