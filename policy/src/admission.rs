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
        /// Whether it completed before and is counted and charged: what it gave was lost before it was
        /// answered, and it runs again.
        counted: bool,
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
    counted: bool,
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
        counted: bool,
    ) -> Option<Reason> {
        if self.retiring {
            return Some(Reason::FunctionNotReady);
        }
        if self.requests.len() >= self.config.in_flight_max as usize {
            return Some(Reason::QueueFull);
        }
        if deadline <= now {
            self.score.expired += 1;
            if !counted {
                self.score_if_objective(false);
            }
            return Some(Reason::TimedOut);
        }
        self.requests.insert(key, InFlight { accepted, deadline, dispatched: false, counted });
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
        if !request.counted {
            let in_time = self.config.deadline.is_some_and(|limit| now.since(request.accepted) <= limit);
            self.score.completed += 1;
            self.score_if_objective(in_time);
            self.score.billed_ms += u64::try_from(ran.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
        }
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
            let Some(request) = self.remove(key) else { continue };
            self.score.expired += 1;
            if !request.counted {
                self.score_if_objective(false);
            }
            let (reason, may_have_executed) = (Reason::TimedOut, request.dispatched);
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
            Event::Arrive { key, accepted, timeout, attempts_left, counted } => {
                actions.push(match self.arrive(now, key, accepted, accepted + timeout, counted) {
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
mod tests;
