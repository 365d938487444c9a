//! A whole cluster in virtual time, in one thread: the workers' real actors and policies, the
//! gateway's router, the replicated state applied directly, over modelled devices and links. An
//! hour of a cluster takes seconds, and the same seed gives the same events.
//!
//! ```text
//! Scenario { nodes, functions, arrivals, faults }  ──►  run  ──►  Outcome { requests, GPUs, events }
//!    ▲                                                              │
//!  models: figures of the papers' models                        summary: what the papers report
//!  workload: who asks when                                      report: tables, CSV, SVG
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`scenario`] | what is simulated |
//! | [`workload`] | generators of arrivals, and readers of traces |
//! | [`memory`] | a GPU's memory as the Torpor paper and its baseline give it out |
//! | [`models`] | what the papers say of their models, and what is assumed beyond that |
//! | [`mod@run`] | runs a scenario |
//! | [`control`] | the control plane: who serves which function, by state and placement as in production |
//! | [`router`] | which node a request goes to, as the gateway has it |
//! | [`outcome`] | what came of it, request by request, and summed up |
//! | [`report`] | tables, CSV and plots |
//! | [`passing`] | data between the functions of workflows, as flows: without actors, and a simulation of its own |
//!
//! What is modelled, and how: links divide their rates evenly among the copies that cross them
//! (`worker::port::links`); a run takes what its model's figures say; a message takes no time. What
//! is absent: the front door, sockets, the time that decisions take. Speeds are what the scenario
//! says, so nothing here shows how fast a machine is.

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

pub use outcome::{Ending, Outcome, Record, Summary};
pub use run::{run, run_each};
pub use scenario::{Function, NodeSpec, Scenario};
