//! The messages to a Gpu actor.

use std::sync::Arc;

use millrace_policy::elastic::ObjectKey;
use millrace_policy::fabric::{Outcome, Piece};
use millrace_policy::gpu::Event;
use millrace_policy::ids::{RequestKey, RunId, TransferId};
use millrace_policy::paths::Hops;
use millrace_proto::executor::{Fault, LaunchTimes, ObjectPart};
use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId};

use super::ModelUsers;
use super::data::DataSaid;
use crate::actors::function::Outputs;
use crate::actors::node::Reader;
use crate::actors::spans::Copied;
use crate::actors::work::SharedWork;
use crate::handle::Parts;
use crate::install::PreparedModel;
use crate::objects::{OnHost, Reply};

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
    Copied(Copied),
    /// A run ended with outputs. `times` holds the times of its launches, if the run asked for times.
    RunDone { run: RunId, times: Vec<LaunchTimes>, event: Event, outputs: Outputs },
    /// A run failed. `detail` is the executor's error message.
    RunFailed { event: Event, detail: String },
    /// The executor reported on an object.
    Data(DataSaid),
    /// A request that reads an object joined the node's queue at this rank, or left the queue.
    Queued { object: ObjectKey, place: u64, waits: bool },
    /// The node's actors were restarted, and another actor manages this GPU from now on.
    Replaced,
    /// A reader asks for a part of an object in host memory.
    Fetch { part: ObjectPart, reader: Reader, reply: Reply },
    /// The fabric asks to lock an object that another GPU copies from here.
    LockObject { transfer: TransferId, piece: Piece },
    /// A transfer of an object to this GPU ended.
    Came { transfer: TransferId, outcome: Outcome, routes: Vec<Hops> },
    /// A transfer from this GPU to the host ended.
    Left { transfer: TransferId, outcome: Outcome },
    /// Input number `place` of a run arrived in host memory, or is lost.
    Brought { run: RunId, place: usize, found: OnHost },
    /// The last handle of an object was dropped.
    Discard(ObjectKey),
    /// A fault to inject into the executor.
    Inject { fault: Fault, model: Option<ModelId> },
    /// A request for the GPU's part of a snapshot.
    Report { parts: Parts, users: Arc<ModelUsers> },
}
