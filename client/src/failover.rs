//! Where a call goes when an endpoint fails it. Pure: failures in, what to do next out.
//!
//! | what an endpoint did | then |
//! |---|---|
//! | it could not be connected to | the next one: the call did not happen there |
//! | the connection broke under the call | the next one, under the same id, if that may be; else the caller hears of it |
//! | it has no leader, no worker that is ready, or goes down | the next one, unless the call may have been carried out and must not be again |
//! | it refused the call for another reason | the caller hears of it: the others would say the same |
//! | it did not answer in time | the caller hears of it |
//!
//! Each endpoint is asked once in a round. Another round follows, after a pause, only where one of
//! them said that there is no leader: an election ends by itself, and what else is wrong is not
//! likely to.

use std::time::Duration;

use millrace_types::{Failure, Reason};

use crate::address::Address;
use crate::endpoints::Repeat;
use crate::error::{Cause, Error};

/// How long the election of a leader is waited for. It takes less than two seconds where a majority
/// of the controllers is up; more than this and it waits for an operator.
const LEADER_PATIENCE: Duration = Duration::from_secs(10);
/// The first pause before everybody is asked again; each is twice the one before.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_millis(800);

/// One round of a call over the endpoints.
#[derive(Debug)]
pub(crate) struct Round {
    repeat: Repeat,
    timeout: Duration,
    pause: Duration,
    /// In this round, in order.
    tried: Vec<Address>,
    /// The failure of this round that says most.
    told: Option<Error>,
    /// Whether an endpoint of any round may have carried the call out.
    may_have_executed: bool,
}

/// How long to wait before each round but the first.
#[derive(Debug)]
pub(crate) struct Pauses {
    next: Duration,
    until: Duration,
}

impl Pauses {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self { next: PAUSE_MIN, until: timeout.min(LEADER_PATIENCE) }
    }

    /// The next pause, so long after the call began; `None` when it is time to give up.
    pub(crate) fn next(&mut self, elapsed: Duration) -> Option<Duration> {
        let pause = self.next;
        self.next = (pause * 2).min(PAUSE_MAX);
        (elapsed + pause < self.until).then_some(pause)
    }
}

impl Round {
    pub(crate) fn first(repeat: Repeat, timeout: Duration) -> Self {
        let (pause, tried, told) = (Duration::ZERO, Vec::new(), None);
        Self { repeat, timeout, pause, tried, told, may_have_executed: false }
    }

    /// The pause before it.
    pub(crate) fn pause(&self) -> Duration {
        self.pause
    }

    /// Takes an endpoint's failure in. An error when no other is to be asked.
    pub(crate) fn failed(&mut self, address: &Address, cause: Cause) -> Result<(), Error> {
        self.tried.push(address.clone());
        let (address, timeout) = (address.clone(), self.timeout);
        let error = match cause {
            Cause::TimedOut => return Err(Error::TimedOut { address, timeout }),
            Cause::NotSent(cause) => Error::Unreachable { addresses: self.tried.clone(), cause },
            Cause::Broken(cause) => {
                let lost = Error::ConnectionLost { address, cause };
                if self.repeat != Repeat::Allowed {
                    return Err(lost);
                }
                lost
            }
            Cause::Answer(failure) if self.goes_on(&failure) => Error::Refused(failure),
            Cause::Answer(failure) => return Err(Error::Refused(failure)),
        };
        self.may_have_executed |= error.may_have_executed();
        if self.told.as_ref().is_none_or(|told| weight(told) <= weight(&error)) {
            self.told = Some(error);
        }
        Ok(())
    }

    /// Whether another endpoint may do what this one did not.
    fn goes_on(&self, failure: &Failure) -> bool {
        // A gateway that has just started waits for its workers while the others serve.
        let elsewhere = matches!(
            failure.reason,
            Reason::NoLeader | Reason::NoWorker | Reason::FunctionNotReady | Reason::ShuttingDown
        );
        elsewhere && (self.repeat == Repeat::Allowed || !failure.may_have_executed)
    }

