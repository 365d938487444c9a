//! Expected memory need of functions (D23). From each function's recent behaviour, this module
//! derives how much of the store to keep allocated for the function, and for how long after its
//! last request.
//!
//! | value | sampled | used as |
//! |---|---|---|
//! | interval | at each request, since the one before | `R_window`: the reservation holds that long after the last request, its last nanosecond included |
//! | size | at each stored object that the cap could hold | `R_size`, rounded up to blocks: the memory of one object |
//! | concurrency | at each of these: the function's objects that exist, the new one included, in any place | `R_con` |
//!
//! Each `R` is the exact 99th percentile, by nearest rank, of the last [`SAMPLES_MAX`] samples: the
//! 254th of 256, so up to two outliers do not count. With at most 99 samples `R` is the largest. A
//! histogram would cover more history, with an error of a bucket's width in each of two factors;
//! the paper draws histograms (Fig. 10a) and gives no buckets.
//!
//! Before a function's second request no interval is known, and no memory is reserved: the pool's
//! floor serves the function.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millrace_types::{Bytes, Timestamp};

use crate::BlockSize;
use millrace_core::ids::FunctionIndex;

/// Samples remembered per value and function.
pub const SAMPLES_MAX: usize = 256;
/// Functions remembered, at 12 KiB each. In a full table, a new function replaces an idle function,
/// which has neither objects nor an open window; the oldest last request decides. If every function
/// has either, the new function gets no reservation.
pub const FUNCTIONS_MAX: usize = 2048;

/// The most recent samples of a value.
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

/// Recent behaviour of one function.
#[derive(Debug, Clone, Default)]
pub struct FunctionDemand {
    intervals: Samples,
    sizes: Samples,
    concurrency: Samples,
    live: u64,
    last_request: Option<Timestamp>,
    /// End and size of the current reservation.
    reserved: Option<(Timestamp, Bytes)>,
}

impl FunctionDemand {
    /// Returns `R_window`: the time after a request within which the next is expected; `None`
    /// before the second request.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        self.intervals.p99().map(Duration::from_nanos)
    }

    /// Returns `R_size`: the expected size of an object; `None` before the first object.
    #[must_use]
    pub fn size(&self) -> Option<Bytes> {
        self.sizes.p99().map(Bytes)
    }

    /// Returns `R_con`: the expected number of concurrent objects; `None` before the first object.
    #[must_use]
    pub fn concurrency(&self) -> Option<u64> {
        self.concurrency.p99()
    }

    fn due(&self, now: Timestamp, block: BlockSize) -> Option<(Timestamp, Bytes)> {
        let ends = self.last_request? + self.window()?;
        let object = block.round_up(self.size()?).max(block.get());
        let reservation = object.0.saturating_mul(self.concurrency()?);
        (now <= ends).then_some((ends, Bytes(reservation)))
    }
}

/// Recent behaviour of all functions on a GPU.
#[derive(Debug)]
pub struct DemandTable {
    block: BlockSize,
    functions: BTreeMap<FunctionIndex, FunctionDemand>,
    /// Ends of open windows.
    ends: BTreeSet<(Timestamp, FunctionIndex)>,
    /// Sum of all reservations. 128 bits wide, because each function may reserve more than any GPU
    /// has.
    total: u128,
}

impl DemandTable {
    /// Returns an empty table. Reservations are whole blocks of this size.
    #[must_use]
    pub fn new(block: BlockSize) -> Self {
        Self { block, functions: BTreeMap::new(), ends: BTreeSet::new(), total: 0 }
    }

    /// Returns the sum of all open reservations, as of the last change or [`Self::expire`].
    #[must_use]
    pub fn total(&self) -> Bytes {
        Bytes(u64::try_from(self.total).unwrap_or(u64::MAX))
    }

    /// Returns the time at which the first window has ended.
    #[must_use]
    pub fn next_end(&self) -> Option<Timestamp> {
        self.ends.first().map(|&(ends, _)| ends + Duration::from_nanos(1))
    }

    /// Records a request, which reopens its function's window.
    pub fn requested(&mut self, now: Timestamp, function: FunctionIndex) {
        let Some(demand) = self.entry(function) else { return };
        if let Some(last) = demand.last_request {
            demand.intervals.add(now.as_nanos().saturating_sub(last.as_nanos()));
        }
        demand.last_request = Some(now);
        self.recompute(now, function);
    }

