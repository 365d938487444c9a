//! A simulation of the data that passes between the functions of a workflow, as flows in virtual time, for
//! the experiments of the `FaaSTube` paper. There are no actors and no single chunks: bytes move at rates
//! that change with each event.
//!
//! ```text
//! Setup { topology, nodes, apps, system, arrivals } ──► run ──► Outcome { requests, memory, checks }
//!
//!   requests ──► instances ──► courses (fabric) ──► links: transfers::paths, transfers::rates
//!                    └───────► stores: memory::elastic
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`system`] | the systems that are compared, as choices on this one code path, and costs |
//! | [`workflow`] | the workflows of table 1, with assumed sizes and times |
//! | [`setup`] | the input of a simulation, and the placement of functions (`transfers::paths::place`) |
//! | [`mod@run`] | runs requests through the functions of their workflow |
//! | [`outcome`] | the result of a simulation |
//!
//! The decisions are those of the cores of production: NVLink paths and placement (`transfers::paths`), shares
//! of PCIe links (`transfers::rates`), and the stores with their pools (`memory::elastic`). Baselines are the
//! same cores with other options. Computation, copies, pinning, calls and native allocations take time.
//! Absent are the time that decisions take, the loading of models, and faults.

mod copies;
mod fabric;
mod instances;
mod links;
pub mod outcome;
mod requests;
pub mod run;
pub mod setup;
mod stores;
pub mod system;
pub mod workflow;

#[cfg(test)]
mod tests;

pub use outcome::{CopyCounts, DataflowOutcome, PathBreakdown, SimulatedWorkflow, StoreMemory};
pub use run::run;
pub use setup::{ArrivalProcess, DataflowSetup, ServedWorkflow};
pub use system::{Costs, System};
pub use workflow::ModelledWorkflow;

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
