//! Judges the records of the clients and the observations of the harness. Pure: records in, checks
//! out.
//!
//! | module | promise |
//! |---|---|
//! | [`acknowledged`] | no acknowledged write is lost |
//! | [`answered`] | no idempotent request is lost |
//! | [`billed`] | each answer is billed once |
//! | [`counted`] | every answer of a sequence counts each of its requests once |
//! | [`leaks`] | the resources of a process do not grow |
//! | [`leftover_processes`] | no process outlives its parent |
//! | [`healthy`] | the cluster is healthy again within a stated time, and its controllers agree |
//! | [`hostile`] | hostile clients end no process, and other clients do not notice them |
//! | [`linearizable`] | admin writes and linearizable reads of each function are linearizable |
//! | [`shared_memory`] | no shared memory is left behind |
//! | [`correct_answers`] | every answer is right |

pub mod acknowledged;
pub mod answered;
pub mod billed;
pub mod correct_answers;
pub mod counted;
pub mod healthy;
pub mod hostile;
pub mod leaks;
pub mod leftover_processes;
pub mod linearizable;
mod register;
pub mod shared_memory;
