//! Admits a function's requests, answers each exactly once, and keeps its score. The core of the
//! Function actor.
//!
//! ```text
//! Arrive ──► Enqueue | Refuse
//! Completed | Failed | Cancel | Tick past the deadline ──► Answer | Fail | Withdraw
//! ```
//!
//! A request is known from its arrival to its answer and no longer: what comes about it later (a
//! run that outlived its timeout) is dropped here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{Reason, Timestamp};

use crate::attempts::{Attempts, Idempotent};
use crate::core::Core;
use crate::ids::RequestKey;

/// What a function's requests are held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Requests it may have in flight.
    pub in_flight_max: u32,
    /// Within how long a request counts as served in time; `None` scores nothing.
    pub deadline: Option<Duration>,
    /// Whether its requests may be run twice.
    pub idempotent: Idempotent,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// A request came.
    Arrive {
        /// Its key.
        key: RequestKey,
        /// When the worker took it.
        accepted: Timestamp,
        /// What was left then of the client's timeout.
        timeout: Duration,
        /// How often it may be started.
        attempts_left: u32,
    },
    /// It was given to a GPU.
    Dispatched {
        /// Which.
        key: RequestKey,
    },
    /// It has outputs.
    Completed {
        /// Which.
        key: RequestKey,
        /// GPU time of the attempt.
        ran: Duration,
    },
    /// It will have none.
    Failed {
        /// Which.
        key: RequestKey,
        /// Why.
        reason: Reason,
        /// Whether it may have run.
        may_have_executed: bool,
    },
    /// Its client went away.
    Cancel {
        /// Which.
        key: RequestKey,
    },
    /// The node drops everything it has.
    NodeLost {
        /// Why.
        reason: Reason,
    },
    /// Take no more requests.
    Retire,
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Give it to the node's queue.
    Enqueue {
        /// Which.
        key: RequestKey,
        /// Its record.
        attempts: Attempts,
    },
    /// Answer with the outputs that came with the event.
    Answer {
        /// Which.
        key: RequestKey,
    },
    /// Answer with an error.
    Fail {
        /// Which.
        key: RequestKey,
        /// Which.
        reason: Reason,
        /// Whether it may have run.
        may_have_executed: bool,
    },
    /// Tell the node that nobody waits for it any more.
    Withdraw {
        /// Which.
        key: RequestKey,
    },
    /// The function has no request left and will get no more.
    Retired,
}

/// A function's score and bill so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Score {
    /// Answered with outputs.
    pub completed: u64,
    /// Timed out.
    pub expired: u64,
    /// Answered with another error.
    pub failed: u64,
    /// Given up by the client.
    pub cancelled: u64,
    /// m: served in time (T17).
    pub in_time: u64,
    /// n: completed or expired (T17). A request that the client gave up or that failed says
    /// nothing about how fast the function is served.
    pub scored: u64,
    /// Milliseconds of GPU time charged: of answered attempts only, each rounded up.
    pub billed_ms: u64,
}

impl Score {
    /// Both, added up.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            completed: self.completed + other.completed,
            expired: self.expired + other.expired,
            failed: self.failed + other.failed,
            cancelled: self.cancelled + other.cancelled,
            in_time: self.in_time + other.in_time,
            scored: self.scored + other.scored,
            billed_ms: self.billed_ms + other.billed_ms,
        }
    }
}

#[derive(Debug)]
struct InFlight {
    accepted: Timestamp,
    deadline: Timestamp,
    /// Whether a GPU has it or had it.
    dispatched: bool,
}

/// One function's requests.
#[derive(Debug)]
pub struct Admission {
    config: Config,
    requests: BTreeMap<RequestKey, InFlight>,
    deadlines: BTreeSet<(Timestamp, RequestKey)>,
    score: Score,
    retiring: bool,
}

