//! The process pool of one program, and the queue of its requests. This is the core of the process pool
//! actor.
//!
//! ```text
//!            Spawn            Ready           Run
//! Waiting ────────► Starting ───────► Idle ────────► Running
//!    ▲                │ too long        ▲              │ │ withdrawn, or its deadline
//!    │ backoff        ▼                 ├── Returned ──┘ ▼
//!    └──── Exited ◄─ Dying              └── Returned ── Abandoned
//!               at once ▲                  its grace │
//!                       └────────────────────────────┘
//! ```
//!
//! Each process runs one request at a time; other requests wait in order of arrival. If a running
//! request is withdrawn or expires, its process has [`GRACE`] to finish. After that the process is
//! killed, and another is started at once.
//!
//! If a process dies with a request, the request is retried or refused by the rules of
//! [`millrace_core::attempts`], as on a GPU. If the last few starts all failed and no process is ready,
//! requests are refused instead of waiting.
//!
//! A worker that lacks descriptors or memory is not a fault of the program or of the request. A
//! request that cannot be handed over for that reason is refused, so that the controller tries
//! another worker, and its process goes on. After a stop, no request is run again.

mod protocol;

use std::collections::VecDeque;
use std::time::Duration;

use millrace_types::{Incarnation, Reason, Timestamp};

pub use self::protocol::{Action, Event, KillReason, ProcessSlot, ProgramHealth};
use crate::lifecycle::{RESTARTS, START_TIMEOUT};
use millrace_core::Core;
use millrace_core::attempts::{AttemptLoss, AttemptProgress, AttemptRecord, RetryDecision};
use millrace_core::backoff::Backoff;
use millrace_core::ids::RequestKey;

/// Maximum number of requests of one program that wait for a process.
pub const WAITING_MAX: usize = 1024;
/// Consecutive failed starts after which requests are refused.
pub const FAILED_STARTS_MAX: u32 = 3;
/// Time that a process has to answer a request without a waiting client. The next request waits
/// this long at most; a new process would cost its start.
pub const GRACE: Duration = Duration::from_secs(1);

/// Bits of an incarnation that count the starts within one life of an actor: more than any life
/// needs.
const LIFE_BITS: u32 = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    key: RequestKey,
    attempts: AttemptRecord,
    deadline: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No process exists, because of a pending first start or a stop of the pool.
    Gone,
    Waiting {
        until: Timestamp,
    },
    Starting {
        give_up: Timestamp,
    },
    Idle,
    Running(Request),
    /// The process runs a request without a waiting client.
    Abandoned {
        key: RequestKey,
        until: Timestamp,
    },
    /// The process was killed, for a fault of its own or not.
    Dying(Fault),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Own,
    None,
}

#[derive(Debug)]
struct Process {
    state: State,
    incarnation: Incarnation,
    ready_since: Option<Timestamp>,
    backoff: Backoff,
}

/// The processes of one program, and their queue.
#[derive(Debug)]
pub struct ProcessPool {
    processes: Vec<Process>,
    waiting: VecDeque<Request>,
    failed_starts: u32,
    restarts: u64,
    /// Whether any process has ever completed its handshake.
    greeted: bool,
    /// Whether a start timed out since the last handshake.
    silent: bool,
    stopping: bool,
}

impl ProcessPool {
    /// Returns a pool of processes that are not started yet. Incarnations begin above those of
    /// earlier lives, because `life` grows from one life to the next. The seed spreads restarts.
    #[must_use]
    pub fn new(processes: u32, life: u64, seed: u64) -> Self {
        let process = |place: u32| Process {
            state: State::Gone,
            incarnation: Incarnation(life << LIFE_BITS),
            ready_since: None,
            backoff: Backoff::new(RESTARTS, seed ^ u64::from(place).wrapping_mul(0xff51_afd7_ed55_8ccd)),
        };
        Self {
            processes: (0..processes).map(process).collect(),
            waiting: VecDeque::new(),
            failed_starts: 0,
            restarts: 0,
            greeted: false,
            silent: false,
            stopping: false,
        }
    }

