//! Events and actions of the process pool's core.

use millrace_types::{Incarnation, Reason, Timestamp};

use millrace_core::attempts::AttemptRecord;
use millrace_core::ids::RequestKey;

/// Slot of a process within the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessSlot(pub u32);

/// Input of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// Keep the processes alive from now on.
    Start,
    /// A process completed its handshake.
    Ready { place: ProcessSlot, incarnation: Incarnation },
    /// A process ended, or could not be started.
    Exited { place: ProcessSlot, incarnation: Incarnation },
    /// A process ended because the worker lacked a resource.
    ResourceExhausted { place: ProcessSlot, incarnation: Incarnation },
    /// A process did not receive its request, not even in part, because the worker lacked a
    /// resource.
    Unsent { place: ProcessSlot, incarnation: Incarnation, key: RequestKey },
    /// A process answered its request.
    Returned { place: ProcessSlot, incarnation: Incarnation, key: RequestKey },
    /// A request arrived.
    Enqueue {
        key: RequestKey,
        /// Earlier starts of the request.
        attempts: AttemptRecord,
        /// Time after which no client waits for the answer.
        deadline: Timestamp,
    },
    /// No client waits for a request any more.
    Withdraw { key: RequestKey },
    /// Stop all processes and start no other.
    Stop,
    /// Time passed.
    Tick,
}

/// Output of the pool, to be carried out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Start a process.
    Spawn { place: ProcessSlot, incarnation: Incarnation },
    /// Kill a process.
    Kill { place: ProcessSlot, why: KillReason },
    /// Hand a request to a process.
    Run {
        place: ProcessSlot,
        key: RequestKey,
        /// Number of this start of the request, from 1.
        attempt: u32,
    },
    /// Forget a request without a waiting client: no further action will name the request.
    Forget { key: RequestKey },
    /// Answer a request with an error.
    Fail {
        key: RequestKey,
        reason: Reason,
        /// Whether the request may have run.
        may_have_executed: bool,
    },
}

/// Reason why a process is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KillReason {
    /// The process did not complete its handshake in time.
    Silent,
    /// The process did not finish an abandoned request within the grace.
    Abandoned,
    /// The pool is being stopped.
    Stop,
}

/// Whether the program can run requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProgramHealth {
    /// No process has completed its handshake yet.
    Starting,
    /// A process has completed its handshake at some time, and the program is not failing.
    Up,
    /// The last starts failed and no process is ready, or a start timed out before any handshake; further
    /// starts are attempted.
    Failing,
}