impl Admission {
    /// No request yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            requests: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            score: Score::default(),
            retiring: false,
        }
    }

    /// The score so far.
    #[must_use]
    pub fn score(&self) -> Score {
        self.score
    }

    /// Requests admitted and not answered.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.requests.len()
    }

    fn arrive(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        accepted: Timestamp,
        deadline: Timestamp,
    ) -> Option<Reason> {
        if self.retiring {
            return Some(Reason::FunctionNotReady);
        }
        if self.requests.len() >= self.config.in_flight_max as usize {
            return Some(Reason::QueueFull);
        }
        if deadline <= now {
            self.score.expired += 1;
            self.score_if_objective(false);
            return Some(Reason::TimedOut);
        }
        self.requests.insert(key, InFlight { accepted, deadline, dispatched: false });
        self.deadlines.insert((deadline, key));
        None
    }

    fn remove(&mut self, key: RequestKey) -> Option<InFlight> {
        let request = self.requests.remove(&key)?;
        self.deadlines.remove(&(request.deadline, key));
        Some(request)
    }

    fn score_if_objective(&mut self, in_time: bool) {
        if self.config.deadline.is_some() {
            self.score.scored += 1;
            self.score.in_time += u64::from(in_time);
        }
    }

    fn completed(&mut self, now: Timestamp, key: RequestKey, ran: Duration, actions: &mut Vec<Action>) {
        let Some(request) = self.remove(key) else { return };
        let in_time = self.config.deadline.is_some_and(|limit| now.since(request.accepted) <= limit);
        self.score.completed += 1;
        self.score_if_objective(in_time);
        self.score.billed_ms += u64::try_from(ran.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        actions.push(Action::Answer { key });
    }

    fn lose_all(&mut self, reason: Reason, actions: &mut Vec<Action>) {
        self.deadlines.clear();
        for (key, request) in std::mem::take(&mut self.requests) {
            self.score.failed += 1;
            let may_have_executed = request.dispatched;
            actions.push(Action::Fail { key, reason, may_have_executed });
        }
    }

    fn expire(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while let Some(&(deadline, key)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            let dispatched = self.remove(key).is_some_and(|request| request.dispatched);
            self.score.expired += 1;
            self.score_if_objective(false);
            let (reason, may_have_executed) = (Reason::TimedOut, dispatched);
            actions.push(Action::Fail { key, reason, may_have_executed });
            actions.push(Action::Withdraw { key });
        }
    }
}

