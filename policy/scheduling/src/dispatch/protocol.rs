//! Events and actions of the dispatcher.

use std::num::NonZeroU32;
use std::time::Duration;

use millrace_types::{
    Alphas, Bytes, GpuIndex, Incarnation, ModelId, Priority, Reason, SliceId, Slo, SloCounts,
};

use super::config::PolicyConfig;
use super::inputs::InputLocations;
use millrace_core::attempts::{AttemptProgress, AttemptRecord, ReturnReason};
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex};
use millrace_memory::eviction::{Eviction, EvictionCandidate};

/// Latency objective of a function, as far as the queue order needs. Uses whole
/// numbers, because events are hashed to compare runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LatencyObjective {
    /// Share of requests to serve in time, in billionths. Strictly between 0 and 10^9: at 1 the
    /// required request count is infinite (T18).
    share: u32,
    /// Time from arrival to response. Without a deadline, a request counts only after its end.
    deadline: Option<Duration>,
    /// Whether several requests may run as one ([`crate::batching`]).
    together: bool,
}

impl LatencyObjective {
    /// The whole share, in billionths.
    pub const ONE: u32 = 1_000_000_000;

    /// Creates an objective from a share in billionths. Returns `None` unless the share is strictly
    /// between 0 and [`Self::ONE`].
    #[must_use]
    pub const fn from_billionths(share: u32) -> Option<Self> {
        if share > 0 && share < Self::ONE {
            Some(Self { share, deadline: None, together: false })
        } else {
            None
        }
    }

    /// Returns the same objective with a deadline, counted from a request's arrival.
    #[must_use]
    pub const fn within(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// Returns the same objective, with or without batching of its requests.
    #[must_use]
    pub const fn together(self, together: bool) -> Self {
        Self { together, ..self }
    }

    /// Returns whether several requests may run as one.
    #[must_use]
    pub const fn batchable(self) -> bool {
        self.together
    }

    /// Creates an objective from an SLO. The share is rounded to billionths and clamped to the
    /// allowed range.
    #[must_use]
    pub fn of(slo: &Slo) -> Self {
        let billionths = (slo.percentile * f64::from(Self::ONE)).round();
        // The clamp also maps not-a-number to the least share.
        let share = billionths.clamp(1.0, f64::from(Self::ONE - 1)) as u32;
        Self { share, deadline: Some(slo.deadline), together: false }
    }

    /// Returns the share in billionths.
    #[must_use]
    pub const fn billionths(self) -> u32 {
        self.share
    }

    /// Returns the time from a request's arrival within which the response is due.
    #[must_use]
    pub const fn deadline(self) -> Option<Duration> {
        self.deadline
    }
}

/// A request, as far as dispatch needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueuedRequest {
    pub key: RequestKey,
    pub function: FunctionIndex,
    pub model: ModelId,
    /// Starts and losses of the request so far.
    pub attempts: AttemptRecord,
    /// Priority; requests of a higher priority go first.
    pub priority: Priority,
    /// Location of the inputs that are on GPUs of this node.
    pub inputs: InputLocations,
}

/// Profile of a model on a kind of GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelProfile {
    pub model: ModelId,
    /// Type of the GPUs, a [`GpuConfig::kind`](super::GpuConfig::kind).
    pub kind: u32,
    /// Time that a copy from the host keeps a free link busy.
    pub load: Duration,
    /// Time that such a copy adds to a run, if seen. Less than `load` if the run overlaps the copy.
    pub swap: Option<Duration>,
    /// Run time of one row.
    pub run: Duration,
}

