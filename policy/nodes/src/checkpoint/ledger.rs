//! The present items, the leader's knowledge of them, and the changes still to be sent.

use std::collections::{BTreeMap, BTreeSet};

/// Items of a single kind. The leader's copy equals the truth once all changes are sent.
#[derive(Debug, Clone)]
pub(super) struct SyncLedger<K, V> {
    truth: BTreeMap<K, V>,
    /// Last values sent in this epoch, including removed items until their removal is sent.
    told: BTreeMap<K, V>,
    /// Keys of new items, and of items that were sent with another value.
    changed: BTreeSet<K>,
    /// Keys of items that were sent and then removed.
    gone: BTreeSet<K>,
    /// Keys that the present full sync has not sent yet, even if they were sent before the sync.
    again: BTreeSet<K>,
}

/// Set of items to send next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SyncScope {
    /// Changed items. Removals come first, so that the leader never has more items than exist.
    Changes,
    /// Items that the full sync has not sent yet.
    Everything,
}

/// One item to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LedgerEntry<K, V> {
    There(K, V),
    Gone(K),
}

impl<K: Ord + Clone, V: Clone + PartialEq> SyncLedger<K, V> {
    pub(super) fn new() -> Self {
        Self {
            truth: BTreeMap::new(),
            told: BTreeMap::new(),
            changed: BTreeSet::new(),
            gone: BTreeSet::new(),
            again: BTreeSet::new(),
        }
    }

    pub(super) fn set(&mut self, key: K, value: V) {
        if !self.again.contains(&key) {
            if self.told.get(&key) == Some(&value) {
                self.changed.remove(&key);
            } else {
                self.changed.insert(key.clone());
            }
        }
        self.gone.remove(&key);
        self.truth.insert(key, value);
    }

    /// Removes an item, and returns whether the item existed.
    pub(super) fn unset(&mut self, key: &K) -> bool {
        self.changed.remove(key);
        if self.again.remove(key) {
            self.told.remove(key);
        } else if self.told.contains_key(key) {
            self.gone.insert(key.clone());
        }
        self.truth.remove(key).is_some()
    }

    /// Removes an item that the leader drops by itself.
    pub(super) fn forget(&mut self, key: &K) {
        self.truth.remove(key);
        self.told.remove(key);
        self.again.remove(key);
        self.changed.remove(key);
        self.gone.remove(key);
    }

    /// Begins a full sync, in which the leader drops removed items by itself.
    pub(super) fn begin_again(&mut self) {
        self.told.retain(|key, _| self.truth.contains_key(key));
        self.changed.clear();
        self.gone.clear();
        self.again = self.truth.keys().cloned().collect();
    }

    /// Returns the key of the item that [`Self::take`] would return.
    pub(super) fn peek(&self, source: SyncScope) -> Option<&K> {
        match source {
            SyncScope::Changes => self.gone.first().or_else(|| self.changed.first()),
            SyncScope::Everything => self.again.first(),
        }
    }

    /// Returns the next item to send, which counts as sent from now on.
    pub(super) fn take(&mut self, source: SyncScope) -> Option<LedgerEntry<K, V>> {
        if source == SyncScope::Changes
            && let Some(key) = self.gone.pop_first()
        {
            self.told.remove(&key);
            return Some(LedgerEntry::Gone(key));
        }
        let pending = match source {
            SyncScope::Changes => &mut self.changed,
            SyncScope::Everything => &mut self.again,
        };
        let key = pending.pop_first()?;
        let value = self.truth.get(&key)?.clone();
        self.told.insert(key.clone(), value.clone());
        Some(LedgerEntry::There(key, value))
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.truth.get(key)
    }

    pub(super) fn len(&self) -> usize {
        self.truth.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.truth.iter()
    }

    /// Makes the values sent so far the new zero. Keeps the result of `rest`, called with each
    /// item's present and sent value, or drops the item.
    pub(super) fn rebase(&mut self, rest: impl Fn(&V, &V) -> Option<V>) {
        let told = std::mem::take(&mut self.told);
        let truth = std::mem::take(&mut self.truth);
        *self = Self::new();
        for (key, value) in truth {
            let left = match told.get(&key) {
                Some(told) => rest(&value, told),
                None => Some(value),
            };
            if let Some(left) = left {
                self.set(key, left);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(ledger: &mut SyncLedger<u8, u8>, source: SyncScope) -> Vec<LedgerEntry<u8, u8>> {
        std::iter::from_fn(|| ledger.take(source)).collect()
    }

    #[test]
    fn changes_are_sent_with_removals_first() {
        let mut ledger = SyncLedger::new();
        ledger.set(1, 10);
        ledger.set(2, 20);
        assert_eq!(
            drain(&mut ledger, SyncScope::Changes),
            [LedgerEntry::There(1, 10), LedgerEntry::There(2, 20)]
        );
        ledger.set(0, 5);
        ledger.unset(&2);
        assert_eq!(drain(&mut ledger, SyncScope::Changes), [LedgerEntry::Gone(2), LedgerEntry::There(0, 5)]);
    }

    #[test]
    fn an_item_added_and_removed_unsent_is_never_sent() {
        let mut ledger = SyncLedger::new();
        ledger.set(1, 10);
        ledger.unset(&1);
        assert_eq!(drain(&mut ledger, SyncScope::Changes), []);
        ledger.set(1, 10);
        drain(&mut ledger, SyncScope::Changes);
        ledger.unset(&1);
        ledger.set(1, 10);
        assert_eq!(
            drain(&mut ledger, SyncScope::Changes),
            [],
            "the item is back before its removal was sent"
        );
        ledger.unset(&1);
        ledger.set(1, 11);
        ledger.unset(&1);
        assert_eq!(drain(&mut ledger, SyncScope::Changes), [LedgerEntry::Gone(1)]);
    }

    #[test]
    fn a_full_sync_sends_each_item_once_and_the_changes_follow() {
        let mut ledger = SyncLedger::new();
        for key in 1..4 {
            ledger.set(key, key);
        }
        drain(&mut ledger, SyncScope::Changes);
        ledger.begin_again();
        assert_eq!(ledger.take(SyncScope::Everything), Some(LedgerEntry::There(1, 1)));
        ledger.unset(&1);
        ledger.unset(&2);
        ledger.set(3, 9);
        ledger.set(7, 7);
        assert_eq!(drain(&mut ledger, SyncScope::Everything), [LedgerEntry::There(3, 9)]);
        assert_eq!(drain(&mut ledger, SyncScope::Changes), [LedgerEntry::Gone(1), LedgerEntry::There(7, 7)]);
    }
}
