//! What the checkpoint's core is told, what it wants done, and its limits.

use std::sync::Arc;

use millrace_types::checkpoint::{SYNC_BYTES_MAX, SYNC_ITEMS_MAX};
use millrace_types::limits::INDEX_ENTRIES_PER_NODE_MAX;
use millrace_types::{Alpha, Bytes, DataId, Epoch, FunctionKey, ModelCopy, SloCounts, SyncBatch, Usage};

/// The bounds of batches and of named data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The most items of a batch.
    pub items_max: usize,
    /// The most bytes of a batch, encoded.
    pub bytes_max: usize,
    /// The most data that is named.
    pub entries_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { items_max: SYNC_ITEMS_MAX, bytes_max: SYNC_BYTES_MAX, entries_max: INDEX_ENTRIES_PER_NODE_MAX }
    }
}

/// What the core is told.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A copy of a model is there.
    ModelLoaded {
        /// Which, and where.
        copy: ModelCopy,
        /// What it takes.
        bytes: Bytes,
    },
    /// A copy of a model is gone.
    ModelDropped {
        /// Which, and where.
        copy: ModelCopy,
    },
    /// A piece of data is here.
    DataStored {
        /// Which.
        id: DataId,
        /// Its size.
        bytes: Bytes,
    },
    /// A piece of data is no longer here.
    DataDropped {
        /// Which.
        id: DataId,
    },
    /// Requests finished or expired.
    Scored {
        /// Whose.
        function: FunctionKey,
        /// How many since the last time this was said.
        counts: SloCounts,
    },
    /// Requests were answered, or a function was idle for a while.
    Used {
        /// Whose.
        function: FunctionKey,
        /// What was used since the last time this was said.
        usage: Usage,
    },
    /// A function was deleted, and its score with it. Not one that only moved away.
    FunctionDeleted {
        /// Which.
        function: FunctionKey,
    },
    /// The share of prioritised requests changed.
    AlphaSet {
        /// The share.
        alpha: Alpha,
    },
    /// A registration holds. The same epoch again, from another controller, changes nothing.
    Registered {
        /// Its epoch.
        epoch: Epoch,
    },
    /// Another leader than before can be sent to: what is in flight goes to it.
    Reached,
    /// A batch is committed, or was before.
    Acknowledged {
        /// The registration it belongs to.
        epoch: Epoch,
        /// Its number, or a later one.
        seq: u64,
    },
    /// A batch does not follow what the leader has.
    ResyncWanted {
        /// The registration it belongs to.
        epoch: Epoch,
        /// The batch's number.
        seq: u64,
        /// The last that the leader took: a full sync has higher numbers.
        last: u64,
    },
    /// The node goes down in order: what is to be told is told now, not when the period ends.
    Flush,
    /// Time has passed.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a batch to the leader. The same number may come more than once: it is the same batch.
    Send(Arc<SyncBatch>),
}