    /// Records a stored object. Its effect on the reservation shows at the next request or
    /// execution (D25).
    pub fn stored(&mut self, function: FunctionIndex, size: Bytes) {
        let Some(demand) = self.entry(function) else { return };
        demand.live += 1;
        demand.sizes.add(size.0);
        demand.concurrency.add(demand.live);
    }

    /// Records the end of an object.
    pub fn gone(&mut self, function: FunctionIndex) {
        if let Some(demand) = self.functions.get_mut(&function) {
            demand.live = demand.live.saturating_sub(1);
        }
    }

    /// Recomputes a function's reservation, as after each of its executions (D25).
    pub fn recompute(&mut self, now: Timestamp, function: FunctionIndex) {
        let Some(demand) = self.functions.get_mut(&function) else { return };
        let before = demand.reserved;
        let after = demand.due(now, self.block);
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

    /// Ends expired windows.
    pub fn expire(&mut self, now: Timestamp) {
        while let Some(&(ends, function)) = self.ends.first()
            && ends < now
        {
            self.recompute(now, function);
        }
    }

    /// Drops all records of a function that no longer exists.
    pub fn forget(&mut self, function: FunctionIndex) {
        if let Some((ends, size)) = self.functions.remove(&function).and_then(|demand| demand.reserved) {
            self.ends.remove(&(ends, function));
            self.total -= u128::from(size.0);
        }
    }

    fn entry(&mut self, function: FunctionIndex) -> Option<&mut FunctionDemand> {
        if self.functions.len() >= FUNCTIONS_MAX && !self.functions.contains_key(&function) {
            self.drop_idle()?;
        }
        Some(self.functions.entry(function).or_default())
    }

    /// Drops the function with the oldest last request among the functions without objects and
    /// reservation. Returns `None` if there is no such function.
    fn drop_idle(&mut self) -> Option<()> {
        let idle = self.functions.iter().filter(|(_, it)| it.live == 0 && it.reserved.is_none());
        let (&function, _) = idle.min_by_key(|(function, it)| (it.last_request, **function))?;
        self.functions.remove(&function);
        Some(())
    }
}

#[cfg(test)]
impl DemandTable {
    pub(super) fn of(&self, function: FunctionIndex) -> Option<&FunctionDemand> {
        self.functions.get(&function)
    }

    /// Returns the number of a function's objects.
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
        let mut demands = DemandTable::new(BlockSize::DEFAULT);
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
        let mut demands = DemandTable::new(BlockSize::DEFAULT);
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
    fn concurrency_counts_only_objects_that_exist_together() {
        let mut demands = DemandTable::new(BlockSize::DEFAULT);
        for _ in 0..5 {
            demands.stored(F, Bytes::mib(1));
            demands.gone(F);
        }
        assert_eq!(demands.of(F).unwrap().concurrency(), Some(1));
    }

    #[test]
    fn a_full_table_drops_the_idle_function_with_the_oldest_request() {
        let mut demands = DemandTable::new(BlockSize::DEFAULT);
        let all = || (0..FUNCTIONS_MAX as u32).map(FunctionIndex);
        for function in all() {
            demands.requested(secs(u64::from(function.0)), function);
            demands.stored(function, Bytes::mib(1));
        }
        let newest = FunctionIndex(FUNCTIONS_MAX as u32);
        let live = FunctionIndex(0);
        all().filter(|&function| function != live).for_each(|function| demands.gone(function));
        // Function 1 now has an open window, so function 2 is the oldest idle function.
        demands.requested(secs(10_000), FunctionIndex(1));
        demands.requested(secs(10_000), newest);
        assert!(demands.of(newest).is_some(), "a function that comes later is remembered");
        assert!(demands.of(live).is_some() && demands.of(FunctionIndex(1)).is_some());
        assert!(demands.of(FunctionIndex(2)).is_none());
        assert_eq!(demands.functions.len(), FUNCTIONS_MAX);
    }

    #[test]
    fn objects_of_forgotten_functions_do_not_keep_new_functions_out() {
        let mut demands = DemandTable::new(BlockSize::DEFAULT);
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
        let mut demands = DemandTable::new(BlockSize::DEFAULT);
        let all = (0..=FUNCTIONS_MAX as u32).map(FunctionIndex);
        all.for_each(|function| demands.stored(function, Bytes::mib(1)));
        assert!(demands.of(FunctionIndex(FUNCTIONS_MAX as u32)).is_none());
        assert!(demands.of(F).is_some());
    }
}
