//! Refuses operators that could make an output of an arbitrary size, chosen by a request or by the file.
//!
//! The size of most outputs follows from the shapes of the inputs, which arrived as so many bytes. A few
//! operators ([`size_inputs`]) read the size from the *contents* of a tensor instead. Each such tensor has
//! an origin ([`SizeOrigin`]):
//!
//! | origin | the operator |
//! |---|---|
//! | numbers of the file | is refused if they make more than [`OUTPUT_BYTES_MAX`] |
//! | shapes, or constants computed with | is accepted |
//! | contents of an input of the model | is refused: eight bytes of a request would choose the size |
//!
//! `Min` and `Clip` with a bound from the file or from a shape turn contents into bounded numbers.
//!
//! Absent: a bound for outputs that grow with shapes (an outer product), with attributes, or over the
//! iterations of a `Loop`. Shapes alone do not bound those, so the memory of the executor process is
//! limited as well.

use std::collections::HashMap;

use crate::error::ModelError;
use crate::onnx::{GraphProto, NodeProto, TensorProto, element};
use crate::tensors;

/// Most bytes of an output with a size that the file states.
pub const OUTPUT_BYTES_MAX: u64 = 4 << 30;

/// Most elements of a constant that is read as a size. A size has one number per dimension, or two at most.
const NUMBERS_MAX: u64 = 64;

/// The origin of a tensor's numbers.
#[derive(Debug, Clone, PartialEq)]
enum SizeOrigin {
    /// The file states exactly these numbers.
    Numbers(Vec<f64>),
    /// The numbers are computed from constants and from the shapes of inputs.
    Shapes,
    /// The numbers depend on the contents of an input of the model.
    Contents,
}

impl SizeOrigin {
    fn is_contents(&self) -> bool {
        *self == Self::Contents
    }

    /// Returns the origin of a value that is computed from both origins.
    fn join(&self, other: &Self) -> Self {
        if self.is_contents() || other.is_contents() { Self::Contents } else { Self::Shapes }
    }
}

type Origins<'a> = HashMap<&'a str, SizeOrigin>;

/// Checks the nodes of a graph, which must be in the order of execution.
///
/// # Errors
/// Returns [`ModelError::OutputTooLarge`] or [`ModelError::SizeFromInput`].
pub(crate) fn check(graph: &GraphProto) -> Result<(), ModelError> {
    let mut origins = Origins::new();
    origins.extend(graph.input.iter().map(|input| (input.name(), SizeOrigin::Contents)));
    visit(graph, &mut origins)
}

/// Visits a graph. A single map serves a graph and all of its subgraphs: an inner graph never reuses
/// a name of an outer graph, and sibling graphs define a name before they read it.
fn visit<'a>(graph: &'a GraphProto, origins: &mut Origins<'a>) -> Result<(), ModelError> {
    origins.extend(graph.initializer.iter().map(|weight| (weight.name(), constant(weight))));
    for node in &graph.node {
        check_node(node, origins)?;
        let subgraphs: Vec<&GraphProto> =
            node.attribute.iter().filter_map(|attribute| attribute.g.as_deref()).collect();
        for subgraph in &subgraphs {
            enter(node, subgraph, origins);
            visit(subgraph, origins)?;
        }
        let made = if subgraphs.is_empty() {
            vec![output(node, origins)]
        } else {
            outputs(node, &subgraphs, origins)
        };
        for (index, name) in node.output.iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            // All outputs of an operator without subgraphs have the same origin.
            let origin = made.get(index).or_else(|| made.last().filter(|_| subgraphs.is_empty()));
            origins.insert(name, origin.cloned().unwrap_or(SizeOrigin::Contents));
        }
    }
    Ok(())
}

/// Returns the indices of the inputs with contents that determine the size of an operator's output.
fn size_inputs(op_type: &str) -> &'static [usize] {
    match op_type {
        "ConstantOfShape" => &[0],
        "Expand" | "OneHot" | "Pad" | "Tile" | "Upsample" => &[1],
        "Range" => &[0, 1, 2],
        "Resize" => &[2, 3],
        // The trip count, which sizes the outputs that have a row per iteration.
        "Loop" => &[0],
        _ => &[],
    }
}

