//! What becomes of a request that lost its GPU. The worker owns executor failure (DESIGN §3): it
//! runs the request again where that does no harm, but a request that kills executors must not
//! walk through all of them.

use millrace_types::Reason;

/// Executors a request may be running in as they die before it is kept from others.
pub const DEATHS_MAX: u32 = 2;

/// A request's record. Travels with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attempts {
    /// How often it may still be started, counting the present time. At least 1.
    pub left: u32,
    /// Times it was started before, and lost.
    pub lost: u32,
    /// Executors it was running in as they died.
    pub deaths: u32,
    /// Whether it may have run by now, wherever it was lost.
    pub begun: bool,
    /// Whether running it twice does no harm.
    pub idempotent: Idempotent,
}

/// Whether a request may be run again when it may have run before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Idempotent {
    /// It may.
    Yes,
    /// It must not.
    No,
}

/// How far a request was when it lost its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Progress {
    /// It waited behind another, with its program known to be harmless. It has nothing to do with
    /// what happened.
    Waiting,
    /// It was being brought onto the GPU: not run, but perhaps the cause.
    Preparing,
    /// It may have run.
    Begun,
}

/// What to do with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Run it again, with this record.
    Again(Attempts),
    /// Answer with an error.
    Refuse {
        /// Which.
        reason: Reason,
        /// Whether it may have run.
        may_have_executed: bool,
    },
}

/// How a request lost its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Loss {
    /// The executor died.
    Died(Progress),
    /// The executor lives, but could not run it.
    Failed(Progress),
}

impl Attempts {
    /// The record of a request that was never started.
    #[must_use]
    pub fn new(left: u32, idempotent: Idempotent) -> Self {
        Self { left: left.max(1), lost: 0, deaths: 0, begun: false, idempotent }
    }

    /// Whether it was around when an executor died. A suspect runs alone, so that nobody else is
    /// blamed for what it does.
    #[must_use]
    pub fn suspect(&self) -> bool {
        self.lost > 0
    }

    /// Decides after a loss.
    #[must_use]
    pub fn after(self, loss: Loss) -> Verdict {
        let (progress, died) = match loss {
            Loss::Died(progress) => (progress, 1),
            Loss::Failed(progress) => (progress, 0),
        };
        // What failed by itself is nobody's bystander.
        if loss == Loss::Died(Progress::Waiting) {
            return Verdict::Again(self);
        }
        let now_begun = progress == Progress::Begun;
        let begun = self.begun || now_begun;
        let refuse = |reason| Verdict::Refuse { reason, may_have_executed: begun };
        if now_begun && self.idempotent == Idempotent::No {
            return refuse(Reason::ExecutorLost);
        }
        let deaths = self.deaths + if now_begun { died } else { 0 };
        if deaths >= DEATHS_MAX {
            return refuse(Reason::Quarantined);
        }
        if self.left <= 1 {
            return refuse(Reason::AttemptsExhausted);
        }
        Verdict::Again(Self { left: self.left - 1, lost: self.lost + 1, deaths, begun, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Idempotent::{No, Yes};
    use Loss::{Died, Failed};
    use Progress::{Begun, Preparing, Waiting};

    fn check(left: u32, idempotent: Idempotent, losses: &[Loss], expected: Verdict) {
        let mut verdict = Verdict::Again(Attempts::new(left, idempotent));
        for &loss in losses {
            let Verdict::Again(attempts) = verdict else { panic!("refused before {loss:?}: {verdict:?}") };
            verdict = attempts.after(loss);
        }
        assert_eq!(verdict, expected, "{losses:?}");
    }

    fn refused(reason: Reason, may_have_executed: bool) -> Verdict {
        Verdict::Refuse { reason, may_have_executed }
    }

    #[test]
    fn running_in_two_dying_executors_is_quarantined() {
        check(3, Yes, &[Died(Begun), Died(Begun)], refused(Reason::Quarantined, true));
        check(3, Yes, &[Died(Begun), Failed(Preparing), Died(Begun)], refused(Reason::Quarantined, true));
    }

    #[test]
    fn what_must_not_run_twice_is_not_run_again_once_it_may_have() {
        check(3, No, &[Died(Begun)], refused(Reason::ExecutorLost, true));
        check(3, No, &[Failed(Begun)], refused(Reason::ExecutorLost, true));
        let again = Attempts { left: 2, lost: 1, deaths: 0, begun: false, idempotent: No };
        check(3, No, &[Died(Preparing)], Verdict::Again(again));
    }

    #[test]
    fn attempts_run_out() {
        check(3, Yes, &[Failed(Begun); 3], refused(Reason::AttemptsExhausted, true));
        check(3, Yes, &[Died(Preparing); 3], refused(Reason::AttemptsExhausted, false));
        let begun_before = [Failed(Begun), Failed(Preparing), Died(Preparing)];
        check(3, Yes, &begun_before, refused(Reason::AttemptsExhausted, true));
        check(2, Yes, &[Failed(Waiting); 2], refused(Reason::AttemptsExhausted, false));
        check(1, Yes, &[Died(Begun)], refused(Reason::AttemptsExhausted, true));
        check(0, Yes, &[Failed(Preparing)], refused(Reason::AttemptsExhausted, false));
    }

    #[test]
    fn a_bystander_loses_nothing() {
        let untouched = Verdict::Again(Attempts::new(1, No));
        check(1, No, &[Died(Waiting); 9], untouched);
        assert!(!Attempts::new(1, No).suspect());
    }
}
