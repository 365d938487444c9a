//! What a store is told, and what it wants done.

use std::fmt;

use millrace_types::Bytes;

use crate::ids::FunctionIndex;

/// A piece of intermediate data, as one worker numbers it. Not given again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey(pub u64);

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o{}", self.0)
    }
}

/// A stretch of the store's address range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Where it begins, in bytes from the beginning of the range.
    pub at: u64,
    /// How long it is, at least 1.
    pub len: Bytes,
}

/// Where a consumer of an object is, the nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Standing {
    /// It runs, or it is next: it has been given to a GPU. The object stays where it is.
    Claimed,
    /// It waits in the queue, at this place: the smaller, the sooner.
    Queued(u64),
    /// It is not queued yet.
    Unqueued,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A request of a function came.
    Requested {
        /// Whose.
        function: FunctionIndex,
    },
    /// An execution of a function ended.
    Executed {
        /// Whose.
        function: FunctionIndex,
    },
    /// A function is gone.
    Forget {
        /// Which.
        function: FunctionIndex,
    },
    /// An object wants to be stored. Until it is filled or on the host it is where it was produced.
    Store {
        /// A new name.
        object: ObjectKey,
        /// Whose output it is.
        function: FunctionIndex,
        /// How large.
        size: Bytes,
        /// Where those who will read it are: 1 to [`CONSUMERS_MAX`](super::CONSUMERS_MAX). They are
        /// known by their place here.
        consumers: Vec<Standing>,
    },
    /// An object that was placed has been written.
    Filled {
        /// Which.
        object: ObjectKey,
    },
    /// A consumer is somewhere else in the queue, or out of it, or has been given to a GPU, or is back.
    Stands {
        /// Of which object.
        object: ObjectKey,
        /// Which.
        consumer: usize,
        /// Where.
        standing: Standing,
    },
    /// A consumer has read an object, or will never.
    Consumed {
        /// Which object.
        object: ObjectKey,
        /// Which consumer.
        consumer: usize,
    },
    /// Nobody will read an object any more.
    Discard {
        /// Which.
        object: ObjectKey,
    },
    /// A whole copy of an object is on the host.
    Migrated {
        /// Which.
        object: ObjectKey,
    },
    /// An object is on the GPU again. Its copy on the host may go.
    Reloaded {
        /// Which.
        object: ObjectKey,
    },
    /// What was to be written, migrated, reloaded or refused was not, or not to the end.
    CopyFailed {
        /// Which object.
        object: ObjectKey,
    },
    /// What the GPU's memory can spare for the store, by evicting idle models where need be.
    Limit {
        /// How much. Above the cap it is the cap.
        limit: Bytes,
    },
    /// Time passed.
    Tick,
}

/// What to do, in this order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Have the device back stretches of the address range with memory: one native allocation.
    Allocate {
        /// Which.
        extents: Vec<Extent>,
    },
    /// Give the memory of stretches back to the device: one native release.
    Release {
        /// Which.
        extents: Vec<Extent>,
    },
    /// Have an object written to the store.
    Place {
        /// Which.
        object: ObjectKey,
        /// Where to, in this order. The last may be longer than what is left of the object.
        extents: Vec<Extent>,
    },
    /// Copy an object to the host. It can be read here until then.
    Migrate {
        /// Which.
        object: ObjectKey,
    },
    /// A migrated object is on the host alone now: whoever reads it from now on reads it there. Before
    /// its memory is anybody else's.
    Left {
        /// Which.
        object: ObjectKey,
    },
    /// A migrated object was claimed before it left, or is wanted again: drop its copy on the host.
    Keep {
        /// Which.
        object: ObjectKey,
    },
    /// Copy an object from the host to the GPU. It may be read there until then.
    Reload {
        /// Which.
        object: ObjectKey,
        /// Where to.
        extents: Vec<Extent>,
    },
    /// There is no room, or an object could not be written: copy it from where it was produced to the host, and say that it
    /// migrated.
    Refuse {
        /// Which.
        object: ObjectKey,
    },
    /// An object is gone: drop every copy. What is copied still is to end, and to be reported.
    Free {
        /// Which.
        object: ObjectKey,
    },
    /// The only copy of an object is lost, or could be taken nowhere: its producer has to run again.
    Lost {
        /// Which.
        object: ObjectKey,
    },
    /// An object is not taken: its name is in use, [`OBJECTS_MAX`](super::OBJECTS_MAX) are here, or
    /// it has no consumers or too many.
    Decline {
        /// Which.
        object: ObjectKey,
    },
}
