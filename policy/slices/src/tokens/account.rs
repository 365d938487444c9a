//! The time that a slice has used, and the time that it is still owed.
//!
//! Amounts are in picoseconds: a thousandth of a nanosecond is exact for shares in thousandths. Charges are made
//! when a token is granted, and corrected when the token ends. So runs of a slice never share a remainder twice.

use std::time::Duration;

use millrace_types::{Permille, Terms, Timestamp};

use super::protocol::{Config, QuotaCap};
use crate::units::Grid;

/// Device time in picoseconds. May be negative: a debt, or time beyond a request.
pub(super) type Picos = i64;

const PICOS_PER_NANO: i64 = 1000;
/// Longest pause between two runs of a slice that wants to run all the time: the end of a run is reported before
/// the next run arrives.
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// The longest time that is credited at once: a bucket is full long before.
const CREDIT_MAX: Duration = Duration::from_secs(1_000_000);

/// Converts a time to picoseconds.
pub(super) fn picos(time: Duration) -> Picos {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX).saturating_mul(PICOS_PER_NANO)
}

/// Converts picoseconds to a time, rounded up to a nanosecond; zero for a negative amount.
pub(super) fn time_of(amount: Picos) -> Duration {
    Duration::from_nanos((amount.max(0) as u64).div_ceil(PICOS_PER_NANO as u64))
}

/// Returns a share of a time in picoseconds.
fn part(share: Permille, time: Duration) -> Picos {
    let nanos = i64::try_from(time.min(CREDIT_MAX).as_nanos()).unwrap_or(i64::MAX);
    nanos.saturating_mul(i64::from(share.get()))
}

/// The account of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) terms: Terms,
    /// Least and most units of a token.
    pub(super) least: u8,
    pub(super) most: u8,
    /// Number of runs that want or hold a token.
    pub(super) runs: u32,
    /// The time since which the slice has wanted to run without a long pause.
    wants_since: Option<Timestamp>,
    /// The time of the last run's end, while there is no run.
    idle_since: Option<Timestamp>,
    /// Time charged in the present window; used by [`QuotaCap::Window`] alone.
    used: Picos,
    /// Content of the bucket; used by [`QuotaCap::Bucket`] alone.
    level: Picos,
    /// Guaranteed time that the slice has not received; negative if it received more. Used by
    /// [`QuotaCap::Bucket`] alone.
    gap: Picos,
    /// Shortfall at the end of the last period.
    missed: Picos,
    /// Device time in total.
    pub(super) served: Duration,
}

impl Account {
    /// Returns the account of a new slice, with a full bucket.
    pub(super) fn new(terms: Terms, config: &Config) -> Self {
        Self {
            terms,
            least: config.grid().units(terms.least()),
            most: config.grid().units(terms.most()),
            runs: 0,
            wants_since: None,
            idle_since: None,
            used: 0,
            level: part(terms.limit(), config.cap().period()),
            gap: 0,
            missed: 0,
            served: Duration::ZERO,
        }
    }

    /// Changes the terms. Used time stays used, and the bucket holds no more than before.
    pub(super) fn change(&mut self, terms: Terms, grid: Grid, cap: QuotaCap) {
        self.terms = terms;
        self.least = grid.units(terms.least());
        self.most = grid.units(terms.most());
        self.level = self.level.min(part(terms.limit(), cap.period()));
        self.gap = self.gap.min(part(terms.request(), cap.period()));
    }

    /// Adds a run. A slice that paused for longer than [`PAUSE_MAX`] has forgotten its growing gap: a guarantee
    /// is for the time in which the slice wants to run.
    pub(super) fn add_run(&mut self, now: Timestamp) {
        self.runs += 1;
        let paused = self.idle_since.take().is_some_and(|since| now.since(since) > PAUSE_MAX);
        if self.wants_since.is_none() || paused {
            self.wants_since = Some(now);
            self.gap = self.gap.min(0);
        }
    }

    pub(super) fn remove_run(&mut self, now: Timestamp) {
        self.runs = self.runs.saturating_sub(1);
        if self.runs == 0 {
            self.idle_since = Some(now);
        }
    }

    /// Whether the slice wants to run, or paused a moment ago.
    fn wants(&self, now: Timestamp) -> bool {
        self.idle_since.is_none_or(|since| now.since(since) <= PAUSE_MAX)
    }

    /// Credits the bucket and the growing gap with the time since the last event.
    pub(super) fn credit(&mut self, elapsed: Duration, cap: QuotaCap) {
        let QuotaCap::Bucket(burst) = cap else { return };
        let limit = self.terms.limit();
        self.level = self.level.saturating_add(part(limit, elapsed)).min(part(limit, burst));
        if self.runs > 0 {
            let request = self.terms.request();
            self.gap = self.gap.saturating_add(part(request, elapsed)).min(part(request, burst));
        }
    }

    /// Ends a period at `boundary`. Returns the shortfall of a slice that wanted to run during all of it.
    /// `carried` is the rest of the tokens out, which counts in the new window.
    pub(super) fn end_period(&mut self, boundary: Timestamp, cap: QuotaCap, carried: Picos) -> Picos {
        let wanted = self.wants(boundary)
            && self.wants_since.is_some_and(|since| boundary.since(since) >= cap.period());
        self.missed = if wanted { self.gap(cap).max(0) } else { 0 };
        self.used = carried;
        self.missed
    }

    /// Returns the shortfall of the slice at the end of the last period; zero if the slice did not want to run
    /// during all of that period.
    pub(super) fn missed(&self) -> Picos {
        self.missed
    }

    /// Returns the time that the slice still misses of its request: the paper's `Q_miss` under a window.
    pub(super) fn gap(&self, cap: QuotaCap) -> Picos {
        match cap {
            QuotaCap::Window(window) => part(self.terms.request(), window) - self.used,
            QuotaCap::Bucket(_) => self.gap,
        }
    }

    /// Returns the time that the slice may still compute: the paper's `Q_remain` under a window. `None` for a
    /// slice without a limit.
    pub(super) fn remaining(&self, cap: QuotaCap) -> Option<Picos> {
        let limit = self.terms.limit();
        (limit != Permille::ALL).then(|| match cap {
            QuotaCap::Window(window) => part(limit, window) - self.used,
            QuotaCap::Bucket(_) => self.level,
        })
    }

    /// Returns whether the slice is below its limit (F09).
    pub(super) fn below_limit(&self, cap: QuotaCap) -> bool {
        self.remaining(cap).is_none_or(|remaining| remaining > 0)
    }

    /// Returns the time until the bucket is no longer empty.
    pub(super) fn refill(&self) -> Duration {
        // One nanosecond more than the debt: an empty bucket gives no token.
        let rate = i64::from(self.terms.limit().get());
        let nanos = (-self.level).max(0) / rate + 1;
        Duration::from_nanos(nanos as u64)
    }

    /// Charges time; a negative amount is a refund.
    pub(super) fn charge(&mut self, amount: Picos) {
        self.used = self.used.saturating_add(amount);
        self.level = self.level.saturating_sub(amount);
        self.gap = self.gap.saturating_sub(amount);
    }

    /// Records the device time of a token that ended. Time beyond the request counts for one token at most, so
    /// that a slice with idle neighbours does not pay for their idleness later.
    pub(super) fn settle(&mut self, busy: Duration, token: Duration) {
        self.served = self.served.saturating_add(busy);
        self.gap = self.gap.max(-picos(token));
    }
}
