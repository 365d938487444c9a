//! Tests of the worker with real executor processes, a real model and a controller for tests.
//!
//! Executors are this test program started again, and so are workers in tests that kill one. If a
//! variable is set, [`executor_child`], [`worker_child`] and the other children act as an executor,
//! a worker and so on.

#![allow(clippy::unwrap_used, reason = "tests, and what they share")]

mod artifacts;
mod batched_objects;
mod checkpoints;
mod control;
mod controller;
mod elsewhere;
mod failures;
mod forwards;
mod gpu_objects;
mod isolation;
mod ledger;
mod links;
mod many;
mod memory;
mod metrics;
mod objects;
mod peers;
mod port;
mod ports;
mod processes;
mod program_child;
mod program_ends;
mod programs;
mod recovery;
mod sequences;
mod serving;
mod sharing;
mod slices;
mod support;
mod to_host;

/// Acts as an executor if the worker started this program as one; otherwise passes.
#[test]
fn executor_child() {
    if std::env::var_os(support::EXECUTOR_VARIABLE).is_some() {
        support::be_an_executor();
    }
}

/// Acts as a launcher of a program if a worker started this program as one; otherwise passes.
#[test]
fn launcher_child() {
    if std::env::var_os(support::LAUNCHER_VARIABLE).is_some() {
        let code = millrace_worker::programs::launch();
        panic!("the launcher did not become a program: {code:?}");
    }
}

/// Acts as a function if a test's script started this program as one; otherwise passes.
#[test]
fn function_child() {
    if std::env::var_os(support::FUNCTION_VARIABLE).is_some() {
        program_child::be_a_function();
    }
}

/// Acts as a worker if a test started this program as one; otherwise passes.
#[test]
fn worker_child() {
    if std::env::var_os(support::WORKER_VARIABLE).is_some() {
        support::be_a_worker();
    }
}
