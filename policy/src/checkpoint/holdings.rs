//! The data a node holds, and which of it the leader is told: what has outlived a sync period, up
//! to a bound. Most data does not live that long, and then costs no command.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{Bytes, DataId, Timestamp};

use super::ledger::Ledger;

#[derive(Debug, Clone)]
pub(super) struct Holdings {
    /// Told, or to be told.
    pub(super) named: Ledger<DataId, Bytes>,
    named_max: usize,
    young: BTreeMap<DataId, (Timestamp, Bytes)>,
    by_age: BTreeSet<(Timestamp, DataId)>,
    /// Old enough, and beyond the bound.
    beyond: BTreeMap<DataId, Bytes>,
}

impl Holdings {
    pub(super) fn new(named_max: usize) -> Self {
        Self {
            named: Ledger::new(),
            named_max,
            young: BTreeMap::new(),
            by_age: BTreeSet::new(),
            beyond: BTreeMap::new(),
        }
    }

    /// Data is immutable: what is held already is the same.
    pub(super) fn store(&mut self, now: Timestamp, id: DataId, bytes: Bytes) {
        let held =
            self.named.get(&id).is_some() || self.young.contains_key(&id) || self.beyond.contains_key(&id);
        if !held {
            self.by_age.insert((now, id.clone()));
            self.young.insert(id, (now, bytes));
        }
    }

    pub(super) fn drop(&mut self, id: &DataId) {
        if let Some((stored, _)) = self.young.remove(id) {
            self.by_age.remove(&(stored, id.clone()));
        } else if !self.named.unset(id) {
            self.beyond.remove(id);
        }
    }

    /// Names what is older than `age`, as far as the bound allows.
    pub(super) fn mature(&mut self, now: Timestamp, age: Duration) {
        while let Some((stored, _)) = self.by_age.first()
            && *stored + age <= now
            && let Some((_, id)) = self.by_age.pop_first()
        {
            if let Some((_, bytes)) = self.young.remove(&id) {
                self.beyond.insert(id, bytes);
            }
        }
        while self.named.len() < self.named_max
            && let Some((id, bytes)) = self.beyond.pop_first()
        {
            self.named.set(id, bytes);
        }
    }

    /// How much is old enough and not named.
    pub(super) fn overflow(&self) -> u64 {
        self.beyond.len() as u64
    }

    /// Whether something may be named later.
    pub(super) fn is_growing(&self) -> bool {
        !self.young.is_empty() || (!self.beyond.is_empty() && self.named.len() < self.named_max)
    }
}
