//! What the dispatcher is told and what it wants done.

use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Reason};

use crate::attempts::{Attempts, Progress};
use crate::ids::RequestKey;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A model may be asked for from now on.
    Install {
        /// Which.
        model: ModelId,
        /// The GPU memory it holds while it is on one.
        memory: Bytes,
        /// What of that has to be copied.
        weights: Bytes,
    },
    /// It will not be asked for any more.
    Remove {
        /// Which.
        model: ModelId,
    },
    /// A request wants to run.
    Enqueue {
        /// Its key.
        key: RequestKey,
        /// Its model.
        model: ModelId,
        /// Its record.
        attempts: Attempts,
    },
    /// Nobody waits for it any more.
    Withdraw {
        /// Which.
        key: RequestKey,
    },
    /// A GPU can run things.
    Up {
        /// Which.
        gpu: GpuIndex,
        /// Its executor.
        incarnation: Incarnation,
    },
    /// A GPU lost everything that was on it.
    Down {
        /// Which.
        gpu: GpuIndex,
        /// How far each request that reached it was.
        lost: Vec<(RequestKey, Progress)>,
    },
    /// A GPU lost everything, and cannot tell how far its requests were.
    Reset {
        /// Which.
        gpu: GpuIndex,
    },
    /// A request left a GPU with an answer, or was dropped there.
    Ended {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which request.
        key: RequestKey,
        /// How long it computed, where it ran.
        ran: Option<Duration>,
    },
    /// A request came back from a GPU that lives.
    Returned {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which request.
        key: RequestKey,
        /// Why.
        why: Return,
    },
    /// Models are no longer on a GPU.
    Evicted {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which models.
        models: Vec<ModelId>,
    },
    /// Time passed.
    Tick,
}

/// Why a GPU gave a request back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Return {
    /// It was asked to, and the request had not begun.
    Recalled,
    /// It could not run it.
    Failed(Progress),
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Give a request to a GPU.
    Assign {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which request.
        key: RequestKey,
        /// Its model.
        model: ModelId,
        /// The GPU's executor, as far as is known: another one does not take it.
        incarnation: Incarnation,
        /// Which attempt this is, from 1.
        attempt: u32,
    },
    /// Ask for a request that was handed ahead; it may have begun by now.
    Recall {
        /// Which GPU has it.
        gpu: GpuIndex,
        /// Which request.
        key: RequestKey,
    },
    /// Tell a GPU that nobody waits for a request any more.
    Cancel {
        /// Which GPU has it.
        gpu: GpuIndex,
        /// Which request.
        key: RequestKey,
    },
    /// Give a request up.
    Fail {
        /// Which.
        key: RequestKey,
        /// Why.
        reason: Reason,
        /// Whether it may have run.
        may_have_executed: bool,
    },
}
