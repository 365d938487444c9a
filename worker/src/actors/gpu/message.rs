//! What a Gpu actor is told.

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

/// What a Gpu actor is told.
pub(crate) enum Message {
    /// A model may be asked for.
    Install { model: ModelId, memory: Bytes, prepared: Arc<PreparedModel> },
    /// It will not be any more.
    Remove(ModelId),
    /// A request is to run here, or several as one, known by a key of theirs.
    Assign {
        key: RequestKey,
        works: Vec<SharedWork>,
        incarnation: Incarnation,
        attempt: u32,
        from: Option<GpuIndex>,
    },
    /// The node wants it back, if it has not begun.
    Recall(RequestKey),
    /// Nobody waits for it any more.
    Cancel(RequestKey),
    /// There is an executor.
    Up { incarnation: Incarnation, pid: u32 },
    /// A model's own executor is up.
    ProgramUp { model: ModelId, pid: u32 },
    /// Something for its core.
    Event(Event),
    /// A batch of a transfer came.
    Copied(Copied),
    /// A run ended with outputs. `times` has when its launches ran, if the run asked for that.
    RunDone { run: RunId, times: Vec<LaunchTimes>, event: Event, outputs: Outputs },
    /// A run ended without, and why.
    RunFailed { event: Event, detail: String },
    /// Its executor said something of objects.
    Data(DataSaid),
    /// A request that reads an object waits in the queue at this place, or does no more.
    Queued { object: ObjectKey, place: u64, waits: bool },
    /// The node began anew, and with it another actor for this GPU.
    Replaced,
    /// Somebody wants bytes of an object in host memory.
    Fetch { part: ObjectPart, reader: Reader, reply: Reply },
    /// Another GPU is to copy an object from here.
    LockObject { transfer: TransferId, piece: Piece },
    /// A transfer of an object to this GPU is over.
    Came { transfer: TransferId, outcome: Outcome, routes: Vec<Hops> },
    /// A transfer from this GPU to the host is over.
    Left { transfer: TransferId, outcome: Outcome },
    /// An input of a run came to the host, or will not.
    Brought { run: RunId, place: usize, found: OnHost },
    /// Nobody holds an object any more.
    Discard(ObjectKey),
    /// Pass a fault on.
    Inject { fault: Fault, model: Option<ModelId> },
    /// Tell what the GPU looks like.
    Report { parts: Parts, users: Arc<ModelUsers> },
}
