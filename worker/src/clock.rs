//! The worker's clocks. Everything above the device reads time through [`Clock`] alone, so that the
//! same actors run on real time and on virtual time.

use std::time::Duration;

use millrace_types::{GpuIndex, Timestamp};

use millrace_core::trace::CoreId;

/// A monotonic clock, with the conversion of its spans to sleeps of the tokio runtime.
pub trait Clock: Send + Sync + 'static {
    /// Returns the current time.
    fn now(&self) -> Timestamp;

    /// Returns the time at which to wake `sleeper`, which asks for `at`. The result is never before
    /// `at`.
    fn wake_at(&self, at: Timestamp, sleeper: Sleeper) -> Timestamp;

    /// Returns the duration of a tokio sleep during which `span` passes on this clock.
    fn sleep_for(&self, span: Duration) -> Duration;
}

/// An actor or port that sleeps. In virtual time no two sleepers wake in the same microsecond, so
/// that the order of events does not depend on the order in which tokio serves timers that are due
/// at the same moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sleeper(u32);

impl Sleeper {
    /// The source of requests from outside the actors.
    pub const OUTSIDE: Self = Self(0);
    /// The Node actor, which has the timers of two cores: dispatch and fabric.
    pub const NODE: Self = Self(1);

    /// Returns the sleeper of a GPU's executor process.
    #[must_use]
    pub const fn port(gpu: GpuIndex) -> Self {
        Self(2 + gpu.0 * 4)
    }

    /// Returns this sleeper at another position among the sleepers that are due at the same moment. Each
    /// seed gives a different order, and seed 0 the usual order. The actors must be correct in
    /// every order.
    #[must_use]
    pub const fn permuted(self, seed: u64) -> Self {
        // The multiplier is odd and [`SLEEPERS`] a power of two, so no two sleepers get the same
        // position.
        let factor = (seed % SLEEPERS) * 2 + 1;
        let shift = (seed / SLEEPERS) % SLEEPERS;
        Self(((self.0 as u64 * factor + shift) % SLEEPERS) as u32)
    }

    /// Returns the sleeper of the actor that runs a core.
    #[must_use]
    pub const fn core(core: CoreId) -> Self {
        match core {
            CoreId::Dispatch | CoreId::Fabric => Self::NODE,
            CoreId::Gpu(gpu) => Self(3 + gpu.0 * 4),
            CoreId::Executor(gpu) => Self(4 + gpu.0 * 4),
            CoreId::Admission(function) => Self(5 + function.0 * 4),
            // The link core has no timer.
            CoreId::Link(_) => Self::NODE,
        }
    }
}

/// `CLOCK_MONOTONIC`. Grants name times of this clock and executors stamp events with this clock:
/// all processes of a machine share `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy, Default)]
pub struct MonotonicClock;

impl Clock for MonotonicClock {
    fn now(&self) -> Timestamp {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        // The monotonic clock starts at boot: neither part is ever negative.
        Timestamp(now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs())
    }

    fn wake_at(&self, at: Timestamp, _: Sleeper) -> Timestamp {
        at
    }

    fn sleep_for(&self, span: Duration) -> Duration {
        span
    }
}

/// A tokio runtime's paused time, slowed a thousandfold: a microsecond of this clock is a
/// millisecond of tokio's time. tokio's timers have a granularity of a millisecond, below which
/// they fire out of order.
#[derive(Debug, Clone, Copy)]
pub struct VirtualClock {
    zero: tokio::time::Instant,
    ties: u64,
}

impl VirtualClock {
    /// Factor by which the runtime's time passes faster than this clock.
    const SCALE: u32 = 1000;

    /// Returns a clock that reads zero at `zero`, in a runtime with paused time. Only sleeps
    /// move the time forward.
    #[must_use]
    pub fn starting_at(zero: tokio::time::Instant) -> Self {
        Self { zero, ties: 0 }
    }

    /// Returns this clock with another order of the sleepers that are due at the same moment
    /// ([`Sleeper::permuted`]).
    #[must_use]
    pub fn with_ties(self, ties: u64) -> Self {
        Self { ties, ..self }
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.zero.elapsed() / Self::SCALE
    }

    fn wake_at(&self, at: Timestamp, sleeper: Sleeper) -> Timestamp {
        own_microsecond(at, sleeper.permuted(self.ties))
    }

    fn sleep_for(&self, span: Duration) -> Duration {
        span.saturating_mul(Self::SCALE)
    }
}

/// Number of sleepers with separate microseconds. Sleepers beyond this number share microseconds.
const SLEEPERS: u64 = 256;

/// Returns the first microsecond at or after `at` that belongs to `sleeper`.
#[must_use]
pub fn own_microsecond(at: Timestamp, sleeper: Sleeper) -> Timestamp {
    let micros = at.0.div_ceil(1000);
    let own = u64::from(sleeper.0) % SLEEPERS;
    Timestamp((micros + (own + SLEEPERS - micros % SLEEPERS) % SLEEPERS) * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffled_sleepers_stay_apart() {
        for seed in [0, 1, 77, 255, 256, 65_535, u64::MAX] {
            let places: std::collections::BTreeSet<_> =
                (0..256).map(|sleeper| Sleeper(sleeper).permuted(seed)).collect();
            assert_eq!(places.len(), 256, "seed {seed}");
        }
        assert_eq!(Sleeper(7).permuted(0), Sleeper(7));
        assert_ne!(Sleeper(7).permuted(5), Sleeper(7));
    }

    #[test]
    fn each_sleeper_wakes_in_a_microsecond_of_its_own() {
        let sleepers = [Sleeper::OUTSIDE, Sleeper::NODE, Sleeper::port(GpuIndex(3))];
        for at in [0, 1, 999, 1000, 255_000, 256_001, 1_234_567] {
            let wakes = sleepers.map(|sleeper| own_microsecond(Timestamp(at), sleeper));
            for (wake, sleeper) in wakes.iter().zip(sleepers) {
                assert!(wake.0 >= at && wake.0 < at + (SLEEPERS + 1) * 1000, "{at} -> {wake:?}");
                assert_eq!(
                    own_microsecond(*wake, sleeper),
                    *wake,
                    "the clock's own wake time is not delayed again"
                );
            }
            assert!(wakes[0] != wakes[1] && wakes[1] != wakes[2] && wakes[0] != wakes[2]);
        }
    }
}
