//! Objects by name, with their expiry. The objects of a node's registration have a table of their
//! own, by counter, so that the home's name is not stored with each of a million objects.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{DataId, Epoch, NodeName, Timestamp};

use super::capacity::{IndexCapacity, IndexedObject, one};
use super::pages::{CounterMap, Hashed};

#[derive(Debug)]
pub(super) struct IndexTable<T> {
    /// Tables by home and registration. No inner map is empty.
    homes: Hashed<NodeName, BTreeMap<Epoch, RegistrationObjects<T>>>,
    /// First expiry of each registration's objects.
    firsts: BTreeSet<(Timestamp, NodeName, Epoch)>,
    takes: IndexCapacity,
}

/// Objects of a node's registration, by counter.
#[derive(Debug)]
struct RegistrationObjects<T> {
    objects: CounterMap<Object<T>>,
    expiries: BTreeSet<(Timestamp, u64)>,
}

#[derive(Debug)]
struct Object<T> {
    held: T,
    until: Timestamp,
}

impl<T: IndexedObject> IndexTable<T> {
    pub(super) fn new() -> Self {
        Self { homes: Hashed::default(), firsts: BTreeSet::new(), takes: IndexCapacity::default() }
    }

    /// Returns the total size of the objects.
    pub(super) fn takes(&self) -> IndexCapacity {
        self.takes
    }

    pub(super) fn get(&self, id: &DataId) -> Option<&T> {
        let made = self.homes.get(&id.home)?.get(&id.epoch)?;
        made.objects.get(id.counter).map(|object| &object.held)
    }

    /// Adds an object under a new name.
    pub(super) fn put(&mut self, id: &DataId, held: T, until: Timestamp) {
        self.takes = self.takes.plus(one(&held));
        let made = self.homes.entry(id.home.clone()).or_default().entry(id.epoch).or_default();
        let before = made.first();
        made.objects.insert(id.counter, Object { held, until });
        made.expiries.insert((until, id.counter));
        let after = made.first();
        self.note(id, before, after);
    }

    /// Drops an object, and returns whether the object was present.
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

    /// Changes the expiry of an object. Returns whether the object is present.
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

    /// Drops the object that expires first.
    pub(super) fn pop_first(&mut self) -> Option<DataId> {
        let (_, id) = self.first()?;
        self.remove(&id);
        Some(id)
    }

    /// Drops an object that has expired.
    pub(super) fn expire(&mut self, now: Timestamp) -> Option<DataId> {
        let (until, id) = self.first()?;
        (until <= now && self.remove(&id)).then_some(id)
    }

    fn first(&self) -> Option<(Timestamp, DataId)> {
        let (until, home, epoch) = self.firsts.first()?;
        let &(_, counter) = self.homes.get(home)?.get(epoch)?.expiries.first()?;
        Some((*until, DataId { home: home.clone(), epoch: *epoch, counter }))
    }

    /// Updates the first expiry of the registration that made `id`.
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

impl<T> RegistrationObjects<T> {
    /// Returns the first expiry of these objects.
    fn first(&self) -> Option<Timestamp> {
        self.expiries.first().map(|&(until, _)| until)
    }
}

impl<T> Default for RegistrationObjects<T> {
    fn default() -> Self {
        Self { objects: CounterMap::default(), expiries: BTreeSet::new() }
    }
}
