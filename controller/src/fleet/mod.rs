//! The workers attached to this controller: streams, last reports, and clients for calls. All of this
//! is in memory: a new leader hears from the workers themselves.
//!
//! | module | task |
//! |---|---|
//! | [`service`] | the service to which workers attach; [`control`] has the sources |
//! | [`session`] | attaches a worker |
//! | [`registration`] | a worker's registration in the replicated state |
//! | [`hear`] | receives a worker's messages |
//! | [`checkpoints`] | commits a worker's soft state to the log |
//! | [`tell`] | sends updates to a worker |
//! | [`gpu_absence`] | the GPUs that have had no executor for a while |
//! | [`load`] | the part of telemetry that routing reads |
//! | [`readiness`] | whether a function can serve |
//! | [`worker`] | an attached worker |
//! | [`worker_fleet`] | all attached workers |

mod checkpoints;
mod control;
mod gpu_absence;
mod hear;
mod load;
pub(crate) mod readiness;
pub(crate) mod registration;
mod service;
mod session;
mod tell;
mod worker;
mod worker_fleet;

pub(crate) use control::WorkerControlService;
pub(crate) use load::WorkerLoad;
pub(crate) use worker::{AttachedWorker, RevisionPhase};
pub(crate) use worker_fleet::{WorkerFleet, Workers};
