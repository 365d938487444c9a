//! Keeps one executor process alive: starts the process, gives up on a start that takes too long,
//! and restarts a dead process with backoff. This is the core of the Executor actor.
//!
//! ```text
//!            Start                Ready
//! Stopped ─────────► Starting ─────────────► Up
//!                     ▲   │ too long           │ Kill
//!                     │   └──────► Dying ◄─────┘
//!              backoff│              │ Exited     (Exited leads to Waiting from anywhere)
//!                     └── Waiting ◄──┘
//! ```

use std::time::Duration;

use millrace_types::{GpuIndex, Incarnation, Timestamp};

use millrace_core::Core;
use millrace_core::backoff::{Backoff, RestartLimits};

/// Time that a process may take to become ready. With a CUDA GPU of 80 GB it takes 3 s, most of them for
/// the GPU's memory.
pub const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Backoff between starts.
pub const RESTARTS: RestartLimits = RestartLimits {
    base: Duration::from_millis(50),
    ceiling: Duration::from_secs(5),
    stable: Duration::from_secs(10),
};

/// Input of the lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Keep an executor alive from now on.
    Start,
    /// The process completed its handshake.
    Ready { incarnation: Incarnation },
    /// The process ended.
    Exited { incarnation: Incarnation },
    /// Replace the process: its reports are no longer reliable.
    Kill,
    /// Stop the process and start no other.
    Stop,
    /// Time passed.
    Tick,
}

/// Output of the lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Start a process.
    Spawn { incarnation: Incarnation },
    /// Kill the process.
    Kill,
    /// Report to the GPU that an executor is ready.
    Up { incarnation: Incarnation },
    /// Report to the GPU that its executor is gone.
    Down {
        /// Incarnation of the last process.
        incarnation: Incarnation,
    },
    /// No process exists and none will be started.
    Stopped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Stopped,
    Starting { give_up: Timestamp },
    Up,
    Dying,
    Waiting { until: Timestamp },
}

/// Life of one executor.
#[derive(Debug)]
pub struct Lifecycle {
    state: State,
    /// Incarnation of the present or the last process; 0 before the first.
    incarnation: Incarnation,
    next: Incarnation,
    /// Start of the present process's readiness; `None` before its handshake.
    ready_since: Option<Timestamp>,
    stride: u64,
    stopping: bool,
    backoff: Backoff,
}

impl Lifecycle {
    /// Returns the stopped lifecycle of a GPU's executor. Its incarnations are `first`, `first +
    /// stride` and so on, which keeps the incarnations of a node's GPUs distinct if each begins at
    /// its own number.
    #[must_use]
    pub fn new(gpu: GpuIndex, first: Incarnation, stride: u64, seed: u64) -> Self {
        // The GPU's index changes the seed, so that each GPU draws its own waits.
        let seed = seed ^ u64::from(gpu.0).wrapping_mul(0xff51_afd7_ed55_8ccd);
        let backoff = Backoff::new(RESTARTS, seed);
        Self {
            state: State::Stopped,
            incarnation: Incarnation(0),
            next: first,
            ready_since: None,
            stride,
            stopping: false,
            backoff,
        }
    }

    /// Returns the incarnation of the present or the last process.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    fn spawn(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        self.incarnation = self.next;
        self.next = Incarnation(self.next.0 + self.stride);
        self.state = State::Starting { give_up: now + START_TIMEOUT };
        actions.push(Action::Spawn { incarnation: self.incarnation });
    }

    fn exited(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let since = self.ready_since.take();
        actions.push(Action::Down { incarnation: self.incarnation });
        if self.stopping {
            self.state = State::Stopped;
            actions.push(Action::Stopped);
            return;
        }
        let until = self.backoff.died(now, since);
        if until <= now {
            self.spawn(now, actions);
        } else {
            self.state = State::Waiting { until };
        }
    }

    fn stop(&mut self, actions: &mut Vec<Action>) {
        self.stopping = true;
        match self.state {
            State::Stopped | State::Waiting { .. } => {
                self.state = State::Stopped;
                actions.push(Action::Stopped);
            }
            State::Starting { .. } | State::Up => {
                self.state = State::Dying;
                actions.push(Action::Kill);
            }
            State::Dying => {}
        }
    }
}

