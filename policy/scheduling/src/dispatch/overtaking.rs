//! Order by age, and bounds on overtaking (L14).
//!
//! A request is overtaken when a younger request that fits the same GPUs leaves the queue earlier.
//! A request that overtakes also overtakes all older requests, so no request was overtaken more
//! often than the oldest, and only the oldest request's count is needed. That count is a sum of
//! marks: each overtaking request leaves a mark on the next older request, and a departing request
//! hands its marks to the next older request. A request that returned from a GPU cannot be
//! overtaken any more.
//!
//! **Requests at their limit** go next, or one departure in `every` does. In a lasting overload all
//! requests come to wait until their limit, and would then be served by age, all late. With
//! [`OvertakingBound::every`], one departure in `every` is the oldest request, and the others can be served
//! in time. A request is then overtaken at most `times + (every - 1) × (older requests at their
//! limit + 1)` times, with the largest bound among the request and the older ones.

use std::collections::{BTreeMap, BTreeSet};

use super::policy::{DispatchStats, QueueEntry};
use super::queue::WaitingRequest;
use super::size_rank::SizeRank;
use millrace_core::ids::RequestKey;

/// Bound on how often a request may be overtaken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OvertakingBound {
    /// Number of times before the request is at its limit.
    pub(super) times: u32,
    /// Interval of departures by age once at the limit. At 1, the oldest request goes next, and
    /// `times` is a strict maximum.
    pub(super) every: u32,
}

impl OvertakingBound {
    /// Returns a strict bound of `times`.
    pub(super) const fn strict(times: u32) -> Self {
        Self { times, every: 1 }
    }
}

#[derive(Debug)]
struct Queued {
    request: WaitingRequest,
    bound: OvertakingBound,
    /// Number of requests that overtook this request, and overtook no younger request that still
    /// waits.
    marks: u64,
    /// Value of [`AgeQueues::looks`] on arrival.
    looks: u64,
}

/// Requests of a size class, by age.
#[derive(Debug, Default)]
struct AgeQueue {
    queued: BTreeMap<RequestKey, Queued>,
    /// Oldest request, cached because most lookups need only this request.
    first: Option<First>,
    /// Number of times that the oldest request was overtaken: the sum of all marks.
    marks: u64,
    /// Number of overtakings of the oldest request since the last departure of a request at its
    /// limit.
    since: u64,
    /// Requests that returned from a GPU.
    back: BTreeSet<RequestKey>,
}

/// Key and bound of the oldest request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct First {
    key: RequestKey,
    bound: OvertakingBound,
    looks: u64,
}

impl First {
    fn of((&key, queued): (&RequestKey, &Queued)) -> Self {
        Self { key, bound: queued.bound, looks: queued.looks }
    }
}

/// Counts of a departing oldest request.
#[derive(Debug, Clone, Copy)]
struct Overtaken {
    times: u64,
    looks: u64,
}

impl AgeQueue {
    fn before(&mut self, key: RequestKey) -> Option<&mut Queued> {
        self.queued.range_mut(..key).next_back().map(|(_, queued)| queued)
    }

    fn insert(&mut self, queued: Queued) {
        let key = queued.request.key;
        if self.first.is_none_or(|first| key <= first.key) {
            self.first = Some(First::of((&key, &queued)));
        }
        self.queued.insert(key, queued);
    }

    /// Removes a request. Returns the counts of the oldest request if this was the oldest, and
    /// whether the request overtook any older request (never without `passes`).
    fn take(&mut self, key: RequestKey, passes: bool) -> Option<(WaitingRequest, Option<Overtaken>, bool)> {
        let counts = self.oldest().filter(|&(oldest, _)| oldest == key).map(|(_, counts)| counts);
        let gone = self.queued.remove(&key)?;
        let came_back = self.back.remove(&key);
        if counts.is_some() {
            if passes && !came_back && self.marks >= gone.bound.times.into() {
                self.since = 0;
            }
            self.first = self.queued.first_key_value().map(First::of);
        }
        let mark = u64::from(passes);
        let passed = match self.before(key) {
            Some(before) => {
                before.marks += gone.marks + mark;
                self.marks += mark;
                self.since += mark;
                passes
            }
            None => {
                self.marks -= gone.marks;
                false
            }
        };
        Some((gone.request, counts, passed))
    }

    /// Notes that a request of this age leaves for a GPU that fits all requests of this class.
    /// Returns whether the request overtook any.
    fn passed_by(&mut self, key: RequestKey) -> bool {
        let Some(before) = self.before(key) else { return false };
        before.marks += 1;
        self.marks += 1;
        self.since += 1;
        true
    }

    fn oldest(&self) -> Option<(RequestKey, Overtaken)> {
        let First { key, looks, .. } = self.first?;
        Some((key, Overtaken { times: self.marks, looks }))
    }

    /// Returns the oldest request that the next departure may not overtake.
    fn at_limit(&self) -> Option<RequestKey> {
        let is_next = |OvertakingBound { times, every }: OvertakingBound| {
            self.marks >= times.into() && self.since + 1 >= every.into()
        };
        let oldest = self.first.filter(|first| is_next(first.bound));
        oldest.map(|first| first.key).into_iter().chain(self.back.first().copied()).min()
    }
}

