//! Objects by name, and until when each is kept. What a node made under one registration has a table of
//! its own, by its count: of a million objects no name is kept a million times.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{DataId, Epoch, NodeName, Timestamp};

use super::pages::{Hashed, Pages};
use super::{Held, Limit, one};

/// Objects, each under its name.
#[derive(Debug)]
pub(super) struct Table<T> {
    /// By home and registration. Nothing in it is empty.
    homes: Hashed<NodeName, BTreeMap<Epoch, Made<T>>>,
    /// When the first of each registration's objects goes.
    firsts: BTreeSet<(Timestamp, NodeName, Epoch)>,
    takes: Limit,
}

/// What one node made under one registration, by its count.
#[derive(Debug)]
struct Made<T> {
    objects: Pages<Object<T>>,
    expiries: BTreeSet<(Timestamp, u64)>,
}

#[derive(Debug)]
struct Object<T> {
    held: T,
    until: Timestamp,
}

impl<T: Held> Table<T> {
    pub(super) fn new() -> Self {
        Self { homes: Hashed::default(), firsts: BTreeSet::new(), takes: Limit::default() }
    }

    /// How much of everything they take.
    pub(super) fn takes(&self) -> Limit {
        self.takes
    }

    pub(super) fn get(&self, id: &DataId) -> Option<&T> {
        let made = self.homes.get(&id.home)?.get(&id.epoch)?;
        made.objects.get(id.counter).map(|object| &object.held)
    }

    /// Takes one whose name is not here.
    pub(super) fn put(&mut self, id: &DataId, held: T, until: Timestamp) {
        self.takes = self.takes.plus(one(&held));
        let made = self.homes.entry(id.home.clone()).or_default().entry(id.epoch).or_default();
        let before = made.first();
        made.objects.insert(id.counter, Object { held, until });
        made.expiries.insert((until, id.counter));
        let after = made.first();
        self.note(id, before, after);
    }

    /// Drops one, and says whether it was here.
    pub(super) fn remove(&mut self, id: &DataId) -> bool {
        let Some(epochs) = self.homes.get_mut(&id.home) else { return false };
        let Some(made) = epochs.get_mut(&id.epoch) else { return false };
        let before = made.first();
        let Some(object) = made.objects.remove(id.counter) else { return false };
        made.expiries.remove(&(object.until, id.counter));
        let after = made.first();
        if after.is_none() {
            epochs.remove(&id.epoch);
            if epochs.is_empty() {
                self.homes.remove(&id.home);
            }
        }
        self.note(id, before, after);
        self.takes = self.takes.minus(one(&object.held));
        true
    }

    /// Keeps one until another time. Says whether it is here.
    pub(super) fn keep_on(&mut self, id: &DataId, until: Timestamp) -> bool {
        let made = self.homes.get_mut(&id.home).and_then(|epochs| epochs.get_mut(&id.epoch));
        let Some(made) = made else { return false };
        let before = made.first();
        let Some(object) = made.objects.get_mut(id.counter) else { return false };
        made.expiries.remove(&(object.until, id.counter));
        made.expiries.insert((until, id.counter));
        object.until = until;
        let after = made.first();
        self.note(id, before, after);
        true
    }

    /// Drops the one whose time is over first.
    pub(super) fn pop_first(&mut self) -> Option<DataId> {
        let (_, id) = self.first()?;
        self.remove(&id);
        Some(id)
    }

    /// Drops one whose time is over.
    pub(super) fn expire(&mut self, now: Timestamp) -> Option<DataId> {
        let (until, id) = self.first()?;
        (until <= now && self.remove(&id)).then_some(id)
    }

    fn first(&self) -> Option<(Timestamp, DataId)> {
        let (until, home, epoch) = self.firsts.first()?;
        let &(_, counter) = self.homes.get(home)?.get(epoch)?.expiries.first()?;
        Some((*until, DataId { home: home.clone(), epoch: *epoch, counter }))
    }

    /// Notes when the first of what was made with this one goes, and went before.
    fn note(&mut self, id: &DataId, before: Option<Timestamp>, after: Option<Timestamp>) {
        if before == after {
            return;
        }
        let of = |until| (until, id.home.clone(), id.epoch);
        if let Some(before) = before {
            self.firsts.remove(&of(before));
        }
        self.firsts.extend(after.map(of));
    }
}

impl<T> Made<T> {
    /// When the first of them goes.
    fn first(&self) -> Option<Timestamp> {
        self.expiries.first().map(|&(until, _)| until)
    }
}

impl<T> Default for Made<T> {
    fn default() -> Self {
        Self { objects: Pages::default(), expiries: BTreeSet::new() }
    }
}
