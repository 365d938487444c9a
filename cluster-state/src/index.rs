//! Tier 2 of the data index (D09): the nodes that hold each piece of data. The
//! [`NodeCheckpoint`](crate::checkpoint::NodeCheckpoint) of a node lists the data of that node. This index
//! is the reverse map, and also records lost data: data whose last holder was lost, and that no
//! node has reported since.
//!
//! Only the lost data is stored. The holders are rebuilt from the checkpoints.

use std::sync::Arc;

use imbl::{OrdMap, OrdSet};
/// Maximum number of lost pieces of data. The index forgets the oldest losses beyond this bound, and such
/// data becomes unknown.
pub use millrace_types::limits::LOST_ENTRIES_MAX;
use millrace_types::{Bytes, DataId, NodeName};
use serde::{Deserialize, Serialize};

/// The location of a piece of data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DataLocation {
    /// Live nodes hold the data.
    Held {
        /// The node to ask: the node that made the data, if that node still holds the data. Otherwise a
        /// replica, which is the same for every reader.
        home: NodeName,
        /// All nodes that hold the data, by name.
        holders: Arc<[NodeName]>,
        bytes: Bytes,
    },
    /// No node holds the data: its last holder was lost. A new run has to produce the data.
    Lost { bytes: Bytes },
    /// The state does not know the data: too young, beyond its node's bound, dropped, or lost long
    /// ago.
    Unknown,
}

/// The record of data that was lost with its last holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LostDataRecord {
    /// The state's version at the loss.
    pub(crate) version: u64,
    pub(crate) bytes: Bytes,
}

/// The holders of each piece of data, and the lost data.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredLosses", into = "StoredLosses")]
pub(crate) struct HolderIndex {
    held: OrdMap<DataId, Arc<[NodeName]>>,
    lost: OrdMap<DataId, LostDataRecord>,
    by_loss: OrdSet<(u64, DataId)>,
}

#[derive(Serialize, Deserialize)]
struct StoredLosses(Vec<(DataId, u64, Bytes)>);

impl From<StoredLosses> for HolderIndex {
    fn from(StoredLosses(lost): StoredLosses) -> Self {
        let by_loss = lost.iter().map(|(id, version, _)| (*version, id.clone())).collect();
        let lost =
            lost.into_iter().map(|(id, version, bytes)| (id, LostDataRecord { version, bytes })).collect();
        Self { held: OrdMap::new(), lost, by_loss }
    }
}

impl From<HolderIndex> for StoredLosses {
    fn from(index: HolderIndex) -> Self {
        Self(index.lost.into_iter().map(|(id, lost)| (id, lost.version, lost.bytes)).collect())
    }
}

impl HolderIndex {
    /// Records that a node holds the data. Lost data is thereby found again.
    pub(crate) fn add_holder(&mut self, id: &DataId, node: &NodeName) {
        match self.held.get_mut(id) {
            Some(holders) => {
                if let Err(place) = holders.binary_search(node) {
                    *holders =
                        [&holders[..place], std::slice::from_ref(node), &holders[place..]].concat().into();
                }
            }
            None => {
                self.held.insert(id.clone(), Arc::new([node.clone()]));
                self.remove_loss(id);
            }
        }
    }

    /// Records that a node dropped the data. Data that its last holder dropped becomes unknown.
    pub(crate) fn drop_holder(&mut self, id: &DataId, node: &NodeName) {
        self.remove_holder(id, node);
    }

    /// Records that a holder was lost at `version`. The data is lost too if no other node holds
    /// the data.
    pub(crate) fn record_loss(&mut self, id: &DataId, bytes: Bytes, node: &NodeName, version: u64) {
        if self.remove_holder(id, node) {
            self.lost.insert(id.clone(), LostDataRecord { version, bytes });
            self.by_loss.insert((version, id.clone()));
        }
    }

    /// Forgets the oldest losses until at most `max` are left.
    pub(crate) fn forget_oldest_losses(&mut self, max: usize) {
        while self.lost.len() > max {
            let Some((_, id)) = self.by_loss.remove_min() else { return };
            self.lost.remove(&id);
        }
    }

    /// Removes a holder and returns whether the node was the last one.
    fn remove_holder(&mut self, id: &DataId, node: &NodeName) -> bool {
        let Some(holders) = self.held.get_mut(id) else { return false };
        let Ok(place) = holders.binary_search(node) else { return false };
        if holders.len() == 1 {
            self.held.remove(id);
            return true;
        }
        *holders = [&holders[..place], &holders[place + 1..]].concat().into();
        false
    }

