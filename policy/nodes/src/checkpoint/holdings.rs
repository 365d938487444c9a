//! Data of a node, and the part that the leader knows: data that outlived a sync period, up to a
//! bound. Most data is dropped earlier and costs no command.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Bytes, DataId, Epoch, NodeName, Timestamp};

use super::ledger::SyncLedger;

#[derive(Debug, Clone)]
pub(super) struct DataHoldings {
    /// Data that the leader knows, or will be told about.
    pub(super) named: SyncLedger<DataId, Bytes>,
    named_max: usize,
    /// Data not known to be old enough, with the time of its storage. Each period scans all of it,
    /// which is only about the data of a period.
    young: ByHome<(Timestamp, Bytes)>,
    /// Data that is old enough, but beyond the bound.
    beyond: ByHome<Bytes>,
}

impl DataHoldings {
    pub(super) fn new(named_max: usize) -> Self {
        Self { named: SyncLedger::new(), named_max, young: ByHome::new(), beyond: ByHome::new() }
    }

    /// Data is immutable: a repeated store changes nothing.
    pub(super) fn store(&mut self, now: Timestamp, id: DataId, bytes: Bytes) {
        let held = self.named.get(&id).is_some() || self.young.contains(&id) || self.beyond.contains(&id);
        if !held {
            self.young.insert(id, (now, bytes));
        }
    }

    pub(super) fn drop(&mut self, id: &DataId) {
        if !self.young.remove(id) && !self.named.unset(id) {
            self.beyond.remove(id);
        }
    }

    /// Names data older than `age`, up to the bound.
    pub(super) fn mature(&mut self, now: Timestamp, age: Duration) {
        let Self { young, beyond, .. } = self;
        young.take_if(|(stored, _)| *stored + age <= now, |id, (_, bytes)| beyond.insert(id, bytes));
        while self.named.len() < self.named_max
            && let Some((id, bytes)) = self.beyond.pop_first()
        {
            self.named.set(id, bytes);
        }
    }

    /// Returns the number of data pieces that are old enough and not named.
    pub(super) fn overflow(&self) -> u64 {
        self.beyond.len as u64
    }

    /// Returns whether more data may be named later.
    pub(super) fn is_growing(&self) -> bool {
        self.young.len > 0 || (self.beyond.len > 0 && self.named.len() < self.named_max)
    }
}

/// A value for each piece of data, in the order of their names. A million pieces may have the same
/// home and registration, which are stored once.
#[derive(Debug, Clone)]
struct ByHome<T> {
    /// Values by counter, for each home and registration. No inner map is empty.
    homes: BTreeMap<(NodeName, Epoch), BTreeMap<u64, T>>,
    len: usize,
}

impl<T: Copy> ByHome<T> {
    fn new() -> Self {
        Self { homes: BTreeMap::new(), len: 0 }
    }

    fn contains(&self, id: &DataId) -> bool {
        let made = self.homes.get(&(id.home.clone(), id.epoch));
        made.is_some_and(|made| made.contains_key(&id.counter))
    }

    /// Adds the value of a new piece of data.
    fn insert(&mut self, id: DataId, it: T) {
        self.homes.entry((id.home, id.epoch)).or_default().insert(id.counter, it);
        self.len += 1;
    }

    /// Removes a value, and returns whether the value existed.
    fn remove(&mut self, id: &DataId) -> bool {
        let home = (id.home.clone(), id.epoch);
        let Some(made) = self.homes.get_mut(&home) else { return false };
        let removed = made.remove(&id.counter).is_some();
        if made.is_empty() {
            self.homes.remove(&home);
        }
        self.len -= usize::from(removed);
        removed
    }

    fn pop_first(&mut self) -> Option<(DataId, T)> {
        let mut first = self.homes.first_entry()?;
        let (home, epoch) = first.key().clone();
        let (counter, it) = first.get_mut().pop_first()?;
        if first.get().is_empty() {
            first.remove();
        }
        self.len -= 1;
        Some((DataId { home, epoch, counter }, it))
    }

    /// Removes all values for which `is_so` holds, and passes them to `take`.
    fn take_if(&mut self, is_so: impl Fn(&T) -> bool, mut take: impl FnMut(DataId, T)) {
        self.homes.retain(|(home, epoch), made| {
            made.retain(|&counter, it| {
                let taken = is_so(it);
                if taken {
                    self.len -= 1;
                    take(DataId { home: home.clone(), epoch: *epoch, counter }, *it);
                }
                !taken
            });
            !made.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(home: &str, counter: u64) -> DataId {
        DataId { home: NodeName::new(home).unwrap(), epoch: Epoch(1), counter }
    }

    #[test]
    fn old_data_is_named_in_order_and_dropped_data_leaves_no_trace() {
        let mut holdings = DataHoldings::new(2);
        for (stored, home, counter) in [(0, "b", 1), (0, "a", 2), (0, "a", 1), (5, "a", 3)] {
            holdings.store(Timestamp(stored), id(home, counter), Bytes(counter));
        }
        let age = Duration::from_nanos(10);
        holdings.mature(Timestamp(10), age);
        let named =
            |holdings: &DataHoldings| holdings.named.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>();
        assert_eq!(named(&holdings), [id("a", 1), id("a", 2)]);
        assert_eq!((holdings.overflow(), holdings.is_growing()), (1, true));
        // These pieces are held already: named, young and beyond the bound.
        for (home, counter) in [("a", 1), ("a", 3), ("b", 1)] {
            holdings.store(Timestamp(11), id(home, counter), Bytes(9));
        }
        assert_eq!((holdings.overflow(), holdings.young.len), (1, 1));
        holdings.drop(&id("a", 1));
        holdings.mature(Timestamp(11), age);
        assert_eq!(named(&holdings), [id("a", 2), id("b", 1)]);
        holdings.drop(&id("a", 3));
        assert_eq!((holdings.overflow(), holdings.is_growing()), (0, false));
        assert!(holdings.young.homes.is_empty() && holdings.beyond.homes.is_empty());
    }
}
