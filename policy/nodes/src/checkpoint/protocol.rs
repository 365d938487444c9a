//! Events, actions and limits of the checkpoint's core.

use std::sync::Arc;

use millrace_types::checkpoint::{SYNC_BYTES_MAX, SYNC_ITEMS_MAX};
use millrace_types::limits::INDEX_ENTRIES_PER_NODE_MAX;
use millrace_types::{Alphas, Bytes, DataId, Epoch, FunctionKey, ModelCopy, SloCounts, SyncBatch, Usage};

/// Bounds of batches and of named data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Maximum number of items of a batch.
    pub items_max: usize,
    /// Maximum encoded size of a batch, in bytes.
    pub bytes_max: usize,
    /// Maximum number of data entries that are named.
    pub entries_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { items_max: SYNC_ITEMS_MAX, bytes_max: SYNC_BYTES_MAX, entries_max: INDEX_ENTRIES_PER_NODE_MAX }
    }
}

/// Input of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A copy of a model was loaded.
    ModelLoaded {
        copy: ModelCopy,
        /// Memory that the copy uses.
        bytes: Bytes,
    },
    /// A copy of a model was dropped.
    ModelDropped { copy: ModelCopy },
    /// A piece of data was stored.
    DataStored { id: DataId, bytes: Bytes },
    /// A piece of data was dropped.
    DataDropped { id: DataId },
    /// Requests finished or expired.
    Scored {
        function: FunctionKey,
        /// SLO counts since the last such event for the function.
        counts: SloCounts,
    },
    /// Requests were answered, or a function was idle for a while.
    Used {
        function: FunctionKey,
        /// Usage since the last such event for the function.
        usage: Usage,
    },
    /// A function and its SLO counts were deleted. A function that only moved away is not reported.
    FunctionDeleted { function: FunctionKey },
    /// An alpha of the node changed; holds the alphas of all levels.
    AlphasSet(Alphas),
    /// The node was registered. The same epoch again, from another controller, changes nothing.
    Registered { epoch: Epoch },
    /// Another leader than before became reachable, so the batch in flight is sent to that leader.
    Reached,
    /// A batch was committed, now or earlier.
    Acknowledged {
        /// Registration that the batch belongs to.
        epoch: Epoch,
        /// Number of the batch, or of a later batch.
        seq: u64,
    },
    /// A batch does not follow the leader's last batch.
    ResyncWanted {
        /// Registration that the batch belongs to.
        epoch: Epoch,
        /// Number of the batch.
        seq: u64,
        /// Last number that the leader accepted. A full sync uses higher numbers.
        last: u64,
    },
    /// The node shuts down in order: report changes now, before the period ends.
    Flush,
    /// Time has passed.
    Tick,
}

/// Output of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a batch to the leader. A number sent again names the same batch.
    Send(Arc<SyncBatch>),
}
