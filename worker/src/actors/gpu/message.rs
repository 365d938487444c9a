//! The messages to a Gpu actor.

use std::sync::Arc;

use millrace_core::ids::ObjectKey;
use millrace_core::ids::{RequestKey, RunId, TransferId};
use millrace_gpu::Event;
use millrace_proto::executor::{Fault, LaunchTimes, ObjectPart};
use millrace_transfers::fabric::{ObjectPiece, TransferOutcome};
use millrace_transfers::paths::RouteHops;
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId};

use super::ModelUsers;
use super::data::ObjectReport;
use crate::actors::function::RunOutputs;
use crate::actors::node::TransferReader;
use crate::actors::spans::CopiedBatch;
use crate::actors::work::SharedWork;
use crate::install::PreparedModel;
use crate::objects::{HostBytes, Reply};
use crate::snapshot::SnapshotSender;

/// A message to a Gpu actor.
pub(crate) enum Message {
    /// A model is installed on the node: requests for the model may be assigned to this GPU.
    Install { model: ModelId, memory: Bytes, prepared: Arc<PreparedModel> },
    /// A model is no longer installed on the node.
    Remove(ModelId),
    /// A request or a batch is assigned to this GPU. A batch has the key of one of its requests.
    Assign {
        key: RequestKey,
        works: Vec<SharedWork>,
        incarnation: Incarnation,
        attempt: u32,
        from: Option<GpuIndex>,
    },
    /// The Node recalls a request, unless the request's run has begun.
    Recall(RequestKey),
    /// No caller waits for a request's answer any longer.
    Cancel(RequestKey),
    /// The GPU's executor is ready. `pid` is 0 if each model has its own executor.
    Up { incarnation: Incarnation, pid: u32 },
    /// A model's own executor is up.
    ProgramUp { model: ModelId, pid: u32 },
    /// An event for the GPU's core.
    Event(Event),
    /// A batch of a transfer was copied over a link.
    Copied(CopiedBatch),
    /// A run ended with outputs. `times` holds the times of its launches, if the run asked for times.
    RunDone { run: RunId, times: Vec<LaunchTimes>, event: Event, outputs: RunOutputs },
    /// A run failed. `detail` is the executor's error message.
    RunFailed { event: Event, detail: String },
    /// The executor reported on an object.
    Data(ObjectReport),
    /// A request that reads an object joined the node's queue at this rank, or left the queue.
    ReaderQueued { object: ObjectKey, place: u64, waits: bool },
    /// The node's actors were restarted, and another actor manages this GPU from now on.
    ActorReplaced,
    /// A reader asks for a part of an object in host memory.
    Fetch { part: ObjectPart, reader: TransferReader, reply: Reply },
    /// The fabric asks to lock an object that another GPU copies from here.
    LockObject { transfer: TransferId, piece: ObjectPiece },
    /// A transfer of an object to this GPU ended.
    ObjectTransferEnded { transfer: TransferId, outcome: TransferOutcome, routes: Vec<RouteHops> },
    /// A transfer from this GPU to the host ended.
    HostTransferEnded { transfer: TransferId, outcome: TransferOutcome },
    /// Input number `place` of a run arrived in host memory, or is lost.
    InputFetched { run: RunId, place: usize, found: HostBytes },
    /// The last handle of an object was dropped.
    Discard(ObjectKey),
    /// A fault to inject into the executor.
    Inject { fault: Fault, model: Option<ModelId> },
    /// A request for the GPU's part of a snapshot.
    Report { parts: SnapshotSender, users: Arc<ModelUsers> },
}
