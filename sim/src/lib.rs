//! A simulator of a whole cluster in virtual time, in one thread. The simulator runs the workers' real
//! actors and policies, the gateway's router, and the replicated state without Raft, over modelled devices
//! and links. An hour of a cluster takes seconds, and the same seed gives the same events.
//!
//! ```text
//! ClusterScenario { nodes, functions, arrivals, faults } ─► run ─► SimulationOutcome { requests, GPUs, events }
//!    ▲                                                              │
//!  models: figures of the papers' models                        summary: the papers' metrics
//!  workload: arrivals of requests                               report: tables, CSV, SVG
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`scenario`] | the input of a simulation |
//! | [`workload`] | generators of arrivals, and readers of traces |
//! | [`memory`] | the allocators of GPU memory of the Torpor paper and its baseline |
//! | [`models`] | the papers' figures of their models, and the assumptions beyond those figures |
//! | [`mod@run`] | runs a scenario |
//! | [`control`] | the control plane: places functions on nodes, with the state and the planner of production |
//! | [`router`] | chooses the node of a request, as the gateway does |
//! | [`outcome`] | the result of a run: a record of each request, and the sums |
//! | [`report`] | tables, CSV and plots |
//! | [`passing`] | flows of data between the functions of workflows: a separate simulation without actors |
//!
//! Links divide their rates evenly among the copies that cross them (`worker::port::links`). A run lasts as
//! long as its model's figures state. A message takes no time. Absent are the gateway's middleware,
//! sockets, and the time that decisions take. The scenario sets all speeds, so nothing here shows how fast
//! a machine is.

pub mod control;
mod machine;
pub mod memory;
pub mod models;
pub mod outcome;
pub mod passing;
pub mod report;
pub mod router;
pub mod run;
pub mod scenario;
pub mod workload;

pub use outcome::{RequestEnding, RunSummary, SimulatedRequest, SimulationOutcome};
pub use run::{run, run_each};
pub use scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