    /// Returns whether the pool was stopped and its last process has ended: no more actions follow.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.stopping && self.processes.iter().all(|process| process.state == State::Gone)
    }

    /// Returns the number of attempts to start a process after the first in its slot.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Returns the request that a process runs, abandoned or not.
    #[must_use]
    pub fn running(&self, place: ProcessSlot, incarnation: Incarnation) -> Option<RequestKey> {
        let process = self.processes.get(place.0 as usize).filter(|it| it.incarnation == incarnation)?;
        match process.state {
            State::Running(Request { key, .. }) | State::Abandoned { key, .. } => Some(key),
            _ => None,
        }
    }

    /// Returns whether the program can run requests. A single process that exits early may be an
    /// accident, but a start that times out counts as a failure at once.
    #[must_use]
    pub fn health(&self) -> ProgramHealth {
        match self.greeted {
            _ if self.is_broken() => ProgramHealth::Failing,
            false if self.silent => ProgramHealth::Failing,
            false => ProgramHealth::Starting,
            true => ProgramHealth::Up,
        }
    }

    /// Returns whether the program does not start.
    fn is_broken(&self) -> bool {
        self.failed_starts >= FAILED_STARTS_MAX && self.processes.iter().all(|it| it.ready_since.is_none())
    }

    fn process(&mut self, place: ProcessSlot, incarnation: Incarnation) -> Option<&mut Process> {
        self.processes.get_mut(place.0 as usize).filter(|it| it.incarnation == incarnation)
    }

    /// Starts another process in the slot of an ended process.
    fn again(&mut self, now: Timestamp, place: ProcessSlot, actions: &mut Vec<Action>) {
        self.restarts += 1;
        self.spawn(now, place, actions);
    }

    fn spawn(&mut self, now: Timestamp, place: ProcessSlot, actions: &mut Vec<Action>) {
        let process = &mut self.processes[place.0 as usize];
        process.incarnation = Incarnation(process.incarnation.0 + 1);
        process.state = State::Starting { give_up: now + START_TIMEOUT };
        actions.push(Action::Spawn { place, incarnation: process.incarnation });
    }

    fn places(&self) -> impl Iterator<Item = ProcessSlot> + use<> {
        // The number of processes is at most `PROCESSES_MAX`.
        (0..self.processes.len() as u32).map(ProcessSlot)
    }

    fn exited(&mut self, now: Timestamp, place: ProcessSlot, actions: &mut Vec<Action>) {
        let process = &mut self.processes[place.0 as usize];
        let since = process.ready_since.take();
        if self.stopping {
            process.state = State::Gone;
            return;
        }
        if process.state == State::Dying(Fault::None) {
            return self.again(now, place, actions);
        }
        let until = process.backoff.died(now, since);
        let was = std::mem::replace(&mut process.state, State::Waiting { until });
        match since {
            None => self.failed_starts = self.failed_starts.saturating_add(1),
            Some(_) => self.failed_starts = 0,
        }
        if let State::Running(request) = was {
            self.lost(request, AttemptLoss::Died(AttemptProgress::Begun), actions);
        }
        if self.is_broken() {
            for Request { key, attempts, .. } in std::mem::take(&mut self.waiting) {
                actions.push(Action::Fail {
                    key,
                    reason: Reason::FunctionNotReady,
                    may_have_executed: attempts.begun,
                });
            }
        }
        if until <= now {
            self.again(now, place, actions);
        }
    }

    /// Handles a process that ended because the worker lacked a resource. Without a handshake, the
    /// start counts as failed for any reason, so that the next starts are spread over time.
    fn given_up(&mut self, now: Timestamp, place: ProcessSlot, actions: &mut Vec<Action>) {
        let process = &mut self.processes[place.0 as usize];
        if process.ready_since.is_none() || self.stopping {
            return self.exited(now, place, actions);
        }
        process.ready_since = None;
        if let State::Running(request) = process.state {
            self.lost(request, AttemptLoss::Failed(AttemptProgress::Begun), actions);
        }
        self.again(now, place, actions);
    }

    /// Decides about the request of a process that ended.
    fn lost(&mut self, request: Request, loss: AttemptLoss, actions: &mut Vec<Action>) {
        match request.attempts.after(loss) {
            RetryDecision::Again(attempts) => self.waiting.push_front(Request { attempts, ..request }),
            RetryDecision::Refuse { reason, may_have_executed } => {
                actions.push(Action::Fail { key: request.key, reason, may_have_executed });
            }
        }
    }

    /// Refuses a request that could not be handed to its process, which waits for another request.
    fn unsent(
        &mut self,
        place: ProcessSlot,
        incarnation: Incarnation,
        key: RequestKey,
        actions: &mut Vec<Action>,
    ) {
        let Some(process) = self.process(place, incarnation) else { return };
        match process.state {
            State::Running(request) if request.key == key => {
                let may_have_executed = request.attempts.begun;
                actions.push(Action::Fail { key, reason: Reason::QueueFull, may_have_executed });
            }
            State::Abandoned { key: has, .. } if has == key => {}
            _ => return,
        }
        process.state = State::Idle;
    }

    fn enqueue(&mut self, request: Request, actions: &mut Vec<Action>) {
        let reason = match () {
            () if self.is_broken() => Reason::FunctionNotReady,
            () if self.waiting.len() >= WAITING_MAX => Reason::QueueFull,
            () => return self.waiting.push_back(request),
        };
        let may_have_executed = request.attempts.begun;
        actions.push(Action::Fail { key: request.key, reason, may_have_executed });
    }

    /// Assigns waiting requests to idle processes.
    fn give_out(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        for place in self.places() {
            if self.processes[place.0 as usize].state != State::Idle {
                continue;
            }
            let Some(request) = self.next(now, actions) else { return };
            self.processes[place.0 as usize].state = State::Running(request);
            actions.push(Action::Run { place, key: request.key, attempt: request.attempts.lost + 1 });
        }
    }

    /// Returns the first waiting request that has not expired.
    fn next(&mut self, now: Timestamp, actions: &mut Vec<Action>) -> Option<Request> {
        loop {
            let request = self.waiting.pop_front()?;
            if now < request.deadline {
                return Some(request);
            }
            actions.push(Action::Forget { key: request.key });
        }
    }

    /// Marks a running request as abandoned: its client no longer waits.
    fn abandon(&mut self, place: ProcessSlot, until: Timestamp, actions: &mut Vec<Action>) {
        let state = &mut self.processes[place.0 as usize].state;
        if let State::Running(Request { key, .. }) = *state {
            *state = State::Abandoned { key, until };
            actions.push(Action::Forget { key });
        }
    }

    /// Kills all processes. The caller has answered every request, so the queue is emptied. A
    /// running request is not run again, even if a process completes its handshake during the kill.
    fn stop(&mut self, actions: &mut Vec<Action>) {
        self.stopping = true;
        let waiting = std::mem::take(&mut self.waiting);
        actions.extend(waiting.into_iter().map(|Request { key, .. }| Action::Forget { key }));
        for place in self.places() {
            let state = &mut self.processes[place.0 as usize].state;
            if let State::Running(Request { key, .. }) = *state {
                actions.push(Action::Forget { key });
            }
            if matches!(state, State::Gone | State::Waiting { .. }) {
                *state = State::Gone;
                continue;
            }
            *state = State::Dying(Fault::None);
            actions.push(Action::Kill { place, why: KillReason::Stop });
        }
    }

    fn tick(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        for place in self.places() {
            let mut kill = |pool: &mut Self, fault, why| {
                pool.processes[place.0 as usize].state = State::Dying(fault);
                actions.push(Action::Kill { place, why });
            };
            match self.processes[place.0 as usize].state {
                State::Waiting { until } if until <= now => self.again(now, place, actions),
                State::Starting { give_up } if give_up <= now => {
                    self.silent = true;
                    kill(self, Fault::Own, KillReason::Silent);
                }
                State::Abandoned { until, .. } if until <= now => {
                    kill(self, Fault::None, KillReason::Abandoned)
                }
                State::Running(Request { deadline, .. }) if deadline <= now => {
                    self.abandon(place, now + GRACE, actions);
                }
                _ => {}
            }
        }
    }
}

