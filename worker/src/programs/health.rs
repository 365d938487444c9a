//! The health of programs, which decides whether their functions are ready, and the restarts of their
//! processes, for the metrics. The process pools report both.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use millrace_types::{FunctionKey, RevisionKey};

/// The health of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProcessHealth {
    /// No process of the program has sent a greeting yet.
    Starting,
    /// A process of the program has sent a greeting.
    Up,
    /// The program's processes do not start, for this reason.
    Failing(String),
}

/// The health of every program. A program without an entry is starting.
pub(crate) type ProgramHealths = BTreeMap<RevisionKey, HealthReport>;

/// The report of a process pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HealthReport {
    /// The number of the pool among the pools of its revision. A pool that ends must not withdraw the
    /// report of its successor.
    pub(super) life: u64,
    pub(crate) health: ProcessHealth,
}

/// The number of process restarts of each function that is or was a program on this worker, over all its
/// revisions. The counts are kept here because a process pool counts only its own restarts, and ends with
/// its revision.
#[derive(Debug, Default)]
pub(super) struct ProcessRestarts(Mutex<BTreeMap<FunctionKey, u64>>);

impl ProcessRestarts {
    pub(super) fn add(&self, function: &FunctionKey, restarts: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(function.clone()).or_default() += restarts;
    }

    /// Returns the number of restarts of each function.
    pub(super) fn counts(&self) -> BTreeMap<FunctionKey, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
