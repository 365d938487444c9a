//! The processes of one program and the requests for them. The core of the Crew actor.
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
//! Each process has one request at a time; the others wait in the order they came. One whose request
//! nobody waits for any more, since it was withdrawn or its deadline has come, has [`GRACE`] to answer
//! it all the same: then it is killed, and another one started at once. One that ends with a request is
//! lost, and the request goes by the rules of [`crate::attempts`], as on a GPU. While the last few starts
//! all failed and no process is up, requests are refused, and not kept waiting for what does not come. What
//! the worker lacks (descriptors, memory) is neither the program's fault nor the request's: a request that
//! cannot be handed over for it is refused, so that another worker is asked, and its process goes on. Once
//! it is stopped, nobody waits for any request, and none is run again.

mod protocol;

use std::collections::VecDeque;
use std::time::Duration;

use millrace_types::{Incarnation, Reason, Timestamp};

pub use self::protocol::{Action, Event, Health, Place, Why};
use crate::attempts::{Attempts, Loss, Progress, Verdict};
use crate::backoff::Backoff;
use crate::core::Core;
use crate::ids::RequestKey;
use crate::lifecycle::{RESTARTS, START_TIMEOUT};

/// Requests of one program that wait for a process.
pub const WAITING_MAX: usize = 1024;
/// So many starts in a row that came to nothing have requests refused.
pub const FAILED_STARTS_MAX: u32 = 3;
/// How long a process may take to answer what nobody waits for any more. It costs whoever is next this
/// long; a new process would cost its start.
pub const GRACE: Duration = Duration::from_secs(1);

/// Starts of one life of an actor, in bits: more than it ever comes to.
const LIFE_BITS: u32 = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    key: RequestKey,
    attempts: Attempts,
    deadline: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// There is none: it was not started yet, or the crew is stopped.
    Gone,
    Waiting {
        until: Timestamp,
    },
    Starting {
        give_up: Timestamp,
    },
    Idle,
    Running(Request),
    /// It runs what nobody waits for.
    Abandoned {
        key: RequestKey,
        until: Timestamp,
    },
    /// It was killed; for its own fault or not.
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

/// The processes of one program.
#[derive(Debug)]
pub struct Crew {
    processes: Vec<Process>,
    waiting: VecDeque<Request>,
    failed_starts: u32,
    restarts: u64,
    /// Whether any process has ever greeted, or took too long to.
    greeted: bool,
    silent: bool,
    stopping: bool,
}

impl Crew {
    /// So many processes, none of which is started. Their incarnations begin above those of `life`, of
    /// which each is lower than the next. The seed spreads restarts.
    #[must_use]
    pub fn new(processes: u32, life: u64, seed: u64) -> Self {
        let process = |place: u32| Process {
            state: State::Gone,
            incarnation: Incarnation(life << LIFE_BITS),
            ready_since: None,
            backoff: Backoff::new(RESTARTS, seed ^ u64::from(place).wrapping_mul(0xff51_afd7_ed55_8ccd)),
        };
        let processes = (0..processes).map(process).collect();
        let waiting = VecDeque::new();
        let (failed_starts, restarts) = (0, 0);
        Self { processes, waiting, failed_starts, restarts, greeted: false, silent: false, stopping: false }
    }

