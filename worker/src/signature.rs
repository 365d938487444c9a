//! The signatures of functions: inputs, outputs and kept state. Requests are checked against signatures.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_types::sequences::StateTensor;
use millrace_types::{Digest, RevisionKey, TensorSpec};

/// The inputs and outputs of the functions that are ready on this worker.
pub type Signatures = BTreeMap<RevisionKey, Arc<FunctionSignature>>;

/// The inputs and outputs of a model, or of a function of the model. Requests are checked against this
/// signature.
#[derive(Debug, PartialEq, Eq)]
pub struct FunctionSignature {
    /// The digest of the model.
    pub digest: Digest,
    pub inputs: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    /// The reader of the inputs.
    pub reader: InputReader,
    /// The state that the function keeps. Its tensors are not among the inputs and outputs.
    pub state: Option<FunctionState>,
}

/// The reader of a function's inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputReader {
    /// A run on a GPU reads the inputs.
    Gpu,
    /// A program's process reads the inputs, without access to a GPU's memory.
    Process,
}

/// The state that a function keeps from one request of a sequence to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionState {
    pub tensors: Arc<[StateTensor]>,
    /// The time without requests after which a sequence ends.
    pub idle: Duration,
    /// Maximum number of concurrent sequences.
    pub max: u32,
}
