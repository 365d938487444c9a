//! Judges what clients recorded. Pure: records in, checks out.
//!
//! | module | promise |
//! |---|---|
//! | [`acknowledged`] | no acknowledged write is lost |
//! | [`flat`] | what a process takes of its machine does not grow |
//! | [`linearizable`] | admin writes and linearizable reads are linearizable, function by function |
//! | [`requests`] | no idempotent request is lost, and every answer is right |

pub mod acknowledged;
pub mod flat;
pub mod linearizable;
mod register;
pub mod requests;
