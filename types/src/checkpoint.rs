//! The checkpoint that a worker sends to the leader about once a second, so that the worker's soft
//! state outlives the worker. A checkpoint covers the resident models and their
//! locations, the stored pieces of data, the SLO counts of functions, and their usage.
//!
//! ```text
//!   worker                                             leader
//!     │── SyncBatch{epoch, seq 1, Full(First), delta} ──▶ │  commits, then acknowledges
//!     │◀───────────────────────────────────────── seq 1 ──│
//!     │── SyncBatch{epoch, seq 2, Full(Last), delta} ───▶ │
//!     │── SyncBatch{epoch, seq 3, Delta, delta} ────────▶ │  last + 1 applies, older is
//!     │                                                   │  acknowledged again, a gap asks
//!     ▼                                                   ▼  for a full sync
//! ```
//!
//! Counters are cumulative within the node's epoch, so that a batch may arrive twice. Items are
//! stored as tuples without field names, because there can be a hundred thousand of them. A tuple
//! can grow only at its end, as [`Usage`] did. [`NodeDelta`] around the items is a map and may
//! grow.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::counts::{Alpha, SloCounts};
use crate::digest::Digest;
use crate::ids::{Epoch, FunctionKey, GpuIndex, NodeName};
use crate::serving::Priority;
use crate::units::Bytes;
use crate::usage::Usage;

/// Maximum number of items in a batch.
pub const SYNC_ITEMS_MAX: usize = 1_000;
/// Maximum size of an encoded batch, in bytes: well below the limit on a command.
pub const SYNC_BYTES_MAX: usize = 96 << 10;
/// Maximum value of a counter of requests or milliseconds. Sums over all nodes and epochs stay far
/// below 2^64.
pub const COUNT_MAX: u64 = 1 << 48;

/// The cluster-wide name of a piece of intermediate data, never used twice: the node that made the
/// data, the epoch of the node's registration then, and the node's own counter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "(NodeName, Epoch, u64)", into = "(NodeName, Epoch, u64)")]
pub struct DataId {
    /// The owner node: the node that made the data, and the first to be asked for its location.
    pub home: NodeName,
    /// The epoch of the owner node's registration when the data was made.
    pub epoch: Epoch,
    /// The owner node's counter, unique within the epoch.
    pub counter: u64,
}

impl From<(NodeName, Epoch, u64)> for DataId {
    fn from((home, epoch, counter): (NodeName, Epoch, u64)) -> Self {
        Self { home, epoch, counter }
    }
}

impl From<DataId> for (NodeName, Epoch, u64) {
    fn from(id: DataId) -> Self {
        (id.home, id.epoch, id.counter)
    }
}

impl fmt::Display for DataId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.home, self.epoch, self.counter)
    }
}

/// The kind of memory on a node in which a model is resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MemoryTier {
    /// Pinned host memory.
    Host,
    /// The memory of this GPU.
    Gpu(GpuIndex),
}

/// A copy of a model on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "(Digest, MemoryTier)", into = "(Digest, MemoryTier)")]
pub struct ModelCopy {
    /// The digest of the model file.
    pub digest: Digest,
    /// The memory that holds the copy.
    pub tier: MemoryTier,
}

impl From<(Digest, MemoryTier)> for ModelCopy {
    fn from((digest, tier): (Digest, MemoryTier)) -> Self {
        Self { digest, tier }
    }
}

impl From<ModelCopy> for (Digest, MemoryTier) {
    fn from(copy: ModelCopy) -> Self {
        (copy.digest, copy.tier)
    }
}

/// The alphas of a node, by priority level. Levels without functions with an
/// objective, and policies other than `torpor`, have none.
pub type Alphas = BTreeMap<Priority, Alpha>;

/// The changes on a node since the previous batch. In a full sync, a portion of the complete state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeDelta {
    /// Copies of models that are present, with their sizes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<(ModelCopy, Bytes)>,
    /// Copies of models that are gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models_gone: Vec<ModelCopy>,
    /// Entries of the data index: data that is present and has outlived a sync period, with its
    /// size.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<(DataId, Bytes)>,
    /// Index entries of data that is gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entries_gone: Vec<DataId>,
    /// SLO counts by function, cumulative in this epoch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slo: Vec<(FunctionKey, SloCounts)>,
    /// Usage by function, cumulative in this epoch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub usage: Vec<(FunctionKey, Usage)>,
    /// All alphas of the node, if any changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alphas: Option<Alphas>,
    /// The number of pieces of data that the node holds beyond the bound on its index entries, if
    /// that number changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overflow: Option<u64>,
}

/// Whether a batch holds changes or a portion of a full sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SyncPart {
    /// The changes since the previous batch.
    Delta,
    /// A portion of the complete state. When the last portion has arrived, items that no portion
    /// named are gone.
    Full(SyncPortion),
}

/// The position of a batch in a full sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SyncPortion {
    /// The batch is the whole full sync.
    Only,
    /// The batch begins a full sync. A full sync that was under way is abandoned.
    First,
    /// The batch continues a full sync.
    Middle,
    /// The batch ends a full sync.
    Last,
}

/// A batch of checkpoint data from a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SyncBatch {
    /// The epoch of the node's registration.
    pub epoch: Epoch,
    /// The batch's sequence number, counted from 1 in each epoch.
    pub seq: u64,
    /// Whether the batch holds changes or a portion of a full sync.
    pub part: SyncPart,
    /// The items of the batch.
    pub delta: NodeDelta,
}

/// Upper bounds on MessagePack sizes, in bytes: 1 for a short tuple, 9 for a number, 73 for a
/// digest, and 2 plus the length of a name.
const NUMBER: usize = 9;
const COPY: usize = 1 + 73 + 1 + 4 + NUMBER;
const KEY_FIELDS: usize = 1 + "tenant".len() + 1 + "name".len() + 1;
/// Upper bound on the encoded size of a batch without its items, in bytes. The alphas of all levels
/// take at most 7 bytes each.
const AROUND: usize = 320;

fn id_len(id: &DataId) -> usize {
    1 + 2 + id.home.as_str().len() + 2 * NUMBER
}

fn key_len(key: &FunctionKey) -> usize {
    KEY_FIELDS + 4 + key.tenant.as_str().len() + key.name.as_str().len()
}

/// Upper bounds on the encoded size of an item of each kind, in bytes. A worker fills a batch by
/// these bounds.
pub mod encoded {
    use super::{AROUND, COPY, DataId, FunctionKey, NUMBER, id_len, key_len};

    /// Returns the upper bound for a batch without items.
    #[must_use]
    pub const fn around() -> usize {
        AROUND
    }

    /// Returns the upper bound for a copy of a model, present or gone.
    #[must_use]
    pub const fn model() -> usize {
        1 + COPY + NUMBER
    }

    /// Returns the upper bound for an index entry, present or gone.
    #[must_use]
    pub fn entry(id: &DataId) -> usize {
        1 + id_len(id) + NUMBER
    }

    /// Returns the upper bound for a function's SLO counts.
    #[must_use]
    pub fn score(key: &FunctionKey) -> usize {
        2 + key_len(key) + 2 * NUMBER
    }

    /// Returns the upper bound for a function's usage.
    #[must_use]
    pub fn usage(key: &FunctionKey) -> usize {
        2 + key_len(key) + 3 * NUMBER
    }
}

impl NodeDelta {
    /// Returns the number of items of all kinds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.models.len()
            + self.models_gone.len()
            + self.entries.len()
            + self.entries_gone.len()
            + self.slo.len()
            + self.usage.len()
    }

    /// Returns whether the delta reports no change at all: neither items nor alphas nor overflow.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
