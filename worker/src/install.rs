//! What the host tier gives to the actors: functions, and models ready to be swapped.

use std::time::Duration;

use millrace_proto::executor::{Launch, TensorSpec};
use millrace_types::{Bytes, Digest, RevisionKey, Serving, Slo};

use crate::port::Descriptor;

/// A model in host memory, compiled: all that an executor has to be given. Shared by every
/// function with the same artifact; its descriptors close when the last user drops it.
#[derive(Debug)]
pub struct PreparedModel {
    /// The artifact it was made of.
    pub digest: Digest,
    /// For people.
    pub name: String,
    /// A memfd with the graph without weights.
    pub graph: Descriptor,
    /// The graph's size.
    pub graph_bytes: Bytes,
    /// A memfd with the weights in first-use order.
    pub weights: Descriptor,
    /// The weights' size.
    pub weights_bytes: Bytes,
    /// How much of them travels together.
    pub group_bytes: Bytes,
    /// How it runs.
    pub launches: Vec<Launch>,
    /// What it takes.
    pub inputs: Vec<TensorSpec>,
    /// What it gives.
    pub outputs: Vec<TensorSpec>,
}

/// One function to serve.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionConfig {
    /// Which revision of which function.
    pub key: RevisionKey,
    /// Its objective.
    pub slo: Option<Slo>,
    /// Whether a request may be run again when it may have run before.
    pub idempotent: bool,
    /// GPU memory to hold for it; `None` or less than the weights: the weights' size.
    pub gpu_memory: Option<Bytes>,
    /// How it is served among others.
    pub serving: Serving,
    /// What is known of its runs before the first: by type of GPU. What happens then is learned.
    pub profiles: Vec<Profile>,
}

/// What a function takes on one type of GPU, as measured before (L15, L21).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// The GPUs' product name.
    pub gpu_type: String,
    /// Bringing its model from the host.
    pub load: Duration,
    /// What that adds to a run, where it was seen.
    pub swap: Option<Duration>,
    /// A run.
    pub run: Duration,
}

/// Why a function was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallError {
    /// No GPU here is large enough.
    #[error(
        "{key} needs {needed} of GPU memory and the largest GPU here has {largest}: use a smaller model or a larger GPU"
    )]
    TooLarge {
        /// The function.
        key: RevisionKey,
        /// What it needs.
        needed: Bytes,
        /// What there is.
        largest: Bytes,
    },
    /// The node is going down.
    #[error("the node is shutting down: install the function elsewhere")]
    NodeGone,
}
