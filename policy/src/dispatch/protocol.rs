//! What the dispatcher is told and what it wants done.

use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Priority, Reason, Slo, SloCounts};

use super::config::PolicyConfig;
use super::inputs::Inputs;
use crate::attempts::{Attempts, Progress};
use crate::gpu::{Eviction, Standing};
use crate::ids::{FunctionIndex, RequestKey};

/// A function's objective, as far as the order of the queue depends on it. Whole numbers: what
/// cores are told is hashed to compare runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Objective {
    /// The share of requests to be served in time, in billionths, strictly between 0 and 10^9:
    /// at 1 the required request count is infinite (T18).
    share: u32,
    /// Within how long. Without, nothing of it can be said before a request has ended.
    deadline: Option<Duration>,
    /// Whether several may run as one ([`crate::batching`]).
    together: bool,
}

impl Objective {
    /// The whole, in billionths.
    pub const ONE: u32 = 1_000_000_000;

    /// Takes a share in billionths. `None` unless it is strictly between none and all.
    #[must_use]
    pub const fn from_billionths(share: u32) -> Option<Self> {
        if share > 0 && share < Self::ONE {
            Some(Self { share, deadline: None, together: false })
        } else {
            None
        }
    }

    /// The same share, of requests answered within so long of when they came.
    #[must_use]
    pub const fn within(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// The same, of requests of which several may run as one, or not.
    #[must_use]
    pub const fn together(self, together: bool) -> Self {
        Self { together, ..self }
    }

    /// Whether several of its requests may run as one.
    #[must_use]
    pub const fn runs_together(self) -> bool {
        self.together
    }

    /// An objective's deadline, and its share rounded to billionths and into what is allowed.
    #[must_use]
    pub fn of(slo: &Slo) -> Self {
        let billionths = (slo.percentile * f64::from(Self::ONE)).round();
        // Clamped, so that it fits; not-a-number becomes the least.
        let share = billionths.clamp(1.0, f64::from(Self::ONE - 1)) as u32;
        Self { share, deadline: Some(slo.deadline), together: false }
    }

    /// The share in billionths.
    #[must_use]
    pub const fn billionths(self) -> u32 {
        self.share
    }

    /// Within how long of its arrival a request should be answered.
    #[must_use]
    pub const fn deadline(self) -> Option<Duration> {
        self.deadline
    }
}

/// A request, as far as who runs it where depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    /// Its key.
    pub key: RequestKey,
    /// Whose it is.
    pub function: FunctionIndex,
    /// Its model.
    pub model: ModelId,
    /// Its record.
    pub attempts: Attempts,
    /// Before whom it goes.
    pub priority: Priority,
    /// Where its data is, as far as it is on GPUs here.
    pub inputs: Inputs,
}

/// What was learned of a model on one kind of GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Learned {
    /// Which.
    pub model: ModelId,
    /// On GPUs of this [kind](super::GpuConfig::kind).
    pub kind: u32,
    /// How long its copy from the host keeps a free link busy.
    pub load: Duration,
    /// What that adds to a run, where it was seen: they overlap.
    pub swap: Option<Duration>,
    /// A run.
    pub run: Duration,
}

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
    /// So many GPUs are to hold a model, requests or none.
    Keep {
        /// Which.
        model: ModelId,
        /// How many; 0 keeps none.
        copies: u32,
    },
    /// What an earlier process learned of a model: replaces what is known of it.
    Learned(Learned),
    /// What a function is held to; `None`: nothing.
    Objective {
        /// Which.
        function: FunctionIndex,
        /// What.
        objective: Option<Objective>,
    },
    /// What a function scored, all in all: m of n requests in time (T17).
    Score {
        /// Which.
        function: FunctionIndex,
        /// Cumulative. What falls below the last one begins anew.
        counts: SloCounts,
    },
    /// A function is gone.
    Forget {
        /// Which.
        function: FunctionIndex,
    },
    /// A request wants to run.
    Enqueue(Request),
    /// A request stands for several, which run as one of so many rows. Said before it is given to a
    /// GPU, right after that of those that run with it, and whenever data of theirs has moved.
    Rows {
        /// Which.
        key: RequestKey,
        /// How many; 1 takes back what was said.
        rows: u32,
        /// Where the data of all of them is.
        inputs: Inputs,
    },
    /// A request's data is elsewhere from now on.
    Moved {
        /// Whose.
        key: RequestKey,
        /// Where it is, as far as it is on GPUs here.
        inputs: Inputs,
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
    /// All of a model's weights have arrived on a GPU: its links are free again.
    Loaded {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which model.
        model: ModelId,
        /// The GPU that all of it came from, where not from the host.
        from: Option<GpuIndex>,
    },
    /// Models are no longer on a GPU.
    Evicted {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which models.
        models: Vec<ModelId>,
    },
    /// A model is likely to be asked for soon, and nobody waits for it yet.
    Likely {
        /// Which.
        model: ModelId,
        /// The model of the request whose outputs it would take, where that is on a GPU.
        after: Option<ModelId>,
    },
    /// Time passed.
    Tick,
    /// Another policy decides from now on, and GPUs choose otherwise what makes room. What waits goes
    /// over in order.
    Change {
        /// Which. None that binds early: it may have to refuse what waits.
        policy: PolicyConfig,
        /// How GPUs choose. They are told by whoever says this.
        eviction: Eviction,
        /// What it goes by, where it [wants that](PolicyConfig::scores): each function's objective, and
        /// what it scored.
        functions: Vec<(FunctionIndex, Option<Objective>, SloCounts)>,
    },
}

/// Why a GPU gave a request back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Return {
    /// It was asked to, and the request had not begun.
    Recalled,
    /// It could not run it.
    Failed(Progress),
    /// The executor that its model had to itself died.
    Died(Progress),
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
        /// The GPU to copy its model from over a direct link, where that is faster than from the
        /// host. It holds all of it, as far as is known.
        from: Option<GpuIndex>,
    },
    /// Have a GPU bring a model that requests wait for, though none of them goes there yet.
    Prefetch {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which model.
        model: ModelId,
    },
    /// Have a GPU bring a model that is likely to be asked for.
    Prewarm {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which model.
        model: ModelId,
    },
    /// Tell a GPU what a model on it, or about to come, is to the node. Only where evictions depend
    /// on it.
    Standing {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which model.
        model: ModelId,
        /// As far as evicting it goes.
        standing: Standing,
    },
    /// Ask for a request that was handed ahead; it may have begun by now.
    Recall {
        /// Which GPU has it.
        gpu: GpuIndex,
        /// Which request.
        key: RequestKey,
    },
    /// Requests wait for this model on this GPU: evict others first.
    Pin {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which model.
        model: ModelId,
    },
    /// They do no longer.
    Unpin {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which model.
        model: ModelId,
    },
    /// A GPU's copy of a model is one of those that are kept, and makes room last; or is no longer.
    Keep {
        /// Which GPU.
        gpu: GpuIndex,
        /// Which model.
        model: ModelId,
        /// Whether it is.
        kept: bool,
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
