//! What the Node actor is told, and who waits for what crosses links.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use millrace_policy::attempts::{Attempts, Progress};
use millrace_policy::dispatch::Return;
use millrace_policy::fabric::{self, Cargo};
use millrace_policy::ids::{FunctionIndex, RequestKey, TransferId};
use millrace_proto::executor::Fault;
use millrace_types::{Digest, GpuIndex, Incarnation, ModelId, RevisionKey, SloCounts, Timestamp};
use tokio::sync::oneshot;

use crate::actors::work::SharedWork;
use crate::control::checkpoint::Scores;
use crate::control::desired::Quotas;
use crate::handle::{FaultError, Parts};
use crate::install::{FunctionConfig, InstallError, PreparedModel, Profile};
use crate::policy::Wanted;
use crate::programs::Program;
use crate::request::Asker;
use crate::snapshot::Look;

/// What the Node actor is told.
pub(crate) enum Message {
    /// A request wants to run.
    Enqueue { work: SharedWork, attempts: Attempts },
    /// Others are likely to be asked for with what it gives. Said after it was.
    Next(SharedWork),
    /// Some of what a request reads came to a GPU's memory, or left it.
    Moved(RequestKey),
    /// Nobody waits for it any more.
    Withdraw(RequestKey),
    /// A GPU can run things.
    Up { gpu: GpuIndex, incarnation: Incarnation },
    /// A GPU lost everything.
    Down { gpu: GpuIndex, lost: Vec<(RequestKey, Progress)> },
    /// A Gpu actor was started again and knows nothing.
    GpuReset(GpuIndex),
    /// A request left a GPU.
    Ended { gpu: GpuIndex, key: RequestKey, ran: Option<Duration> },
    /// The run of several requests failed; it ends next. Each is to run again alone.
    Split(RequestKey),
    /// A request came back from a GPU.
    Returned { gpu: GpuIndex, key: RequestKey, why: Return },
    /// A function has scored so much since it is here.
    Scored { function: FunctionIndex, counts: SloCounts },
    /// What functions go by, with their scores elsewhere and before.
    Scores(Scores),
    /// What tenants may use of this node.
    Quotas(Arc<Quotas>),
    /// How the node schedules from now on.
    Policy(Wanted),
    /// Models left a GPU.
    Evicted { gpu: GpuIndex, models: Vec<ModelId> },
    /// Weights or an object want to go to a GPU, or an object from there to the host.
    Transfer {
        gpu: GpuIndex,
        transfer: TransferId,
        cargo: Cargo,
        chunks: Vec<Range<u32>>,
        from: Option<GpuIndex>,
        reader: Reader,
    },
    /// A request waits for them now.
    Hasten { transfer: TransferId, reader: RequestKey },
    /// They are not wanted any more.
    CancelTransfer(TransferId),
    /// A batch ended, or a GPU says whether it locked a model.
    Fabric(fabric::Event),
    /// Say what was learned of each model.
    Learned { reply: oneshot::Sender<Vec<(Digest, Profile)>> },
    /// Serve a function.
    Install {
        function: FunctionConfig,
        model: Arc<PreparedModel>,
        reply: oneshot::Sender<Result<(), InstallError>>,
    },
    /// Serve a program, with so many processes.
    Host { function: FunctionConfig, program: Arc<Program>, processes: u32, reply: oneshot::Sender<()> },
    /// Serve it no more.
    Retire { key: RevisionKey, reply: oneshot::Sender<()> },
    /// A function answered its last request.
    Retired(FunctionIndex),
    /// A Function actor was started again and knows none of its requests.
    FunctionReset(FunctionIndex),
    /// Tell what the node looks like.
    Report { look: Look, parts: Parts },
    /// Break something.
    Inject {
        gpu: GpuIndex,
        fault: Fault,
        function: Option<RevisionKey>,
        reply: oneshot::Sender<Result<(), FaultError>>,
    },
    /// Stop every executor, then end.
    Shutdown { reply: oneshot::Sender<()> },
    /// An executor is gone for good.
    ExecutorStopped(GpuIndex),
}

/// Who waits for bytes to cross.
#[derive(Debug, Clone)]
pub(crate) enum Reader {
    /// Nobody in particular.
    Nobody,
    /// A request whose run reads them, or whose model has no room before they have left.
    Run(RequestKey),
    /// One that has run, and is answered when they are there.
    Answer(SharedWork),
    /// One that is put into the queue when they are there, among its other inputs.
    Inputs(Arc<Asker>),
    /// One that has left the queue or takes no place there: a program reads them for it, or they are
    /// answered.
    Outside(Arc<Asker>),
    /// One of another worker, which wants them by then.
    Elsewhere(Timestamp),
}

impl Reader {
    /// The request whose run reads them, if there is one.
    pub(crate) fn run(key: Option<RequestKey>) -> Self {
        key.map_or(Self::Nobody, Self::Run)
    }
}
