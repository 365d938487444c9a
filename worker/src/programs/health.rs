//! Whether programs start, as their Crews see it, for whoever says which functions are ready; and how often
//! their processes were started again, for whoever scrapes that.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use millrace_types::{FunctionKey, RevisionKey};
use tokio::sync::watch;

use super::Programs;

/// How a program is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    /// None of its processes has greeted yet.
    Starting,
    /// One has.
    Up,
    /// None starts; why.
    Failing(String),
}

/// How every program is. One of which nothing is said starts yet.
pub(crate) type Healths = BTreeMap<RevisionKey, Said>;

/// What one Crew said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Said {
    /// Which: a Crew that goes takes nothing back that the next one of its function has said.
    life: u64,
    pub(crate) health: Health,
}

/// How often processes of each function that is or was a program here were started again, its revisions
/// together. It is looked at when it is scraped: each Crew that counts knows its own part alone, and goes
/// with its revision.
#[derive(Debug, Default)]
pub(super) struct Restarts(Mutex<BTreeMap<FunctionKey, u64>>);

impl Restarts {
    fn add(&self, function: &FunctionKey, restarts: u64) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(function.clone()).or_default() += restarts;
    }
}

/// Where one Crew says how its program is. Dropped, nothing is said of it any more.
#[derive(Debug)]
pub(super) struct Reporter {
    programs: Programs,
    key: RevisionKey,
    said: Said,
    /// Of its restarts, how many are counted.
    restarts: u64,
}

impl Programs {
    /// Follows how programs are.
    pub(crate) fn healths(&self) -> watch::Receiver<Healths> {
        self.0.healths.subscribe()
    }

    /// How often processes of each function were started again.
    pub(crate) fn restarts(&self) -> BTreeMap<FunctionKey, u64> {
        self.0.restarts.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// For a Crew of this function: its program starts from now on.
    pub(super) fn reporter(&self, key: &RevisionKey) -> Reporter {
        let mut life = 0;
        self.0.healths.send_modify(|healths| {
            life = healths.get(key).map_or(0, |said| said.life) + 1;
            healths.insert(key.clone(), Said { life, health: Health::Starting });
        });
        self.0.restarts.add(&key.function, 0);
        let said = Said { life, health: Health::Starting };
        Reporter { programs: self.clone(), key: key.clone(), said, restarts: 0 }
    }
}

impl Reporter {
    /// What it said last.
    pub(super) fn last(&self) -> &Health {
        &self.said.health
    }

    pub(super) fn tell(&mut self, health: Health) {
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

impl Reporter {
    /// Counts restarts, of which there were so many since its Crew began.
    pub(super) fn count(&mut self, restarts: u64) {
        let new = restarts - self.restarts;
        if new > 0 {
            self.restarts = restarts;
            self.programs.0.restarts.add(&self.key.function, new);
        }
    }

    /// Nothing is said of it any more.
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

impl Drop for Reporter {
    fn drop(&mut self) {
        self.withdraw();
    }
}
