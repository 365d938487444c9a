//! The events that a GPU's core handles and the actions that it returns.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use millrace_types::profile::TrialSetting;
use millrace_types::{
    Bytes, GpuIndex, Incarnation, ModelId, Reason, ResidencyOptions, SliceCompute, SliceId, SmShare,
    Timestamp,
};

use super::executor_seat::{ExecutorSeat, RunTokens};
use super::object_action::ObjectAction;
use millrace_core::attempts::AttemptProgress;
use millrace_core::attempts::ReturnReason;
use millrace_core::ids::{Generation, RequestKey, RunId, SeatIndex, TransferId};
use millrace_memory::BlockRun;
use millrace_memory::elastic;
use millrace_memory::eviction::{Eviction, EvictionCandidate};
use millrace_slices::gate::SeatToken;
use millrace_slices::tokens::{self, TokenId};
use millrace_transfers::fabric::{PeerBlocks, TransferOutcome, WeightsCargo};

/// An event that a GPU's core handles.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// Requests may use a model from now on.
    Install {
        model: ModelId,
        /// GPU memory that the model needs.
        memory: Bytes,
        /// Size of the part of that memory that has to be copied.
        weights: Bytes,
    },
    /// No request will use a model any longer.
    Remove { model: ModelId },
    /// Requests wait for this model and will run here: load the model if that delays no request.
    Prefetch { model: ModelId },
    /// Requests are likely to need this model soon: load the model if that delays no request.
    Prewarm { model: ModelId },
    /// The properties that decide on a model's eviction changed. The model is on this GPU or about to be
    /// loaded.
    CandidateChanged { model: ModelId, candidate: EvictionCandidate },
    /// The residency options of a model changed, as set by the owners of its functions.
    Residency {
        model: ModelId,
        /// The options. The number of GPUs that hold the model is decided by the node.
        residency: ResidencyOptions,
    },
    /// The node marks this GPU's copy of a model as a warm copy, which is evicted last, or unmarks it.
    Keep {
        model: ModelId,
        /// Whether the copy is a warm copy.
        kept: bool,
    },
    /// Requests wait for this model here: other models are evicted first.
    Pin { model: ModelId },
    /// No request waits for this model here any longer.
    Unpin { model: ModelId },
    /// A request is assigned to a seat of this GPU, behind the requests that are already there.
    Assign {
        seat: SeatIndex,
        key: RequestKey,
        model: ModelId,
        /// The executor that the request is meant for.
        incarnation: Incarnation,
        /// The GPU to copy the model from; `None` for the host.
        from: Option<GpuIndex>,
        /// The time by which the response is due; `None` if no time was asked for.
        deadline: Option<Timestamp>,
        /// The SMs and the time that the request may use while the GPU is shared.
        right: ComputeRight,
    },
    /// All slices of this GPU from now on. Runs of a slice that is not among them keep the slice until
    /// they end.
    Slices(BTreeMap<SliceId, SliceCompute>),
    /// The node recalls a request that has not begun.
    Recall { key: RequestKey },
    /// No client waits for a request any longer.
    Cancel { key: RequestKey },
    /// An executor is up.
    Up { incarnation: Incarnation },
    /// The executor is lost.
    Down,
    /// The executor loaded a program.
    ProgramLoaded { model: ModelId },
    /// The executor could not load a program.
    ProgramFailed { model: ModelId },
    /// The process of a single model is lost.
    ProgramLost { model: ModelId },
    /// The executor could not map a region.
    MapFailed {
        model: ModelId,
        /// The mapping that failed.
        generation: Generation,
    },
    /// Chunks of weights have arrived.
    Arrived {
        model: ModelId,
        /// The mapping that the chunks were copied into.
        generation: Generation,
        chunks: Range<u32>,
    },
    /// A transfer ended.
    TransferEnded {
        transfer: TransferId,
        outcome: TransferOutcome,
        /// The GPU that the transfer copied from until its end; `None` for the host.
        from: Option<GpuIndex>,
    },
    /// Another GPU wants to copy a model from here: keep the model in place (T25).
    Lock { transfer: TransferId, model: ModelId },
    /// Another GPU no longer copies a model from here.
    Unlock { transfer: TransferId },
    /// A run ended with outputs.
    RunDone {
        run: RunId,
        /// Start of the first launch.
        started: Timestamp,
        /// End of the last launch.
        finished: Timestamp,
        /// Time between these that launches waited for weights.
        waited: Duration,
        /// Time between these that launches waited for tokens.
        held: Duration,
        /// SM time of the run: the device time of each launch, times its share of the SMs.
        sm: Duration,
        /// The token that the seat holds, with the device time of the launches under it.
        token: Option<(TokenId, Duration)>,
    },
    /// A seat of the executor wants a token.
    TokenAsked { seat: ExecutorSeat },
    /// A token was used up or given back.
    TokenSpent {
        seat: ExecutorSeat,
        token: TokenId,
        /// Device time of the launches under the token.
        busy: Duration,
        /// Whether the seat wants another token. Without, the seat has given back all tokens.
        more: bool,
    },
    /// The GPU is shared in this way from now on; `None`: a single run has the whole GPU.
    Sharing(Option<tokens::Config>),
    /// A run ended without outputs.
    RunFailed { run: RunId, why: RunFailure },
    /// A run was dropped before it began.
    RunCancelled { run: RunId },
    /// The device itself failed.
    DeviceFailed,
    /// The executor can no longer use the device, which works.
    ContextLost,
    /// An event for the store of intermediate data.
    Data(elastic::Event),
    /// Time has passed; no other event happened.
    Tick,
    /// The eviction policy changed.
    Eviction(Eviction),
}

