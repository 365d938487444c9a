//! Decides whether a request that lost its GPU runs again. The worker owns executor
//! failure: the worker runs the request again if that does no harm, but a request that kills executors
//! must not walk through all of them.

use millrace_types::Reason;

/// Number of executor deaths during a request's runs, without other runs beside, at which the request
/// is quarantined.
pub const DEATHS_MAX: u32 = 2;

/// Attempts of a request, which travel with the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttemptRecord {
    /// Starts that are left, including the present one. At least 1.
    pub left: u32,
    /// Earlier starts that were lost.
    pub lost: u32,
    /// Executors that died while the request was running in them alone.
    pub deaths: u32,
    /// Whether the request may have run in an attempt that was lost.
    pub begun: bool,
    /// Whether a second run does no harm.
    pub idempotent: Idempotence,
}

/// Whether a request may be run again after a possible run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Idempotence {
    /// A second run does no harm.
    Yes,
    /// The request must not run twice.
    No,
}

/// Progress of a request at the loss of its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttemptProgress {
    /// The request was not at its turn, and either was not sent to the executor or its model was loaded there
    /// already; or the request had not reached the GPU. The request is not the cause of the loss.
    Waiting,
    /// The request's model was being loaded, or the run waited for room or inputs. The request has not run,
    /// but may be the cause.
    Preparing,
    /// The executor had the run while its weights were copied, and no copy was reported, perhaps because the
    /// reports were lost with the executor or are still on their way. So the request may have run, but the
    /// death does not count towards [`DEATHS_MAX`].
    Starting,
    /// The request may have run, and no other request on the executor may have.
    Begun,
    /// The request may have run beside others, any of which may be the cause.
    BegunBeside,
}

impl AttemptProgress {
    /// Returns the progress of a request that may have run, if `requests` requests of its executor may have
    /// run, this one included.
    #[must_use]
    pub fn begun(requests: usize) -> Self {
        if requests > 1 { Self::BegunBeside } else { Self::Begun }
    }
}

/// Decision about a request that lost its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RetryDecision {
    /// Run the request again, with this record.
    Again(AttemptRecord),
    /// Answer the request with an error.
    Refuse {
        /// Reason of the error.
        reason: Reason,
        /// Whether the request may have run.
        may_have_executed: bool,
    },
}

/// Cause of a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttemptLoss {
    /// The executor died.
    Died(AttemptProgress),
    /// The executor lives, but the run failed or could not be made.
    Failed(AttemptProgress),
}

/// Reason for which a GPU returned a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReturnReason {
    /// The dispatcher recalled the request, and the request had not begun.
    Recalled,
    /// The run failed or could not be made. The executor lives.
    Failed(AttemptProgress),
    /// The model's own executor process died; only in isolation by model.
    Died(AttemptProgress),
}

impl AttemptRecord {
    /// Returns the record of a request that was never started.
    #[must_use]
    pub fn new(left: u32, idempotent: Idempotence) -> Self {
        Self { left: left.max(1), lost: 0, deaths: 0, begun: false, idempotent }
    }

    /// Returns whether an earlier attempt was lost. Such a suspect runs alone, so that no other
    /// request is blamed for its failures.
    #[must_use]
    pub fn suspect(&self) -> bool {
        self.lost > 0
    }

