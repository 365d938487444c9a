//! When a part that ended is started again. Pure.

use std::time::Duration;

/// The first wait; each is twice the one before.
const WAIT_MIN: Duration = Duration::from_millis(500);
const WAIT_MAX: Duration = Duration::from_secs(10);
/// A part that lived this long starts from the first wait again.
const LIVED_WELL: Duration = Duration::from_secs(30);

/// Whether parts that end are started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restart {
    /// The operator does that: who tries out what a death costs wants to see it.
    Never,
    /// A little later each time.
    WithBackoff,
}

/// How often a part ended lately.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    ends: u32,
}

impl Backoff {
    /// How long to wait before the next start of a part that lived so long.
    pub(super) fn wait(&mut self, lived: Duration) -> Duration {
        if lived >= LIVED_WELL {
            self.ends = 0;
        }
        let wait = WAIT_MIN.saturating_mul(1 << self.ends.min(16)).min(WAIT_MAX);
        self.ends += 1;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_while_a_part_does_not_live_well() {
        let mut backoff = Backoff::default();
        let waits: Vec<_> = (0..7).map(|_| backoff.wait(Duration::from_secs(1)).as_millis()).collect();
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
        assert_eq!(backoff.wait(LIVED_WELL), WAIT_MIN);
        assert_eq!(backoff.wait(Duration::ZERO), WAIT_MIN * 2);
    }
}
