//! The failover rules of a call. Pure logic: takes the failure of an endpoint and returns the next
//! action.
//!
//! | failure of an endpoint | next action |
//! |---|---|
//! | the connection cannot be opened | try the next endpoint: the call did not reach this one |
//! | the connection breaks under the call | try the next endpoint under the same id if the call may run twice; otherwise report the error |
//! | the server has no leader or no ready worker, or is shutting down | try the next endpoint, unless the call may have been carried out and must not run twice |
//! | the server refuses the call for another reason | report the error: the other endpoints would refuse too |
//! | no response arrives within the timeout | report the error |
//!
//! A round asks each endpoint once. Another round follows after a pause only if an endpoint
//! reported that there is no leader. An election ends by itself, and other failures probably do
//! not.

use std::time::Duration;

use millrace_types::{Failure, Reason};

use crate::address::Address;
use crate::error::{CallFailure, Error};

/// The longest wait for the election of a leader. An election takes less than two seconds while a
/// majority of the controllers is up. A longer interruption needs an operator.
const LEADER_PATIENCE: Duration = Duration::from_secs(10);
/// The first pause between rounds. Each later pause is twice as long, up to `PAUSE_MAX`.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_millis(800);

/// The action after the connection broke under a call that was sent. The server may have carried
/// out the call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RetryPolicy {
    /// Reports the loss to [`Inference`](crate::Inference), which asks an endpoint whether the function is
    /// declared idempotent, and sends the call again only if it is. Without an answer, the call is not sent
    /// again.
    #[default]
    AsDeclared,
    /// Sends the call again to the next endpoint under the same id: a second execution does no
    /// harm.
    Allowed,
    /// Reports [`Error::ConnectionLost`] and never sends the call again.
    Forbidden,
}

/// A round of a call over all endpoints.
#[derive(Debug)]
pub(crate) struct FailoverRound {
    repeat: RetryPolicy,
    timeout: Duration,
    pause: Duration,
    /// The endpoints that failed in this round, in order.
    tried: Vec<Address>,
    /// The failure of this round that is most useful to the caller.
    told: Option<Error>,
    /// Another failure of this or an earlier round after which the call may have been carried out.
    executed: Option<Error>,
}

/// The pauses before each round except the first.
#[derive(Debug)]
pub(crate) struct Pauses {
    next: Duration,
    until: Duration,
}

impl Pauses {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { next: PAUSE_MIN, until: timeout.min(LEADER_PATIENCE) }
    }

    /// Returns the next pause, or `None` when the time is over. `elapsed` is the time since the
    /// call began.
    pub(crate) fn next(&mut self, elapsed: Duration) -> Option<Duration> {
        let pause = self.next;
        self.next = (pause * 2).min(PAUSE_MAX);
        (elapsed + pause < self.until).then_some(pause)
    }
}

impl FailoverRound {
    pub(crate) fn first(repeat: RetryPolicy, timeout: Duration) -> Self {
        Self { repeat, timeout, pause: Duration::ZERO, tried: Vec::new(), told: None, executed: None }
    }

    /// Returns the pause before this round.
    pub(crate) fn pause(&self) -> Duration {
        self.pause
    }

    /// Records the failure of an endpoint. Returns an error if no other endpoint may be asked.
    pub(crate) fn failed(&mut self, address: &Address, cause: CallFailure) -> Result<(), Error> {
        self.tried.push(address.clone());
        let address = address.clone();
        let error = match cause {
            CallFailure::TimedOut => return Err(Error::TimedOut { address, timeout: self.timeout }),
            CallFailure::NotSent(cause) => Error::Unreachable { addresses: self.tried.clone(), cause },
            CallFailure::Broken(cause) => {
                let lost = Error::ConnectionLost { address, cause };
                if self.repeat != RetryPolicy::Allowed {
                    return Err(lost);
                }
                lost
            }
            CallFailure::Answer(failure) if self.may_succeed_elsewhere(&failure) => Error::Refused(failure),
            CallFailure::Answer(failure) => return Err(self.with_earlier(Error::Refused(failure))),
        };
        let more_useful = self.told.as_ref().is_none_or(|told| weight(told) <= weight(&error));
        let other = if more_useful { self.told.replace(error) } else { Some(error) };
        self.executed = self.executed.take().or(other.filter(Error::may_have_executed));
        Ok(())
    }

    /// Returns the failure to report: the last one, with what earlier attempts may have done.
    fn with_earlier(&mut self, last: Error) -> Error {
        let told = self.told.take().filter(Error::may_have_executed);
        after_execution(last, self.executed.take().or(told))
    }

    /// Returns whether another endpoint may succeed.
    fn may_succeed_elsewhere(&self, failure: &Failure) -> bool {
        // A gateway that has just started waits for its workers while the other gateways serve.
        let elsewhere = matches!(
            failure.reason,
            Reason::NoLeader | Reason::NoWorker | Reason::FunctionNotReady | Reason::ShuttingDown
        );
        elsewhere && (self.repeat == RetryPolicy::Allowed || !failure.may_have_executed)
    }

    /// Returns the round after this one, in which every endpoint failed. Returns an error if no
    /// further round is due.
    pub(crate) fn next(self, pause: Option<Duration>) -> Result<Self, Error> {
        let Self { repeat, timeout, told, executed, .. } = self;
        let told = told.unwrap_or(Error::NoEndpoints);
        match pause {
            Some(pause) if told.reason() == Some(Reason::NoLeader) => {
                let executed = executed.or(Some(told).filter(Error::may_have_executed));
                Ok(Self { pause, executed, ..Self::first(repeat, timeout) })
            }
            _ => Err(after_execution(told, executed)),
        }
    }
}

