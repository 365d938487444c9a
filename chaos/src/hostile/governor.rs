//! Limits a process to a share of one processor, with a token bucket of processor time: the bucket fills at
//! the share, and the process spends its own time. The computation ([`Governor`]) is pure;
//! [`ProcessorPace`] reads the clocks and sleeps. No facility of the machine is needed, such as a
//! cgroup.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

use crate::clock;

/// The attackers' share of a processor.
pub(crate) const SHARE: f64 = 0.5;
/// Maximum processor time in a burst, after the process was idle. The value is small, so that attackers take
/// their share as evenly as the control does. A longer burst alone would delay the clients on this machine.
const BURST: Duration = Duration::from_millis(4);
/// Processor time that low-priority work leaves to other work.
const SPARE: Duration = Duration::from_millis(2);
/// Minimum pause, because timers are not finer.
const REST_MIN: Duration = Duration::from_millis(1);

/// The token bucket.
#[derive(Debug, Clone, PartialEq)]
struct Governor {
    share: f64,
    at: Duration,
    used: Duration,
    /// Seconds of processor time in the bucket; negative after an overdraft.
    credit: f64,
    /// Maximum overdraft so far, in seconds of processor time.
    overdraft: f64,
}

impl Governor {
    fn new(share: f64, at: Duration, used: Duration) -> Self {
        Self { share, at, used, credit: BURST.as_secs_f64(), overdraft: 0.0 }
    }

    /// Returns the pause that the process owes at `at`, after `used` processor time in all, until
    /// the bucket contains `reserve`.
    fn rest(&mut self, at: Duration, used: Duration, reserve: Duration) -> Duration {
        let filled = at.saturating_sub(self.at).as_secs_f64() * self.share;
        let spent = used.saturating_sub(self.used).as_secs_f64();
        self.credit = (self.credit + filled - spent).min(BURST.as_secs_f64());
        self.overdraft = self.overdraft.max(-self.credit);
        self.at = at;
        self.used = used;
        let missing = reserve.as_secs_f64() - self.credit;
        if missing <= 0.0 {
            return Duration::ZERO;
        }
        Duration::from_secs_f64(missing / self.share).max(REST_MIN)
    }
}

/// Returns the used share of a processor.
pub(crate) fn share_of(used: Duration, passed: Duration) -> f64 {
    if passed.is_zero() { 0.0 } else { used.as_secs_f64() / passed.as_secs_f64() }
}

/// The governor of this process. Clones share the governor, so every task of the process keeps the same pace.
#[derive(Debug, Clone)]
pub(super) struct ProcessorPace {
    begun: Instant,
    governor: Arc<Mutex<Governor>>,
}

impl ProcessorPace {
    /// Starts with a full bucket now.
    ///
    /// # Errors
    /// If the system does not report the processor time of the process.
    pub(super) fn begin() -> anyhow::Result<Self> {
        let governor = Governor::new(SHARE, Duration::ZERO, used()?);
        Ok(Self { begun: clock::now(), governor: Arc::new(Mutex::new(governor)) })
    }

    /// Sleeps as long as the process has to. Call this before each step of work.
    pub(super) async fn keep(&self) {
        self.keep_with(Duration::ZERO).await;
    }

    /// Sleeps until the process has time to spare: low-priority work leaves the rest to others.
    pub(super) async fn keep_spare(&self) {
        self.keep_with(SPARE).await;
    }

    async fn keep_with(&self, reserve: Duration) {
        loop {
            let rest = {
                let mut governor = self.governor.lock().unwrap_or_else(PoisonError::into_inner);
                let spent = used().unwrap_or(governor.used);
                governor.rest(self.begun.elapsed(), spent, reserve)
            };
            if rest.is_zero() {
                return;
            }
            tokio::time::sleep(rest).await;
        }
    }

    /// Returns the maximum overdraft of a step of work. A large value reveals a step that was not
    /// cut into pieces.
    pub(super) fn overdraft(&self) -> Duration {
        let overdraft = self.governor.lock().unwrap_or_else(PoisonError::into_inner).overdraft;
        Duration::from_secs_f64(overdraft)
    }

    /// Returns the processor time of the process so far.
    pub(super) fn used(&self) -> Duration {
        used().unwrap_or_else(|_| self.governor.lock().unwrap_or_else(PoisonError::into_inner).used)
    }
}

/// Returns the processor time of all threads of this process.
fn used() -> anyhow::Result<Duration> {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).context("processor time is not negative")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a process that does steps of `step` and sleeps as required, for `lasts`. Returns
    /// its processor time.
    fn run(governor: &mut Governor, step: Duration, lasts: Duration) -> Duration {
        let begun = governor.at;
        let before = governor.used;
        let mut at = begun;
        let mut used = before;
        while at < begun + lasts {
            at += step;
            used += step;
            at += governor.rest(at, used, SPARE);
        }
        used - before
    }

    #[test]
    fn a_busy_process_is_held_to_its_share() {
        let second = Duration::from_secs(1);
        for step_micros in [50, 700, 3_000, 40_000] {
            let step = Duration::from_micros(step_micros);
            let mut governor = Governor::new(SHARE, Duration::ZERO, Duration::ZERO);
            let took = run(&mut governor, step, 60 * second);
            let share = share_of(took, 60 * second);
            assert!((0.45..=0.505).contains(&share), "steps of {step:?}: {share}");
        }
    }

    #[test]
    fn an_idle_process_saves_at_most_a_burst() {
        let mut governor = Governor::new(SHARE, Duration::ZERO, Duration::ZERO);
        let hour = Duration::from_secs(3_600);
        assert_eq!(governor.rest(hour, Duration::ZERO, Duration::ZERO), Duration::ZERO);
        let too_many = BURST + Duration::from_millis(50);
        let rest = governor.rest(hour, too_many, Duration::ZERO);
        assert!((rest.as_secs_f64() - 0.1).abs() < 1e-6, "an overdraft of 50 ms costs 100 ms: {rest:?}");
        assert!((governor.overdraft - 0.05).abs() < 1e-6, "the overdraft is 50 ms: {}", governor.overdraft);
    }

    #[test]
    fn low_priority_work_waits_while_other_work_may_continue() {
        let mut governor = Governor::new(SHARE, Duration::ZERO, Duration::ZERO);
        let took = BURST - SPARE / 2;
        assert_eq!(governor.rest(Duration::ZERO, took, Duration::ZERO), Duration::ZERO);
        let rest = governor.rest(Duration::ZERO, took, SPARE);
        let missing = (SPARE / 2).as_secs_f64();
        assert!(
            (rest.as_secs_f64() - missing / SHARE).abs() < 1e-6,
            "half of {SPARE:?} is missing: {rest:?}"
        );
    }

    #[test]
    fn clocks_that_stand_still_require_no_pause() {
        let mut governor = Governor::new(SHARE, Duration::ZERO, Duration::ZERO);
        assert_eq!(governor.rest(Duration::ZERO, Duration::ZERO, Duration::ZERO), Duration::ZERO);
        assert!(share_of(Duration::ZERO, Duration::ZERO).abs() < f64::EPSILON);
    }
}
