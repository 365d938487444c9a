//! Faults that tests inject into executors: the operator's permission, and the reasons of a refusal.

use millrace_types::{GpuIndex, RevisionKey};

/// Whether faults may be injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedFaults {
    /// Fault requests are refused.
    Refuse,
    /// Fault requests are passed on to the executors, for tests.
    Obey,
}

/// The reason why a fault was not injected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// The node has no GPU of this number.
    #[error("no GPU {0} on this node")]
    NoSuchGpu(GpuIndex),
    /// The node does not serve this function.
    #[error("{0} is not installed on this node")]
    NoSuchFunction(RevisionKey),
    /// The node is shutting down.
    #[error("the node is shutting down")]
    NodeGone,
}
