//! Admission of a function's requests: admits each request, answers each exactly once, and counts
//! its outcome. The core of the Function actor.
//!
//! ```text
//! Arrive ──► Enqueue | Fail
//! Completed | Failed | Cancel | Tick past the deadline ──► Answer | Fail | Withdraw
//! ```
//!
//! A request is known from its arrival to its answer. Later events about the request, such as the
//! end of a run that outlived its timeout, are dropped here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{Reason, Timestamp};

use millrace_core::Core;
use millrace_core::attempts::{AttemptRecord, Idempotence};
use millrace_core::ids::RequestKey;

/// Limits and objective of a function's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Maximum number of requests in flight.
    pub in_flight_max: u32,
    /// Time within which a request counts as served in time; `None` scores no request.
    pub deadline: Option<Duration>,
    /// Whether the function's requests may run twice.
    pub idempotent: Idempotence,
}

/// Input of the admission core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// A request arrived.
    Arrive {
        key: RequestKey,
        /// Time at which the worker accepted the request.
        accepted: Timestamp,
        /// Remainder of the client's timeout at that time.
        timeout: Duration,
        /// Maximum number of starts.
        attempts_left: u32,
        /// Whether the request completed before and is already counted and charged. The request
        /// runs again because its outputs were lost before the answer.
        counted: bool,
    },
    /// A request was assigned to a GPU.
    Dispatched { key: RequestKey },
    /// A request produced outputs.
    Completed {
        key: RequestKey,
        /// GPU time to bill.
        billed: Duration,
    },
    /// A request will produce no outputs.
    Failed {
        key: RequestKey,
        reason: Reason,
        /// Whether the request may have run.
        may_have_executed: bool,
    },
    /// The client of a request disconnected or cancelled.
    Cancel { key: RequestKey },
    /// The node dropped all its requests.
    NodeLost { reason: Reason },
    /// The function accepts no further requests.
    Retire,
    /// Time passed.
    Tick,
}

/// Output of the admission core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Add a request to the node's queue.
    Enqueue {
        key: RequestKey,
        /// Record of the request's attempts.
        attempts: AttemptRecord,
    },
    /// Answer with the outputs that came with the event.
    Answer { key: RequestKey },
    /// Answer with an error.
    Fail {
        key: RequestKey,
        reason: Reason,
        /// Whether the request may have run.
        may_have_executed: bool,
    },
    /// Withdraw a request from the node, because its client no longer waits.
    Withdraw { key: RequestKey },
    /// Report that the function has no request left and will get no more.
    Retired,
}

/// Outcomes and charges of a function so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct FunctionTotals {
    /// Requests answered with outputs.
    pub completed: u64,
    /// Requests that timed out.
    pub expired: u64,
    /// Requests answered with another error.
    pub failed: u64,
    /// Requests cancelled by the client.
    pub cancelled: u64,
    /// m: requests served in time (T17).
    pub in_time: u64,
    /// n: requests that completed or expired (T17). A cancelled or failed request does not show how
    /// fast the function is served.
    pub scored: u64,
    /// Milliseconds of GPU time charged: only answered attempts, each rounded up. On a
    /// shared GPU a run counts with its share of the SMs.
    pub billed_ms: u64,
}

impl FunctionTotals {
    /// Returns the sum of both scores.
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
    /// Whether the request was ever assigned to a GPU.
    dispatched: bool,
    counted: bool,
}

/// Requests of a function.
#[derive(Debug)]
pub struct Admission {
    config: Config,
    requests: BTreeMap<RequestKey, InFlight>,
    deadlines: BTreeSet<(Timestamp, RequestKey)>,
    score: FunctionTotals,
    retiring: bool,
}

impl Admission {
    /// Creates a function without requests.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            requests: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            score: FunctionTotals::default(),
            retiring: false,
        }
    }

    /// Returns the score so far.
    #[must_use]
    pub fn score(&self) -> FunctionTotals {
        self.score
    }

    /// Returns the number of admitted requests without an answer.
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

    fn completed(&mut self, now: Timestamp, key: RequestKey, billed: Duration, actions: &mut Vec<Action>) {
        let Some(request) = self.remove(key) else { return };
        if !request.counted {
            let in_time = self.config.deadline.is_some_and(|limit| now.since(request.accepted) <= limit);
            self.score.completed += 1;
            self.score_if_objective(in_time);
            self.score.billed_ms += u64::try_from(billed.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX);
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
            let may_have_executed = request.dispatched;
            actions.push(Action::Fail { key, reason: Reason::TimedOut, may_have_executed });
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
                        let attempts = AttemptRecord::new(attempts_left, self.config.idempotent);
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
            Event::Completed { key, billed } => self.completed(now, key, billed, actions),
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
