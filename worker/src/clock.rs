//! Where time comes from. Everything above the device reads it here and nowhere else, so that the
//! same actors run on the wall clock and on virtual time.

use std::time::Duration;

use millrace_types::{GpuIndex, Timestamp};

use millrace_policy::trace::CoreId;

/// A monotonic clock, and how long the runtime has to sleep for it.
pub trait Clock: Send + Sync + 'static {
    /// Now.
    fn now(&self) -> Timestamp;

    /// When to wake `sleeper`, who asks for `at`: not before it.
    fn wake_at(&self, at: Timestamp, sleeper: Sleeper) -> Timestamp;

    /// How long a tokio sleep must be for `span` to pass on this clock.
    fn sleep_for(&self, span: Duration) -> Duration;
}

/// Who sleeps. In virtual time no two of them ever wake in the same microsecond, so that the order
/// of what happens does not depend on how timers of one moment are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sleeper(u32);

impl Sleeper {
    /// Whoever brings requests from outside.
    pub const OUTSIDE: Self = Self(0);
    /// The Node actor, which has the timers of two cores.
    pub const NODE: Self = Self(1);

    /// A GPU's executor process.
    #[must_use]
    pub const fn port(gpu: GpuIndex) -> Self {
        Self(2 + gpu.0 * 4)
    }

    /// The same one, at another place among those of one moment: each seed has an order of its own, 0
    /// the usual one. What holds must hold in any order.
    #[must_use]
    pub const fn shuffled(self, seed: u64) -> Self {
        // Odd factors keep any two of the places apart.
        let (factor, shift) = ((seed % SLEEPERS) * 2 + 1, (seed / SLEEPERS) % SLEEPERS);
        Self(((self.0 as u64 * factor + shift) % SLEEPERS) as u32)
    }

    /// The actor of a core.
    #[must_use]
    pub const fn core(core: CoreId) -> Self {
        match core {
            CoreId::Dispatch | CoreId::Fabric => Self::NODE,
            CoreId::Gpu(gpu) => Self(3 + gpu.0 * 4),
            CoreId::Executor(gpu) => Self(4 + gpu.0 * 4),
            CoreId::Admission(function) => Self(5 + function.0 * 4),
            // Has no timer.
            CoreId::Link(_) => Self::NODE,
        }
    }
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

    fn wake_at(&self, at: Timestamp, _: Sleeper) -> Timestamp {
        at
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
    ties: u64,
}

impl VirtualClock {
    /// How much slower the runtime's time passes.
    const SCALE: u32 = 1000;

    /// Zero at this moment of a runtime whose time is paused: it moves on by what is slept, and by nothing
    /// else.
    #[must_use]
    pub fn starting_at(zero: tokio::time::Instant) -> Self {
        Self { zero, ties: 0 }
    }

    /// The same with those of one moment in an order of their own ([`Sleeper::shuffled`]).
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
        own_microsecond(at, sleeper.shuffled(self.ties))
    }

    fn sleep_for(&self, span: Duration) -> Duration {
        span.saturating_mul(Self::SCALE)
    }
}

/// Sleepers that virtual time keeps apart; more than that share microseconds.
const SLEEPERS: u64 = 256;

/// The first microsecond from `at` on that is `sleeper`'s own.
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
                (0..256).map(|sleeper| Sleeper(sleeper).shuffled(seed)).collect();
            assert_eq!(places.len(), 256, "seed {seed}");
        }
        assert_eq!(Sleeper(7).shuffled(0), Sleeper(7));
        assert_ne!(Sleeper(7).shuffled(5), Sleeper(7));
    }

    #[test]
    fn everyone_wakes_in_a_microsecond_of_their_own() {
        let sleepers = [Sleeper::OUTSIDE, Sleeper::NODE, Sleeper::port(GpuIndex(3))];
        for at in [0, 1, 999, 1000, 255_000, 256_001, 1_234_567] {
            let wakes = sleepers.map(|sleeper| own_microsecond(Timestamp(at), sleeper));
            for (wake, sleeper) in wakes.iter().zip(sleepers) {
                assert!(wake.0 >= at && wake.0 < at + (SLEEPERS + 1) * 1000, "{at} -> {wake:?}");
                assert_eq!(own_microsecond(*wake, sleeper), *wake, "a wake is due when it comes");
            }
            assert!(wakes[0] != wakes[1] && wakes[1] != wakes[2] && wakes[0] != wakes[2]);
        }
    }
}
