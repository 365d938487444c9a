//! The restart of ended processes. Pure logic.

use std::time::Duration;

/// The first wait before a restart. Each later wait is twice as long, up to `WAIT_MAX`.
const WAIT_MIN: Duration = Duration::from_millis(500);
const WAIT_MAX: Duration = Duration::from_secs(10);
/// The lifetime after which a process starts from the first wait again.
const LIVED_WELL: Duration = Duration::from_secs(30);

/// Whether ended processes restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RestartPolicy {
    /// The operator restarts processes, for example to observe the effect of a process's death.
    Never,
    /// Processes restart after growing waits.
    WithBackoff,
}

/// The number of recent ends of a process.
#[derive(Debug, Default)]
pub(super) struct RestartBackoff {
    ends: u32,
}

impl RestartBackoff {
    /// Returns the wait before the next start of a process that lived this long.
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
    fn waits_grow_while_a_process_keeps_ending_early() {
        let mut backoff = RestartBackoff::default();
        let waits: Vec<_> = (0..7).map(|_| backoff.wait(Duration::from_secs(1)).as_millis()).collect();
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
        assert_eq!(backoff.wait(LIVED_WELL), WAIT_MIN);
        assert_eq!(backoff.wait(Duration::ZERO), WAIT_MIN * 2);
    }
}