    /// The round after this one, which every endpoint failed. An error when there is to be none.
    pub(crate) fn next(self, pause: Option<Duration>) -> Result<Self, Error> {
        let Self { repeat, timeout, told, may_have_executed, .. } = self;
        let told = told.unwrap_or(Error::NoEndpoints);
        match pause {
            Some(pause) if told.reason() == Some(Reason::NoLeader) => {
                Ok(Self { pause, may_have_executed, ..Self::first(repeat, timeout) })
            }
            _ => Err(match told {
                Error::Refused(failure) => {
                    let may_have_executed = failure.may_have_executed || may_have_executed;
                    Error::Refused(Failure { may_have_executed, ..failure })
                }
                told => told,
            }),
        }
    }
}

/// How much a failure says: why there is no leader is more than that somebody did not answer.
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

    fn refused(reason: Reason) -> Cause {
        Cause::Answer(Failure::new(reason, "why"))
    }

    fn broken() -> Cause {
        Cause::Broken("reset".to_owned())
    }

    fn not_sent() -> Cause {
        Cause::NotSent("refused".to_owned())
    }

    /// A round in which every endpoint failed so.
    fn round(repeat: Repeat, causes: Vec<Cause>) -> Result<Round, Error> {
        let mut round = Round::first(repeat, TIMEOUT);
        for (name, cause) in ["a", "b", "c"].iter().zip(causes) {
            round.failed(&address(name), cause)?;
        }
        Ok(round)
    }

    #[test]
    fn what_another_endpoint_would_refuse_too_is_told_at_once() {
        for reason in Reason::ALL {
            let goes_on = round(Repeat::Allowed, vec![refused(*reason)]).is_ok();
            let elsewhere =
                [Reason::NoLeader, Reason::NoWorker, Reason::FunctionNotReady, Reason::ShuttingDown];
            assert_eq!(goes_on, elsewhere.contains(reason), "{reason}");
        }
    }

    #[test]
    fn what_may_have_run_is_sent_again_only_where_allowed() {
        let after = || Cause::Answer(Failure::new(Reason::NoLeader, "unconfirmed").after_execution());
        for repeat in [Repeat::AsDeclared, Repeat::Forbidden] {
            assert!(matches!(round(repeat, vec![broken()]), Err(Error::ConnectionLost { .. })));
            assert!(matches!(round(repeat, vec![after()]), Err(Error::Refused(_))));
            assert!(round(repeat, vec![not_sent()]).is_ok());
        }
        assert!(round(Repeat::Allowed, vec![broken(), after()]).is_ok());
    }

    #[test]
    fn only_the_lack_of_a_leader_is_waited_for() {
        let next = |causes| round(Repeat::Allowed, causes).unwrap().next(SOON);
        assert!(next(vec![not_sent(), refused(Reason::NoLeader), broken()]).is_ok());
        assert!(matches!(next(vec![not_sent(), not_sent()]), Err(Error::Unreachable { .. })));
        assert!(matches!(next(vec![refused(Reason::ShuttingDown), not_sent()]), Err(Error::Refused(_))));
        let given_up = round(Repeat::Allowed, vec![refused(Reason::NoLeader)]).unwrap().next(None);
        assert_eq!(given_up.unwrap_err().reason(), Some(Reason::NoLeader));
    }

    #[test]
    fn an_attempt_that_may_have_run_is_not_forgotten() {
        let lost = round(Repeat::Allowed, vec![broken(), not_sent()]).unwrap().next(SOON).unwrap_err();
        assert!(matches!(lost, Error::ConnectionLost { .. }), "{lost:?}");
        let round = round(Repeat::Allowed, vec![broken(), refused(Reason::NoLeader)]).unwrap();
        let mut second = round.next(SOON).unwrap();
        second.failed(&address("a"), refused(Reason::NoLeader)).unwrap();
        assert!(second.next(None).unwrap_err().may_have_executed());
    }

    #[test]
    fn pauses_grow_and_end_in_time() {
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
