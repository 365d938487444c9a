//! The updates on an admitted request, which the Function actor that admitted it receives.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_core::ids::RequestKey;
use millrace_gpu::GpuTimes;
use millrace_types::{GpuIndex, Reason, Timestamp};

use crate::request::{OutputRemark, RunOutputs};

/// A message about a request to the Function actor that admitted the request.
pub(crate) enum RequestUpdate {
    /// The Node assigned a request to a GPU, or the process pool to a process.
    Dispatched(RequestKey),
    /// A request ran on a GPU and has outputs.
    Completed { key: RequestKey, outputs: RunOutputs, spent: GpuTimes, gpu: GpuIndex, attempts: u32 },
    /// A request ran in a program's process and has outputs.
    Computed { key: RequestKey, computed: ProgramOutputs },
    /// A request ended without outputs.
    Failed { key: RequestKey, reason: Reason, may_have_executed: bool, detail: Option<String> },
}

/// The outputs of a program's process.
#[derive(Debug)]
pub(crate) struct ProgramOutputs {
    pub(crate) outputs: RunOutputs,
    pub(crate) marks: BTreeMap<String, OutputRemark>,
    /// The time at which the process received the request.
    pub(crate) began: Timestamp,
    pub(crate) ran: Duration,
    pub(crate) attempts: u32,
}