impl Core for ProcessPool {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Start => self.places().for_each(|place| self.spawn(now, place, actions)),
            Event::Ready { place, incarnation } => {
                if let Some(process) = self.process(place, incarnation)
                    && matches!(process.state, State::Starting { .. })
                {
                    (process.state, process.ready_since) = (State::Idle, Some(now));
                    (self.failed_starts, self.greeted, self.silent) = (0, true, false);
                }
            }
            Event::Exited { place, incarnation } => {
                if self.process(place, incarnation).is_some() {
                    self.exited(now, place, actions);
                }
            }
            Event::ResourceExhausted { place, incarnation } => {
                if self.process(place, incarnation).is_some() {
                    self.given_up(now, place, actions);
                }
            }
            Event::Unsent { place, incarnation, key } => self.unsent(place, incarnation, key, actions),
            Event::Returned { place, incarnation, key } => {
                if let Some(process) = self.process(place, incarnation)
                    && let State::Running(Request { key: has, .. }) | State::Abandoned { key: has, .. } =
                        process.state
                    && has == key
                {
                    process.state = State::Idle;
                }
            }
            Event::Enqueue { key, attempts, deadline } => {
                self.enqueue(Request { key, attempts, deadline }, actions);
            }
            Event::Withdraw { key } => {
                if let Some(at) = self.waiting.iter().position(|request| request.key == key) {
                    self.waiting.remove(at);
                    actions.push(Action::Forget { key });
                }
                let runs = |process: &Process| matches!(process.state, State::Running(request) if request.key == key);
                if let Some(at) = self.places().find(|place| runs(&self.processes[place.0 as usize])) {
                    self.abandon(at, now + GRACE, actions);
                }
            }
            Event::Stop => self.stop(actions),
            Event::Tick => {}
        }
        self.tick(now, actions);
        self.give_out(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let wake = |process: &Process| match process.state {
            State::Waiting { until: at }
            | State::Starting { give_up: at }
            | State::Running(Request { deadline: at, .. })
            | State::Abandoned { until: at, .. } => Some(at),
            State::Gone | State::Idle | State::Dying(_) => None,
        };
        self.processes.iter().filter_map(wake).min()
    }
}

#[cfg(test)]
mod tests;