/// All waiting requests, by size class and age.
#[derive(Debug)]
pub(super) struct AgeQueues {
    lines: Vec<AgeQueue>,
    /// Number of times that an idle GPU searched the whole queue and found no hit.
    looks: u64,
    passed: u64,
    overtaken_max: u64,
    visits_max: u64,
}

impl AgeQueues {
    pub(super) fn new(ranks: usize) -> Self {
        let lines = (0..ranks).map(|_| AgeQueue::default()).collect();
        Self { lines, looks: 0, passed: 0, overtaken_max: 0, visits_max: 0 }
    }

    /// Adds a request with its bound. While an older request of the same size class has a larger
    /// bound, that bound applies.
    pub(super) fn insert(&mut self, request: WaitingRequest, entry: QueueEntry, bound: OvertakingBound) {
        let line = &mut self.lines[request.rank.0];
        let queued = Queued { request, bound, marks: 0, looks: self.looks };
        line.insert(queued);
        if entry == QueueEntry::Back {
            line.back.insert(request.key);
        }
    }

    pub(super) fn get(&self, rank: SizeRank, key: RequestKey) -> Option<WaitingRequest> {
        Some(self.lines[rank.0].queued.get(&key)?.request)
    }

    /// Returns whether a request returned from a GPU.
    pub(super) fn is_back(&self, request: &WaitingRequest) -> bool {
        self.lines[request.rank.0].back.contains(&request.key)
    }

    /// Removes a request that goes to no GPU.
    pub(super) fn take(&mut self, rank: SizeRank, key: RequestKey) -> Option<WaitingRequest> {
        let (request, counts, _) = self.lines[rank.0].take(key, false)?;
        self.count_first(counts);
        Some(request)
    }

    fn count_first(&mut self, counts: Option<Overtaken>) {
        if let Some(Overtaken { times, looks }) = counts {
            self.overtaken_max = self.overtaken_max.max(times);
            self.visits_max = self.visits_max.max(times + self.looks - looks);
        }
    }

    /// Removes a request that goes to a GPU of rank `to`, and counts that as overtaking all older
    /// requests that fit the GPU.
    pub(super) fn send(&mut self, from: SizeRank, key: RequestKey, to: SizeRank) -> Option<WaitingRequest> {
        let (request, counts, mut passed) = self.lines[from.0].take(key, from <= to)?;
        self.count_first(counts);
        for (rank, line) in self.lines.iter_mut().enumerate().take(to.0 + 1) {
            passed |= rank != from.0 && line.passed_by(key);
        }
        self.passed += u64::from(passed);
        Some(request)
    }

    /// Notes that an idle GPU searched the whole queue and found no hit.
    pub(super) fn record_fruitless_search(&mut self) {
        self.looks += 1;
    }

    /// Returns the oldest of the requests that `of` returns for each size class that fits GPUs of
    /// this rank.
    fn first(
        &self,
        rank: SizeRank,
        of: impl Fn(&AgeQueue) -> Option<RequestKey>,
    ) -> Option<(RequestKey, SizeRank)> {
        let lines = self.lines.iter().take(rank.0 + 1).enumerate();
        lines.filter_map(|(rank, line)| Some((of(line)?, SizeRank(rank)))).min()
    }

    /// Returns the oldest request that fits GPUs of this rank.
    pub(super) fn oldest(&self, rank: SizeRank) -> Option<(RequestKey, SizeRank)> {
        self.first(rank, |line| line.oldest().map(|(key, _)| key))
    }

    /// Returns the oldest request that fits GPUs of this rank and that the next departure may not
    /// overtake.
    pub(super) fn at_limit(&self, rank: SizeRank) -> Option<(RequestKey, SizeRank)> {
        self.first(rank, AgeQueue::at_limit)
    }

    /// Returns whether a request may go to a GPU of this rank: no older request that fits the GPU
    /// is at its limit.
    pub(super) fn may_go(&self, key: RequestKey, rank: SizeRank) -> bool {
        self.at_limit(rank).is_none_or(|(oldest, _)| key <= oldest)
    }

    /// Returns the smallest size class with a waiting request.
    pub(super) fn smallest(&self) -> Option<SizeRank> {
        self.lines.iter().position(|line| !line.queued.is_empty()).map(SizeRank)
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        for line in &self.lines {
            let oldest = line.queued.first_key_value();
            assert_eq!(line.first, oldest.map(First::of));
            assert_eq!(line.marks, line.queued.values().map(|it| it.marks).sum());
            let is_next =
                |it: &OvertakingBound| line.marks >= it.times.into() && line.since + 1 >= it.every.into();
            let overtaken = oldest.filter(|(_, it)| is_next(&it.bound)).map(|(&key, _)| key);
            assert_eq!(line.at_limit(), overtaken.into_iter().chain(line.back.first().copied()).min());
        }
    }

    pub(super) fn count(&self, stats: &mut DispatchStats) {
        stats.overtakings = self.passed;
        stats.overtaken_max = self.overtaken_max;
        stats.visits_max = self.visits_max;
    }
}
