//! The events and actions of the host tier's plan.

use millrace_types::{Bytes, Digest, RevisionKey};

/// A function that this worker should serve, reduced to the facts that the host tier needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredFunction {
    pub key: RevisionKey,
    /// The digest of the function's model.
    pub digest: Digest,
    /// The size of the model's file. This much memory is reserved until the prepared size is known.
    pub artifact_bytes: Bytes,
}

/// An event for the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The complete list of functions that this worker should serve now.
    Desired(Vec<DesiredFunction>),
    /// A model is in host memory.
    Prepared {
        digest: Digest,
        /// The host memory of the weights and the graph.
        bytes: Bytes,
    },
    /// A model could not be prepared.
    Failed { digest: Digest, failure: PrepareFailure },
    /// The node installed or refused a function.
    Installed {
        key: RevisionKey,
        /// The node's error message, if it refused the function.
        outcome: Result<(), String>,
    },
    /// Requests wait for these models, which had been evicted.
    ModelsAwaited(Vec<Digest>),
    /// An evicted model is likely to be needed soon.
    Hinted(Digest),
    /// The models that were evicted for [`Action::MakeRoom`]. The list is empty if all evictable models
    /// together were not enough.
    RoomMade(Vec<Digest>),
    /// Time passed. Sent at the time of [`wake_at`](super::HostTierPlan::wake_at), and when more models have become
    /// evictable.
    Tick,
}

/// The reason why a model could not be prepared, and the consequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrepareFailure {
    /// No source could be reached. The model is not at fault, and the preparation is retried.
    Unavailable(String),
    /// The received bytes were wrong, or the disk refused an operation. The failure is reported, and the
    /// preparation is retried.
    Transient(String),
    /// The model itself is unusable. The failure is reported, and the preparation is never retried.
    Permanent(String),
}

/// An action of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Loads a model into host memory, from the local file or else from a controller.
    Prepare {
        digest: Digest,
        /// The size of the model's file.
        artifact_bytes: Bytes,
    },
    /// Installs a function with its prepared model on the node.
    Install { key: RevisionKey, digest: Digest },
    /// Removes a function from the node.
    Retire { key: RevisionKey },
    /// Releases a model's memory and deletes its file, because no function uses the model.
    Drop { digest: Digest },
    /// Releases a model's memory and keeps its file: the model did not fit, or was evicted.
    Release { digest: Digest },
    /// Reports that a model is in host memory and that its functions were installed on the node.
    Arrived { digest: Digest },
    /// Evicts idle models, in the order of `room`, until `bytes` are freed. The answer is
    /// [`Event::RoomMade`].
    MakeRoom {
        /// The missing host memory.
        bytes: Bytes,
        asker: RoomPurpose,
    },
    /// Fails the requests that wait for a model that cannot be loaded.
    Refuse { digest: Digest, why: String },
}

/// The purpose for which room is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoomPurpose {
    /// Requests wait for the model, or a function has to become ready.
    Request,
    /// The model is prewarmed. Pinned models and models with warm copies are not evicted for prewarming.
    Hint,
}

/// The state of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServingPhase {
    /// The function's model is being prepared. The message says what the preparation waits for, if that is
    /// not obvious.
    Preparing(String),
    /// The function accepts requests.
    Ready,
    /// The function cannot be served, for this reason.
    Failed(String),
}
