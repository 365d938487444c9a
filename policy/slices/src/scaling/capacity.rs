//! The rate that slices of a function serve within its objective, by a simulation of the function's queue.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::Permille;

/// Arrivals of a simulation.
const ARRIVALS: usize = 4_000;
/// Halvings of the interval in which the rate is searched: to within a thousandth of the throughput.
const HALVINGS: u32 = 10;
/// The part of the throughput that counts as capacity without an objective.
const WITHOUT_OBJECTIVE: f64 = 0.8;
/// The time over which the limit of a slice is counted, in seconds: the bucket of the token core.
const PERIOD: f64 = 1.0;
/// Seed of the arrivals. The same question always has the same answer.
const SEED: u64 = 0x5eed_0f51;

/// The speed of a slice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SliceSpeed {
    /// The time of a run on the slice's SMs.
    pub run: Duration,
    /// The greatest share of the time.
    pub limit: Permille,
}

/// The objective of a function, and the speed of its slices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capacity {
    /// The speed of each slice.
    pub speed: SliceSpeed,
    /// The deadline and the share of the requests that meet it; `None` without an objective.
    pub objective: Option<(Duration, f64)>,
}

impl Capacity {
    /// Returns the requests in a second that a number of slices computes: the paper's `T`, with no regard to the time
    /// that requests wait.
    #[must_use]
    pub fn throughput(&self, slices: u32) -> f64 {
        let limit = f64::from(self.speed.limit.get()) / 1000.0;
        f64::from(slices) * limit / self.speed.run.as_secs_f64().max(1e-9)
    }

    /// Returns the greatest rate at which the objective is met, in requests a second. Requests arrive at random
    /// (Poisson) in one line for all slices. An objective that a run alone misses counts as none.
    #[must_use]
    pub fn rate(&self, slices: u32) -> f64 {
        let most = self.throughput(slices);
        let objective = self.objective.filter(|(deadline, _)| self.speed.run <= *deadline);
        let Some((deadline, share)) = objective else { return most * WITHOUT_OBJECTIVE };
        if slices == 0 {
            return 0.0;
        }
        let (mut met, mut missed) = (0.0, most);
        for _ in 0..HALVINGS {
            let rate = f64::midpoint(met, missed);
            if self.share_in_time(slices, rate, deadline) >= share {
                met = rate;
            } else {
                missed = rate;
            }
        }
        met
    }

    /// Returns the share of the requests that are answered within the deadline at this rate.
    fn share_in_time(&self, slices: u32, rate: f64, deadline: Duration) -> f64 {
        let run = self.speed.run.as_secs_f64();
        let limit = f64::from(self.speed.limit.get()) / 1000.0;
        let mut servers = vec![Server { free: 0.0, credit: limit * PERIOD, counted: 0.0 }; slices as usize];
        let mut random = SEED;
        let (mut now, mut in_time) = (0.0, 0_usize);
        for _ in 0..ARRIVALS {
            now += exponential(&mut random) / rate;
            let begin = |server: &Server| server.next_begin(now, limit);
            let next = servers.iter_mut().min_by(|a, b| begin(a).total_cmp(&begin(b)));
            let Some(server) = next else { return 0.0 };
            let end = server.serve(now, run, limit);
            in_time += usize::from(end - now <= deadline.as_secs_f64() + 1e-9);
        }
        in_time as f64 / ARRIVALS as f64
    }
}

/// A slice that serves one request at a time.
#[derive(Debug, Clone, Copy)]
struct Server {
    /// The time from which the slice is free.
    free: f64,
    /// The time that the slice may compute, as of `counted`.
    credit: f64,
    counted: f64,
}

impl Server {
    fn credit_at(&self, now: f64, limit: f64) -> f64 {
        (self.credit + limit * (now - self.counted).max(0.0)).min(limit * PERIOD)
    }

    /// Returns the time at which a request that waits since `now` begins: a slice in debt waits until the debt is
    /// paid.
    fn next_begin(&self, now: f64, limit: f64) -> f64 {
        let at = self.free.max(now);
        let credit = self.credit_at(at, limit);
        if credit >= 0.0 || limit >= 1.0 { at } else { at - credit / limit }
    }

    /// Serves a request, and returns the time of its end.
    fn serve(&mut self, now: f64, run: f64, limit: f64) -> f64 {
        let begin = self.next_begin(now, limit);
        self.credit = self.credit_at(begin, limit) - run + limit * run;
        self.free = begin + run;
        self.counted = self.free;
        self.free
    }
}

/// Returns a random number with mean 1 (SplitMix64).
fn exponential(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    let uniform = ((mixed >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    -uniform.ln()
}

/// The rates of 1, 2, 3 … slices. Each is computed when it is needed first, and kept.
#[derive(Debug, Clone, PartialEq)]
pub struct CapacityTable {
    of: Capacity,
    max: u32,
    rates: BTreeMap<u32, f64>,
}

impl CapacityTable {
    /// Returns the rates of up to `max` slices.
    #[must_use]
    pub fn new(of: Capacity, max: u32) -> Self {
        Self { of, max, rates: BTreeMap::new() }
    }

    /// Returns the function and the slices that the table is for.
    #[must_use]
    pub fn of(&self) -> Capacity {
        self.of
    }

    /// Returns the greatest number of slices in the table.
    #[must_use]
    pub fn slices_max(&self) -> u32 {
        self.max
    }

    /// Returns the rate of a number of slices.
    pub fn rate(&mut self, slices: u32) -> f64 {
        let slices = slices.min(self.max);
        *self.rates.entry(slices).or_insert_with(|| self.of.rate(slices))
    }

    /// Returns the least number of slices that serve a rate, or the greatest number in the table.
    pub fn slices_for(&mut self, rate: f64) -> u32 {
        if rate <= 0.0 {
            return 0;
        }
        // More slices serve more, so half of the numbers are excluded at a time.
        let mut sufficient = self.max;
        let mut too_few = 0;
        while sufficient > too_few + 1 {
            let middle = too_few + (sufficient - too_few) / 2;
            if self.rate(middle) >= rate { sufficient = middle } else { too_few = middle }
        }
        sufficient
    }
}
