//! The reports of process pools on the health and the restarts of programs.

use std::collections::BTreeMap;

use millrace_types::{FunctionKey, RevisionKey};
use tokio::sync::watch;

use super::health::{HealthReport, ProcessHealth, ProgramHealths};
use super::store::ProgramStore;

/// The reporter of a process pool. Dropping the reporter withdraws the pool's report.
#[derive(Debug)]
pub(crate) struct HealthReporter {
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
        self.0.restarts.counts()
    }

    /// Returns a reporter for a process pool of this function, and reports the program as starting.
    pub(crate) fn reporter(&self, key: &RevisionKey) -> HealthReporter {
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
    pub(crate) fn last(&self) -> &ProcessHealth {
        &self.said.health
    }

    pub(crate) fn tell(&mut self, health: ProcessHealth) {
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
    pub(crate) fn count(&mut self, restarts: u64) {
        let new = restarts - self.restarts;
        if new > 0 {
            self.restarts = restarts;
            self.programs.0.restarts.add(&self.key.function, new);
        }
    }

    /// Removes the pool's report, unless the report is a successor's.
    pub(crate) fn withdraw(&self) {
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
