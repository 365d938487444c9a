//! The soft state that a live node reported in its present epoch, as the leader committed it.
//!
//! A checkpoint starts empty with the registration, and is *whole* once a full sync has ended.
//! Before that, an item's absence from the checkpoint means nothing. During a later full sync the
//! old items stay and the new ones are added; items that the sync does not name are removed with
//! its last portion.

use imbl::OrdMap;
use millrace_types::limits::{INDEX_ENTRIES_PER_NODE_MAX, MODELS_PER_NODE_MAX};
use millrace_types::{
    Alpha, Alphas, Bytes, DataId, Epoch, FunctionKey, ModelCopy, SloBase, SloCounts, Usage,
};
use serde::{Deserialize, Serialize};

use crate::table::TableRecord;

/// Whether the state knows all items of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CheckpointCoverage {
    /// No full sync has ended in this epoch.
    #[default]
    Partial,
    /// A full sync has ended: the node holds exactly its reported items.
    Whole,
}

/// A function's score on a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(SloCounts, SloBase)", into = "(SloCounts, SloBase)")]
pub struct ReplicaScore {
    /// Counts that the node reported, cumulative in its epoch.
    pub counts: SloCounts,
    /// Counts that the placement adds.
    pub base: SloBase,
}

impl ReplicaScore {
    /// Returns the counts by which the function's replica on the node decides, and that other
    /// replicas inherit.
    #[must_use]
    pub const fn effective(self) -> SloCounts {
        self.base.effective(self.counts)
    }
}

impl From<(SloCounts, SloBase)> for ReplicaScore {
    fn from((counts, base): (SloCounts, SloBase)) -> Self {
        Self { counts, base }
    }
}

impl From<ReplicaScore> for (SloCounts, SloBase) {
    fn from(score: ReplicaScore) -> Self {
        (score.counts, score.base)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCheckpoint {
    /// The epoch of the registration.
    pub epoch: Epoch,
    /// The number of the last merged batch.
    pub seq: u64,
    /// Whether the checkpoint lists all items of the node.
    pub knowledge: CheckpointCoverage,
    /// Copies of models on the node, with their sizes.
    #[serde(deserialize_with = "crate::packed::map")]
    pub models: OrdMap<ModelCopy, Bytes>,
    /// The node's entries of the data index, with their sizes. At most
    /// [`INDEX_ENTRIES_PER_NODE_MAX`]; twice as many during a full sync.
    #[serde(deserialize_with = "crate::packed::map")]
    pub entries: OrdMap<DataId, Bytes>,
    /// Scores of the node's functions.
    #[serde(deserialize_with = "crate::packed::map")]
    pub scores: OrdMap<FunctionKey, ReplicaScore>,
    /// Usage of the node's functions, cumulative in its epoch.
    #[serde(deserialize_with = "crate::packed::map")]
    pub usage: OrdMap<FunctionKey, Usage>,
    /// Always [`Alpha::ONE`]: the first versions of the rules encode the field, and no worker ever
    /// reported another value.
    pub(crate) alpha: Alpha,
    /// The node's alphas.
    #[serde(default, skip_serializing_if = "Alphas::is_empty")]
    pub alphas: Alphas,
    /// Pieces of data that the node holds beyond the bound of its reports, by its own count.
    pub overflow: u64,
    /// Items beyond the bounds that the node reported since the last full sync; 0 for a worker that
    /// keeps to the bounds.
    pub dropped: u64,
    /// The full sync that is under way.
    pub(crate) incoming: Option<IncomingSync>,
}

/// The received part of a full sync.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IncomingSync {
    #[serde(deserialize_with = "crate::packed::map")]
    pub(crate) models: OrdMap<ModelCopy, Bytes>,
    #[serde(deserialize_with = "crate::packed::map")]
    pub(crate) entries: OrdMap<DataId, Bytes>,
    pub(crate) dropped: u64,
}

/// Maximum number of a node's entries during a full sync.
pub(crate) const ENTRIES_IN_SYNC_MAX: usize = 2 * INDEX_ENTRIES_PER_NODE_MAX;

/// Bytes of a checkpoint without items.
const AROUND_BYTES: usize = 512;
/// Maximum bytes of a copy of a model.
const MODEL_BYTES_MAX: usize = 112;
/// Maximum bytes of an index entry.
const ENTRY_BYTES_MAX: usize = 96;
/// Maximum bytes of a function's score, or of its usage.
const FUNCTION_BYTES_MAX: usize = 224;

/// The size is a bound from the number of items, because encoding would be too slow: a checkpoint
/// of a hundred thousand items changes every second.
impl TableRecord for NodeCheckpoint {
    fn bytes(&self) -> u64 {
        let incoming = self.incoming.as_ref();
        let models = self.models.len() + incoming.map_or(0, |it| it.models.len());
        let entries = self.entries.len() + incoming.map_or(0, |it| it.entries.len());
        let functions = self.scores.len() + self.usage.len();
        let items = models * MODEL_BYTES_MAX + entries * ENTRY_BYTES_MAX + functions * FUNCTION_BYTES_MAX;
        (AROUND_BYTES + items) as u64
    }
}

impl NodeCheckpoint {
    pub(crate) fn for_epoch(epoch: Epoch) -> Self {
        Self { epoch, ..Self::default() }
    }

    #[must_use]
    pub fn is_syncing(&self) -> bool {
        self.incoming.is_some()
    }

    /// Returns the map that receives reported copies of models, and the count of dropped items.
    pub(crate) fn models_mut(&mut self) -> (&mut OrdMap<ModelCopy, Bytes>, &mut u64) {
        match &mut self.incoming {
            Some(incoming) => (&mut incoming.models, &mut incoming.dropped),
            None => (&mut self.models, &mut self.dropped),
        }
    }

    /// Whether the checkpoint keeps to its named bounds.
    pub(crate) fn is_bounded(&self) -> bool {
        let entries = if self.is_syncing() { ENTRIES_IN_SYNC_MAX } else { INDEX_ENTRIES_PER_NODE_MAX };
        let incoming = self.incoming.as_ref();
        self.entries.len() <= entries
            && self.models.len() <= MODELS_PER_NODE_MAX
            && incoming.is_none_or(|it| it.entries.len() <= INDEX_ENTRIES_PER_NODE_MAX)
            && incoming.is_none_or(|it| it.models.len() <= MODELS_PER_NODE_MAX)
    }
}

/// Inserts a value unless the map would then have more than `max` entries. Returns whether the
/// value was inserted.
pub(crate) fn insert_within<K: Ord + Clone, V: Clone>(
    map: &mut OrdMap<K, V>,
    key: &K,
    value: V,
    max: usize,
) -> bool {
    let fits = map.len() < max || map.contains_key(key);
    if fits {
        map.insert(key.clone(), value);
    }
    fits
}
