//! The number of slices of a function: a forecast of its load, the rate that its slices can serve, and
//! hysteresis (F13, F14, F18).
//!
//! ```text
//! requests answered, slices busy ─────► Forecast ─► rate to expect
//!                                                      ├─► SliceScaler ─► number of slices
//! time of a run on the slice's SMs ─► CapacityTable ─► rates
//! ```
//!
//! Slices are added at once, and taken away after [`DOWN_AFTER`] only. Scaling changes the number of slices and
//! never the terms of a slice, as in the paper (F18).
//!
//! The paper's Algorithm 1 takes the throughput of a profile as the rate that a pod can serve. At that rate requests
//! wait without bound. Here the rate is the one at which the objective is still met, found by a simulation of the
//! function's queue.

use std::collections::VecDeque;
use std::time::Duration;

use millrace_types::{Permille, Timestamp};

mod capacity;
mod forecast;

pub use self::capacity::{Capacity, CapacityTable, SliceSpeed};
pub use self::forecast::Forecast;

/// The time for which fewer slices must suffice before slices are taken away.
pub const DOWN_AFTER: Duration = Duration::from_secs(60);
/// The part of the capacity that fewer slices may need. Between this part and all of it the number stays.
const DOWN_LOAD: f64 = 0.8;
/// The factor of the expected rate while all slices are busy: answers then tell nothing of the requests that wait.
const SATURATED_GROWTH: f64 = 1.5;
/// The use of the limit from which a slice counts as busy. Between two runs a slice waits for a moment, for longer
/// while the node's processors are busy.
const BUSY: f64 = 0.85;

/// The load of a function at a look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observed {
    /// All answers so far.
    pub answered: u64,
    /// The share of the last second that each slice computed, as a mean; `None` before any report.
    pub used: Option<f64>,
    /// The number of slices that have a GPU.
    pub slices: u32,
}

/// The bounds on the number of slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SliceBounds {
    /// The least number.
    pub min: u32,
    /// The greatest number.
    pub max: u32,
}

/// The scaler of a function.
#[derive(Debug, Clone)]
pub struct SliceScaler {
    forecast: Forecast,
    /// The number of slices at present.
    count: u32,
    /// Numbers that sufficed, each with the time of its look; the greatest first, and each less than those before.
    sufficient: VecDeque<(Timestamp, u32)>,
    expected: f64,
}

impl SliceScaler {
    /// Returns the scaler of a function that has `count` slices. No slice is taken away for [`DOWN_AFTER`], so that a
    /// new leader keeps the present slices.
    #[must_use]
    pub fn new(now: Timestamp, count: u32) -> Self {
        let sufficient = VecDeque::from([(now, count)]);
        Self { forecast: Forecast::new(), count, sufficient, expected: 0.0 }
    }

    /// Looks at a function, and returns the number of slices that it should have.
    pub fn look(
        &mut self,
        now: Timestamp,
        seen: Observed,
        limit: Permille,
        capacity: &mut CapacityTable,
        bounds: SliceBounds,
    ) -> u32 {
        self.forecast.look(now, seen.answered);
        let full = f64::from(limit.get()) / 1000.0 * BUSY;
        let saturated = seen.slices > 0 && seen.used.is_some_and(|used| used >= full);
        let mut expected = self.forecast.upper();
        if saturated {
            expected = expected.max(capacity.rate(seen.slices)) * SATURATED_GROWTH;
        }
        self.expected = expected;
        let clamp = |count: u32| count.clamp(bounds.min, bounds.max.max(bounds.min));
        let up = clamp(capacity.slices_for(expected));
        let down = clamp(capacity.slices_for(expected / DOWN_LOAD));
        while self.sufficient.back().is_some_and(|(_, count)| *count <= down) {
            self.sufficient.pop_back();
        }
        self.sufficient.push_back((now, down));
        while self.sufficient.len() > 1
            && self.sufficient.front().is_some_and(|(at, _)| now.since(*at) > DOWN_AFTER)
        {
            self.sufficient.pop_front();
        }
        let recent = self.sufficient.front().map_or(down, |(_, count)| *count);
        self.count = clamp(if up > self.count { up } else { self.count.min(recent.max(up)) });
        self.count
    }

    /// Returns the rate to expect, in requests a second.
    #[must_use]
    pub fn expected(&self) -> f64 {
        self.expected
    }

    /// Returns the mean error of the forecast, in requests a second: how much more came than was expected.
    #[must_use]
    pub fn missed(&self) -> f64 {
        self.forecast.missed()
    }
}

#[cfg(test)]
mod tests;
