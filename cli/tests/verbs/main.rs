//! The verbs as a user runs them: the binary as a process, against small servers in this process or
//! without a server. The tests share a binary, because each further binary costs seconds to link.

#![allow(clippy::unwrap_used)]

mod cluster;
#[path = "../../../client/tests/fake/mod.rs"]
mod fake;
mod load;
mod offline;
mod sim;
mod support;
mod telemetry;
mod workflows;
