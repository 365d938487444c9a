//! Judges what clients recorded and what the harness looked at. Pure: records in, checks out.
//!
//! | module | promise |
//! |---|---|
//! | [`acknowledged`] | no acknowledged write is lost |
//! | [`answered`] | no idempotent request is lost |
//! | [`billed`] | each answer is billed, and once |
//! | [`counted`] | every answer of a sequence counts its requests, each once |
//! | [`flat`] | what a process takes of its machine does not grow |
//! | [`gone`] | no process outlives its parent |
//! | [`healthy`] | the cluster is healthy again within a stated time, and agrees |
//! | [`hostile`] | hostile clients end nothing, and no other client notices them |
//! | [`linearizable`] | admin writes and linearizable reads are linearizable, function by function |
//! | [`returned`] | no shared memory is left behind |
//! | [`right`] | every answer is right |

pub mod acknowledged;
pub mod answered;
pub mod billed;
pub mod counted;
pub mod flat;
pub mod gone;
pub mod healthy;
pub mod hostile;
pub mod linearizable;
mod register;
pub mod requests;
pub mod returned;
pub mod right;