fn check_node(node: &NodeProto, origins: &Origins<'_>) -> Result<(), ModelError> {
    if node.op_type() == "Loop" && scan_outputs(node) == 0 {
        return Ok(());
    }
    let sizes: Vec<&SizeOrigin> =
        size_inputs(node.op_type()).iter().filter_map(|&index| origin_of(node, index, origins)).collect();
    if sizes.iter().any(|origin| origin.is_contents()) {
        return Err(ModelError::SizeFromInput { node: node.label() });
    }
    let elements = least_elements(node.op_type(), &sizes);
    // Compares elements with bytes, because an element has at least one byte.
    if elements > OUTPUT_BYTES_MAX as f64 {
        return Err(ModelError::OutputTooLarge { node: node.label(), limit: OUTPUT_BYTES_MAX });
    }
    Ok(())
}

/// Returns the number of a `Loop`'s outputs that have a row per iteration: the outputs after the
/// carried values.
fn scan_outputs(node: &NodeProto) -> usize {
    node.output.len().saturating_sub(node.input.len().saturating_sub(2))
}

/// Returns the smallest number of elements that the operator's output can have according to the file,
/// or 0 if the file does not state the size.
fn least_elements(op_type: &str, sizes: &[&SizeOrigin]) -> f64 {
    let numbers: Vec<&[f64]> = sizes
        .iter()
        .filter_map(
            |origin| if let SizeOrigin::Numbers(numbers) = origin { Some(&numbers[..]) } else { None },
        )
        .collect();
    let product = |numbers: &[f64]| numbers.iter().map(|number| number.floor()).map(at_least_one).product();
    match (op_type, &numbers[..]) {
        ("ConstantOfShape" | "Expand" | "Tile", [dims]) => {
            if dims.contains(&0.0) {
                0.0
            } else {
                product(dims)
            }
        }
        ("OneHot", [[depth]]) => *depth,
        ("Range", [[start], [limit], [delta]]) => (limit - start) / delta,
        ("Pad", [pads]) => {
            let (begins, ends) = pads.split_at(pads.len() / 2);
            begins.iter().zip(ends).map(|(begin, end)| at_least_one(begin + end)).product()
        }
        // Resize has scales, sizes, or both.
        ("Resize" | "Upsample", numbers) => {
            numbers.iter().map(|numbers| product(numbers)).fold(0.0, f64::max)
        }
        _ => 0.0,
    }
}

fn at_least_one(number: f64) -> f64 {
    number.max(1.0)
}

fn origin_of<'o>(node: &NodeProto, index: usize, origins: &'o Origins<'_>) -> Option<&'o SizeOrigin> {
    let name = node.input.get(index).filter(|name| !name.is_empty())?;
    Some(origins.get(name.as_str()).unwrap_or(&SizeOrigin::Contents))
}

/// Returns the origin of the outputs of a node without subgraphs.
fn output(node: &NodeProto, origins: &Origins<'_>) -> SizeOrigin {
    let input = |index| origin_of(node, index, origins);
    let all = || {
        let all = (0..node.input.len()).filter_map(input);
        all.fold(SizeOrigin::Shapes, |joined, origin| joined.join(origin))
    };
    let bounded = |origin: Option<&SizeOrigin>| origin.is_some_and(|origin| !origin.is_contents());
    match node.op_type() {
        // Dimensions, indices into dimensions, or one of two values.
        "Shape" | "Size" | "NonZero" | "ArgMax" | "ArgMin" | "NonMaxSuppression" | "SequenceLength"
        | "EyeLike" | "Equal" | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" | "And" | "Or"
        | "Xor" | "Not" | "IsNaN" | "IsInf" | "Sign" => SizeOrigin::Shapes,
        // The same numbers in another form.
        "Cast" | "Identity" | "Squeeze" | "Unsqueeze" => input(0).cloned().unwrap_or(SizeOrigin::Contents),
        // Some of the numbers of the first input, selected by the other inputs.
        "CastLike" | "Expand" | "Flatten" | "Gather" | "GatherElements" | "GatherND" | "Reshape"
        | "Slice" | "Split" | "Tile" | "Transpose" => {
            input(0).map_or(SizeOrigin::Contents, |origin| origin.join(&SizeOrigin::Shapes))
        }
        // The contents of this output do not depend on its size.
        "ConstantOfShape" => SizeOrigin::Shapes,
        "Where" => (1..3).filter_map(input).fold(SizeOrigin::Shapes, |joined, origin| joined.join(origin)),
        "Min" if (0..node.input.len()).any(|index| bounded(input(index))) => SizeOrigin::Shapes,
        "Clip" if bounded(input(2)) => SizeOrigin::Shapes,
        "Mod" if bounded(input(1)) => SizeOrigin::Shapes,
        _ => all(),
    }
}