/// Returns the failure to report after `last`, if the call may have been carried out with the failure `executed`.
pub(crate) fn after_execution(last: Error, executed: Option<Error>) -> Error {
    match (last, executed) {
        (Error::Refused(failure), Some(_)) => Error::Refused(Failure { may_have_executed: true, ..failure }),
        (last, Some(executed)) if !last.may_have_executed() => executed,
        (last, _) => last,
    }
}

/// Ranks a failure by its use to the caller: the lack of a leader explains more than a missing
/// response.
fn weight(error: &Error) -> u8 {
    match error {
        Error::Refused(failure) if failure.reason == Reason::NoLeader => 3,
        Error::Refused(_) => 2,
        Error::ConnectionLost { .. } => 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);
    const SOON: Option<Duration> = Some(PAUSE_MIN);

    fn address(name: &str) -> Address {
        format!("{name}:1").parse().unwrap()
    }

    fn refused(reason: Reason) -> CallFailure {
        CallFailure::Answer(Failure::new(reason, "why"))
    }

    fn broken() -> CallFailure {
        CallFailure::Broken("reset".to_owned())
    }

    fn not_sent() -> CallFailure {
        CallFailure::NotSent("refused".to_owned())
    }

    /// Returns a round in which the endpoints failed with these causes.
    fn round(repeat: RetryPolicy, causes: Vec<CallFailure>) -> Result<FailoverRound, Error> {
        let mut round = FailoverRound::first(repeat, TIMEOUT);
        for (name, cause) in ["a", "b", "c"].iter().zip(causes) {
            round.failed(&address(name), cause)?;
        }
        Ok(round)
    }

    #[test]
    fn only_failures_of_one_endpoint_are_retried_at_another() {
        for reason in Reason::ALL {
            let goes_on = round(RetryPolicy::Allowed, vec![refused(*reason)]).is_ok();
            let elsewhere =
                [Reason::NoLeader, Reason::NoWorker, Reason::FunctionNotReady, Reason::ShuttingDown];
            assert_eq!(goes_on, elsewhere.contains(reason), "{reason}");
        }
    }

    #[test]
    fn calls_that_may_have_run_are_repeated_only_if_allowed() {
        let after = || CallFailure::Answer(Failure::new(Reason::NoLeader, "unconfirmed").after_execution());
        for repeat in [RetryPolicy::AsDeclared, RetryPolicy::Forbidden] {
            assert!(matches!(round(repeat, vec![broken()]), Err(Error::ConnectionLost { .. })));
            assert!(matches!(round(repeat, vec![after()]), Err(Error::Refused(_))));
            assert!(round(repeat, vec![not_sent()]).is_ok());
        }
        assert!(round(RetryPolicy::Allowed, vec![broken(), after()]).is_ok());
    }

    #[test]
    fn another_round_follows_only_without_a_leader() {
        let next = |causes| round(RetryPolicy::Allowed, causes).unwrap().next(SOON);
        assert!(next(vec![not_sent(), refused(Reason::NoLeader), broken()]).is_ok());
        assert!(matches!(next(vec![not_sent(), not_sent()]), Err(Error::Unreachable { .. })));
        assert!(matches!(next(vec![refused(Reason::ShuttingDown), not_sent()]), Err(Error::Refused(_))));
        let given_up = round(RetryPolicy::Allowed, vec![refused(Reason::NoLeader)]).unwrap().next(None);
        assert_eq!(given_up.unwrap_err().reason(), Some(Reason::NoLeader));
    }

    #[test]
    fn an_attempt_that_may_have_run_is_not_forgotten() {
        let lost = round(RetryPolicy::Allowed, vec![broken(), not_sent()]).unwrap().next(SOON).unwrap_err();
        assert!(matches!(lost, Error::ConnectionLost { .. }), "{lost:?}");
        let first = round(RetryPolicy::Allowed, vec![broken(), refused(Reason::NoLeader)]).unwrap();
        let mut second = first.next(SOON).unwrap();
        second.failed(&address("a"), refused(Reason::NoLeader)).unwrap();
        assert!(second.next(None).unwrap_err().may_have_executed());
        let unconfirmed = CallFailure::Answer(Failure::new(Reason::NoLeader, "why").after_execution());
        for cause in [broken(), unconfirmed] {
            let first = round(RetryPolicy::Allowed, vec![cause, refused(Reason::NoLeader)]).unwrap();
            let mut second = first.next(SOON).unwrap();
            second.failed(&address("a"), not_sent()).unwrap();
            let unreachable = second.next(SOON).unwrap_err();
            assert!(unreachable.may_have_executed(), "{unreachable:?}");
        }
        let full = round(RetryPolicy::Allowed, vec![broken(), refused(Reason::QueueFull)]).unwrap_err();
        assert_eq!((full.reason(), full.may_have_executed()), (Some(Reason::QueueFull), true));
    }

    #[test]
    fn pauses_grow_and_end_before_the_timeout() {
        let all = |timeout: Duration| {
            let mut pauses = Pauses::new(timeout);
            let mut elapsed = Duration::ZERO;
            let mut made = Vec::new();
            while let Some(pause) = pauses.next(elapsed) {
                elapsed += pause;
                made.push(pause);
            }
            (made, elapsed)
        };
        let (made, elapsed) = all(TIMEOUT);
        assert!(made.is_sorted() && made[0] == PAUSE_MIN && elapsed < LEADER_PATIENCE, "{made:?}");
        assert!(all(Duration::from_millis(100)).1 < Duration::from_millis(100));
    }
}