    /// Whether it was stopped and its last process has ended: nothing happens any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.stopping && self.processes.iter().all(|process| process.state == State::Gone)
    }

    /// Processes started, or tried to, after the first at their place.
    #[must_use]
    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    /// The request that a process has, whether or not somebody waits for it.
    #[must_use]
    pub fn running(&self, place: Place, incarnation: Incarnation) -> Option<RequestKey> {
        let process = self.processes.get(place.0 as usize).filter(|it| it.incarnation == incarnation)?;
        match process.state {
            State::Running(Request { key, .. }) | State::Abandoned { key, .. } => Some(key),
            _ => None,
        }
    }

    /// Whether requests have somebody to run them. One start that comes to nothing at once may be an
    /// accident; one that takes all its time is none.
    #[must_use]
    pub fn health(&self) -> Health {
        match self.greeted {
            _ if self.is_broken() => Health::Failing,
            false if self.silent => Health::Failing,
            false => Health::Starting,
            true => Health::Up,
        }
    }

    /// Whether the program does not start.
    fn is_broken(&self) -> bool {
        self.failed_starts >= FAILED_STARTS_MAX && self.processes.iter().all(|it| it.ready_since.is_none())
    }

    fn process(&mut self, place: Place, incarnation: Incarnation) -> Option<&mut Process> {
        self.processes.get_mut(place.0 as usize).filter(|it| it.incarnation == incarnation)
    }

    /// Starts another process where one has ended.
    fn again(&mut self, now: Timestamp, place: Place, actions: &mut Vec<Action>) {
        self.restarts += 1;
        self.spawn(now, place, actions);
    }

    fn spawn(&mut self, now: Timestamp, place: Place, actions: &mut Vec<Action>) {
        let process = &mut self.processes[place.0 as usize];
        process.incarnation = Incarnation(process.incarnation.0 + 1);
        process.state = State::Starting { give_up: now + START_TIMEOUT };
        actions.push(Action::Spawn { place, incarnation: process.incarnation });
    }

    fn places(&self) -> impl Iterator<Item = Place> + use<> {
        // At most PROCESSES_MAX.
        (0..self.processes.len() as u32).map(Place)
    }

    fn exited(&mut self, now: Timestamp, place: Place, actions: &mut Vec<Action>) {
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
            self.lost(request, Loss::Died(Progress::Begun), actions);
        }
        if self.is_broken() {
            for Request { key, attempts, .. } in std::mem::take(&mut self.waiting) {
                let (reason, may_have_executed) = (Reason::FunctionNotReady, attempts.begun);
                actions.push(Action::Fail { key, reason, may_have_executed });
            }
        }
        if until <= now {
            self.again(now, place, actions);
        }
    }

    /// A process ended for want of what the worker lacks. One that had not greeted is a start that came to
    /// nothing, whatever the reason: the next ones are spread.
    fn given_up(&mut self, now: Timestamp, place: Place, actions: &mut Vec<Action>) {
        let process = &mut self.processes[place.0 as usize];
        if process.ready_since.is_none() || self.stopping {
            return self.exited(now, place, actions);
        }
        process.ready_since = None;
        if let State::Running(request) = process.state {
            self.lost(request, Loss::Failed(Progress::Begun), actions);
        }
        self.again(now, place, actions);
    }

    /// A process ended with a request, or was ended.
    fn lost(&mut self, request: Request, loss: Loss, actions: &mut Vec<Action>) {
        match request.attempts.after(loss) {
            Verdict::Again(attempts) => self.waiting.push_front(Request { attempts, ..request }),
            Verdict::Refuse { reason, may_have_executed } => {
                actions.push(Action::Fail { key: request.key, reason, may_have_executed });
            }
        }
    }

    /// A process was not given its request, and waits for another one.
    fn unsent(&mut self, process: (Place, Incarnation), key: RequestKey, actions: &mut Vec<Action>) {
        let Some(process) = self.process(process.0, process.1) else { return };
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

    /// Gives those that wait to processes that do nothing.
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

    /// The first of those that wait for which somebody waits.
    fn next(&mut self, now: Timestamp, actions: &mut Vec<Action>) -> Option<Request> {
        loop {
            let request = self.waiting.pop_front()?;
            if now < request.deadline {
                return Some(request);
            }
            actions.push(Action::Forget { key: request.key });
        }
    }

    /// Nobody waits any more for what a process runs.
    fn abandon(&mut self, place: Place, until: Timestamp, actions: &mut Vec<Action>) {
        let state = &mut self.processes[place.0 as usize].state;
        if let State::Running(Request { key, .. }) = *state {
            *state = State::Abandoned { key, until };
            actions.push(Action::Forget { key });
        }
    }

    /// Kills them all. Whoever has it done has answered every request: what ran is not run again by a
    /// process that greets as it is killed, and nothing waits any more.
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
            actions.push(Action::Kill { place, why: Why::Stop });
        }
    }

    fn tick(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        for place in self.places() {
            let mut kill = |crew: &mut Self, fault, why| {
                crew.processes[place.0 as usize].state = State::Dying(fault);
                actions.push(Action::Kill { place, why });
            };
            match self.processes[place.0 as usize].state {
                State::Waiting { until } if until <= now => self.again(now, place, actions),
                State::Starting { give_up } if give_up <= now => {
                    self.silent = true;
                    kill(self, Fault::Own, Why::Silent);
                }
                State::Abandoned { until, .. } if until <= now => kill(self, Fault::None, Why::Abandoned),
                State::Running(Request { deadline, .. }) if deadline <= now => {
                    self.abandon(place, now + GRACE, actions);
                }
                _ => {}
            }
        }
    }
}

impl Core for Crew {
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
            Event::GivenUp { place, incarnation } => {
                if self.process(place, incarnation).is_some() {
                    self.given_up(now, place, actions);
                }
            }
            Event::Unsent { place, incarnation, key } => self.unsent((place, incarnation), key, actions),
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
