//! The functions and prepared models that the host tier passes to the actors.

use std::time::Duration;

use millrace_proto::executor::{Launch, TensorSpec};
use millrace_types::{Bytes, Digest, RevisionKey, SchedulingOptions, Slo};

use crate::port::Descriptor;

/// A compiled model in host memory, with all that an executor needs to load it. Functions with the
/// same artifact share a prepared model; the descriptors close with its last user.
#[derive(Debug)]
pub struct PreparedModel {
    /// Digest of the artifact.
    pub digest: Digest,
    /// Name of the model for logs and messages.
    pub name: String,
    /// Memfd with the graph, without the weights.
    pub graph: Descriptor,
    pub graph_bytes: Bytes,
    /// Memfd with the weights in first-use order.
    pub weights: Descriptor,
    pub weights_bytes: Bytes,
    /// Size of a weight group: the weights that are copied and awaited together.
    pub group_bytes: Bytes,
    /// Launches of a run, in order.
    pub launches: Vec<Launch>,
    pub inputs: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
}

/// A function to serve.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionConfig {
    pub key: RevisionKey,
    /// Latency objective.
    pub slo: Option<Slo>,
    /// Whether a request may run again although it may have run before.
    pub idempotent: bool,
    /// GPU memory to reserve for the function; `None` or less than the weights: the weights' size.
    pub gpu_memory: Option<Bytes>,
    /// Priority, batching and residency settings.
    pub serving: SchedulingOptions,
    /// Measured times by type of GPU, used before the first run; later runs update the times in the
    /// node.
    pub profiles: Vec<Profile>,
}

/// The times of a function on one type of GPU, as measured earlier (L15, L21).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// Product name of the GPU type.
    pub gpu_type: String,
    /// Duration of the model's copy from the host.
    pub load: Duration,
    /// Time by which a copy extends a run; `None` before the first measurement.
    pub swap: Option<Duration>,
    /// Duration of a run.
    pub run: Duration,
}

/// The reason why a function was not installed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallError {
    /// No GPU of the node has enough memory.
    #[error(
        "{key} needs {needed} of GPU memory and the largest GPU here has {largest}: use a smaller model or a larger GPU"
    )]
    TooLarge {
        key: RevisionKey,
        /// GPU memory that the function needs.
        needed: Bytes,
        /// Memory of the largest GPU.
        largest: Bytes,
    },
    /// The node is shutting down.
    #[error("the node is shutting down: install the function elsewhere")]
    NodeGone,
}
