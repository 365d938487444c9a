//! How data passes between the functions of a workflow, as flows in virtual time: the experiments of
//! the `FaaSTube` paper. No actors, no chunks one by one: bytes move at rates that change with each event.
//!
//! ```text
//! Setup { topology, nodes, apps, system, arrivals } ──► run ──► Outcome { requests, memory, checks }
//!
//!   requests ──► instances ──► courses (fabric) ──► links: policy::paths, policy::rates
//!                    └───────► stores: policy::elastic
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`system`] | the systems that are compared, as choices on this one code path, and costs |
//! | [`workflow`] | the workflows of table 1, and what is assumed of them |
//! | [`setup`] | what is simulated, and where its functions run (`policy::paths::place`) |
//! | [`mod@run`] | requests through the functions of their workflow |
//! | [`outcome`] | what came of it |
//!
//! The decisions are those of the cores that run in production: NVLink paths and placement
//! (`policy::paths`), shares of PCIe links (`policy::rates`), and the stores with their pools
//! (`policy::elastic`). Baselines are the same cores with the other choices they offer. What takes
//! time is modelled; absent are the time that decisions take, models that are loaded, and faults.

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

pub use outcome::{Memory, Methods, Outcome, Record, Split};
pub use run::run;
pub use setup::{App, Arrivals, Setup};
pub use system::{Costs, System};
pub use workflow::Workflow;

/// Why a simulation could not be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The NVLinks took no flow.
    #[error(transparent)]
    Paths(#[from] millrace_policy::paths::Error),
    /// The PCIe links took no flow.
    #[error(transparent)]
    Rates(#[from] millrace_policy::rates::Error),
    /// A store of such sizes.
    #[error(transparent)]
    Store(#[from] millrace_policy::elastic::ConfigError),
    /// A store did what only happens when a device fails, or refused an object for good.
    #[error("a store gave an object up")]
    GaveUp,
    /// The functions are more than the GPUs.
    #[error("{functions} functions need a GPU each, {free} are free")]
    NoRoom {
        /// Of one replica, or what of it goes to a node.
        functions: usize,
        /// There.
        free: usize,
    },
    /// Something moves at no rate, and nothing is going to end.
    #[error("nothing moves any more")]
    Stuck,
}
