//! The worker with real executor processes, a real model and a controller of the tests' own.
//!
//! Executors and, where a test kills one, workers are this test program started again: with a
//! variable set, [`executor_child`], [`worker_child`] and others are an executor, a worker and so on.

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
mod support;
mod to_host;

/// An executor, when the worker starts this program as one; otherwise nothing.
#[test]
fn executor_child() {
    if std::env::var_os(support::EXECUTOR_VARIABLE).is_some() {
        support::be_an_executor();
    }
}

/// What becomes a program, when a worker starts this program as one; otherwise nothing.
#[test]
fn launcher_child() {
    if std::env::var_os(support::LAUNCHER_VARIABLE).is_some() {
        let code = millrace_worker::programs::launch();
        panic!("it is no program now: {code:?}");
    }
}

/// A function, when a script of a test starts this program as one; otherwise nothing.
#[test]
fn function_child() {
    if std::env::var_os(support::FUNCTION_VARIABLE).is_some() {
        program_child::be_a_function();
    }
}

/// A worker, when a test starts this program as one; otherwise nothing.
#[test]
fn worker_child() {
    if std::env::var_os(support::WORKER_VARIABLE).is_some() {
        support::be_a_worker();
    }
}
