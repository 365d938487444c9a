//! The processes of one program and the requests for them. The core of the Crew actor.
//!
//! ```text
//!            Spawn            Ready           Run
//! Waiting ────────► Starting ───────► Idle ────────► Running
//!    ▲                │ too long        ▲              │ Returned ─► Idle
//!    │ backoff        ▼                 └──────────────┤
//!    └──── Exited ◄─ Dying ◄────────────── its deadline┘
//! ```
//! Each process has one request at a time; the others wait in the order they came. A process that has
//! a request beyond its deadline hangs: it is killed. One that ends with a request is lost, and the
//! request goes by the rules of [`crate::attempts`], as on a GPU. While the last few starts all
//! failed and no process is up, requests are refused, and not kept waiting for what does not come.

use std::collections::VecDeque;

use millrace_types::{Incarnation, Reason, Timestamp};

use crate::attempts::{Attempts, Loss, Progress, Verdict};
use crate::backoff::Backoff;
use crate::core::Core;
use crate::ids::RequestKey;
use crate::lifecycle::{RESTARTS, START_TIMEOUT};

/// Requests of one program that wait for a process.
pub const WAITING_MAX: usize = 1024;
/// So many starts in a row that came to nothing have requests refused.
pub const FAILED_STARTS_MAX: u32 = 3;

/// Starts of one life of an actor, in bits: more than it ever comes to.
const LIFE_BITS: u32 = 32;

/// A process's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(pub u32);

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Keep the processes alive from now on.
    Start,
    /// A process greeted.
    Ready {
        /// Where.
        place: Place,
        /// Which.
        incarnation: Incarnation,
    },
    /// It ended, or could not be started.
    Exited {
        /// Where.
        place: Place,
        /// Which.
        incarnation: Incarnation,
    },
    /// It answered.
    Returned {
        /// Where.
        place: Place,
        /// Which.
        incarnation: Incarnation,
        /// What.
        key: RequestKey,
    },
    /// A request came.
    Enqueue {
        /// Its key.
        key: RequestKey,
        /// Its record.
        attempts: Attempts,
        /// When nobody waits for it any more.
        deadline: Timestamp,
    },
    /// Nobody waits for it any more.
    Withdraw {
        /// Which.
        key: RequestKey,
    },
    /// Keep none alive any more.
    Stop,
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Start a process.
    Spawn {
        /// Where.
        place: Place,
        /// Its number.
        incarnation: Incarnation,
    },
    /// Kill it.
    Kill {
        /// Where.
        place: Place,
    },
    /// Give it a request.
    Run {
        /// Where.
        place: Place,
        /// Which.
        key: RequestKey,
        /// Which start of it this is, from 1.
        attempt: u32,
    },
    /// Nothing more will be heard of it: nobody waits for it.
    Forget {
        /// Which.
        key: RequestKey,
    },
    /// Answer with an error.
    Fail {
        /// Which.
        key: RequestKey,
        /// Why.
        reason: Reason,
        /// Whether it may have run.
        may_have_executed: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    key: RequestKey,
    attempts: Attempts,
    deadline: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting { until: Timestamp },
    Starting { give_up: Timestamp },
    Idle,
    Running(Request),
    Dying,
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
    stopping: bool,
}

impl Crew {
    /// So many processes, none of which is started. Their incarnations begin above those of `life`, of
    /// which each is lower than the next. The seed spreads restarts.
    #[must_use]
    pub fn new(processes: u32, life: u64, seed: u64) -> Self {
        let process = |place: u32| Process {
            state: State::Dying,
            incarnation: Incarnation(life << LIFE_BITS),
            ready_since: None,
            backoff: Backoff::new(RESTARTS, seed ^ u64::from(place).wrapping_mul(0xff51_afd7_ed55_8ccd)),
        };
        let processes = (0..processes).map(process).collect();
        Self { processes, waiting: VecDeque::new(), failed_starts: 0, stopping: false }
    }

