//! The messages to the Node actor.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use millrace_core::attempts::ReturnReason;
use millrace_core::attempts::{AttemptProgress, AttemptRecord};
use millrace_core::ids::{FunctionIndex, RequestKey, TransferId};
use millrace_proto::executor::Fault;
use millrace_transfers::fabric::{self, TransferCargo};
use millrace_types::{Alphas, Digest, GpuIndex, Incarnation, ModelId, RevisionKey, SloCounts};
use tokio::sync::oneshot;

use super::work::SharedWork;
use crate::desired_state::{NodeSlices, TenantQuotas};
use crate::faults::FaultError;
use crate::install::{FunctionConfig, InstallError, PreparedModel, Profile};
use crate::object_handle::{InputMoved, TransferReader};
use crate::policy::DesiredPolicy;
use crate::programs::HostedProgram;
use crate::slo_scores::SloScores;
use crate::snapshot::{SnapshotScope, SnapshotSender};

/// A message to the Node actor.
pub(crate) enum Message {
    /// A Function actor admitted a request, which waits for a GPU from now on.
    Enqueue { work: SharedWork, attempts: AttemptRecord },
    /// The workflow of an enqueued request is likely to call other functions next. Sent after `Enqueue`.
    PrewarmHints(SharedWork),
    /// An input of a request arrived in a GPU's memory, or left a GPU's memory.
    InputMoved(RequestKey),
    /// No caller waits for a request's answer any longer.
    Withdraw(RequestKey),
    /// A GPU is ready to run requests.
    Up { gpu: GpuIndex, incarnation: Incarnation },
    /// A GPU lost its models, its data and its requests.
    Down { gpu: GpuIndex, lost: Vec<(RequestKey, AttemptProgress)> },
    /// A Gpu actor was restarted and has no state.
    GpuReset(GpuIndex),
    /// A request's run ended, and the request left its GPU.
    RunEnded { gpu: GpuIndex, key: RequestKey, ran: Option<Duration> },
    /// The run of a batch failed, and `RunEnded` follows. Each request of the batch runs again alone.
    Split(RequestKey),
    /// A GPU returned a request to the queue.
    RequestReturned { gpu: GpuIndex, key: RequestKey, why: ReturnReason },
    /// The SLO counts of a function changed: its new counts since the function is on this node.
    SloCountsChanged { function: FunctionIndex, counts: SloCounts },
    /// The SLO counts of functions in the whole cluster, earlier registrations included.
    ClusterSloCounts(SloScores),
    /// The slices of the node's GPUs.
    Slices(Arc<NodeSlices>),
    /// The caps of the tenants on this node.
    Quotas(Arc<TenantQuotas>),
    /// The scheduling policy of the node from now on.
    Policy(DesiredPolicy),
    /// The alphas of an earlier registration, with which the node begins.
    AlphasCommitted(Alphas),
    /// A GPU evicted models.
    Evicted { gpu: GpuIndex, models: Vec<ModelId> },
    /// A GPU asks for a transfer: weights or an object to the GPU, or an object from the GPU to the host.
    Transfer {
        gpu: GpuIndex,
        transfer: TransferId,
        cargo: TransferCargo,
        chunks: Vec<Range<u32>>,
        from: Option<GpuIndex>,
        reader: TransferReader,
    },
    /// A request waits for a transfer that began without a waiting request.
    Hasten { transfer: TransferId, reader: RequestKey },
    /// The bytes of a transfer are no longer needed.
    CancelTransfer(TransferId),
    /// A batch of a transfer ended, or a GPU reports the outcome of a lock for a copy.
    Fabric(fabric::Event),
    /// A request for the profile of each model.
    Profiles { reply: oneshot::Sender<Vec<(Digest, Profile)>> },
    /// The node serves a function from now on.
    Install {
        function: FunctionConfig,
        model: Arc<PreparedModel>,
        reply: oneshot::Sender<Result<(), InstallError>>,
    },
    /// The node serves a program from now on, with `processes` processes.
    Host { function: FunctionConfig, program: Arc<HostedProgram>, processes: u32, reply: oneshot::Sender<()> },
    /// The node stops serving a function or program.
    Retire { key: RevisionKey, reply: oneshot::Sender<()> },
    /// A retiring function answered its last request.
    Retired(FunctionIndex),
    /// A Function actor was restarted and has no requests.
    FunctionReset(FunctionIndex),
    /// A request for a snapshot of the node.
    Report { look: SnapshotScope, parts: SnapshotSender },
    /// A fault to inject into a GPU's executor.
    Inject {
        gpu: GpuIndex,
        fault: Fault,
        function: Option<RevisionKey>,
        reply: oneshot::Sender<Result<(), FaultError>>,
    },
    /// The node stops every executor, and ends after the last executor has stopped.
    Shutdown { reply: oneshot::Sender<()> },
    /// An executor stopped, and no other will be started for its GPU.
    ExecutorStopped(GpuIndex),
}

impl From<InputMoved> for Message {
    fn from(InputMoved(key): InputMoved) -> Self {
        Self::InputMoved(key)
    }
}