/// Records the origins of a subgraph's inputs. A `Loop` passes the iteration number, its condition
/// and the carried values.
fn enter<'a>(node: &NodeProto, subgraph: &'a GraphProto, origins: &mut Origins<'a>) {
    for (index, input) in subgraph.input.iter().enumerate() {
        let origin = match (node.op_type(), index) {
            ("Loop", 0 | 1) => SizeOrigin::Shapes,
            ("Loop", index) => origin_of(node, index, origins).cloned().unwrap_or(SizeOrigin::Contents),
            _ => SizeOrigin::Contents,
        };
        // A carried value changes between iterations: a number in the file is only its first value.
        origins.insert(input.name(), origin.join(&SizeOrigin::Shapes));
    }
}

/// Returns the origins of the outputs of a node with subgraphs, joined over all of its subgraphs. The
/// first output of a `Loop`'s body is its condition, which is no output of the node.
fn outputs(node: &NodeProto, subgraphs: &[&GraphProto], origins: &Origins<'_>) -> Vec<SizeOrigin> {
    let first = usize::from(node.op_type() == "Loop");
    let given = |graph: &&GraphProto, index: usize| {
        let output = graph.output.get(index + first);
        output.and_then(|output| origins.get(output.name())).cloned().unwrap_or(SizeOrigin::Contents)
    };
    let of = |index| {
        let given = subgraphs.iter().map(|graph| given(graph, index));
        given.fold(SizeOrigin::Shapes, |joined, origin| joined.join(&origin))
    };
    (0..node.output.len()).map(of).collect()
}

/// Returns the origin of a constant. A constant with many elements is not a size.
fn constant(tensor: &TensorProto) -> SizeOrigin {
    if tensors::elements(tensor) > NUMBERS_MAX {
        return SizeOrigin::Shapes;
    }
    let numbers: Option<Vec<f64>> = match (tensor.data_type, &tensor.raw_data) {
        (Some(element::INT64), Some(raw)) => Some(read(raw, |it| i64::from_le_bytes(it) as f64)),
        (Some(element::INT32), Some(raw)) => Some(read(raw, |it| i32::from_le_bytes(it).into())),
        (Some(element::FLOAT), Some(raw)) => Some(read(raw, |it| f32::from_le_bytes(it).into())),
        (Some(element::DOUBLE), Some(raw)) => Some(read(raw, f64::from_le_bytes)),
        (Some(element::INT64), None) => Some(tensor.int64_data.iter().map(|&it| it as f64).collect()),
        (Some(element::INT32), None) => Some(tensor.int32_data.iter().map(|&it| it.into()).collect()),
        (Some(element::FLOAT), None) => Some(tensor.float_data.iter().map(|&it| it.into()).collect()),
        (Some(element::DOUBLE), None) => Some(tensor.double_data.clone()),
        // One-byte numbers cannot make a large output.
        _ => None,
    };
    numbers.map_or(SizeOrigin::Shapes, SizeOrigin::Numbers)
}

fn read<const N: usize>(raw: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    raw.as_chunks::<N>().0.iter().map(|chunk| number(*chunk)).collect()
}