    /// Requests that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The request that a process has.
    #[must_use]
    pub fn running(&self, place: Place, incarnation: Incarnation) -> Option<RequestKey> {
        let process = self.processes.get(place.0 as usize).filter(|it| it.incarnation == incarnation)?;
        match process.state {
            State::Running(request) => Some(request.key),
            _ => None,
        }
    }

    /// Whether the program does not start.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.failed_starts >= FAILED_STARTS_MAX && self.processes.iter().all(|it| it.ready_since.is_none())
    }

    fn process(&mut self, place: Place, incarnation: Incarnation) -> Option<&mut Process> {
        self.processes.get_mut(place.0 as usize).filter(|it| it.incarnation == incarnation)
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
        let until = process.backoff.died(now, since);
        let was = std::mem::replace(&mut process.state, State::Waiting { until });
        match since {
            None => self.failed_starts = self.failed_starts.saturating_add(1),
            Some(_) => self.failed_starts = 0,
        }
        if let State::Running(request) = was {
            self.lost(request, actions);
        }
        if self.is_broken() {
            for Request { key, attempts, .. } in std::mem::take(&mut self.waiting) {
                let (reason, may_have_executed) = (Reason::FunctionNotReady, attempts.begun);
                actions.push(Action::Fail { key, reason, may_have_executed });
            }
        }
        if until <= now && !self.stopping {
            self.spawn(now, place, actions);
        }
    }

    /// A process ended with a request.
    fn lost(&mut self, request: Request, actions: &mut Vec<Action>) {
        match request.attempts.after(Loss::Died(Progress::Begun)) {
            Verdict::Again(attempts) => self.waiting.push_front(Request { attempts, ..request }),
            Verdict::Refuse { reason, may_have_executed } => {
                actions.push(Action::Fail { key: request.key, reason, may_have_executed });
            }
        }
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

    fn tick(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        for place in self.places() {
            match self.processes[place.0 as usize].state {
                State::Waiting { until } if until <= now && !self.stopping => {
                    self.spawn(now, place, actions);
                }
                State::Starting { give_up: until } | State::Running(Request { deadline: until, .. })
                    if until <= now =>
                {
                    let state = &mut self.processes[place.0 as usize].state;
                    if let State::Running(Request { key, .. }) = std::mem::replace(state, State::Dying) {
                        actions.push(Action::Forget { key });
                    }
                    actions.push(Action::Kill { place });
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
                    self.failed_starts = 0;
                }
            }
            Event::Exited { place, incarnation } => {
                if self.process(place, incarnation).is_some() {
                    self.exited(now, place, actions);
                }
            }
            Event::Returned { place, incarnation, key } => {
                if let Some(process) = self.process(place, incarnation)
                    && matches!(process.state, State::Running(request) if request.key == key)
                {
                    process.state = State::Idle;
                }
            }
            Event::Enqueue { key, attempts, deadline } => {
                self.enqueue(Request { key, attempts, deadline }, actions);
            }
            // What a process has it keeps until it answers or its deadline has come.
            Event::Withdraw { key } => {
                if let Some(at) = self.waiting.iter().position(|request| request.key == key) {
                    self.waiting.remove(at);
                    actions.push(Action::Forget { key });
                }
            }
            Event::Stop => {
                self.stopping = true;
                actions.extend(self.places().map(|place| Action::Kill { place }));
            }
            Event::Tick => {}
        }
        self.tick(now, actions);
        self.give_out(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let wake = |process: &Process| match process.state {
            State::Waiting { .. } if self.stopping => None,
            State::Waiting { until: at }
            | State::Starting { give_up: at }
            | State::Running(Request { deadline: at, .. }) => Some(at),
            State::Idle | State::Dying => None,
        };
        self.processes.iter().filter_map(wake).min()
    }
}

#[cfg(test)]
mod tests;