/// Input of the dispatcher.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A model may be requested from now on.
    Install {
        model: ModelId,
        /// GPU memory that the model occupies while resident.
        memory: Bytes,
        /// Part of `memory` that has to be copied.
        weights: Bytes,
    },
    /// A model will not be requested any more.
    Remove { model: ModelId },
    /// A number of GPUs must hold a model, with or without requests.
    WarmCopiesRequired {
        model: ModelId,
        /// Number of copies; 0 keeps none.
        copies: u32,
    },
    /// An earlier process profiled a model. Replaces the present profile.
    ProfileLoaded(ModelProfile),
    /// A function has a new objective; `None` removes the objective.
    Objective { function: FunctionIndex, objective: Option<LatencyObjective> },
    /// The cumulative SLO counts of a function changed: m of n requests were in time (T17).
    SloCountsChanged {
        function: FunctionIndex,
        /// Counts since the function started. A decrease starts a new count.
        counts: SloCounts,
    },
    /// A function was removed.
    FunctionRemoved { function: FunctionIndex },
    /// The slices of a function on this node changed.
    SlicesChanged {
        function: FunctionIndex,
        model: ModelId,
        /// The slices with their GPUs. Without a slice, the function's requests wait. `None`: the
        /// function computes on any GPU.
        slices: Option<Vec<(SliceId, GpuIndex)>>,
    },
    /// The committed alphas of the node's earlier registration, or of a lost node with functions that
    /// come here (T16, T20). A level begins with its alpha, unless the level has adjusted
    /// an alpha of its own. The alphas also hold for a policy that is set within the next
    /// `ALPHA_PERIOD`.
    AlphasCommitted(Alphas),
    /// A request is ready to run.
    Enqueue(QueuedRequest),
    /// A request stands for a batch that runs as one. Sent before the batch is assigned to a GPU,
    /// directly after each change of its members, and whenever inputs of the batch moved.
    BatchChanged {
        key: RequestKey,
        /// Number of rows; 1 ends the batch.
        rows: u32,
        /// Location of the inputs of all requests in the batch.
        inputs: InputLocations,
    },
    /// Inputs of a request moved.
    InputsMoved {
        key: RequestKey,
        /// New location of the inputs that are on GPUs of this node.
        inputs: InputLocations,
    },
    /// The client no longer waits for a request.
    Withdraw { key: RequestKey },
    /// The executor of a GPU is up.
    Up { gpu: GpuIndex, incarnation: Incarnation },
    /// A GPU lost its executor and everything in its memory.
    Down {
        gpu: GpuIndex,
        /// Progress of each request that had reached the GPU.
        lost: Vec<(RequestKey, AttemptProgress)>,
    },
    /// A GPU lost everything, and the progress of its requests is unknown.
    Reset { gpu: GpuIndex },
    /// A request left a GPU with a response, or was dropped there.
    RequestEnded {
        gpu: GpuIndex,
        key: RequestKey,
        /// Computation time of the request, if any.
        ran: Option<Duration>,
    },
    /// A GPU that is still up returned a request.
    RequestReturned { gpu: GpuIndex, key: RequestKey, why: ReturnReason },
    /// All weights of a model arrived on a GPU, so its links are free again.
    ModelLoaded {
        gpu: GpuIndex,
        model: ModelId,
        /// GPU from which all weights came; `None` if any came from the host.
        from: Option<GpuIndex>,
    },
    /// A GPU evicted models.
    ModelsEvicted { gpu: GpuIndex, models: Vec<ModelId> },
    /// A workflow will probably request a model soon, and no request waits for the model yet.
    PrewarmHint {
        model: ModelId,
        /// Model that produces the inputs of the request, if that model runs on a GPU.
        after: Option<ModelId>,
    },
    /// Time passed.
    Tick,
    /// Another dispatch policy and another eviction rule apply from now on. Waiting requests move
    /// to the new policy in order.
    PolicyChanged {
        /// New dispatch policy. Must not bind early, because such a policy may refuse waiting
        /// requests.
        policy: PolicyConfig,
        /// New eviction rule. The sender of this event also informs the GPUs.
        eviction: Eviction,
        /// Objective and SLO counts of each function, if the policy [uses
        /// them](PolicyConfig::uses_scores).
        functions: Vec<(FunctionIndex, Option<LatencyObjective>, SloCounts)>,
    },
    /// The first `seats` seats of each GPU take requests from now on, and its other seats take none.
    /// Requests on seats that close stay there and end there, or are recalled.
    SeatsOpened {
        /// Number of open seats of each GPU. All seats of a GPU with fewer are open.
        seats: NonZeroU32,
    },
}

/// Output of the dispatcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Assign a request to a seat of a GPU.
    Assign {
        gpu: GpuIndex,
        seat: SeatIndex,
        key: RequestKey,
        model: ModelId,
        /// Last known executor of the GPU. Another incarnation rejects the assignment.
        incarnation: Incarnation,
        /// Number of this attempt, from 1.
        attempt: u32,
        /// GPU from which to copy the model over a direct link, if faster than the host. Holds all
        /// weights as far as the dispatcher knows.
        from: Option<GpuIndex>,
    },
    /// Load a model that requests wait for, although none of the requests was assigned to this GPU
    /// yet.
    Prefetch { gpu: GpuIndex, model: ModelId },
    /// Load a model that a workflow will probably request.
    Prewarm { gpu: GpuIndex, model: ModelId },
    /// Set the eviction rank of a model on a GPU, or on its way there. Sent only if evictions
    /// depend on the rank.
    SetEvictionRank { gpu: GpuIndex, model: ModelId, candidate: EvictionCandidate },
    /// Recall a request that was assigned to a busy seat. The request may have begun meanwhile.
    Recall { gpu: GpuIndex, key: RequestKey },
    /// Pin a model on a GPU: requests wait for the model there, so the GPU evicts other models
    /// first.
    Pin { gpu: GpuIndex, model: ModelId },
    /// Unpin a model: no request waits for the model on this GPU, so eviction may choose it again.
    Unpin { gpu: GpuIndex, model: ModelId },
    /// Mark or unmark a GPU's copy of a model as a warm copy, which is evicted last.
    SetWarmCopy {
        gpu: GpuIndex,
        model: ModelId,
        /// Whether the copy is a warm copy from now on.
        kept: bool,
    },
    /// Inform a GPU that the client no longer waits for a request.
    Cancel { gpu: GpuIndex, key: RequestKey },
    /// Fail a request.
    Fail {
        key: RequestKey,
        reason: Reason,
        /// Whether the request may have run.
        may_have_executed: bool,
    },
}
