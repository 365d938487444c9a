//! What a GPU's core is told and what it wants done.

use std::ops::Range;
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Reason, Residency, Timestamp};

use super::data::DataAction;
use super::eviction::{Eviction, Standing};
use crate::attempts::Progress;
use crate::dispatch::Return;
use crate::elastic;
use crate::fabric::{Outcome, PeerBlocks, Weights};
use crate::ids::{Generation, RequestKey, RunId, TransferId};
use crate::memory::Run as BlockRun;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A model may be asked for from now on.
    Install {
        /// Which.
        model: ModelId,
        /// The memory to hold for it.
        memory: Bytes,
        /// What of that has to be copied.
        weights: Bytes,
    },
    /// It will not be asked for any more.
    Remove {
        /// Which.
        model: ModelId,
    },
    /// Requests wait for this model and will find it here: bring it, if that is in nobody's way.
    Prefetch {
        /// Which.
        model: ModelId,
    },
    /// Requests are likely to need this model soon: bring it, if that is in nobody's way.
    Prewarm {
        /// Which.
        model: ModelId,
    },
    /// What a model here, or about to come, is to the node.
    Standing {
        /// Which model.
        model: ModelId,
        /// As far as evicting it goes.
        standing: Standing,
    },
    /// What of a model's copies here is to stay, as its functions' owners say.
    Residency {
        /// Which.
        model: ModelId,
        /// What; how many GPUs are to hold it is the node's business.
        residency: Residency,
    },
    /// The node keeps this copy, and it makes room last; or does no longer.
    Keep {
        /// Which model.
        model: ModelId,
        /// Whether it does.
        kept: bool,
    },
    /// Requests wait for this model here: others are evicted first.
    Pin {
        /// Which.
        model: ModelId,
    },
    /// They do no longer.
    Unpin {
        /// Which.
        model: ModelId,
    },
    /// A request is to run here, after the one that does.
    Assign {
        /// Which.
        key: RequestKey,
        /// Its model.
        model: ModelId,
        /// In which executor.
        incarnation: Incarnation,
        /// The GPU to copy its model from, where not from the host.
        from: Option<GpuIndex>,
    },
    /// The node wants it back, if it has not begun.
    Recall {
        /// Which.
        key: RequestKey,
    },
    /// Nobody waits for it any more.
    Cancel {
        /// Which.
        key: RequestKey,
    },
    /// There is an executor.
    Up {
        /// Which.
        incarnation: Incarnation,
    },
    /// It is gone.
    Down,
    /// The executor loaded a program.
    ProgramLoaded {
        /// Which.
        model: ModelId,
    },
    /// It could not.
    ProgramFailed {
        /// Which.
        model: ModelId,
    },
    /// The process that a model had to itself is gone.
    ProgramLost {
        /// Which model.
        model: ModelId,
    },
    /// The executor could not map a region.
    MapFailed {
        /// Whose.
        model: ModelId,
        /// Which mapping.
        generation: Generation,
    },
    /// Weights have arrived.
    Arrived {
        /// Of which model.
        model: ModelId,
        /// For which mapping.
        generation: Generation,
        /// Which chunks.
        chunks: Range<u32>,
    },
    /// A transfer is over.
    TransferEnded {
        /// Which.
        transfer: TransferId,
        /// How.
        outcome: Outcome,
        /// The GPU it came from to the end, where not from the host.
        from: Option<GpuIndex>,
    },
    /// Another GPU wants to copy a model from here: it is to stay where it is (T25).
    Lock {
        /// For which transfer.
        transfer: TransferId,
        /// Which model.
        model: ModelId,
    },
    /// It is not copied any more.
    Unlock {
        /// For which transfer.
        transfer: TransferId,
    },
    /// A run ended with outputs.
    RunDone {
        /// Which.
        run: RunId,
        /// When its first launch began.
        started: Timestamp,
        /// When its last launch ended.
        finished: Timestamp,
        /// How long launches waited for weights in between.
        waited: Duration,
    },
    /// A run ended without.
    RunFailed {
        /// Which.
        run: RunId,
        /// Why.
        why: RunFailure,
    },
    /// A run was dropped before it began.
    RunCancelled {
        /// Which.
        run: RunId,
    },
    /// The device itself failed.
    DeviceFailed,
    /// Something about the intermediate data here.
    Data(elastic::Event),
    /// Time passed.
    Tick,
    /// Models make room in this order from now on.
    Eviction(Eviction),
}

