//! Compiles the bytes of an ONNX file into the form in which a device runs the model.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use millrace_types::TensorSpec;
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::cut::{GraphStep, Grouping, Launch};
use crate::error::{ModelError, UnsupportedOperator};
use crate::layout::{WeightLayout, WeightPlacement};
use crate::onnx::{GraphProto, ModelProto, NodeProto, TensorType, TypeProto};
use crate::{constants, cut, layout, node_order, operators, signature, sizes, tensors, wire};

/// Description of a model, without its weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Inputs of a request, in the file's order.
    pub inputs: Vec<TensorSpec>,
    /// Outputs of a response, in the file's order.
    pub outputs: Vec<TensorSpec>,
    /// Number of elements of all constants with a floating-point or 8-bit type.
    pub parameters: u64,
    /// Size of the weights' region in bytes, including padding.
    pub weights_bytes: u64,
    /// Opset version of ONNX's own operators.
    pub opset: u32,
    /// Name and version of the program that wrote the file, if the file has them.
    pub producer: String,
}

/// A model that is ready to load: its graph without weights, the weights' positions in their region,
/// and its launches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompiledModel {
    pub summary: Summary,
    /// ONNX graph, in which the weights refer to the external file [`WEIGHTS_FILE`].
    ///
    /// [`WEIGHTS_FILE`]: crate::WEIGHTS_FILE
    pub graph: Vec<u8>,
    /// Weights in the order of their positions in the region, which is the order of first use.
    pub weights: Vec<WeightPlacement>,
    /// Parts in which the model runs, in order. At least one.
    pub launches: Vec<Launch>,
}

/// Checks an ONNX file and prepares it for serving. The weights' bytes stay in the file; only weights
/// in typed fields are copied.
///
/// # Errors
/// Returns the first [`ModelError`] that prevents serving the model.
pub fn compile(onnx: &Bytes) -> Result<CompiledModel, ModelError> {
    compile_grouped(onnx, Grouping::default())
}

/// Compiles like [`compile`], with launches cut according to `grouping`. The grouping affects only
/// the launches, not the positions of the weights.
///
/// # Errors
/// As [`compile`].
pub fn compile_grouped(onnx: &Bytes, grouping: Grouping) -> Result<CompiledModel, ModelError> {
    wire::check(onnx)?;
    let mut model = ModelProto::decode(onnx.clone())
        .map_err(|error| ModelError::NotOnnx { reason: format!("it does not decode: {error}") })?;
    let mut graph = model.graph.take().ok_or(ModelError::NoGraph)?;
    let opset = signature::opset(&model)?;
    check_operators(&graph)?;
    tensors::check_all(&graph)?;
    constants::hoist(&mut graph)?;
    drop_weights_from_inputs(&mut graph);
    let arranged = node_order::arrange(&mut graph, None)?;
    let signature = signature::read(&graph)?;
    let reads = node_order::prune(&mut graph, arranged.reads)?;
    sizes::check(&graph)?;
    let layout = layout::place(&mut graph, &reads, onnx);
    let launches = cut_graph(&graph, reads, &layout, grouping);
    drop_declared_output_shapes(&mut graph);
    let summary = Summary {
        inputs: signature.inputs,
        outputs: signature.outputs,
        parameters: layout.parameters,
        weights_bytes: layout.bytes,
        opset,
        producer: producer(&model),
    };
    let graph = ModelProto { graph: Some(graph), ..model }.encode_to_vec();
    Ok(CompiledModel { summary, graph, weights: layout.placements, launches })
}

/// Refuses the model if it has unsupported operators, and lists all of them in a single error.
fn check_operators(graph: &GraphProto) -> Result<(), ModelError> {
    let mut found = Unsupported::default();
    found.visit(graph);
    let operators = found.operators;
    if operators.is_empty() { Ok(()) } else { Err(ModelError::UnsupportedOperators { operators }) }
}

#[derive(Default)]
struct Unsupported {
    operators: Vec<UnsupportedOperator>,
    /// Index in `operators` by domain and name.
    places: HashMap<(String, String), usize>,
}

impl Unsupported {
    fn visit(&mut self, graph: &GraphProto) {
        for node in &graph.node {
            for subgraph in node.attribute.iter().filter_map(|attribute| attribute.g.as_ref()) {
                self.visit(subgraph);
            }
            if !operators::is_supported(node.operator_domain(), node.op_type()) {
                self.add(node);
            }
        }
    }

    fn add(&mut self, node: &NodeProto) {
        let domain = node.operator_domain().to_owned();
        let op_type = node.op_type().to_owned();
        match self.places.entry((domain.clone(), op_type.clone())) {
            Entry::Occupied(place) => self.operators[*place.get()].uses += 1,
            Entry::Vacant(place) => {
                place.insert(self.operators.len());
                self.operators.push(UnsupportedOperator { domain, op_type, node: node.label(), uses: 1 });
            }
        }
    }
}

/// Removes weights from the list of inputs. Before IR version 4, every weight was also listed as an
/// input. In later versions, a weight that is listed as an input is a default that the caller may
/// replace, which serving does not support.
fn drop_weights_from_inputs(graph: &mut GraphProto) {
    let weights: HashSet<&str> = graph.initializer.iter().map(|weight| weight.name()).collect();
    graph.input.retain(|input| !weights.contains(input.name()));
}

/// Drops the declared shapes of outputs. Running does not need them. If a declared shape is wrong, a
/// launch that reads the value from an earlier launch would fail, although the whole model runs.
fn drop_declared_output_shapes(graph: &mut GraphProto) {
    for output in &mut graph.output {
        if let Some(TypeProto { tensor_type: Some(TensorType { shape, .. }), .. }) = &mut output.r#type {
            *shape = None;
        }
    }
}

fn cut_graph(
    graph: &GraphProto,
    reads: Vec<Vec<String>>,
    layout: &WeightLayout,
    grouping: Grouping,
) -> Vec<Launch> {
    let constants: HashSet<&str> = graph.initializer.iter().map(|weight| weight.name()).collect();
    let mut steps: Vec<GraphStep> = graph
        .node
        .iter()
        .zip(reads)
        .zip(&layout.by_node)
        .map(|((node, reads), weights)| GraphStep {
            reads: reads.into_iter().filter(|value| !constants.contains(value.as_str())).collect(),
            makes: node.output.iter().filter(|name| !name.is_empty()).cloned().collect(),
            weights: weights.clone(),
        })
        .collect();
    let outputs: Vec<String> = graph.output.iter().map(|output| output.name().to_owned()).collect();
    if let Some(last) = steps.last_mut() {
        // The last launch returns an input or a weight that is also an output.
        let inputs = graph.input.iter().map(|input| input.name().to_owned());
        last.reads.extend(inputs.filter(|input| outputs.contains(input)));
        last.weights.extend(&layout.outputs);
    }
    cut::launches(&steps, &outputs, &layout.placements, grouping)
}

fn producer(model: &ModelProto) -> String {
    let parts = [&model.producer_name, &model.producer_version];
    let parts: Vec<&str> =
        parts.into_iter().flatten().map(String::as_str).filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}
