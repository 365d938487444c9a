//! Wall-clock time, read only in this file: the leader stamps the time into commands.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use millrace_cluster_state::UnixMillis;

/// A source of wall-clock time for stamps.
pub trait WallClock: Debug + Send + Sync + 'static {
    /// Returns the current time.
    fn now(&self) -> UnixMillis;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl WallClock for SystemClock {
    #[allow(clippy::disallowed_methods, reason = "this is the clock that others are handed")]
    fn now(&self) -> UnixMillis {
        let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        // A clock set before 1970 stamps 0; the clock of the replicated state never runs backwards.
        UnixMillis(since_epoch.map_or(0, |span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX)))
    }
}

/// A clock at an adjustable offset from another clock, for tests of clock jumps.
#[derive(Debug)]
pub struct MovedClock {
    of: Arc<dyn WallClock>,
    offset_ms: AtomicI64,
}

impl MovedClock {
    /// Returns a clock with offset 0 from `of`.
    #[must_use]
    pub fn new(of: Arc<dyn WallClock>) -> Self {
        Self { of, offset_ms: AtomicI64::new(0) }
    }

    /// Sets the offset from the underlying clock, in milliseconds. A negative offset is in the past.
    pub fn set_offset_ms(&self, offset_ms: i64) {
        self.offset_ms.store(offset_ms, Ordering::Relaxed);
    }

    /// Returns the offset from the underlying clock, in milliseconds.
    #[must_use]
    pub fn offset_ms(&self) -> i64 {
        self.offset_ms.load(Ordering::Relaxed)
    }
}

impl WallClock for MovedClock {
    fn now(&self) -> UnixMillis {
        UnixMillis(self.of.now().0.saturating_add_signed(self.offset_ms()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Standing(u64);

    impl WallClock for Standing {
        fn now(&self) -> UnixMillis {
            UnixMillis(self.0)
        }
    }

    #[test]
    fn a_moved_clock_shifts_in_both_directions_but_not_before_1970() {
        let clock = MovedClock::new(Arc::new(Standing(1_000)));
        let at = |offset| {
            clock.set_offset_ms(offset);
            (clock.now().0, clock.offset_ms())
        };
        assert_eq!(clock.now(), UnixMillis(1_000));
        assert_eq!([at(500), at(-400), at(-5_000)], [(1_500, 500), (600, -400), (0, -5_000)]);
    }
}