    /// Decides after a loss.
    #[must_use]
    pub fn after(self, loss: AttemptLoss) -> RetryDecision {
        let (progress, died) = match loss {
            AttemptLoss::Died(progress) => (progress, 1),
            AttemptLoss::Failed(progress) => (progress, 0),
        };
        // Only a death has bystanders: a waiting request that failed by itself uses up an attempt.
        if loss == AttemptLoss::Died(AttemptProgress::Waiting) {
            return RetryDecision::Again(self);
        }
        let now_begun = !matches!(progress, AttemptProgress::Waiting | AttemptProgress::Preparing);
        let begun = self.begun || now_begun;
        let refuse = |reason| RetryDecision::Refuse { reason, may_have_executed: begun };
        if now_begun && self.idempotent == Idempotence::No {
            return refuse(Reason::ExecutorLost);
        }
        let deaths = self.deaths + if progress == AttemptProgress::Begun { died } else { 0 };
        if deaths >= DEATHS_MAX {
            return refuse(Reason::Quarantined);
        }
        if self.left <= 1 {
            return refuse(Reason::AttemptsExhausted);
        }
        RetryDecision::Again(Self { left: self.left - 1, lost: self.lost + 1, deaths, begun, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AttemptLoss::{Died, Failed};
    use AttemptProgress::{Begun, BegunBeside, Preparing, Starting, Waiting};
    use Idempotence::{No, Yes};

    fn check(left: u32, idempotent: Idempotence, losses: &[AttemptLoss], expected: RetryDecision) {
        let mut verdict = RetryDecision::Again(AttemptRecord::new(left, idempotent));
        for &loss in losses {
            let RetryDecision::Again(attempts) = verdict else {
                panic!("refused before {loss:?}: {verdict:?}")
            };
            verdict = attempts.after(loss);
        }
        assert_eq!(verdict, expected, "{losses:?}");
    }

    fn refused(reason: Reason, may_have_executed: bool) -> RetryDecision {
        RetryDecision::Refuse { reason, may_have_executed }
    }

    #[test]
    fn a_request_that_runs_in_two_dying_executors_is_quarantined() {
        check(3, Yes, &[Died(Begun), Died(Begun)], refused(Reason::Quarantined, true));
        check(3, Yes, &[Died(Begun), Failed(Preparing), Died(Begun)], refused(Reason::Quarantined, true));
    }

    #[test]
    fn a_death_beside_others_makes_a_suspect_and_only_deaths_alone_count() {
        let suspect = AttemptRecord { left: 2, lost: 1, deaths: 0, begun: true, idempotent: Yes };
        check(3, Yes, &[Died(BegunBeside)], RetryDecision::Again(suspect));
        assert!(suspect.suspect());
        check(3, Yes, &[Died(BegunBeside), Died(Begun), Died(Begun)], refused(Reason::Quarantined, true));
        check(3, No, &[Died(BegunBeside)], refused(Reason::ExecutorLost, true));
        assert_eq!([0, 1, 2].map(AttemptProgress::begun), [Begun, Begun, BegunBeside]);
    }

    #[test]
    fn a_request_that_is_not_idempotent_never_runs_twice() {
        check(3, No, &[Died(Begun)], refused(Reason::ExecutorLost, true));
        check(3, No, &[Failed(Begun)], refused(Reason::ExecutorLost, true));
        check(3, No, &[Died(Starting)], refused(Reason::ExecutorLost, true));
        let again = AttemptRecord { left: 2, lost: 1, deaths: 0, begun: false, idempotent: No };
        check(3, No, &[Died(Preparing)], RetryDecision::Again(again));
    }

    #[test]
    fn a_request_is_refused_when_its_attempts_are_used_up() {
        check(3, Yes, &[Failed(Begun); 3], refused(Reason::AttemptsExhausted, true));
        check(3, Yes, &[Died(Preparing); 3], refused(Reason::AttemptsExhausted, false));
        check(3, Yes, &[Died(Starting); 3], refused(Reason::AttemptsExhausted, true));
        let begun_before = [Failed(Begun), Failed(Preparing), Died(Preparing)];
        check(3, Yes, &begun_before, refused(Reason::AttemptsExhausted, true));
        check(2, Yes, &[Failed(Waiting); 2], refused(Reason::AttemptsExhausted, false));
        check(1, Yes, &[Died(Begun)], refused(Reason::AttemptsExhausted, true));
        check(0, Yes, &[Failed(Preparing)], refused(Reason::AttemptsExhausted, false));
    }

    #[test]
    fn a_bystander_of_a_death_loses_no_attempt() {
        let untouched = RetryDecision::Again(AttemptRecord::new(1, No));
        check(1, No, &[Died(Waiting); 9], untouched);
        assert!(!AttemptRecord::new(1, No).suspect());
    }
}
