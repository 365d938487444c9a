//! The forecast of a function's rate (F14): Holt's linear method, and an upper bound that calibrates itself.

use std::time::Duration;

use millrace_types::Timestamp;

/// Weight of a look in the level.
const LEVEL: f64 = 0.4;
/// Weight of a look in the trend.
const TREND: f64 = 0.1;
/// Weight of a look in the mean error.
const ERROR: f64 = 0.1;
/// Mean errors that the upper bound lies above the forecast.
const MARGIN: f64 = 2.0;
/// The time until a new slice computes: a look, a plan, and the copy of the weights.
const HORIZON: Duration = Duration::from_secs(2);

/// The forecast of a rate from a count that only grows.
#[derive(Debug, Clone, Default)]
pub struct Forecast {
    last: Option<(Timestamp, u64)>,
    /// Requests a second.
    level: f64,
    /// The growth of the level, each second.
    trend: f64,
    /// The rate that was forecast for the next look.
    next: Option<f64>,
    /// The mean of how much more came than was forecast.
    missed: f64,
}

impl Forecast {
    /// Returns a forecast without any look.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Looks at the count. A count that fell was restarted, and begins anew.
    pub fn look(&mut self, now: Timestamp, count: u64) {
        let Some((at, before)) = self.last.replace((now, count)) else { return };
        let seconds = now.since(at).as_secs_f64();
        let Some(grown) = count.checked_sub(before).filter(|_| seconds > 0.0) else { return };
        let rate = grown as f64 / seconds;
        match self.next {
            None => self.level = rate,
            Some(expected) => {
                self.missed += ERROR * ((rate - expected).max(0.0) - self.missed);
                let level = LEVEL * rate + (1.0 - LEVEL) * (self.level + self.trend * seconds).max(0.0);
                self.trend += TREND * ((level - self.level) / seconds - self.trend);
                self.level = level;
            }
        }
        self.next = Some((self.level + self.trend * seconds).max(0.0));
    }

    /// Returns the rate to expect at the horizon, with a margin for the errors so far.
    #[must_use]
    pub fn upper(&self) -> f64 {
        let mean = (self.level + self.trend * HORIZON.as_secs_f64()).max(0.0);
        mean + MARGIN * self.missed
    }

    /// Returns the mean of how much more came than was forecast, in requests a second.
    #[must_use]
    pub fn missed(&self) -> f64 {
        self.missed
    }
}
