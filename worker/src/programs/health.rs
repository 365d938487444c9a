//! The health of programs, which decides whether their functions are ready, and the restarts of their
//! processes, for the metrics. The process pools report both.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use millrace_types::{FunctionKey, RevisionKey};
use tokio::sync::watch;

use super::ProgramStore;

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
    life: u64,
    pub(crate) health: ProcessHealth,
}

/// The number of process restarts of each function that is or was a program on this worker, over all its
/// revisions. The counts are kept here because a process pool counts only its own restarts, and ends with
/// its revision.
#[derive(Debug, Default)]
pub(super) struct ProcessRestarts(Mutex<BTreeMap<FunctionKey, u64>>);

impl ProcessRestarts {
    fn add(&self, function: &FunctionKey, restarts: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(function.clone()).or_default() += restarts;
    }
}

/// The reporter of a process pool. Dropping the reporter withdraws the pool's report.
#[derive(Debug)]
pub(super) struct HealthReporter {
    programs: ProgramStore,
    key: RevisionKey,
    said: HealthReport,
    /// The number of the pool's restarts that are counted already.
    restarts: u64,
}

impl ProgramStore {
    /// Returns a receiver of the health of all programs.
    pub(crate) fn healths(&self) -> watch::Receiver<ProgramHealths> {
        self.0.healths.subscribe()
    }

    /// Returns the number of process restarts of each function.
    pub(crate) fn restarts(&self) -> BTreeMap<FunctionKey, u64> {
        self.0.restarts.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a reporter for a process pool of this function, and reports the program as starting.
    pub(super) fn reporter(&self, key: &RevisionKey) -> HealthReporter {
        let mut life = 0;
        self.0.healths.send_modify(|healths| {
            life = healths.get(key).map_or(0, |said| said.life) + 1;
            healths.insert(key.clone(), HealthReport { life, health: ProcessHealth::Starting });
        });
        self.0.restarts.add(&key.function, 0);
        let said = HealthReport { life, health: ProcessHealth::Starting };
        HealthReporter { programs: self.clone(), key: key.clone(), said, restarts: 0 }
    }
}

impl HealthReporter {
    /// Returns the health that was reported last.
    pub(super) fn last(&self) -> &ProcessHealth {
        &self.said.health
    }

    pub(super) fn tell(&mut self, health: ProcessHealth) {
        if self.said.health == health {
            return;
        }
        self.said.health = health;
        self.programs.0.healths.send_if_modified(|healths| {
            let said = healths.get_mut(&self.key).filter(|said| said.life == self.said.life);
            said.is_some_and(|said| {
                said.clone_from(&self.said);
                true
            })
        });
    }
}

impl HealthReporter {
    /// Adds the new restarts of the pool. `restarts` is the pool's total.
    pub(super) fn count(&mut self, restarts: u64) {
        let new = restarts - self.restarts;
        if new > 0 {
            self.restarts = restarts;
            self.programs.0.restarts.add(&self.key.function, new);
        }
    }

    /// Removes the pool's report, unless the report is a successor's.
    pub(super) fn withdraw(&self) {
        self.programs.0.healths.send_if_modified(|healths| {
            let own = healths.get(&self.key).is_some_and(|said| said.life == self.said.life);
            if own {
                healths.remove(&self.key);
            }
            own
        });
    }
}

impl Drop for HealthReporter {
    fn drop(&mut self) {
        self.withdraw();
    }
}