    fn remove_loss(&mut self, id: &DataId) {
        if let Some(lost) = self.lost.remove(id) {
            self.by_loss.remove(&(lost.version, id.clone()));
        }
    }

    /// Returns the holders of the data, by name; never an empty list.
    pub(crate) fn holders(&self, id: &DataId) -> Option<&Arc<[NodeName]>> {
        self.held.get(id)
    }

    /// Returns the record of the data's loss.
    pub(crate) fn lost(&self, id: &DataId) -> Option<LostDataRecord> {
        self.lost.get(id).copied()
    }

    pub(crate) fn held_len(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn lost_len(&self) -> usize {
        self.lost.len()
    }

    /// Returns the number of holders, summed over all data.
    pub(crate) fn holdings(&self) -> usize {
        self.held.values().map(|holders| holders.len()).sum()
    }

    /// Whether no data is both held and lost, and the order of loss matches the lost data.
    pub(crate) fn is_consistent(&self, version: u64) -> bool {
        self.lost.len() <= LOST_ENTRIES_MAX
            && self.lost.len() == self.by_loss.len()
            && self.lost.iter().all(|(id, lost)| {
                lost.version <= version
                    && self.by_loss.contains(&(lost.version, id.clone()))
                    && !self.held.contains_key(id)
            })
            && self.held.values().all(|holders| !holders.is_empty() && holders.is_sorted())
    }
}

/// Returns the node to ask for data with these holders. The home node is first choice. If the home
/// does not hold the data, the data's number selects a holder, so that the data of a lost home is
/// spread over the replicas.
pub(crate) fn home_of(id: &DataId, holders: &[NodeName]) -> NodeName {
    let replica = usize::try_from(id.counter % holders.len() as u64).unwrap_or(0);
    let home = holders.binary_search(&id.home).unwrap_or(replica);
    holders[home].clone()
}

#[cfg(test)]
mod tests {
    use millrace_types::Epoch;

    use super::*;
    use crate::commands::testing::node_name;

    fn id(counter: u64) -> DataId {
        DataId { home: node_name("n1"), epoch: Epoch(1), counter }
    }

    #[test]
    fn data_is_lost_with_its_last_holder_and_unknown_once_dropped() {
        let mut index = HolderIndex::default();
        index.add_holder(&id(1), &node_name("n2"));
        index.add_holder(&id(1), &node_name("n1"));
        index.add_holder(&id(1), &node_name("n1"));
        assert_eq!(index.holders(&id(1)).unwrap()[..], [node_name("n1"), node_name("n2")]);
        index.record_loss(&id(1), Bytes(5), &node_name("n1"), 7);
        assert_eq!((index.lost_len(), index.held_len()), (0, 1), "a replica is left");
        index.record_loss(&id(1), Bytes(5), &node_name("n2"), 8);
        assert_eq!(index.lost(&id(1)), Some(LostDataRecord { version: 8, bytes: Bytes(5) }));
        index.add_holder(&id(1), &node_name("n3"));
        assert_eq!((index.lost_len(), index.held_len()), (0, 1), "found again");
        index.drop_holder(&id(1), &node_name("n3"));
        assert_eq!((index.lost_len(), index.held_len()), (0, 0), "dropped is not lost");
        assert!(index.is_consistent(8));
    }

    #[test]
    fn index_forgets_oldest_lost_objects_first() {
        let mut index = HolderIndex::default();
        for counter in 0..4 {
            index.add_holder(&id(counter), &node_name("n1"));
            index.record_loss(&id(counter), Bytes(1), &node_name("n1"), 10 - counter);
        }
        index.forget_oldest_losses(2);
        assert_eq!((index.lost(&id(3)), index.lost(&id(2))), (None, None));
        assert!(index.lost(&id(0)).is_some() && index.is_consistent(10));
    }

    #[test]
    fn data_is_fetched_from_its_home_or_else_always_from_the_same_replica() {
        let holders = [node_name("n1"), node_name("n2"), node_name("n3")];
        assert_eq!(home_of(&id(2), &holders), node_name("n1"));
        assert_eq!(home_of(&id(2), &holders[1..]), node_name("n2"));
        assert_eq!(home_of(&id(3), &holders[1..]), node_name("n3"));
    }
}
