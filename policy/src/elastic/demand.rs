//! What functions are expected to need (D23): from what each asked for lately, how much of the store
//! to keep allocated for it, and for how long after its last request.
//!
//! | value | sampled | used as |
//! |---|---|---|
//! | interval | at each request, since the one before | `R_window`: the reservation holds that long after the last request, its last nanosecond included |
//! | size | at each object stored that the cap could hold | `R_size`, rounded up to blocks: what an object takes |
//! | concurrency | at each of those: how many of the function's exist, this one included, wherever they are | `R_con` |
//!
//! Each `R` is the exact 99th percentile, by nearest rank, of the last [`SAMPLES_MAX`] samples: the
//! 254th of 256, so up to two outliers do not count. With at most 99 samples it is the largest. A
//! histogram would hold more history, with an error of a bucket's width in each of two factors; the
//! paper draws histograms (Fig. 10a) and gives no buckets.
//!
//! Until a function's second request no interval is known, and nothing is reserved: the pool's floor
//! serves it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millrace_types::{Bytes, Timestamp};

use crate::ids::FunctionIndex;
use crate::memory::{BLOCK, blocks_for};

/// How many samples of each value are remembered of a function.
pub const SAMPLES_MAX: usize = 256;
/// How many functions are remembered, at 12 KiB each. One that comes when there are as many takes the
/// place of the one that asked longest ago, of those that have neither an object nor an open window;
/// where there is none, it has no reservation.
pub const FUNCTIONS_MAX: usize = 2048;

/// The last samples of a value.
#[derive(Debug, Clone, Default)]
struct Samples {
    by_age: VecDeque<u64>,
    sorted: Vec<u64>,
}

impl Samples {
    fn add(&mut self, sample: u64) {
        if self.by_age.len() == SAMPLES_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.sorted.remove(self.sorted.partition_point(|&other| other < oldest));
        }
        self.by_age.push_back(sample);
        self.sorted.insert(self.sorted.partition_point(|&other| other < sample), sample);
    }

    fn p99(&self) -> Option<u64> {
        let rank = (self.sorted.len() * 99).div_ceil(100);
        self.sorted.get(rank.checked_sub(1)?).copied()
    }
}

/// What one function asked for lately.
#[derive(Debug, Clone, Default)]
pub struct Demand {
    intervals: Samples,
    sizes: Samples,
    concurrency: Samples,
    live: u64,
    last_request: Option<Timestamp>,
    /// What is reserved for it now, and until when.
    reserved: Option<(Timestamp, Bytes)>,
}

impl Demand {
    /// `R_window`: how long after a request the next is expected; `None` before there were two.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        self.intervals.p99().map(Duration::from_nanos)
    }

    /// `R_size`: how large an object is expected to be; `None` before there was one.
    #[must_use]
    pub fn size(&self) -> Option<Bytes> {
        self.sizes.p99().map(Bytes)
    }

    /// `R_con`: how many objects are expected at once; `None` before there was one.
    #[must_use]
    pub fn concurrency(&self) -> Option<u64> {
        self.concurrency.p99()
    }

    fn due(&self, now: Timestamp) -> Option<(Timestamp, Bytes)> {
        let ends = self.last_request? + self.window()?;
        let object = u64::from(blocks_for(self.size()?).max(1)).saturating_mul(BLOCK.0);
        let reservation = object.saturating_mul(self.concurrency()?);
        (now <= ends).then_some((ends, Bytes(reservation)))
    }
}

/// What all functions of a GPU asked for lately.
#[derive(Debug, Default)]
pub struct Demands {
    functions: BTreeMap<FunctionIndex, Demand>,
    /// When windows end.
    ends: BTreeSet<(Timestamp, FunctionIndex)>,
    /// What is reserved in all. Wide: functions may each ask for more than there is.
    total: u128,
}

impl Demands {
    /// What all reservations that hold add up to, as of the last change or [`Self::expire`].
    #[must_use]
    pub fn total(&self) -> Bytes {
        Bytes(u64::try_from(self.total).unwrap_or(u64::MAX))
    }

