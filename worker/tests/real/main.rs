//! The worker with real executor processes, a real model and a controller of the tests' own.
//!
//! Executors and, where a test kills one, workers are this test program started again: with a
//! variable set, [`executor_child`] and [`worker_child`] are an executor and a worker.

#![allow(clippy::unwrap_used, reason = "tests, and what they share")]

mod artifacts;
mod checkpoints;
mod control;
mod controller;
mod failures;
mod isolation;
mod ledger;
mod memory;
mod metrics;
mod objects;
mod peers;
mod port;
mod ports;
mod processes;
mod recovery;
mod serving;
mod support;

/// An executor, when the worker starts this program as one; otherwise nothing.
#[test]
fn executor_child() {
    if std::env::var_os(support::EXECUTOR_VARIABLE).is_some() {
        support::be_an_executor();
    }
}

/// A worker, when a test starts this program as one; otherwise nothing.
#[test]
fn worker_child() {
    if std::env::var_os(support::WORKER_VARIABLE).is_some() {
        support::be_a_worker();
    }
}
