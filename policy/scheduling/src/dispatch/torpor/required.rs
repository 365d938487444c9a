//! Torpor's required request count (T18): the number of requests in a row that a function has to
//! serve in time to meet its objective. The count is (pn - m) / (1 - p), for m of n requests in
//! time and a share p.

use std::collections::VecDeque;

use millrace_types::SloCounts;

use crate::dispatch::config::{ScoreWindow, WINDOW_MAX};
use crate::dispatch::protocol::LatencyObjective;

/// Required request count in millionths. A whole number, so that sums do not depend on their order.
/// Negative if the function can afford late requests; 0 if the objective is just met.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::dispatch) struct RequiredRequestCount(pub(in crate::dispatch) i128);

const MILLION: i128 = 1_000_000;
/// Clamp of the count: beyond 10^12 requests the difference is irrelevant, and products of sums
/// stay within 128 bits.
const REQUIRED_MAX: i128 = 1_000_000_000_000 * MILLION;

impl RequiredRequestCount {
    pub(in crate::dispatch) fn of(counts: SloCounts, objective: LatencyObjective) -> Self {
        let one = i128::from(LatencyObjective::ONE);
        let m = i128::from(counts.m);
        let n = i128::from(counts.n);
        let share = i128::from(objective.billionths());
        Self(((share * n - one * m) * MILLION / (one - share)).clamp(-REQUIRED_MAX, REQUIRED_MAX))
    }

    /// Returns the increase of the count by a further late request: p / (1 - p).
    pub(in crate::dispatch) fn one_late(objective: LatencyObjective) -> Self {
        Self::of(SloCounts { m: 0, n: 1 }, objective)
    }

    /// Returns the count times `thousandths` / 1000.
    pub(in crate::dispatch) fn weighted(self, thousandths: u64) -> Self {
        let weighted = self.0.saturating_mul(thousandths.into()) / 1000;
        Self(weighted.clamp(-REQUIRED_MAX, REQUIRED_MAX))
    }

    /// Returns the contribution to sums: the count, but at least 0.
    pub(in crate::dispatch) fn due(self) -> i128 {
        self.0.max(0)
    }
}

/// Counts for comparison with an objective: of all requests, or of the most recent ones.
#[derive(Debug)]
pub(in crate::dispatch) struct ScoredRequests {
    all: SloCounts,
    /// Whether each of the last requests was in time, oldest first.
    last: VecDeque<bool>,
    window: Option<usize>,
    in_time: u64,
}

impl ScoredRequests {
    pub(in crate::dispatch) fn new(counts: ScoreWindow) -> Self {
        let window = match counts {
            ScoreWindow::Cumulative => None,
            ScoreWindow::Last(last) => Some(last.clamp(1, WINDOW_MAX) as usize),
        };
        Self { all: SloCounts::default(), last: VecDeque::new(), window, in_time: 0 }
    }

    /// Updates the cumulative counts. Within an update, late requests are assumed to have come
    /// first. Decreased counts start a new count.
    pub(in crate::dispatch) fn update(&mut self, counts: SloCounts) {
        let began_anew = counts.n < self.all.n || counts.m < self.all.m;
        if began_anew {
            self.last.clear();
            self.in_time = 0;
        }
        let since = if began_anew { counts } else { counts.since(self.all) };
        self.all = counts;
        let Some(window) = self.window else { return };
        // An update can exceed the window: keep the ratio of in-time requests.
        let fits = since.n.min(window as u64);
        let in_time = (u128::from(since.m.min(since.n)) * u128::from(fits)) / u128::from(since.n.max(1));
        for number in 0..fits {
            self.push(u128::from(fits - number) <= in_time, window);
        }
    }

    fn push(&mut self, in_time: bool, window: usize) {
        if self.last.len() == window {
            self.in_time -= u64::from(self.last.pop_front() == Some(true));
        }
        self.last.push_back(in_time);
        self.in_time += u64::from(in_time);
    }

    pub(in crate::dispatch) fn counts(&self) -> SloCounts {
        match self.window {
            None => self.all,
            Some(_) => SloCounts { m: self.in_time, n: self.last.len() as u64 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P98: u32 = 980_000_000;

    fn required(m: u64, n: u64) -> i128 {
        RequiredRequestCount::of(SloCounts { m, n }, LatencyObjective::from_billionths(P98).unwrap()).0
    }

    #[test]
    fn required_request_count_follows_the_formula_of_t18() {
        assert_eq!(required(97, 100), 50 * MILLION);
        assert_eq!(required(99, 100), -50 * MILLION);
        assert_eq!(required(98, 100), 0);
        assert_eq!(required(0, 0), 0);
        assert_eq!(required(0, u64::MAX), REQUIRED_MAX);
        assert_eq!(LatencyObjective::from_billionths(LatencyObjective::ONE), None, "at 1 it is infinite");
    }

    #[test]
    fn a_window_counts_only_the_most_recent_requests() {
        let mut tally = ScoredRequests::new(ScoreWindow::Last(4));
        let mut told = |m, n| {
            tally.update(SloCounts { m, n });
            (tally.counts().m, tally.counts().n)
        };
        assert_eq!(told(1, 2), (1, 2));
        assert_eq!(told(3, 4), (3, 4));
        assert_eq!(told(3, 5), (3, 4), "the first was late too");
        assert_eq!(told(3, 7), (1, 4));
        assert_eq!(told(753, 1007), (3, 4), "750 of 1000");
        assert_eq!(told(1, 1), (1, 1), "a function that was created again");
    }
}