    /// When the first window has ended.
    #[must_use]
    pub fn next_end(&self) -> Option<Timestamp> {
        self.ends.first().map(|&(ends, _)| ends + Duration::from_nanos(1))
    }

    /// A request came. Its function's window opens anew.
    pub fn requested(&mut self, now: Timestamp, function: FunctionIndex) {
        let Some(demand) = self.entry(function) else { return };
        if let Some(last) = demand.last_request {
            demand.intervals.add(now.as_nanos().saturating_sub(last.as_nanos()));
        }
        demand.last_request = Some(now);
        self.recompute(now, function);
    }

    /// An object came. What it changes shows at the next request or execution (D25).
    pub fn stored(&mut self, function: FunctionIndex, size: Bytes) {
        let Some(demand) = self.entry(function) else { return };
        demand.live += 1;
        demand.sizes.add(size.0);
        demand.concurrency.add(demand.live);
    }

    /// An object is gone.
    pub fn gone(&mut self, function: FunctionIndex) {
        if let Some(demand) = self.functions.get_mut(&function) {
            demand.live = demand.live.saturating_sub(1);
        }
    }

    /// Computes a function's reservation anew: after each of its executions (D25).
    pub fn recompute(&mut self, now: Timestamp, function: FunctionIndex) {
        let Some(demand) = self.functions.get_mut(&function) else { return };
        let (before, after) = (demand.reserved, demand.due(now));
        demand.reserved = after;
        if let Some((ends, size)) = before {
            self.ends.remove(&(ends, function));
            self.total -= u128::from(size.0);
        }
        if let Some((ends, size)) = after {
            self.ends.insert((ends, function));
            self.total += u128::from(size.0);
        }
    }

    /// Ends the windows that are over.
    pub fn expire(&mut self, now: Timestamp) {
        while let Some(&(ends, function)) = self.ends.first()
            && ends < now
        {
            self.recompute(now, function);
        }
    }

    /// A function is gone.
    pub fn forget(&mut self, function: FunctionIndex) {
        if let Some((ends, size)) = self.functions.remove(&function).and_then(|demand| demand.reserved) {
            self.ends.remove(&(ends, function));
            self.total -= u128::from(size.0);
        }
    }

    fn entry(&mut self, function: FunctionIndex) -> Option<&mut Demand> {
        if self.functions.len() >= FUNCTIONS_MAX && !self.functions.contains_key(&function) {
            self.drop_idle()?;
        }
        Some(self.functions.entry(function).or_default())
    }

    /// Drops who asked longest ago of those that have nothing; `None` where all have something.
    fn drop_idle(&mut self) -> Option<()> {
        let idle = self.functions.iter().filter(|(_, it)| it.live == 0 && it.reserved.is_none());
        let (&function, _) = idle.min_by_key(|(function, it)| (it.last_request, **function))?;
        self.functions.remove(&function);
        Some(())
    }
}

#[cfg(test)]
impl Demands {
    pub(super) fn of(&self, function: FunctionIndex) -> Option<&Demand> {
        self.functions.get(&function)
    }

