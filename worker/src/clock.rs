//! Where time comes from. Everything above the device reads it here and nowhere else, so that the
//! same actors run on the wall clock and on virtual time.

use std::time::Duration;

use millrace_types::Timestamp;

/// A monotonic clock, and how long the runtime has to sleep for it.
pub trait Clock: Send + Sync + 'static {
    /// Now.
    fn now(&self) -> Timestamp;

    /// How long a tokio sleep must be for `span` to pass on this clock.
    fn sleep_for(&self, span: Duration) -> Duration;
}

/// `CLOCK_MONOTONIC`: the clock that grants name and executors stamp with, shared by every process
/// of the machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct MonotonicClock;

impl Clock for MonotonicClock {
    fn now(&self) -> Timestamp {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        // The monotonic clock starts at boot: neither part is ever negative.
        Timestamp(now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs())
    }

    fn sleep_for(&self, span: Duration) -> Duration {
        span
    }
}

/// A runtime's paused time, slowed a thousandfold: a microsecond here is a millisecond there,
/// because tokio's timers have a granularity of one millisecond and fire out of order below it.
#[derive(Debug, Clone, Copy)]
pub struct VirtualClock {
    zero: tokio::time::Instant,
}

impl VirtualClock {
    /// How much slower the runtime's time passes.
    const SCALE: u32 = 1000;

    /// Starts at zero now. Belongs in a runtime whose time is paused.
    #[must_use]
    pub fn start() -> Self {
        Self { zero: tokio::time::Instant::now() }
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.zero.elapsed() / Self::SCALE
    }

    fn sleep_for(&self, span: Duration) -> Duration {
        span.saturating_mul(Self::SCALE)
    }
}
