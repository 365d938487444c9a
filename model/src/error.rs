//! Reasons why a model file is refused. Every message names the fault, its position and the next step.

use std::fmt;

use crate::versions::{MAX_IR_VERSION, MAX_OPSET, MIN_IR_VERSION, MIN_OPSET};

/// A fault that prevents serving a model file, with its remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The bytes are no ONNX model, or a damaged one.
    #[error("not an ONNX model ({reason}): give a .onnx file as torch.onnx.export or onnx.save writes it")]
    NotOnnx {
        /// Sign by which the fault was recognized.
        reason: String,
    },
    /// The file ends before the end of a field.
    #[error("the model file is cut short: at least {missing} bytes are missing at its end, copy it again")]
    Truncated {
        /// Bytes of the cut field that are missing.
        missing: u64,
    },
    /// This build does not support the file's ONNX format version.
    #[error(
        "ONNX IR version {found} is not known: save the model with an onnx package that writes \
         version {MIN_IR_VERSION} to {MAX_IR_VERSION}"
    )]
    IrVersion { found: i64 },
    /// The model has no graph.
    #[error("the model has no graph: export it again")]
    NoGraph,
    /// The runtime does not support the opset, or gives its operators another meaning.
    #[error("opset {} is not supported: export the model with opset {MIN_OPSET} to {MAX_OPSET}, or convert it with onnx.version_converter", OptionalNumber(*.found))]
    Opset {
        /// Opset version of the default domain; `None` if the file has none.
        found: Option<i64>,
    },
    /// A weight is stored in another file.
    #[error(
        "tensor {tensor:?} refers to another file, {location:?}: save the model as one file \
         (onnx.save without save_as_external_data)"
    )]
    ExternalData {
        tensor: String,
        /// Name of the other file.
        location: String,
    },
    /// A weight is stored in sparse form.
    #[error("weight {tensor:?} is sparse: convert it to a dense initializer")]
    SparseWeight { tensor: String },
    /// The model uses operators that the runtime does not have.
    #[error("unsupported operators: {}; export the model without them", Listed(operators))]
    UnsupportedOperators {
        /// All of these operators, each once, in the order of first use.
        operators: Vec<UnsupportedOperator>,
    },
    /// A tensor has an element type that the runtime does not have.
    #[error("{what} {name:?} has element type {found}: convert it to one of {}", supported.join(", "))]
    ElementType {
        /// Kind of the tensor: an input, an output or another tensor.
        what: &'static str,
        name: String,
        /// ONNX's name for the type.
        found: String,
        /// Element types that are supported for this kind of tensor.
        supported: &'static [&'static str],
    },
    /// An input or output is not a tensor, but a sequence, a map or an optional.
    #[error(
        "{what} {name:?} is not a tensor: export the model so that all inputs and outputs are tensors (for skl2onnx, zipmap=False)"
    )]
    NotATensor {
        /// `"input"` or `"output"`.
        what: &'static str,
        name: String,
    },
    /// An input or output has no shape, and therefore no rank.
    #[error(
        "{what} {name:?} has no shape, so no dynamic or batch dimension that can be served: name its \
         dimensions when exporting, or run onnx.shape_inference and save the result"
    )]
    NoShape {
        /// `"input"` or `"output"`.
        what: &'static str,
        name: String,
    },
    /// An input has rank 0.
    #[error(
        "input {name:?} is a scalar, so it has no dynamic or batch dimension that can be served: \
         export it with at least one dimension"
    )]
    ScalarInput { name: String },
    /// A declared dimension is below 1.
    #[error(
        "dimension {axis} of {what} {name:?} is {found}: export it as a size from 1, or as a name (dynamic_axes)"
    )]
    Dimension {
        /// `"input"` or `"output"`.
        what: &'static str,
        name: String,
        /// Index of the dimension, from 0.
        axis: usize,
        /// Declared size of the dimension.
        found: i64,
    },
    /// The model has no inputs.
    #[error("the model has no inputs: export it with at least one")]
    NoInputs,
    /// The model has no outputs.
    #[error("the model has no outputs: export it with at least one")]
    NoOutputs,
    /// No output depends on a node.
    #[error("no output of the model is computed by a node: export the network with its operators")]
    NothingToRun,
    /// An input, output, weight or node output has no name.
    #[error("{what} has no name: export the model again, ONNX needs names for them")]
    Unnamed {
        /// Kind of the value, with an article.
        what: &'static str,
    },
    /// Two values have the same name.
    #[error("value {name:?} is defined more than once: give each input, weight and node output its own name")]
    DuplicateName { name: String },
    /// A node reads a value that the graph does not define.
    #[error(
        "node {node:?} reads {value:?}, which no input, weight or node provides: the file is damaged, export it again"
    )]
    DanglingInput {
        node: String,
        /// Name of the undefined value.
        value: String,
    },
    /// No input, weight or node defines an output.
    #[error("output {value:?} has no node that makes it: the file is damaged, export it again")]
    DanglingOutput { value: String },
    /// Nodes depend on each other in a cycle.
    #[error("node {node:?} depends on its own output: the graph has a cycle, export it again")]
    Cycle {
        /// A node of the cycle.
        node: String,
    },
    /// The model exceeds a count limit of this build.
    #[error("the model has more than {limit} {what}: simplify it (onnxsim), or split it in two functions")]
    TooMany {
        /// Counted items, as a plural.
        what: &'static str,
        limit: usize,
    },
    /// The model exceeds a depth limit of this build.
    #[error("the model has more than {limit} {what}: simplify it (onnxsim)")]
    TooDeep {
        /// Nested or chained items, as a plural.
        what: &'static str,
        limit: usize,
    },
    /// A tensor's dimensions are negative, or their product exceeds the address space.
    #[error("tensor {tensor:?} has dimensions {dims:?}, which do not fit in memory: the file is damaged")]
    TensorShape {
        tensor: String,
        /// Dimensions in the file.
        dims: Vec<i64>,
    },
    /// The data length of a tensor does not match its dimensions.
    #[error(
        "tensor {tensor:?} should have {expected} bytes of data and has {found}: the file is damaged or cut short, copy or export it again"
    )]
    TensorData {
        tensor: String,
        /// Bytes that the tensor's dimensions and type require.
        expected: u64,
        /// Bytes that the file has.
        found: u64,
    },
    /// A node makes an output of a size that the file states, and the size exceeds the limit.
    #[error("node {node:?} makes more than {limit} bytes: export the model with a smaller size")]
    OutputTooLarge {
        node: String,
        /// Most bytes of an output.
        limit: u64,
    },
    /// A node makes an output of a size that the contents of an input state.
    #[error(
        "node {node:?} takes the size of its output from the contents of an input, so a request could choose any size: limit the number with Min or Clip before that node, or take it from a shape"
    )]
    SizeFromInput { node: String },
    /// The value of a Constant node is not a single tensor or number.
    #[error(
        "constant {node:?} has no value that can be served: export it as a tensor (value, value_int, value_ints, value_float or value_floats)"
    )]
    ConstantValue { node: String },
}

/// An operator that the runtime does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsupportedOperator {
    /// Domain of the operator; empty for ONNX's own domain.
    pub domain: String,
    pub op_type: String,
    /// First node that uses the operator.
    pub node: String,
    /// Number of nodes that use the operator.
    pub uses: usize,
}

impl fmt::Display for UnsupportedOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.domain.is_empty() {
            write!(f, "{}::", self.domain)?;
        }
        write!(f, "{} (node {:?}", self.op_type, self.node)?;
        match self.uses {
            0 | 1 => f.write_str(")"),
            uses => write!(f, " and {} more)", uses - 1),
        }
    }
}

struct Listed<'a>(&'a [UnsupportedOperator]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, operator) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{operator}")?;
        }
        Ok(())
    }
}

struct OptionalNumber(Option<i64>);

impl fmt::Display for OptionalNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(number) => write!(f, "{number}"),
            None => f.write_str("(the file names none)"),
        }
    }
}
