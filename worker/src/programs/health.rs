//! Whether programs start, as their Crews see it, for whoever says which functions are ready.

use std::collections::BTreeMap;

use millrace_types::RevisionKey;
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

/// Where one Crew says how its program is. Dropped, nothing is said of it any more.
#[derive(Debug)]
pub(super) struct Reporter {
    programs: Programs,
    key: RevisionKey,
    said: Said,
}

impl Programs {
    /// Follows how programs are.
    pub(crate) fn healths(&self) -> watch::Receiver<Healths> {
        self.0.healths.subscribe()
    }

    /// For a Crew of this function: its program starts from now on.
    pub(super) fn reporter(&self, key: &RevisionKey) -> Reporter {
        let mut life = 0;
        self.0.healths.send_modify(|healths| {
            life = healths.get(key).map_or(0, |said| said.life) + 1;
            healths.insert(key.clone(), Said { life, health: Health::Starting });
        });
        let said = Said { life, health: Health::Starting };
        Reporter { programs: self.clone(), key: key.clone(), said }
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
