//! What the processes' core is told and what it says.

use millrace_types::{Incarnation, Reason, Timestamp};

use crate::attempts::Attempts;
use crate::ids::RequestKey;

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
    /// It ended, since the worker lacked what it takes to go on with it.
    GivenUp {
        /// Where.
        place: Place,
        /// Which.
        incarnation: Incarnation,
    },
    /// It was not given its request, since the worker lacks what it takes. It has nothing of it.
    Unsent {
        /// Where.
        place: Place,
        /// Which.
        incarnation: Incarnation,
        /// What.
        key: RequestKey,
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
        /// Why.
        why: Why,
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

/// Why a process is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// It did not greet in time.
    Silent,
    /// Nobody waits any more for what it runs, and it did not end in its grace.
    Abandoned,
    /// None is kept alive any more.
    Stop,
}

/// Whether requests have somebody to run them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Health {
    /// No process has greeted yet.
    Starting,
    /// One has, and the program still starts.
    Up,
    /// The program does not start: it is tried again and again.
    Failing,
}
