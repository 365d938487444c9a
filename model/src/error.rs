//! Why a model file is refused. Every message says what is wrong, where, and what to do.

use std::fmt;

use crate::signature::{MAX_IR_VERSION, MAX_OPSET, MIN_IR_VERSION, MIN_OPSET};

/// A model file that cannot be served, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The bytes are no ONNX model, or one that is damaged.
    #[error("not an ONNX model ({reason}): give a .onnx file as torch.onnx.export or onnx.save writes it")]
    NotOnnx {
        /// What gave it away.
        reason: String,
    },
    /// The file ends before what it announces.
    #[error("the model file is cut short: at least {missing} bytes are missing at its end, copy it again")]
    Truncated {
        /// How many bytes the field that was cut still announces.
        missing: u64,
    },
    /// An ONNX format version this build does not know.
    #[error(
        "ONNX IR version {found} is not known: save the model with an onnx package that writes \
         version {MIN_IR_VERSION} to {MAX_IR_VERSION}"
    )]
    IrVersion {
        /// What the file says.
        found: i64,
    },
    /// A model without a graph.
    #[error("the model has no graph: export it again")]
    NoGraph,
    /// The operators' version is unknown to the runtime, or means something else there.
    #[error("opset {} is not supported: export the model with opset {MIN_OPSET} to {MAX_OPSET}, or convert it with onnx.version_converter", OptionalNumber(*.found))]
    Opset {
        /// The default domain's version; `None` where the file names none.
        found: Option<i64>,
    },
    /// A weight lies in another file.
    #[error(
        "tensor {tensor:?} refers to another file, {location:?}: save the model as one file \
         (onnx.save without save_as_external_data)"
    )]
    ExternalData {
        /// The tensor's name.
        tensor: String,
        /// The file it names.
        location: String,
    },
    /// A weight in sparse form.
    #[error("weight {tensor:?} is sparse: convert it to a dense initializer")]
    SparseWeight {
        /// The weight's name.
        tensor: String,
    },
    /// Operators the runtime does not have: all of them.
    #[error("unsupported operators: {}; export the model without them", Listed(operators))]
    UnsupportedOperators {
        /// Each once, in the order met.
        operators: Vec<UnsupportedOperator>,
    },
    /// An element type the runtime does not have.
    #[error("{what} {name:?} has element type {found}: convert it to one of {}", supported.join(", "))]
    ElementType {
        /// What it is: an input, an output, a tensor.
        what: &'static str,
        /// Its name.
        name: String,
        /// ONNX's name for the type.
        found: String,
        /// What is supported there.
        supported: &'static [&'static str],
    },
    /// An input or output that is no tensor: a sequence, a map, an optional.
    #[error(
        "{what} {name:?} is no tensor: export the model so that it takes and gives tensors only (for skl2onnx, zipmap=False)"
    )]
    NotATensor {
        /// An input or an output.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// An input or output without a shape, so without a rank.
    #[error(
        "{what} {name:?} has no shape, so no dynamic or batch dimension that can be served: name its \
         dimensions when exporting, or run onnx.shape_inference and save the result"
    )]
    NoShape {
        /// An input or an output.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// An input of rank 0.
    #[error(
        "input {name:?} is a scalar, so it has no dynamic or batch dimension that can be served: \
         export it with at least one dimension"
    )]
    ScalarInput {
        /// Its name.
        name: String,
    },
    /// A declared dimension below 1.
    #[error(
        "dimension {axis} of {what} {name:?} is {found}: export it as a size from 1, or as a name (dynamic_axes)"
    )]
    Dimension {
        /// An input or an output.
        what: &'static str,
        /// Its name.
        name: String,
        /// Which dimension, from 0.
        axis: usize,
        /// What the file says.
        found: i64,
    },
    /// Nothing to send.
    #[error("the model has no inputs: export it with at least one")]
    NoInputs,
    /// Nothing comes back.
    #[error("the model has no outputs: export it with at least one")]
    NoOutputs,
    /// No output needs a node.
    #[error("no output of the model is computed by a node: export the network with its operators")]
    NothingToRun,
    /// An input, output, weight or node output without a name.
    #[error("{what} has no name: export the model again, ONNX needs names for them")]
    Unnamed {
        /// What lacks it.
        what: &'static str,
    },
    /// Two values of one name.
    #[error("value {name:?} is defined more than once: give each input, weight and node output its own name")]
    DuplicateName {
        /// The name met again.
        name: String,
    },
    /// A node reads what nothing makes.
    #[error(
        "node {node:?} reads {value:?}, which no input, weight or node provides: the file is damaged, export it again"
    )]
    DanglingInput {
        /// The node.
        node: String,
        /// What it reads.
        value: String,
    },
    /// An output that nothing makes.
    #[error("output {value:?} is made by no node: the file is damaged, export it again")]
    DanglingOutput {
        /// The output.
        value: String,
    },
    /// Nodes that wait for each other.
    #[error("node {node:?} depends on its own output: the graph has a cycle, export it again")]
    Cycle {
        /// One of the nodes on it.
        node: String,
    },
    /// A bound of this build.
    #[error("the model has more than {limit} {what}: simplify it (onnxsim), or split it in two functions")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many are allowed.
        limit: usize,
    },
    /// A bound of this build.
    #[error("the model has more than {limit} {what}: simplify it (onnxsim)")]
    TooDeep {
        /// Of what.
        what: &'static str,
        /// How many are allowed.
        limit: usize,
    },
    /// A tensor whose dimensions are negative or multiply to more than memory can have.
    #[error("tensor {tensor:?} has dimensions {dims:?}, which no memory can hold: the file is damaged")]
    TensorShape {
        /// The tensor's name.
        tensor: String,
        /// What the file says.
        dims: Vec<i64>,
    },
    /// A tensor whose data are not as long as its dimensions say.
    #[error(
        "tensor {tensor:?} should have {expected} bytes of data and has {found}: the file is damaged or cut short, copy or export it again"
    )]
    TensorData {
        /// The tensor's name.
        tensor: String,
        /// What its dimensions and type need.
        expected: u64,
        /// What there is.
        found: u64,
    },
    /// A node whose output has a size that the file writes, and that no device should make.
    #[error("node {node:?} makes more than {limit} bytes: export the model with a smaller size")]
    OutputTooLarge {
        /// The node.
        node: String,
        /// The most bytes.
        limit: u64,
    },
    /// A node whose output is as large as the contents of an input say.
    #[error(
        "node {node:?} takes the size of its output from the contents of an input, so that a request could ask for any: limit the number with Min or Clip before that node, or take it from a shape"
    )]
    SizeFromInput {
        /// The node.
        node: String,
    },
    /// A Constant node whose value is not one tensor or number.
    #[error(
        "constant {node:?} has no value that can be served: export it as a tensor (value, value_int, value_ints, value_float or value_floats)"
    )]
    ConstantValue {
        /// The node.
        node: String,
    },
}

/// An operator the runtime does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsupportedOperator {
    /// Its domain; empty for ONNX's own.
    pub domain: String,
    /// Its name.
    pub op_type: String,
    /// The first node that uses it.
    pub node: String,
    /// How many nodes use it.
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
