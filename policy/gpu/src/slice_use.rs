//! The use of a slice: its device time, and its SM time.

use std::time::Duration;

use millrace_types::{Permille, SmShare, Timestamp};

/// The time over which the present use is measured.
const WINDOW: Duration = Duration::from_secs(1);

/// The use of a slice since its GPU has been shared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SliceUse {
    /// The share of the last full second that the slice computed. Tokens that are out do not count yet.
    pub used: Permille,
    /// Device time.
    pub busy: Duration,
    /// Device time, times the share of the SMs.
    pub sm: Duration,
    /// Number of seconds in which the slice wanted to compute all the time, and at the end of which the slice
    /// lacked more than 50 ms of its requested time.
    pub starved: u64,
}

/// The use of a slice, with the windows from which the present use follows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SliceUseRecord {
    total: SliceUse,
    /// Number of the present window, with the device time in it.
    window: u64,
    busy: Duration,
    /// Device time in the window before.
    before: Duration,
}

impl SliceUseRecord {
    /// Adds the device time of a token.
    pub(super) fn add(&mut self, now: Timestamp, on: SmShare, busy: Duration) {
        self.turn_to(now);
        self.busy += busy;
        self.total.busy += busy;
        self.total.sm += busy * u32::from(on.units()) / u32::from(on.whole());
    }

    pub(super) fn starved(&mut self) {
        self.total.starved += 1;
    }

    /// Returns the use until a time.
    pub(super) fn until(&self, now: Timestamp) -> SliceUse {
        let mut record = *self;
        record.turn_to(now);
        let thousandths = record.before.as_nanos() * 1000 / WINDOW.as_nanos();
        let used = u16::try_from(thousandths).ok().and_then(Permille::new).unwrap_or(Permille::ALL);
        SliceUse { used, ..record.total }
    }

    fn turn_to(&mut self, now: Timestamp) {
        let window = now.as_nanos() / WINDOW.as_nanos() as u64;
        if window > self.window {
            self.before = if window == self.window + 1 { self.busy } else { Duration::ZERO };
            self.busy = Duration::ZERO;
            self.window = window;
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::UnitSet;

    use super::*;

    #[test]
    fn the_present_use_is_that_of_the_last_full_second() {
        let at = |ms: u64| Timestamp(ms * 1_000_000);
        let quarter = SmShare::Block(UnitSet::block(0, 4).unwrap());
        let mut record = SliceUseRecord::default();
        record.add(at(1_100), quarter, Duration::from_millis(200));
        record.add(at(1_900), quarter, Duration::from_millis(100));
        assert_eq!(record.until(at(1_999)).used, Permille::ZERO, "the second is not full");
        let used = record.until(at(2_000));
        assert_eq!(used.used, Permille::new(300).unwrap());
        assert_eq!((used.busy, used.sm), (Duration::from_millis(300), Duration::from_millis(75)));
        assert_eq!(record.until(at(3_000)).used, Permille::ZERO, "nothing ran in the second before");
        record.add(at(2_500), quarter, Duration::from_millis(1_500));
        assert_eq!(record.until(at(3_500)).used, Permille::ALL);
    }
}
