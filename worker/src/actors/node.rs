//! The Node actor: the root.

use std::sync::Arc;

use millrace_proto::executor::Fault;
use millrace_types::{GpuIndex, RevisionKey};
use tokio::sync::oneshot;

use crate::handle::{FaultError, Parts};
use crate::install::{FunctionConfig, InstallError, PreparedModel};

/// What the Node actor is told.
pub(crate) enum Message {
    /// Serve a function.
    Install {
        function: FunctionConfig,
        model: Arc<PreparedModel>,
        reply: oneshot::Sender<Result<(), InstallError>>,
    },
    /// Serve it no more.
    Retire { key: RevisionKey, reply: oneshot::Sender<()> },
    /// Tell what the node looks like.
    Report { parts: Parts },
    /// Break something.
    Inject {
        gpu: GpuIndex,
        fault: Fault,
        function: Option<RevisionKey>,
        reply: oneshot::Sender<Result<(), FaultError>>,
    },
    /// Stop every executor, then end.
    Shutdown { reply: oneshot::Sender<()> },
}
