//! Tier 2 of the data index (DESIGN §5, D09): which nodes hold a piece of data. What a node holds
//! is in its [`Checkpoint`](crate::checkpoint::Checkpoint); here is the other way round, and which
//! data is lost: its last holder was, and nobody has named it since.
//!
//! Only what is lost is stored. Who holds what is rebuilt from the checkpoints.

use std::sync::Arc;

use imbl::{OrdMap, OrdSet};
/// Beyond, what was lost first is forgotten, and unknown.
pub use millrace_types::limits::LOST_ENTRIES_MAX;
use millrace_types::{Bytes, DataId, NodeName};
use serde::{Deserialize, Serialize};

/// Where a piece of data is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Located {
    /// On live nodes.
    Held {
        /// Whom to ask: the node that made it, if it still holds it, or else a replica, which is
        /// the same for everyone.
        home: NodeName,
        /// All who hold it, by name.
        holders: Arc<[NodeName]>,
        /// Its size.
        bytes: Bytes,
    },
    /// Nowhere: it went with its last holder, and has to be made again.
    Lost {
        /// Its size.
        bytes: Bytes,
    },
    /// Never heard of: too young, beyond its node's bound, dropped, or lost long ago.
    Unknown,
}

/// A piece of data that went with its last holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lost {
    /// The state's version when it was lost.
    pub(crate) version: u64,
    pub(crate) bytes: Bytes,
}

/// Who holds what, and what is lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub(crate) struct Index {
    held: OrdMap<DataId, Arc<[NodeName]>>,
    lost: OrdMap<DataId, Lost>,
    by_loss: OrdSet<(u64, DataId)>,
}

#[derive(Serialize, Deserialize)]
struct Stored(Vec<(DataId, u64, Bytes)>);

impl From<Stored> for Index {
    fn from(Stored(lost): Stored) -> Self {
        let by_loss = lost.iter().map(|(id, version, _)| (*version, id.clone())).collect();
        let lost = lost.into_iter().map(|(id, version, bytes)| (id, Lost { version, bytes })).collect();
        Self { held: OrdMap::new(), lost, by_loss }
    }
}

impl From<Index> for Stored {
    fn from(index: Index) -> Self {
        Self(index.lost.into_iter().map(|(id, lost)| (id, lost.version, lost.bytes)).collect())
    }
}

impl Index {
    /// A node holds it. What was lost is found.
    pub(crate) fn hold(&mut self, id: &DataId, node: &NodeName) {
        match self.held.get_mut(id) {
            Some(holders) => {
                if let Err(place) = holders.binary_search(node) {
                    *holders =
                        [&holders[..place], std::slice::from_ref(node), &holders[place..]].concat().into();
                }
            }
            None => {
                self.held.insert(id.clone(), Arc::new([node.clone()]));
                self.find(id);
            }
        }
    }

    /// A node dropped it. The last to do so makes it unknown.
    pub(crate) fn release(&mut self, id: &DataId, node: &NodeName) {
        self.let_go(id, node);
    }

    /// A node that held it is lost at `version`, and it as well if nobody else holds it.
    pub(crate) fn lose(&mut self, id: &DataId, bytes: Bytes, node: &NodeName, version: u64) {
        if self.let_go(id, node) {
            self.lost.insert(id.clone(), Lost { version, bytes });
            self.by_loss.insert((version, id.clone()));
        }
    }

    /// Forgets what was lost first, down to the bound.
    pub(crate) fn forget_beyond(&mut self, max: usize) {
        while self.lost.len() > max {
            let Some((_, id)) = self.by_loss.remove_min() else { return };
            self.lost.remove(&id);
        }
    }

    /// Whether the node was the last to hold it.
    fn let_go(&mut self, id: &DataId, node: &NodeName) -> bool {
        let Some(holders) = self.held.get_mut(id) else { return false };
        let Ok(place) = holders.binary_search(node) else { return false };
        if holders.len() == 1 {
            self.held.remove(id);
            return true;
        }
        *holders = [&holders[..place], &holders[place + 1..]].concat().into();
        false
    }

    fn find(&mut self, id: &DataId) {
        if let Some(lost) = self.lost.remove(id) {
            self.by_loss.remove(&(lost.version, id.clone()));
        }
    }

    /// Who holds it, by name. Never empty.
    pub(crate) fn holders(&self, id: &DataId) -> Option<&Arc<[NodeName]>> {
        self.held.get(id)
    }

    /// What is known of its loss.
    pub(crate) fn lost(&self, id: &DataId) -> Option<Lost> {
        self.lost.get(id).copied()
    }

    pub(crate) fn held_len(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn lost_len(&self) -> usize {
        self.lost.len()
    }

    /// The holders of all data, counted.
    pub(crate) fn holdings(&self) -> usize {
        self.held.values().map(|holders| holders.len()).sum()
    }

    /// Whether nothing is both held and lost, and the order of loss matches what is lost.
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

/// Whom to ask for data with these holders: its home if that is one of them, or else the one its
/// number falls on, so that the data of a lost home is spread over the replicas.
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
    fn the_last_holder_takes_it_along() {
        let mut index = Index::default();
        index.hold(&id(1), &node_name("n2"));
        index.hold(&id(1), &node_name("n1"));
        index.hold(&id(1), &node_name("n1"));
        assert_eq!(index.holders(&id(1)).unwrap()[..], [node_name("n1"), node_name("n2")]);
        index.lose(&id(1), Bytes(5), &node_name("n1"), 7);
        assert_eq!((index.lost_len(), index.held_len()), (0, 1), "a replica is left");
        index.lose(&id(1), Bytes(5), &node_name("n2"), 8);
        assert_eq!(index.lost(&id(1)), Some(Lost { version: 8, bytes: Bytes(5) }));
        index.hold(&id(1), &node_name("n3"));
        assert_eq!((index.lost_len(), index.held_len()), (0, 1), "found again");
        index.release(&id(1), &node_name("n3"));
        assert_eq!((index.lost_len(), index.held_len()), (0, 0), "dropped is not lost");
        assert!(index.is_consistent(8));
    }

    #[test]
    fn what_was_lost_first_is_forgotten_first() {
        let mut index = Index::default();
        for counter in 0..4 {
            index.hold(&id(counter), &node_name("n1"));
            index.lose(&id(counter), Bytes(1), &node_name("n1"), 10 - counter);
        }
        index.forget_beyond(2);
        assert_eq!((index.lost(&id(3)), index.lost(&id(2))), (None, None));
        assert!(index.lost(&id(0)).is_some() && index.is_consistent(10));
    }

    #[test]
    fn the_home_is_asked_and_then_always_the_same_replica() {
        let holders = [node_name("n1"), node_name("n2"), node_name("n3")];
        assert_eq!(home_of(&id(2), &holders), node_name("n1"));
        assert_eq!(home_of(&id(2), &holders[1..]), node_name("n2"));
        assert_eq!(home_of(&id(3), &holders[1..]), node_name("n3"));
    }
}