    /// The number of a function's objects.
    pub(super) fn live(&self, function: FunctionIndex) -> u64 {
        self.of(function).map_or(0, |demand| demand.live)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F: FunctionIndex = FunctionIndex(0);

    fn secs(secs: u64) -> Timestamp {
        Timestamp(secs * 1_000_000_000)
    }

    #[test]
    fn percentiles_are_exact_over_the_last_samples() {
        let mut samples = Samples::default();
        assert_eq!(samples.p99(), None);
        (1..=99).for_each(|sample| samples.add(sample));
        assert_eq!(samples.p99(), Some(99), "the largest of 99");
        samples.add(1000);
        assert_eq!(samples.p99(), Some(99), "the 99th of 100");
        (0..SAMPLES_MAX as u64).for_each(|sample| samples.add(sample));
        assert_eq!(samples.p99(), Some(253), "the 254th of 256, and the older are forgotten");
        assert_eq!(samples.sorted.len(), SAMPLES_MAX);
    }

    #[test]
    fn reserves_size_times_concurrency_until_the_window_ends() {
        let mut demands = Demands::default();
        demands.requested(secs(0), F);
        demands.stored(F, Bytes::mib(3));
        demands.stored(F, Bytes::mib(5));
        demands.recompute(secs(1), F);
        assert_eq!((demands.total(), demands.next_end()), (Bytes::ZERO, None), "no interval is known");
        demands.requested(secs(10), F);
        let demand = demands.of(F).unwrap();
        let known = (demand.window(), demand.size(), demand.concurrency());
        assert_eq!(known, (Some(Duration::from_secs(10)), Some(Bytes::mib(5)), Some(2)));
        assert_eq!(demands.total(), Bytes::mib(12), "two objects of three blocks");
        assert_eq!(demands.next_end(), Some(Timestamp(20_000_000_001)));
        demands.expire(secs(20));
        assert_eq!(demands.total(), Bytes::mib(12), "the window's end is inside");
        demands.expire(Timestamp(20_000_000_001));
        assert_eq!((demands.total(), demands.next_end()), (Bytes::ZERO, None));
        demands.recompute(secs(25), F);
        assert_eq!(demands.total(), Bytes::ZERO, "an execution that ends late reopens nothing");
    }

    #[test]
    fn functions_add_up_and_are_forgotten_one_by_one() {
        let mut demands = Demands::default();
        for function in [FunctionIndex(0), FunctionIndex(1)] {
            demands.requested(secs(0), function);
            demands.stored(function, Bytes::mib(2));
            demands.requested(secs(5), function);
        }
        assert_eq!(demands.total(), Bytes::mib(4));
        demands.forget(FunctionIndex(0));
        assert_eq!((demands.total(), demands.ends.len()), (Bytes::mib(2), 1));
        assert!(demands.of(FunctionIndex(0)).is_none());
    }

    #[test]
    fn concurrency_counts_what_exists_at_once() {
        let mut demands = Demands::default();
        for _ in 0..5 {
            demands.stored(F, Bytes::mib(1));
            demands.gone(F);
        }
        assert_eq!(demands.of(F).unwrap().concurrency(), Some(1));
    }

    #[test]
    fn the_limit_drops_who_asked_longest_ago_and_has_nothing() {
        let mut demands = Demands::default();
        let all = || (0..FUNCTIONS_MAX as u32).map(FunctionIndex);
        for function in all() {
            demands.requested(secs(u64::from(function.0)), function);
            demands.stored(function, Bytes::mib(1));
        }
        let (newest, live) = (FunctionIndex(FUNCTIONS_MAX as u32), FunctionIndex(0));
        all().filter(|&function| function != live).for_each(|function| demands.gone(function));
        // The next after it has an open window.
        demands.requested(secs(10_000), FunctionIndex(1));
        demands.requested(secs(10_000), newest);
        assert!(demands.of(newest).is_some(), "a function that comes later is remembered");
        assert!(demands.of(live).is_some() && demands.of(FunctionIndex(1)).is_some());
        assert!(demands.of(FunctionIndex(2)).is_none());
        assert_eq!(demands.functions.len(), FUNCTIONS_MAX);
    }

    #[test]
    fn what_a_forgotten_function_still_stores_does_not_keep_others_out() {
        let mut demands = Demands::default();
        for function in (0..FUNCTIONS_MAX as u32).map(FunctionIndex) {
            demands.forget(function);
            demands.stored(function, Bytes::mib(1));
            demands.gone(function);
        }
        let new = FunctionIndex(FUNCTIONS_MAX as u32);
        demands.requested(secs(1), new);
        assert!(demands.of(new).is_some());
    }

    #[test]
    fn functions_beyond_the_limit_have_no_reservation() {
        let mut demands = Demands::default();
        let all = (0..=FUNCTIONS_MAX as u32).map(FunctionIndex);
        all.for_each(|function| demands.stored(function, Bytes::mib(1)));
        assert!(demands.of(FunctionIndex(FUNCTIONS_MAX as u32)).is_none());
        assert!(demands.of(F).is_some());
    }
}
