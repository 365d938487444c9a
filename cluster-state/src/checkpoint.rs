//! What a live node has told of its soft state in its present epoch, as the leader committed it.
//!
//! A checkpoint begins empty with the registration and is *whole* once a full sync has ended:
//! until then nothing follows from what it lacks. While a later full sync is under way, what the
//! node had stays, what has come is added, and what has not come goes with the last portion.

use imbl::OrdMap;
use millrace_types::limits::{INDEX_ENTRIES_PER_NODE_MAX, MODELS_PER_NODE_MAX};
use millrace_types::{Alpha, Bytes, DataId, Epoch, FunctionKey, ModelCopy, SloBase, SloCounts, Usage};
use serde::{Deserialize, Serialize};

use crate::table::Record;

/// How far the state's knowledge of a node goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Knowledge {
    /// No full sync has ended in this epoch.
    #[default]
    Partial,
    /// It holds what it says it holds.
    Whole,
}

/// A function's score on a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(SloCounts, SloBase)", into = "(SloCounts, SloBase)")]
pub struct Score {
    /// What the node reported, cumulative in its epoch.
    pub counts: SloCounts,
    /// What the placement adds to it.
    pub base: SloBase,
}

impl Score {
    /// What the function's replica on the node goes by, and what others inherit from it.
    #[must_use]
    pub const fn effective(self) -> SloCounts {
        self.base.effective(self.counts)
    }
}

impl From<(SloCounts, SloBase)> for Score {
    fn from((counts, base): (SloCounts, SloBase)) -> Self {
        Self { counts, base }
    }
}

impl From<Score> for (SloCounts, SloBase) {
    fn from(score: Score) -> Self {
        (score.counts, score.base)
    }
}

/// One node's soft state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The registration it belongs to.
    pub epoch: Epoch,
    /// The last batch taken.
    pub seq: u64,
    /// Whether what it lacks is not there.
    pub knowledge: Knowledge,
    /// Its copies of models.
    #[serde(deserialize_with = "crate::packed::map")]
    pub models: OrdMap<ModelCopy, Bytes>,
    /// Its entries of the data index. At most [`INDEX_ENTRIES_PER_NODE_MAX`]; twice as many while a
    /// full sync is under way.
    #[serde(deserialize_with = "crate::packed::map")]
    pub entries: OrdMap<DataId, Bytes>,
    /// How its functions do.
    #[serde(deserialize_with = "crate::packed::map")]
    pub scores: OrdMap<FunctionKey, Score>,
    /// What its functions used, cumulative in its epoch.
    #[serde(deserialize_with = "crate::packed::map")]
    pub usage: OrdMap<FunctionKey, Usage>,
    /// Its share of prioritised requests.
    pub alpha: Alpha,
    /// Data it holds beyond what it may name, by its own count.
    pub overflow: u64,
    /// Items that it named beyond the bounds, since the last full sync. 0 from a worker that keeps
    /// to them.
    pub dropped: u64,
    /// A full sync that is under way.
    pub(crate) incoming: Option<Incoming>,
}

/// What has come of a full sync.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Incoming {
    #[serde(deserialize_with = "crate::packed::map")]
    pub(crate) models: OrdMap<ModelCopy, Bytes>,
    #[serde(deserialize_with = "crate::packed::map")]
    pub(crate) entries: OrdMap<DataId, Bytes>,
    pub(crate) dropped: u64,
}

/// The most entries of a node while a full sync is under way.
pub(crate) const ENTRIES_IN_SYNC_MAX: usize = 2 * INDEX_ENTRIES_PER_NODE_MAX;

/// Bytes of a checkpoint without items.
const AROUND_BYTES: usize = 512;
/// Bytes of a copy of a model, at most.
const MODEL_BYTES_MAX: usize = 112;
/// Bytes of an index entry, at most.
const ENTRY_BYTES_MAX: usize = 96;
/// Bytes of a function's score, or of its usage, at most.
const FUNCTION_BYTES_MAX: usize = 224;

/// Bounded by the number of items: a checkpoint of a hundred thousand items changes every second.
impl Record for Checkpoint {
    fn bytes(&self) -> u64 {
        let incoming = self.incoming.as_ref();
        let models = self.models.len() + incoming.map_or(0, |it| it.models.len());
        let entries = self.entries.len() + incoming.map_or(0, |it| it.entries.len());
        let functions = self.scores.len() + self.usage.len();
        let items = models * MODEL_BYTES_MAX + entries * ENTRY_BYTES_MAX + functions * FUNCTION_BYTES_MAX;
        (AROUND_BYTES + items) as u64
    }
}

impl Checkpoint {
    pub(crate) fn begun(epoch: Epoch) -> Self {
        Self { epoch, ..Self::default() }
    }

    /// Whether a full sync is under way.
    #[must_use]
    pub fn is_syncing(&self) -> bool {
        self.incoming.is_some()
    }

    /// Where its copies of models go, and the count of those that are dropped.
    pub(crate) fn models_mut(&mut self) -> (&mut OrdMap<ModelCopy, Bytes>, &mut u64) {
        match &mut self.incoming {
            Some(incoming) => (&mut incoming.models, &mut incoming.dropped),
            None => (&mut self.models, &mut self.dropped),
        }
    }

    /// Whether the named bounds hold.
    pub(crate) fn is_bounded(&self) -> bool {
        let entries = if self.is_syncing() { ENTRIES_IN_SYNC_MAX } else { INDEX_ENTRIES_PER_NODE_MAX };
        let incoming = self.incoming.as_ref();
        self.entries.len() <= entries
            && self.models.len() <= MODELS_PER_NODE_MAX
            && incoming.is_none_or(|it| it.entries.len() <= INDEX_ENTRIES_PER_NODE_MAX)
            && incoming.is_none_or(|it| it.models.len() <= MODELS_PER_NODE_MAX)
    }
}

/// Inserts unless that makes more than `max`. Whether it is in.
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
