//! What the host tier's plan is told and what it wants done.

use millrace_types::{Bytes, Digest, RevisionKey};

/// A function this worker should serve, as far as the host tier cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The function.
    pub key: RevisionKey,
    /// Its model.
    pub digest: Digest,
    /// The size of the model's file: what is reserved until the prepared size is known.
    pub artifact_bytes: Bytes,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Everything this worker should serve now.
    Desired(Vec<Wanted>),
    /// A model is in host memory and takes this much of it.
    Prepared {
        /// The model.
        digest: Digest,
        /// Its weights and graph.
        bytes: Bytes,
    },
    /// A model could not be prepared.
    Failed {
        /// The model.
        digest: Digest,
        /// Why, and what that means for another try.
        failure: Failure,
    },
    /// The node took a function, or refused it with a message.
    Installed {
        /// The function.
        key: RevisionKey,
        /// The refusal.
        outcome: Result<(), String>,
    },
    /// Requests wait for these models, which had left.
    Asked(Vec<Digest>),
    /// This model had left, and is likely to be asked for.
    Hinted(Digest),
    /// What came of [`Action::MakeRoom`]: these have left; none, where those that may leave are not
    /// enough.
    RoomMade(Vec<Digest>),
    /// Time passed: sent when [`wake_at`](super::Plan::wake_at) says so, and when more models may leave than before.
    Tick,
}

/// Why a model could not be prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Nobody could be asked: tried again, and no fault of the model's.
    Unavailable(String),
    /// What came was wrong, or the disk refused: reported, and tried again.
    Transient(String),
    /// The model itself is no good: reported, and never tried again.
    Permanent(String),
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Bring a model into host memory: from the local file, else from a controller.
    Prepare {
        /// The model.
        digest: Digest,
        /// The size of its file.
        artifact_bytes: Bytes,
    },
    /// Hand a function and its model to the node.
    Install {
        /// The function.
        key: RevisionKey,
        /// Its model, prepared.
        digest: Digest,
    },
    /// Take a function from the node.
    Retire {
        /// The function.
        key: RevisionKey,
    },
    /// Let go of a model's memory and delete its file: no function wants it.
    Drop {
        /// The model.
        digest: Digest,
    },
    /// Let go of a model's memory only: it did not fit, or has left.
    Release {
        /// The model.
        digest: Digest,
    },
    /// A model is in host memory, and its functions were handed to the node.
    Arrived {
        /// The model.
        digest: Digest,
    },
    /// Have models leave that no request uses, the least recently used first, until so much is free;
    /// say which with [`Event::RoomMade`].
    MakeRoom {
        /// What is lacking.
        bytes: Bytes,
        /// For whom.
        asker: Asker,
    },
    /// Tell whoever waits for a model that it cannot come.
    Refuse {
        /// The model.
        digest: Digest,
        /// Why.
        why: String,
    },
}

/// For whom room is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// Requests wait, or a function is to be served.
    Request,
    /// A model is only likely to be asked for: what is pinned or kept warm stays.
    Hint,
}

/// How far a function is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// On its way; the message says what it waits for, if that is not obvious.
    Preparing(String),
    /// Served.
    Ready,
    /// Not served, and why.
    Failed(String),
}
