//! The messages to a Gpu actor.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_core::ids::ObjectKey;
use millrace_core::ids::{RequestKey, RunId, SeatIndex, TransferId};
use millrace_device::emulated::SmPage;
use millrace_gpu::{ComputeRight, Event};
use millrace_proto::executor::{Fault, LaunchTimes};
use millrace_transfers::fabric::{ObjectPiece, TransferOutcome};
use millrace_transfers::paths::{HostDirection, RouteHops};
use millrace_types::topology::LinkId;
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, RevisionKey, Timestamp};

use super::work::SharedWork;
use crate::install::PreparedModel;
use crate::object_handle::{HostBytes, ObjectRequest};
use crate::request::RunOutputs;
use crate::snapshot::SnapshotSender;

/// A message to a Gpu actor.
pub(crate) enum Message {
    /// A model is installed on the node: requests for the model may be assigned to this GPU.
    Install { model: ModelId, memory: Bytes, prepared: Arc<PreparedModel> },
    /// A model is no longer installed on the node.
    Remove(ModelId),
    /// A request or a batch is assigned to this GPU. A batch has the key of one of its requests.
    Assign {
        seat: SeatIndex,
        key: RequestKey,
        works: Vec<SharedWork>,
        incarnation: Incarnation,
        attempt: u32,
        from: Option<GpuIndex>,
        /// The time by which the first response is due.
        deadline: Option<Timestamp>,
        /// The SMs and the time that the request may use while the GPU is shared.
        right: ComputeRight,
    },
    /// The Node recalls a request, unless the request's run has begun.
    Recall(RequestKey),
    /// No caller waits for a request's answer any longer.
    Cancel(RequestKey),
    /// The GPU's executor is ready. `pid` is 0 if each model has its own executor.
    Up {
        incarnation: Incarnation,
        pid: u32,
        /// The account of the SMs of an emulated GPU, if there is one.
        sms: Option<SmPage>,
    },
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
    /// A request of the handle of an object on this GPU.
    Object(ObjectRequest),
    /// The node's actors were restarted, and another actor manages this GPU from now on.
    ActorReplaced,
    /// The fabric asks to lock an object that another GPU copies from here.
    LockObject { transfer: TransferId, piece: ObjectPiece },
    /// A transfer of an object to this GPU ended.
    ObjectTransferEnded { transfer: TransferId, outcome: TransferOutcome, routes: Vec<RouteHops> },
    /// A transfer from this GPU to the host ended.
    HostTransferEnded { transfer: TransferId, outcome: TransferOutcome },
    /// Input number `place` of a run arrived in host memory, or is lost.
    InputFetched { run: RunId, place: usize, found: HostBytes },
    /// A fault to inject into the executor.
    Inject { fault: Fault, model: Option<ModelId> },
    /// A request for the GPU's part of a snapshot.
    Report { parts: SnapshotSender, users: Arc<ModelUsers> },
}

impl From<ObjectRequest> for Message {
    fn from(request: ObjectRequest) -> Self {
        Self::Object(request)
    }
}

/// The functions of the node that use each model.
pub(crate) type ModelUsers = BTreeMap<ModelId, Vec<RevisionKey>>;

/// A report of an executor on an object or on a copy to the host.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ObjectReport {
    Placed(ObjectKey),
    NotPlaced(ObjectKey),
    CopiedOut(u64),
    NotCopiedOut(u64),
}

/// A batch of a transfer that crossed a link.
pub(crate) struct CopiedBatch {
    pub(crate) transfer: TransferId,
    pub(crate) link: LinkId,
    /// The direction and the hops, if other GPUs forwarded the batch between the host and its GPU. The
    /// hops include that GPU.
    pub(crate) via: Option<(HostDirection, RouteHops)>,
    pub(crate) started: Timestamp,
    pub(crate) finished: Timestamp,
    pub(crate) bytes: Bytes,
}