/// The SMs and the time that a request may use on a shared GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ComputeRight {
    /// Any SMs that slices leave free.
    Free,
    /// The terms of the slice that the seat belongs to.
    Slice(SliceId),
    /// The setting of a trial, also on the seat of a slice.
    Trial(TrialSetting),
}

/// The SMs on which a request computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmUse {
    /// The SMs of the last token.
    pub sms: SmShare,
    /// Whether no other seat had a run that computed or waited for SMs meanwhile.
    pub alone: bool,
}

/// The reason why a run failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunFailure {
    /// The model failed on this input.
    Model,
    /// The run's weights, mapping or program were not there.
    NotThere,
    /// Memory ran out while it computed.
    OutOfMemory,
    /// An object that the run was to read exists nowhere any longer.
    InputLost,
    /// The device itself failed.
    Device,
}

/// The time that a completed request spent on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpuTimes {
    /// Start of the request's turn.
    pub turn: Timestamp,
    /// Time from the start of the turn until the end, without computing; zero if the model was
    /// resident.
    pub swap: Duration,
    /// Time spent computing, without waits for tokens.
    pub ran: Duration,
    /// Time between launches of the run in which the run waited for tokens of a shared GPU.
    pub held: Duration,
    /// Time that is billed: on a shared GPU the SM time, else the time spent computing.
    pub billed: Duration,
    /// Bytes copied for the request.
    pub swapped: Bytes,
    /// The SMs of the request; `None` on a GPU that is not shared.
    pub on: Option<SmUse>,
}

/// An action that a GPU's core asks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Executor: load a program.
    LoadProgram { model: ModelId },
    /// Executor: unload a program.
    UnloadProgram { model: ModelId },
    /// Executor: map memory for a program.
    Map {
        model: ModelId,
        /// The number of the mapping.
        generation: Generation,
        /// The blocks for the weights, in the order of their addresses.
        blocks: Vec<BlockRun>,
    },
    /// Executor: unmap the memory of a program.
    Unmap {
        model: ModelId,
        /// The mapping to remove.
        generation: Generation,
    },
    /// Executor: run a request as soon as the data that it reads has arrived, after the runs of its
    /// seat that were sent before.
    Run {
        /// A new name for the run.
        run: RunId,
        key: RequestKey,
        model: ModelId,
        /// The mapping that the run reads.
        generation: Generation,
        seat: ExecutorSeat,
        /// `None` if the run has the whole GPU.
        tokens: Option<RunTokens>,
    },
    /// Executor: give a seat a token.
    Grant { seat: ExecutorSeat, token: SeatToken },
    /// Executor: end a token after this device time, counted from its beginning.
    Shorten { seat: ExecutorSeat, token: TokenId, busy: Duration },
    /// Executor: take back a token that has not begun.
    Withdraw { seat: ExecutorSeat, token: TokenId },
    /// Executor: drop a run that has not begun.
    CancelRun { run: RunId },
    /// Executor: end the process of a single model, because the process can no longer be relied on.
    EndProgram { model: ModelId },
    /// Executor: replace the whole executor, because it can no longer be relied on.
    Replace,
    /// Fabric: a request now waits for a transfer that began without one.
    Hasten {
        transfer: TransferId,
        /// The request that waits.
        key: RequestKey,
    },
    /// Fabric: copy weights to this GPU. [`GpuCore::reader_of`](super::GpuCore::reader_of) returns the
    /// request that waits for the weights, if any.
    Transfer {
        /// A new name for the transfer.
        transfer: TransferId,
        weights: WeightsCargo,
        /// The chunks that are missing.
        chunks: Vec<Range<u32>>,
        /// The GPU to copy from; `None` for the host.
        from: Option<GpuIndex>,
    },
    /// Fabric: a model is locked in place until it is unlocked.
    Locked {
        transfer: TransferId,
        /// The blocks of the model.
        peer: PeerBlocks,
    },
    /// Fabric: a model could not be locked.
    NotLocked { transfer: TransferId },
    /// Fabric: the model that a transfer copies from here is as good as lost. The blocks stay until
    /// the lock is released.
    LockLost { transfer: TransferId },
    /// Fabric: cancel a transfer.
    CancelTransfer { transfer: TransferId },
    /// Function: a request has completed.
    Completed { key: RequestKey, spent: GpuTimes },
    /// Function: a request has failed.
    Failed {
        key: RequestKey,
        reason: Reason,
        /// Whether the request may have run.
        may_have_executed: bool,
    },
    /// Node: assign requests to this executor.
    Up { incarnation: Incarnation },
    /// Node: everything on this GPU is lost.
    Down {
        /// The progress of each request that a client still waits for.
        lost: Vec<(RequestKey, AttemptProgress)>,
    },
    /// Node: a request left this GPU.
    Ended {
        key: RequestKey,
        /// Time that the request computed, waits for tokens included; `None` if it did not run.
        ran: Option<Duration>,
    },
    /// Node: take a request back.
    RequestReturned { key: RequestKey, why: ReturnReason },
    /// Node: these models are no longer on this GPU.
    Evicted { models: Vec<ModelId> },
    /// Nothing of a removed model is left on this GPU: its descriptors may be closed.
    ModelForgotten { model: ModelId },
    /// Executor: act on an object of intermediate data.
    Data(ObjectAction),
}
