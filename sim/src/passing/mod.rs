//! A simulation of the data that passes between the functions of a workflow, as flows in virtual time, for
//! the experiments of the `FaaSTube` paper. There are no actors and no single chunks: bytes move at rates
//! that change with each event.
//!
//! ```text
//! DataflowSetup { topology, nodes, apps, system, arrivals } ──► run ──► DataflowOutcome { requests, memory, checks }
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
mod error;
mod fabric;
mod instances;
mod lifecycle;
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

pub use error::Error;
pub use outcome::{CopyCounts, DataflowOutcome, PathBreakdown, SimulatedWorkflow, StoreMemory};
pub use run::run;
pub use setup::{ArrivalProcess, DataflowSetup, ServedWorkflow};
pub use system::{Costs, System};
pub use workflow::ModelledWorkflow;
