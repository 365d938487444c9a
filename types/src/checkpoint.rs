//! What a worker tells the leader about its soft state, about once a second, so that it outlives
//! the worker (DESIGN §5): which models it holds and where, which pieces of data, how its functions
//! do against their objectives, and what they used.
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
//! Counters are cumulative within the node's epoch, so that a batch may be told twice. Items are
//! stored as tuples, without field names: there are a hundred thousand of them, and what one
//! consists of can at most be added to at its end, as [`Usage`] was. [`NodeDelta`] around them is a
//! map and may grow.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::counts::{Alpha, SloCounts};
use crate::digest::Digest;
use crate::ids::{Epoch, FunctionKey, GpuIndex, NodeName};
use crate::units::Bytes;
use crate::usage::Usage;

/// The most items of one batch.
pub const SYNC_ITEMS_MAX: usize = 1_000;
/// The most bytes of one batch, encoded: well below what a command may have.
pub const SYNC_BYTES_MAX: usize = 96 << 10;
/// The most a counter of requests, or of milliseconds, may say. Sums over every node and epoch stay
/// far from 2^64.
pub const COUNT_MAX: u64 = 1 << 48;

/// A piece of intermediate data's cluster-wide name, never given twice: the node that made it, the
/// registration under which it did, and a number it counts up.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "(NodeName, Epoch, u64)", into = "(NodeName, Epoch, u64)")]
pub struct DataId {
    /// Who made it, and is asked first where it is now.
    pub home: NodeName,
    /// The home's registration then.
    pub epoch: Epoch,
    /// The home's own count.
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

/// Where on a node a model is resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Tier {
    /// In pinned host memory.
    Host,
    /// On a GPU.
    Gpu(GpuIndex),
}

/// One copy of a model on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "(Digest, Tier)", into = "(Digest, Tier)")]
pub struct ModelCopy {
    /// Which model.
    pub digest: Digest,
    /// Where it is.
    pub tier: Tier,
}

impl From<(Digest, Tier)> for ModelCopy {
    fn from((digest, tier): (Digest, Tier)) -> Self {
        Self { digest, tier }
    }
}

impl From<ModelCopy> for (Digest, Tier) {
    fn from(copy: ModelCopy) -> Self {
        (copy.digest, copy.tier)
    }
}

/// What changed on a node. In a full sync, a part of all there is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeDelta {
    /// Copies of models that are there, with the bytes they take.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<(ModelCopy, Bytes)>,
    /// Copies that are gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models_gone: Vec<ModelCopy>,
    /// Index entries: data that is there and has outlived a sync period, with its size.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<(DataId, Bytes)>,
    /// Data that is gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entries_gone: Vec<DataId>,
    /// Scores, cumulative in this epoch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slo: Vec<(FunctionKey, SloCounts)>,
    /// Usage, cumulative in this epoch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub usage: Vec<(FunctionKey, Usage)>,
    /// The node's alpha, when it changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<Alpha>,
    /// How much data the node holds beyond what it may name, when that changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overflow: Option<u64>,
}

/// Which part of what a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SyncPart {
    /// What changed since the batch before.
    Delta,
    /// A portion of everything. What no portion names is gone when the last has come.
    Full(Portion),
}

/// Where in a full sync a batch stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Portion {
    /// It begins and ends it.
    Only,
    /// It begins it. One that was under way is given up.
    First,
    /// It goes on with it.
    Middle,
    /// It ends it.
    Last,
}

/// One checkpoint of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SyncBatch {
    /// The registration it belongs to.
    pub epoch: Epoch,
    /// Its number, from 1 in each epoch.
    pub seq: u64,
    /// Which part of what.
    pub part: SyncPart,
    /// The contents.
    pub delta: NodeDelta,
}

/// What items take at most when encoded as MessagePack: 1 byte for a short tuple, 9 for a number,
/// 73 for a digest, 2 more than its letters for a name.
const NUMBER: usize = 9;
const COPY: usize = 1 + 73 + 1 + 4 + NUMBER;
const KEY_FIELDS: usize = 1 + "tenant".len() + 1 + "name".len() + 1;
/// What a batch takes around its items.
const AROUND: usize = 256;

fn id_len(id: &DataId) -> usize {
    1 + 2 + id.home.as_str().len() + 2 * NUMBER
}

fn key_len(key: &FunctionKey) -> usize {
    KEY_FIELDS + 4 + key.tenant.as_str().len() + key.name.as_str().len()
}

/// What one item of each kind takes at most, encoded. A batch is filled by these.
pub mod encoded {
    use super::{AROUND, COPY, DataId, FunctionKey, NUMBER, id_len, key_len};

    /// A batch without items.
    #[must_use]
    pub const fn around() -> usize {
        AROUND
    }

    /// A copy of a model, there or gone.
    #[must_use]
    pub const fn model() -> usize {
        1 + COPY + NUMBER
    }

    /// An index entry, there or gone.
    #[must_use]
    pub fn entry(id: &DataId) -> usize {
        1 + id_len(id) + NUMBER
    }

    /// A function's score.
    #[must_use]
    pub fn score(key: &FunctionKey) -> usize {
        2 + key_len(key) + 2 * NUMBER
    }

    /// A function's usage.
    #[must_use]
    pub fn usage(key: &FunctionKey) -> usize {
        2 + key_len(key) + 3 * NUMBER
    }
}

impl NodeDelta {
    /// Items of every kind.
    #[must_use]
    pub fn len(&self) -> usize {
        self.models.len()
            + self.models_gone.len()
            + self.entries.len()
            + self.entries_gone.len()
            + self.slo.len()
            + self.usage.len()
    }

    /// Whether it says nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
