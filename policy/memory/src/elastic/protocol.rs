//! Events and actions of the store.

use millrace_types::Bytes;

use millrace_core::ids::{FunctionIndex, ObjectKey};

/// A stretch of the store's address range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreExtent {
    /// Offset from the beginning of the range, in bytes.
    pub at: u64,
    /// Length, at least 1 byte.
    pub len: Bytes,
}

/// Distance of an object's consumer from its run, the nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConsumerDistance {
    /// The consumer runs, or was assigned to a GPU and is next. The object stays in its place.
    Claimed,
    /// The consumer waits in the queue at this position; a smaller position runs sooner.
    Queued(u64),
    /// The consumer is not queued yet.
    Unqueued,
}

/// Input of the store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A request for a function arrived.
    Requested { function: FunctionIndex },
    /// An execution of a function ended.
    Executed { function: FunctionIndex },
    /// A function no longer exists.
    Forget { function: FunctionIndex },
    /// An object is to be stored. Its bytes stay with the producer until the copy to the store or
    /// to the host ends.
    Store {
        /// New key of the object.
        object: ObjectKey,
        /// Function that produced the object.
        function: FunctionIndex,
        size: Bytes,
        /// Distance of each consumer: 1 to [`CONSUMERS_MAX`](super::CONSUMERS_MAX) entries. Later
        /// events name a consumer by its index here.
        consumers: Vec<ConsumerDistance>,
    },
    /// A placed object has been written.
    Filled { object: ObjectKey },
    /// The distance of a consumer changed: its queue position, its assignment to a GPU, or the end
    /// of either.
    ConsumerMoved {
        object: ObjectKey,
        /// Index of the consumer in the list given to `Store`.
        consumer: usize,
        distance: ConsumerDistance,
    },
    /// A consumer has read an object, or never will.
    Consumed {
        object: ObjectKey,
        /// Index of the consumer in the list given to `Store`.
        consumer: usize,
    },
    /// No consumer will read an object any more.
    Discard { object: ObjectKey },
    /// A whole copy of an object is on the host.
    Migrated { object: ObjectKey },
    /// An object is on the GPU again. Its copy on the host may be dropped.
    Reloaded { object: ObjectKey },
    /// A write, migration, reload or refusal copy of an object failed or stopped early.
    CopyFailed { object: ObjectKey },
    /// The memory that the GPU can spare for the store changed. Idle models that would be evicted
    /// count as spare.
    Limit {
        /// New limit; a value above the cap counts as the cap.
        limit: Bytes,
    },
    /// Time passed.
    Tick,
}

/// Output of the store, to be carried out in order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Back stretches of the address range with device memory: one native allocation.
    Allocate { extents: Vec<StoreExtent> },
    /// Return the memory of stretches to the device: one native release.
    Release { extents: Vec<StoreExtent> },
    /// Write an object to the store.
    Place {
        object: ObjectKey,
        /// Destination stretches, in this order. The last may be longer than the rest of the
        /// object.
        extents: Vec<StoreExtent>,
    },
    /// Copy an object to the host. Until the copy ends, consumers can read the object in the store.
    Migrate { object: ObjectKey },
    /// A migrated object now exists on the host alone: direct every new reader there. This action
    /// precedes any reuse of the object's memory.
    MigrationCompleted { object: ObjectKey },
    /// A migrated object was claimed meanwhile, or would be reloaded at once: drop its copy on the
    /// host.
    CancelMigration { object: ObjectKey },
    /// Copy an object from the host to the GPU. Until the copy ends, consumers may read the object
    /// on the host.
    Reload {
        object: ObjectKey,
        /// Destination stretches, in order.
        extents: Vec<StoreExtent>,
    },
    /// Copy an object from its producer to the host and report it as migrated, because the store
    /// has no room or failed to write.
    Refuse { object: ObjectKey },
    /// Drop every copy of an object that is gone. Running copies are to end, and their end is to be
    /// reported.
    Free { object: ObjectKey },
    /// Run the producer of an object again: its only copy is lost, or could not be copied anywhere.
    Lost { object: ObjectKey },
    /// Reject an object: its key is in use, the store has [`OBJECTS_MAX`](super::OBJECTS_MAX)
    /// objects, or the number of consumers is zero or too large.
    Decline { object: ObjectKey },
}
