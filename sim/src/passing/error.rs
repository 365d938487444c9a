//! The errors of a simulation of dataflow.

/// A reason that a simulation could not be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The core of the NVLinks refused a flow or a topology.
    #[error(transparent)]
    Paths(#[from] millrace_transfers::paths::Error),
    /// The core of the PCIe links refused a flow or a topology.
    #[error(transparent)]
    Rates(#[from] millrace_transfers::rates::Error),
    /// The configuration of a store is invalid.
    #[error(transparent)]
    Store(#[from] millrace_memory::elastic::ConfigError),
    /// A store lost an object, which only happens when a device fails, or declined an object for good.
    #[error("a store lost or declined an object")]
    GaveUp,
    /// A node has fewer free GPUs than functions to place.
    #[error("{functions} functions need a GPU each, but only {free} GPUs are free")]
    NoRoom {
        /// The number of functions of one replica that are placed on the node.
        functions: usize,
        /// The number of free GPUs of the node.
        free: usize,
    },
    /// A transfer has no rate, and no other event is due.
    #[error("the simulation is stuck: a transfer has no rate, and no other event is due")]
    Stuck,
}
