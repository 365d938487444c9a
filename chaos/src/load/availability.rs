//! Records the successes of a kind of call, and the gaps between them.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::timeline::{Timeline, seconds};

/// Minimum gap that is recorded in the timeline.
const GAP: Duration = Duration::from_millis(500);

/// The successes of a kind of call.
#[derive(Debug)]
pub struct CallAvailability {
    what: &'static str,
    timeline: Timeline,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    last: Option<Duration>,
    /// Time of the last [`CallAvailability::mark`].
    marked: Option<Duration>,
    /// Time of the first success that was asked for after the mark.
    resumed: Option<Duration>,
    /// Longest time without a success since the mark.
    gap_max: Duration,
}

impl CallAvailability {
    pub(super) fn new(what: &'static str, timeline: Timeline) -> Self {
        Self { what, timeline, seen: Mutex::default() }
    }

    /// Records a success of a call made at `invoked`.
    pub(super) fn worked(&self, invoked: Duration) {
        let now = self.timeline.now();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let gap = seen.last.map_or(Duration::ZERO, |last| now.saturating_sub(last));
        seen.last = Some(now);
        if seen.marked.is_some() {
            seen.gap_max = seen.gap_max.max(gap);
        }
        if seen.resumed.is_none() && seen.marked.is_some_and(|marked| invoked >= marked) {
            seen.resumed = Some(now);
        }
        if gap >= GAP {
            self.timeline.saw(format!("{} again, after none for {}", self.what, seconds(gap)));
        }
    }

    /// Starts a new measurement, at the time of a fault.
    pub fn mark(&self) {
        let now = self.timeline.now();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.marked = Some(now);
        seen.resumed = None;
        seen.gap_max = Duration::ZERO;
    }

    /// Returns the time from the mark to the first success that was asked for after the mark.
    #[must_use]
    pub fn resumed_after(&self) -> Option<Duration> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        Some(seen.resumed?.saturating_sub(seen.marked?))
    }

    /// Returns the longest time without a success since the mark, the present gap included.
    #[must_use]
    pub fn gap_max(&self) -> Duration {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let open = seen.last.map_or(Duration::ZERO, |last| self.timeline.now().saturating_sub(last));
        seen.gap_max.max(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::EventOutput;

    #[tokio::test(start_paused = true)]
    async fn a_success_asked_for_before_a_fault_does_not_end_the_outage() {
        let timeline = Timeline::begin(EventOutput::Silent);
        let writes = CallAvailability::new("writes", timeline.clone());
        writes.worked(timeline.now());
        let pass = |millis| tokio::time::sleep(Duration::from_millis(millis));
        pass(10).await;
        let before = timeline.now();
        pass(1).await;
        writes.mark();
        pass(5).await;
        writes.worked(before);
        assert_eq!(writes.resumed_after(), None);
        let after = timeline.now();
        pass(700).await;
        writes.worked(after);
        assert_eq!(writes.resumed_after(), Some(Duration::from_millis(705)));
        assert_eq!(writes.gap_max(), Duration::from_millis(700));
        let events = timeline.events();
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(events[0].what, "writes again, after none for 0.70 s");
    }
}