impl Core for Admission {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Arrive { key, accepted, timeout, attempts_left } => {
                actions.push(match self.arrive(now, key, accepted, accepted + timeout) {
                    None => {
                        let attempts = Attempts::new(attempts_left, self.config.idempotent);
                        Action::Enqueue { key, attempts }
                    }
                    Some(reason) => Action::Fail { key, reason, may_have_executed: false },
                });
            }
            Event::Dispatched { key } => {
                if let Some(request) = self.requests.get_mut(&key) {
                    request.dispatched = true;
                }
            }
            Event::Completed { key, ran } => self.completed(now, key, ran, actions),
            Event::Failed { key, reason, may_have_executed } => {
                if self.remove(key).is_some() {
                    self.score.failed += 1;
                    actions.push(Action::Fail { key, reason, may_have_executed });
                }
            }
            Event::Cancel { key } => {
                if self.remove(key).is_some() {
                    self.score.cancelled += 1;
                    actions.push(Action::Withdraw { key });
                }
            }
            Event::NodeLost { reason } => self.lose_all(reason, actions),
            Event::Retire => self.retiring = true,
            Event::Tick => self.expire(now, actions),
        }
        if self.retiring && self.requests.is_empty() {
            actions.push(Action::Retired);
        }
    }

    fn next_wake(&self) -> Option<Timestamp> {
        self.deadlines.first().map(|&(deadline, _)| deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn function(in_flight_max: u32) -> Admission {
        let deadline = Some(Duration::from_millis(10));
        Admission::new(Config { in_flight_max, deadline, idempotent: Idempotent::Yes })
    }

    fn step(function: &mut Admission, at_ms: u64, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        function.on_event(Timestamp(at_ms * MS), event, &mut actions);
        actions
    }

    fn arrive(function: &mut Admission, at_ms: u64, key: u64, timeout_ms: u64) -> Vec<Action> {
        let timeout = Duration::from_millis(timeout_ms);
        let accepted = Timestamp(at_ms * MS);
        step(function, at_ms, Event::Arrive { key: RequestKey(key), accepted, timeout, attempts_left: 3 })
    }

    fn completed(key: u64, ran_us: u64) -> Event {
        Event::Completed { key: RequestKey(key), ran: Duration::from_micros(ran_us) }
    }

    fn failed(key: u64, reason: Reason, may_have_executed: bool) -> Action {
        Action::Fail { key: RequestKey(key), reason, may_have_executed }
    }

    const fn withdraw(key: u64) -> Action {
        Action::Withdraw { key: RequestKey(key) }
    }

    #[test]
    fn answers_what_completes_and_bills_it_by_the_started_millisecond() {
        let mut function = function(8);
        let attempts = Attempts::new(3, Idempotent::Yes);
        assert_eq!(arrive(&mut function, 0, 1, 100), [Action::Enqueue { key: RequestKey(1), attempts }]);
        arrive(&mut function, 0, 2, 100);
        assert_eq!(step(&mut function, 10, completed(1, 1001)), [Action::Answer { key: RequestKey(1) }]);
        assert_eq!(step(&mut function, 11, completed(2, 1000)), [Action::Answer { key: RequestKey(2) }]);
        let expected = Score { completed: 2, in_time: 1, scored: 2, billed_ms: 3, ..Score::default() };
        assert_eq!(function.score(), expected);
        assert_eq!(function.next_wake(), None);
    }

    #[test]
    fn refuses_beyond_the_bound_and_takes_again_below_it() {
        let mut function = function(1);
        arrive(&mut function, 0, 1, 100);
        assert_eq!(arrive(&mut function, 0, 2, 100), [failed(2, Reason::QueueFull, false)]);
        step(&mut function, 1, completed(1, 1));
        assert!(matches!(arrive(&mut function, 1, 3, 100)[..], [Action::Enqueue { .. }]));
    }

    #[test]
    fn a_request_expires_at_its_deadline_and_its_late_end_is_dropped() {
        let mut function = function(8);
        arrive(&mut function, 0, 1, 50);
        arrive(&mut function, 0, 2, 50);
        step(&mut function, 1, Event::Dispatched { key: RequestKey(2) });
        assert_eq!(function.next_wake(), Some(Timestamp(50 * MS)));
        assert_eq!(step(&mut function, 49, Event::Tick), []);
        let expired =
            [failed(1, Reason::TimedOut, false), withdraw(1), failed(2, Reason::TimedOut, true), withdraw(2)];
        assert_eq!(step(&mut function, 50, Event::Tick), expired);
        assert_eq!(step(&mut function, 51, completed(2, 1)), []);
        let expected = Score { expired: 2, scored: 2, ..Score::default() };
        assert_eq!(function.score(), expected);
    }

    #[test]
    fn what_comes_with_no_time_left_expires_at_once() {
        let mut function = function(8);
        assert_eq!(arrive(&mut function, 5, 1, 0), [failed(1, Reason::TimedOut, false)]);
        assert_eq!((function.score().expired, function.in_flight()), (1, 0));
    }

    #[test]
    fn a_cancelled_or_failed_request_is_not_scored() {
        let mut function = function(8);
        arrive(&mut function, 0, 1, 50);
        arrive(&mut function, 0, 2, 50);
        assert_eq!(step(&mut function, 1, Event::Cancel { key: RequestKey(1) }), [withdraw(1)]);
        let quarantined =
            Event::Failed { key: RequestKey(2), reason: Reason::Quarantined, may_have_executed: true };
        assert_eq!(step(&mut function, 1, quarantined), [failed(2, Reason::Quarantined, true)]);
        assert_eq!(step(&mut function, 2, quarantined), []);
        assert_eq!(function.score(), Score { cancelled: 1, failed: 1, ..Score::default() });
    }

    #[test]
    fn a_lost_node_costs_every_request_an_answer_but_none_its_silence() {
        let mut function = function(8);
        arrive(&mut function, 0, 1, 50);
        arrive(&mut function, 0, 2, 50);
        step(&mut function, 1, Event::Dispatched { key: RequestKey(2) });
        let lost = [failed(1, Reason::Internal, false), failed(2, Reason::Internal, true)];
        assert_eq!(step(&mut function, 2, Event::NodeLost { reason: Reason::Internal }), lost);
        assert_eq!((function.in_flight(), function.next_wake()), (0, None));
    }

    #[test]
    fn a_retiring_function_refuses_and_ends_with_its_last_answer() {
        let mut function = function(8);
        arrive(&mut function, 0, 1, 50);
        assert_eq!(step(&mut function, 1, Event::Retire), []);
        let refused = failed(2, Reason::FunctionNotReady, false);
        assert_eq!(arrive(&mut function, 1, 2, 50), [refused]);
        let last = [Action::Answer { key: RequestKey(1) }, Action::Retired];
        assert_eq!(step(&mut function, 2, completed(1, 1)), last);
    }

    #[test]
    fn without_an_objective_nothing_is_scored() {
        let config = Config { in_flight_max: 8, deadline: None, idempotent: Idempotent::No };
        let mut function = Admission::new(config);
        arrive(&mut function, 0, 1, 50);
        step(&mut function, 1, completed(1, 1));
        assert_eq!((function.score().completed, function.score().scored), (1, 0));
    }
}