impl Core for Lifecycle {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match (event, self.state) {
            (Event::Start, State::Stopped) if !self.stopping => self.spawn(now, actions),
            (Event::Ready { incarnation }, State::Starting { .. }) if incarnation == self.incarnation => {
                self.state = State::Up;
                self.ready_since = Some(now);
                actions.push(Action::Up { incarnation });
            }
            (Event::Exited { incarnation }, State::Starting { .. } | State::Up | State::Dying)
                if incarnation == self.incarnation =>
            {
                self.exited(now, actions);
            }
            (Event::Kill, State::Starting { .. } | State::Up) => {
                self.state = State::Dying;
                actions.push(Action::Kill);
            }
            (Event::Tick, State::Starting { give_up }) if give_up <= now => {
                self.state = State::Dying;
                actions.push(Action::Kill);
            }
            (Event::Tick, State::Waiting { until }) if until <= now => self.spawn(now, actions),
            (Event::Stop, _) => self.stop(actions),
            // Late events of an earlier process, or events that need no action.
            (
                Event::Start | Event::Ready { .. } | Event::Exited { .. } | Event::Kill | Event::Tick,
                State::Stopped | State::Starting { .. } | State::Up | State::Dying | State::Waiting { .. },
            ) => {}
        }
    }

    fn next_wake(&self) -> Option<Timestamp> {
        match self.state {
            State::Starting { give_up } => Some(give_up),
            State::Waiting { until } => Some(until),
            State::Stopped | State::Up | State::Dying => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Incarnation = Incarnation(1);
    const TWO: Incarnation = Incarnation(2);

    fn step(life: &mut Lifecycle, at: u64, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        life.on_event(Timestamp(at), event, &mut actions);
        actions
    }

    fn up() -> Lifecycle {
        let mut life = Lifecycle::new(GpuIndex(0), ONE, 1, 7);
        assert_eq!(step(&mut life, 0, Event::Start), [Action::Spawn { incarnation: ONE }]);
        assert_eq!(step(&mut life, 5, Event::Ready { incarnation: ONE }), [Action::Up { incarnation: ONE }]);
        life
    }

    #[test]
    fn the_first_death_restarts_at_once_and_the_next_ones_wait() {
        let mut life = up();
        let died = step(&mut life, 10, Event::Exited { incarnation: ONE });
        assert_eq!(died, [Action::Down { incarnation: ONE }, Action::Spawn { incarnation: TWO }]);
        assert_eq!(
            step(&mut life, 20, Event::Exited { incarnation: TWO }),
            [Action::Down { incarnation: TWO }]
        );
        let until = life.next_wake().unwrap();
        assert!(until > Timestamp(20));
        assert_eq!(step(&mut life, until.0 - 1, Event::Tick), []);
        assert_eq!(step(&mut life, until.0, Event::Tick), [Action::Spawn { incarnation: Incarnation(3) }]);
    }

    #[test]
    fn a_start_that_takes_too_long_is_killed() {
        let mut life = Lifecycle::new(GpuIndex(0), ONE, 1, 7);
        step(&mut life, 0, Event::Start);
        let give_up = life.next_wake().unwrap();
        assert_eq!(step(&mut life, give_up.0, Event::Tick), [Action::Kill]);
        assert_eq!(step(&mut life, give_up.0 + 1, Event::Ready { incarnation: ONE }), []);
        assert_eq!(life.next_wake(), None);
    }

    #[test]
    fn events_of_an_earlier_incarnation_are_ignored() {
        let mut life = up();
        step(&mut life, 10, Event::Exited { incarnation: ONE });
        assert_eq!(step(&mut life, 11, Event::Ready { incarnation: ONE }), []);
        assert_eq!(step(&mut life, 12, Event::Exited { incarnation: ONE }), []);
    }

    #[test]
    fn a_stopped_lifecycle_kills_its_process_and_never_starts_again() {
        let mut life = up();
        assert_eq!(step(&mut life, 10, Event::Stop), [Action::Kill]);
        assert_eq!(
            step(&mut life, 11, Event::Exited { incarnation: ONE }),
            [Action::Down { incarnation: ONE }, Action::Stopped]
        );
        assert_eq!(step(&mut life, 12, Event::Start), []);
        assert_eq!(step(&mut life, 13, Event::Stop), [Action::Stopped]);
    }
}
