//! The order of age, and how often requests are overtaken (L14).
//!
//! A request is overtaken when a younger one that fits the same GPUs leaves the queue before it.
//! Whoever is overtaken, all older ones are too, so no request was overtaken more often than the
//! oldest, and only that one's count is needed: it is the sum of marks that each request that passes
//! leaves on the one just before it, and a request that goes hands its marks to the one before it.
//! One that comes back from a GPU is not overtaken any more.
//!
//! **Who is at its limit goes next, or one in so many does.** In a lasting overload all come to wait
//! for their limit, and would then be served by age, all late. With [`Bound::every`] one in so many that
//! leave is the oldest, and others may be served in time. A request is then overtaken no more than
//! `times + (every - 1) × (older ones at their limit + 1)` times, by the largest bound of its own and
//! those of the older ones.

use std::collections::{BTreeMap, BTreeSet};

use super::policy::{Entry, Stats};
use super::queue::{SizeRank, Waiting};
use crate::ids::RequestKey;

/// How often a request may be overtaken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bound {
    /// So many times.
    pub(super) times: u32,
    /// After that one in so many that leave is the oldest. With 1 each is, and `times` is the most.
    pub(super) every: u32,
}

impl Bound {
    /// So many times and no more.
    pub(super) const fn strict(times: u32) -> Self {
        Self { times, every: 1 }
    }
}

#[derive(Debug)]
struct Queued {
    request: Waiting,
    bound: Bound,
    /// Requests that passed this one and no younger one that waits now.
    marks: u64,
    /// Fruitless looks before it came.
    looks: u64,
}

/// The requests of one size class, by age.
#[derive(Debug, Default)]
struct Line {
    queued: BTreeMap<RequestKey, Queued>,
    /// What is asked of it most.
    first: Option<First>,
    /// Times the oldest was overtaken: the sum of marks.
    marks: u64,
    /// Times an oldest was overtaken since the last that went at its limit.
    since: u64,
    /// Those that came back.
    back: BTreeSet<RequestKey>,
}

/// The oldest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct First {
    key: RequestKey,
    bound: Bound,
    looks: u64,
}

impl First {
    fn of((&key, queued): (&RequestKey, &Queued)) -> Self {
        Self { key, bound: queued.bound, looks: queued.looks }
    }
}

#[derive(Debug, Clone, Copy)]
struct Overtaken {
    times: u64,
    looks: u64,
}

impl Line {
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

    /// Takes a request out, and says what the oldest's counts were, where it was that; and, of one that
    /// `passes` those before it, whether there are any.
    fn take(&mut self, key: RequestKey, passes: bool) -> Option<(Waiting, Option<Overtaken>, bool)> {
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

    /// A request of this age leaves for a GPU that all in this line fit.
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

    /// The oldest that may not be overtaken by the next.
    fn at_limit(&self) -> Option<RequestKey> {
        let is_next =
            |Bound { times, every }: Bound| self.marks >= times.into() && self.since + 1 >= every.into();
        let oldest = self.first.filter(|first| is_next(first.bound));
        oldest.map(|first| first.key).into_iter().chain(self.back.first().copied()).min()
    }
}

/// Everybody who waits, by size class and age.
#[derive(Debug)]
pub(super) struct Ages {
    lines: Vec<Line>,
    /// Times an idle GPU looked through the whole queue and found no hit.
    looks: u64,
    passed: u64,
    overtaken_max: u64,
    visits_max: u64,
}

impl Ages {
    pub(super) fn new(ranks: usize) -> Self {
        let lines = (0..ranks).map(|_| Line::default()).collect();
        Self { lines, looks: 0, passed: 0, overtaken_max: 0, visits_max: 0 }
    }

    /// Takes in a request that may be overtaken so often: while an older one is in its size class
    /// that may be more often, as often as that.
    pub(super) fn insert(&mut self, request: Waiting, entry: Entry, bound: Bound) {
        let line = &mut self.lines[request.rank.0];
        let queued = Queued { request, bound, marks: 0, looks: self.looks };
        line.insert(queued);
        if entry == Entry::Back {
            line.back.insert(request.key);
        }
    }

    pub(super) fn get(&self, rank: SizeRank, key: RequestKey) -> Option<Waiting> {
        Some(self.lines[rank.0].queued.get(&key)?.request)
    }

    /// Whether a request came back.
    pub(super) fn is_back(&self, request: &Waiting) -> bool {
        self.lines[request.rank.0].back.contains(&request.key)
    }

    /// Takes a request out that goes nowhere.
    pub(super) fn take(&mut self, rank: SizeRank, key: RequestKey) -> Option<Waiting> {
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

    /// Takes a request that goes to a GPU of this rank, past all older ones that fit it too.
    pub(super) fn send(&mut self, from: SizeRank, key: RequestKey, to: SizeRank) -> Option<Waiting> {
        let (request, counts, mut passed) = self.lines[from.0].take(key, from <= to)?;
        self.count_first(counts);
        for (rank, line) in self.lines.iter_mut().enumerate().take(to.0 + 1) {
            passed |= rank != from.0 && line.passed_by(key);
        }
        self.passed += u64::from(passed);
        Some(request)
    }

    /// An idle GPU looked through all and found no hit.
    pub(super) fn looked(&mut self) {
        self.looks += 1;
    }

    /// The oldest of those that fit GPUs of this rank, by what is asked of each line.
    fn first(
        &self,
        rank: SizeRank,
        of: impl Fn(&Line) -> Option<RequestKey>,
    ) -> Option<(RequestKey, SizeRank)> {
        let lines = self.lines.iter().take(rank.0 + 1).enumerate();
        lines.filter_map(|(rank, line)| Some((of(line)?, SizeRank(rank)))).min()
    }

    /// The oldest that fits GPUs of this rank.
    pub(super) fn oldest(&self, rank: SizeRank) -> Option<(RequestKey, SizeRank)> {
        self.first(rank, |line| line.oldest().map(|(key, _)| key))
    }

    /// The oldest of those that may not be overtaken by the next.
    pub(super) fn at_limit(&self, rank: SizeRank) -> Option<(RequestKey, SizeRank)> {
        self.first(rank, Line::at_limit)
    }

    /// Whether a request may go to a GPU of this rank: no older one that fits it is at its limit.
    pub(super) fn may_go(&self, key: RequestKey, rank: SizeRank) -> bool {
        self.at_limit(rank).is_none_or(|(oldest, _)| key <= oldest)
    }

    /// The smallest size class in which somebody waits.
    pub(super) fn smallest(&self) -> Option<SizeRank> {
        self.lines.iter().position(|line| !line.queued.is_empty()).map(SizeRank)
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        for line in &self.lines {
            let oldest = line.queued.first_key_value();
            assert_eq!(line.first, oldest.map(First::of));
            assert_eq!(line.marks, line.queued.values().map(|it| it.marks).sum());
            let is_next = |it: &Bound| line.marks >= it.times.into() && line.since + 1 >= it.every.into();
            let overtaken = oldest.filter(|(_, it)| is_next(&it.bound)).map(|(&key, _)| key);
            assert_eq!(line.at_limit(), overtaken.into_iter().chain(line.back.first().copied()).min());
        }
    }

    pub(super) fn count(&self, stats: &mut Stats) {
        stats.passed = self.passed;
        stats.overtaken_max = self.overtaken_max;
        stats.visits_max = self.visits_max;
    }
}
