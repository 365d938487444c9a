//! From the bytes of an ONNX file to what a device needs to run it.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use millrace_types::TensorSpec;
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::cut::{Grouping, Launch, Step};
use crate::error::{ModelError, UnsupportedOperator};
use crate::layout::{Layout, Placement};
use crate::onnx::{GraphProto, ModelProto, NodeProto, TensorType, TypeProto};
use crate::{arrange, constants, cut, layout, operators, signature, sizes, tensors, wire};

/// What a model is, without its weights.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// What a request brings, in the file's order.
    pub inputs: Vec<TensorSpec>,
    /// What an answer has, in the file's order.
    pub outputs: Vec<TensorSpec>,
    /// Elements of all constants of a floating-point or 8-bit type.
    pub parameters: u64,
    /// The size of the region of weights, in bytes, padding included.
    pub weights_bytes: u64,
    /// The version of ONNX's own operators.
    pub opset: u32,
    /// The program that wrote the file, and its version, as far as the file names them.
    pub producer: String,
}

/// A model ready to be loaded: its graph without weights, where the weights go, and its launches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// What the model is.
    pub summary: Summary,
    /// The ONNX graph, its weights referring to the external file [`WEIGHTS_FILE`].
    ///
    /// [`WEIGHTS_FILE`]: crate::WEIGHTS_FILE
    pub graph: Vec<u8>,
    /// The weights in the order in which they lie in their region: that of first use.
    pub weights: Vec<Placement>,
    /// The parts in which the model runs, in order. At least one.
    pub launches: Vec<Launch>,
}

/// Checks an ONNX file and prepares it to be served. The weights' bytes stay in the file: nothing of
/// them is copied but those kept in typed fields.
///
/// # Errors
/// [`ModelError`] for the first thing that keeps the model from being served.
pub fn compile(onnx: &Bytes) -> Result<Compiled, ModelError> {
    compile_grouped(onnx, Grouping::default())
}

/// As [`compile`], cut as `grouping` says. The weights lie in the same places whatever it is: only the
/// launches differ.
///
/// # Errors
/// As [`compile`].
pub fn compile_grouped(onnx: &Bytes, grouping: Grouping) -> Result<Compiled, ModelError> {
    wire::check(onnx)?;
    let mut model = ModelProto::decode(onnx.clone())
        .map_err(|error| ModelError::NotOnnx { reason: format!("it does not decode: {error}") })?;
    let mut graph = model.graph.take().ok_or(ModelError::NoGraph)?;
    let opset = signature::opset(&model)?;
    check_operators(&graph)?;
    tensors::check_all(&graph)?;
    constants::hoist(&mut graph)?;
    drop_weights_from_inputs(&mut graph);
    let arranged = arrange::arrange(&mut graph, None)?;
    let signature = signature::read(&graph)?;
    let reads = arrange::prune(&mut graph, arranged.reads)?;
    sizes::check(&graph)?;
    let layout = layout::place(&mut graph, &reads, onnx);
    let launches = cut_graph(&graph, reads, &layout, grouping);
    forget_claims(&mut graph);
    let summary = Summary {
        inputs: signature.inputs,
        outputs: signature.outputs,
        parameters: layout.parameters,
        weights_bytes: layout.bytes,
        opset,
        producer: producer(&model),
    };
    let graph = ModelProto { graph: Some(graph), ..model }.encode_to_vec();
    Ok(Compiled { summary, graph, weights: layout.placements, launches })
}

/// Refuses every operator that does not run, all at once.
fn check_operators(graph: &GraphProto) -> Result<(), ModelError> {
    let mut found = Unsupported::default();
    found.visit(graph);
    let operators = found.operators;
    if operators.is_empty() { Ok(()) } else { Err(ModelError::UnsupportedOperators { operators }) }
}

#[derive(Default)]
struct Unsupported {
    operators: Vec<UnsupportedOperator>,
    /// Domain and name of each, and its place in the list.
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
        let (domain, op_type) = (node.operator_domain().to_owned(), node.op_type().to_owned());
        match self.places.entry((domain.clone(), op_type.clone())) {
            Entry::Occupied(place) => self.operators[*place.get()].uses += 1,
            Entry::Vacant(place) => {
                place.insert(self.operators.len());
                self.operators.push(UnsupportedOperator { domain, op_type, node: node.label(), uses: 1 });
            }
        }
    }
}

/// Before IR version 4 every weight was listed as an input too; later, one that is has a default
/// that a caller may replace, which serving does not offer.
fn drop_weights_from_inputs(graph: &mut GraphProto) {
    let weights: HashSet<&str> = graph.initializer.iter().map(|weight| weight.name()).collect();
    graph.input.retain(|input| !weights.contains(input.name()));
}

/// Drops the shapes declared for outputs. Nothing needs them to run, and one that is wrong would fail
/// a launch that takes the value from an earlier one, though the whole model runs.
fn forget_claims(graph: &mut GraphProto) {
    for output in &mut graph.output {
        if let Some(TypeProto { tensor_type: Some(TensorType { shape, .. }), .. }) = &mut output.r#type {
            *shape = None;
        }
    }
}

fn cut_graph(
    graph: &GraphProto,
    reads: Vec<Vec<String>>,
    layout: &Layout,
    grouping: Grouping,
) -> Vec<Launch> {
    let constants: HashSet<&str> = graph.initializer.iter().map(|weight| weight.name()).collect();
    let mut steps: Vec<Step> = graph
        .node
        .iter()
        .zip(reads)
        .zip(&layout.by_node)
        .map(|((node, reads), weights)| Step {
            reads: reads.into_iter().filter(|value| !constants.contains(value.as_str())).collect(),
            makes: node.output.iter().filter(|name| !name.is_empty()).cloned().collect(),
            weights: weights.clone(),
        })
        .collect();
    let outputs: Vec<String> = graph.output.iter().map(|output| output.name().to_owned()).collect();
    if let Some(last) = steps.last_mut() {
        // An input or a weight that is an output as well is handed out by the last launch.
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
