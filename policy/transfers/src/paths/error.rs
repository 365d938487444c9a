//! The reasons why a transfer cannot begin, or functions cannot be placed.

use millrace_core::ids::FlowId;
use millrace_types::GpuIndex;

use super::limits::{FLOWS_MAX, GPUS_MAX, LINKS_MAX};

/// The reason why a transfer could not begin, or functions could not be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The topology has no such GPU.
    #[error("the topology has no GPU {0}")]
    UnknownGpu(GpuIndex),
    /// Both ends are the same GPU: bytes that stay on a GPU cross no link.
    #[error("a transfer from GPU {0} to itself crosses no link")]
    SameGpu(GpuIndex),
    /// A flow of this name is running.
    #[error("{0} is already running: end it first, or use another name")]
    Runs(FlowId),
    /// [`FLOWS_MAX`] flows are running.
    #[error("the limit of {FLOWS_MAX} flows is reached: wait until a flow ends")]
    TooManyFlows,
    /// The topology has more than [`GPUS_MAX`] GPUs.
    #[error("the topology has {0} GPUs, at most {GPUS_MAX} are supported")]
    TooManyGpus(usize),
    /// The topology has more than [`LINKS_MAX`] NVLinks.
    #[error("the topology has {0} NVLinks, at most {LINKS_MAX} are supported")]
    TooManyLinks(usize),
    /// An edge names a function past the last.
    #[error("an edge names function {0}, which does not exist")]
    UnknownFunction(usize),
    /// Each function needs a GPU of its own, and too few GPUs are free.
    #[error("{functions} functions need a GPU each, and {free} are free")]
    TooFewGpus {
        /// Number of functions to place.
        functions: usize,
        /// Number of free GPUs.
        free: usize,
    },
}