/// Why a run failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunFailure {
    /// The model failed on this input.
    Model,
    /// What it read was not there: its weights, its mapping or its program.
    NotThere,
    /// Memory ran out while it computed.
    OutOfMemory,
    /// An object that it was to read is nowhere any more.
    InputLost,
    /// The device itself failed.
    Device,
}

/// Where the time of a completed request went on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Spent {
    /// When its turn began.
    pub turn: Timestamp,
    /// Its turn until done, without computing; zero where its model was resident.
    pub swap: Duration,
    /// Computing.
    pub ran: Duration,
    /// What was copied for it.
    pub swapped: Bytes,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Executor: know this model.
    LoadProgram {
        /// Which.
        model: ModelId,
    },
    /// Executor: forget it.
    UnloadProgram {
        /// Which.
        model: ModelId,
    },
    /// Executor: put memory under a program.
    Map {
        /// Which.
        model: ModelId,
        /// The mapping's stamp.
        generation: Generation,
        /// The blocks for its weights, in the order of its addresses.
        blocks: Vec<BlockRun>,
    },
    /// Executor: take it away.
    Unmap {
        /// Which.
        model: ModelId,
        /// Which mapping.
        generation: Generation,
    },
    /// Executor: run a request as soon as what it reads is there, after those sent before.
    Run {
        /// The run's name.
        run: RunId,
        /// Which request.
        key: RequestKey,
        /// Its model.
        model: ModelId,
        /// The mapping it reads.
        generation: Generation,
    },
    /// Executor: drop a run that has not begun.
    CancelRun {
        /// Which.
        run: RunId,
    },
    /// Executor: end the process that a model has to itself; what it does can no longer be relied on.
    EndProgram {
        /// Which model.
        model: ModelId,
    },
    /// Executor: be replaced; what it does can no longer be relied on.
    Replace,
    /// Fabric: a request waits for a transfer that began without one.
    Hasten {
        /// Which transfer.
        transfer: TransferId,
        /// Which request.
        key: RequestKey,
    },
    /// Fabric: bring weights here. Whether a request waits for them says
    /// [`Gpu::reader_of`](super::Gpu::reader_of).
    Transfer {
        /// The transfer's name.
        transfer: TransferId,
        /// What.
        weights: Weights,
        /// Which chunks.
        chunks: Vec<Range<u32>>,
        /// The GPU to copy them from, where not from the host.
        from: Option<GpuIndex>,
    },
    /// Fabric: a model stays where it is until it is unlocked.
    Locked {
        /// For which transfer.
        transfer: TransferId,
        /// Where.
        peer: PeerBlocks,
    },
    /// Fabric: it does not.
    NotLocked {
        /// For which transfer.
        transfer: TransferId,
    },
    /// Fabric: what a transfer copies from here is as good as lost, and stays until it is unlocked.
    LockLost {
        /// Which transfer.
        transfer: TransferId,
    },
    /// Fabric: stop that.
    CancelTransfer {
        /// Which.
        transfer: TransferId,
    },
    /// Function: here is the answer.
    Completed {
        /// To which request.
        key: RequestKey,
        /// Where the time went.
        spent: Spent,
    },
    /// Function: there is none.
    Failed {
        /// To which request.
        key: RequestKey,
        /// Why.
        reason: Reason,
        /// Whether it may have run.
        may_have_executed: bool,
    },
    /// Node: send requests.
    Up {
        /// To this executor.
        incarnation: Incarnation,
    },
    /// Node: everything here is lost.
    Down {
        /// How far the requests that somebody waits for were.
        lost: Vec<(RequestKey, Progress)>,
    },
    /// Node: a request left.
    Ended {
        /// Which.
        key: RequestKey,
        /// How long it computed, where it ran.
        ran: Option<Duration>,
    },
    /// Node: take a request back.
    Returned {
        /// Which.
        key: RequestKey,
        /// Why.
        why: Return,
    },
    /// Node: these models are not here any more.
    Evicted {
        /// Which.
        models: Vec<ModelId>,
    },
    /// Nothing of a removed model is left here: its descriptors may be closed.
    Forgot {
        /// Which.
        model: ModelId,
    },
    /// Executor: what becomes of an object.
    Data(DataAction),
}
