//! The objective of a function or workflow, and its fulfilment, as cells.

use std::time::Duration;

use millrace_client::messages as wire;
use millrace_proto::activity::FunctionActivity;

use super::table::{Cell, Tone};
use crate::output::text::latency;

/// The objective of a function or workflow, and its SLO counts.
pub(super) struct ObjectiveCells {
    deadline: Duration,
    percentile: f64,
    /// The requests that counted in the window, and those of them within the deadline.
    lately: (u64, u64),
    /// The requests that counted since the start, and those of them within the deadline.
    ever: (u64, u64),
}

impl ObjectiveCells {
    pub(super) fn of(
        slo: Option<&wire::Slo>,
        was: &FunctionActivity,
        now: &FunctionActivity,
    ) -> Option<Self> {
        let slo = slo?;
        Some(Self {
            deadline: Duration::try_from(slo.deadline?).ok()?,
            percentile: slo.percentile,
            lately: (
                now.slo_requests.saturating_sub(was.slo_requests),
                now.slo_in_time.saturating_sub(was.slo_in_time),
            ),
            ever: (now.slo_requests, now.slo_in_time),
        })
    }

    pub(super) fn goal(&self) -> Cell {
        let percent = (self.percentile * 1e6).round() / 1e4;
        let text = format!("{} p{percent}", latency(self.deadline));
        Cell::number(-self.deadline.as_secs_f64(), text)
    }

    /// Returns the share of requests within the deadline: in the window, or since the start if none
    /// counted in the window.
    pub(super) fn in_time(&self) -> Cell {
        let (count, in_time) = if self.lately.0 > 0 { self.lately } else { self.ever };
        if count == 0 {
            return Cell::unknown();
        }
        let share = in_time as f64 / count as f64;
        let tone = match () {
            () if self.lately.0 == 0 => Tone::Quiet,
            () if share < self.percentile => Tone::Bad,
            () => Tone::Good,
        };
        // Sort the worst share first.
        Cell::number(-share, format!("{:.1}%", share * 100.0)).tone(tone)
    }

    /// Returns the required request count (T17), (pn - m) / (1 - p): the number of requests that
    /// must still meet the deadline, or if negative the number that may miss it.
    pub(super) fn due(&self) -> Cell {
        let n = self.ever.0 as f64;
        let m = self.ever.1 as f64;
        let due = (self.percentile * n - m) / (1.0 - self.percentile);
        Cell::number(due, format!("{due:+.0}")).tone(if due > 0.0 { Tone::Bad } else { Tone::Quiet })
    }
}
