//! Holds a process to a share of one processor: a bucket of processor time that fills at the share and
//! from which the process pays its own. The sums ([`Governor`]) are pure; [`ProcessorPace`] reads the clocks and
//! sleeps by timers. Nothing of the machine is needed, such as a cgroup.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

use crate::clock;

/// The processor time that attackers may take, of one processor.
pub(crate) const SHARE: f64 = 0.5;
/// The processor time that a process may take at once after it was idle.
const BURST: Duration = Duration::from_millis(20);
/// The processor time that work which only fills the share leaves to other work.
const SPARE: Duration = Duration::from_millis(10);
/// The shortest rest: timers are not finer.
const REST_MIN: Duration = Duration::from_millis(1);

/// The sums.
#[derive(Debug, Clone, PartialEq)]
struct Governor {
    share: f64,
    at: Duration,
    used: Duration,
    /// Seconds of processor time that may be taken now. Negative: that many too many were taken.
    credit: f64,
    /// The most processor time that was taken beyond what the process had.
    overdraft: f64,
}

impl Governor {
    fn new(share: f64, at: Duration, used: Duration) -> Self {
        Self { share, at, used, credit: BURST.as_secs_f64(), overdraft: 0.0 }
    }

    /// Returns the rest that the process owes at `at`, having used so much processor time in all, until it has
    /// `reserve` to take again.
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

/// The share that was taken, of one processor.
pub(crate) fn share_of(used: Duration, passed: Duration) -> f64 {
    if passed.is_zero() { 0.0 } else { used.as_secs_f64() / passed.as_secs_f64() }
}

/// This process's governor. Clones share it: every task of the process keeps the same pace.
#[derive(Debug, Clone)]
pub(super) struct ProcessorPace {
    begun: Instant,
    governor: Arc<Mutex<Governor>>,
}

impl ProcessorPace {
    /// Begins now.
    ///
    /// # Errors
    /// When the system does not tell the time that the process took.
    pub(super) fn begin() -> anyhow::Result<Self> {
        let governor = Governor::new(SHARE, Duration::ZERO, used()?);
        Ok(Self { begun: clock::now(), governor: Arc::new(Mutex::new(governor)) })
    }

    /// Rests for as long as the process has to. To be called before each step of work.
    pub(super) async fn keep(&self) {
        self.keep_with(Duration::ZERO).await;
    }

    /// Rests until the process has time to spare: work that only fills the share leaves the rest to others.
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

    /// The most processor time that one step of work took beyond what the process had: such a step was not cut
    /// into pieces.
    pub(super) fn overdraft(&self) -> Duration {
        let overdraft = self.governor.lock().unwrap_or_else(PoisonError::into_inner).overdraft;
        Duration::from_secs_f64(overdraft)
    }

    /// The processor time that the process took so far.
    pub(super) fn used(&self) -> Duration {
        used().unwrap_or_else(|_| self.governor.lock().unwrap_or_else(PoisonError::into_inner).used)
    }
}

/// The processor time of this process, of all its threads.
fn used() -> anyhow::Result<Duration> {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).context("processor time is not negative")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that does steps of `step` and rests as it is told, for `lasts`; what it took.
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
    fn a_greedy_process_takes_its_share() {
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
    fn an_idle_process_saves_up_no_more_than_a_burst() {
        let mut governor = Governor::new(SHARE, Duration::ZERO, Duration::ZERO);
        let hour = Duration::from_secs(3_600);
        assert_eq!(governor.rest(hour, Duration::ZERO, Duration::ZERO), Duration::ZERO);
        let too_many = BURST + Duration::from_millis(50);
        let rest = governor.rest(hour, too_many, Duration::ZERO);
        assert!((rest.as_secs_f64() - 0.1).abs() < 1e-6, "50 ms too many take 100 ms: {rest:?}");
        assert!((governor.overdraft - 0.05).abs() < 1e-6, "50 ms too many: {}", governor.overdraft);
    }

    #[test]
    fn filling_work_waits_while_other_work_may_go_on() {
        let mut governor = Governor::new(SHARE, Duration::ZERO, Duration::ZERO);
        let took = BURST - SPARE / 2;
        assert_eq!(governor.rest(Duration::ZERO, took, Duration::ZERO), Duration::ZERO);
        let rest = governor.rest(Duration::ZERO, took, SPARE);
        assert!((rest.as_secs_f64() - 0.01).abs() < 1e-6, "5 ms are missing: {rest:?}");
    }

    #[test]
    fn clocks_that_stand_still_are_no_rest() {
        let mut governor = Governor::new(SHARE, Duration::ZERO, Duration::ZERO);
        assert_eq!(governor.rest(Duration::ZERO, Duration::ZERO, Duration::ZERO), Duration::ZERO);
        assert!(share_of(Duration::ZERO, Duration::ZERO).abs() < f64::EPSILON);
    }
}
