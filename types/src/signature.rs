//! The inputs and outputs of a function or workflow.

use serde::{Deserialize, Serialize};

use crate::tensor::TensorSpec;

/// The inputs and outputs of a function or workflow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// The declared inputs.
    pub inputs: Vec<TensorSpec>,
    /// The declared outputs.
    pub outputs: Vec<TensorSpec>,
}

/// A borrowed [`Signature`], wherever the tensors are stored. Checks read many signatures without a
/// copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignatureRef<'a> {
    /// The declared inputs.
    pub inputs: &'a [TensorSpec],
    /// The declared outputs.
    pub outputs: &'a [TensorSpec],
}

impl<'a> From<&'a Signature> for SignatureRef<'a> {
    fn from(signature: &'a Signature) -> Self {
        Self { inputs: &signature.inputs, outputs: &signature.outputs }
    }
}
