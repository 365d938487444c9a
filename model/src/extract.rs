//! Extracts the part of a compiled graph that computes some values from others, as an ONNX model of its
//! own, for an engine that loads each launch alone.
//!
//! In such a part the weights are inputs of the graph. So an engine that loads the part can neither read
//! nor copy a weight: the weights' bytes are first needed in a launch.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use millrace_types::DataType;
use prost::Message;

use crate::error::ModelError;
use crate::node_order;
use crate::onnx::{
    Dimension, EXTERNAL, GraphProto, ModelProto, NodeProto, TensorProto, TensorShapeProto, TensorType,
    TypeProto, ValueInfoProto, element,
};

/// The graph of a [`CompiledModel`](crate::CompiledModel), from which parts are extracted.
#[derive(Debug)]
pub struct ExtractableGraph {
    /// The model without its graph.
    frame: ModelProto,
    /// The graph. The weights are among its inputs, after the model's own inputs.
    graph: GraphProto,
    /// For each node: the values that the node or its subgraphs read.
    reads: Vec<Vec<String>>,
    /// Origin of each value that is no weight.
    origins: HashMap<String, Origin>,
    weights: HashMap<String, RegionWeight>,
}

#[derive(Debug, Clone, Copy)]
enum Origin {
    /// Index in the graph's inputs.
    Input(usize),
    /// Index in the graph's constants.
    Constant(usize),
    /// Index in the graph's nodes.
    Node(usize),
}

/// A weight in the model's region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionWeight {
    /// Name of the graph's input by which a part takes the weight.
    pub name: String,
    pub datatype: DataType,
    pub shape: Vec<usize>,
    /// Offset in the region in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Type of a value inside the graph, as an engine inferred the type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueType {
    /// Number of the element type in ONNX.
    pub element: i32,
    /// Dimensions; `None` for a dimension that is known only in a launch.
    pub shape: Vec<Option<u64>>,
}

/// Part of a graph, as a model of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtractedModel {
    /// Serialized ONNX model. Its inputs are the part's arguments, and then the weights.
    pub onnx: Vec<u8>,
    /// Name of the model's output for each written value, in order.
    pub outputs: Vec<String>,
    /// Weights that the part reads.
    pub weights: Vec<RegionWeight>,
}

/// Reason why a graph, or a part of the graph, cannot be extracted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExtractError {
    #[error(transparent)]
    Graph(#[from] ModelError),
    /// A weight is not in the region, or its size does not match its shape.
    #[error("weight {0:?} does not lie in the model's region with its size")]
    Weight(String),
    /// The graph has no value of this name.
    #[error("the graph has no value named {0:?}")]
    UnknownValue(String),
    /// The part needs an input of the model that is none of its arguments.
    #[error("the part needs input {0:?}, which is none of its arguments")]
    MissingArgument(String),
    /// The type of an argument is not known.
    #[error("value {0:?} is no tensor of a known type, so no launch can begin at it")]
    Untyped(String),
}

impl ExtractableGraph {
    /// Reads the graph of a compiled model. `weights_file` is the name of the external file that stands for
    /// the region, which has `region_bytes` bytes.
    ///
    /// # Errors
    /// [`ExtractError::Graph`], [`ExtractError::Weight`].
    pub fn read(graph: Vec<u8>, weights_file: &str, region_bytes: u64) -> Result<Self, ExtractError> {
        let mut frame = ModelProto::decode(Bytes::from(graph))
            .map_err(|error| ModelError::NotOnnx { reason: format!("it does not decode: {error}") })?;
        let mut graph = frame.graph.take().ok_or(ModelError::NoGraph)?;
        let mut taken = Taken {
            weights_file,
            region_bytes,
            names: all_names(&graph),
            weights: HashMap::new(),
            inputs: Vec::new(),
        };
        taken.take_weights(&mut graph, Depth::Top)?;
        let Taken { weights, inputs, .. } = taken;
        graph.input.extend(inputs);
        let reads = node_order::arrange(&mut graph, None)?.reads;
        let mut origins = HashMap::new();
        for (index, node) in graph.node.iter().enumerate() {
            for output in node.output.iter().filter(|name| !name.is_empty()) {
                origins.insert(output.clone(), Origin::Node(index));
            }
        }
        for (index, input) in graph.input.iter().enumerate() {
            if !weights.contains_key(input.name()) {
                origins.insert(input.name().to_owned(), Origin::Input(index));
            }
        }
        for (index, constant) in graph.initializer.iter().enumerate() {
            origins.insert(constant.name().to_owned(), Origin::Constant(index));
        }
        Ok(Self { frame, graph, reads, origins, weights })
    }

    /// Returns the whole graph with every value as an output, from which an engine infers the types of the
    /// values.
    #[must_use]
    pub fn typed_by_engine(&self) -> Vec<u8> {
        let names = self.graph.node.iter().flat_map(|node| &node.output).filter(|name| !name.is_empty());
        let output = names.map(|name| untyped(name)).collect();
        self.encode(GraphProto { output, ..self.graph.clone() })
    }

    /// Returns whether a value is computed by a node, so that its type is known only to an engine.
    #[must_use]
    pub fn is_computed(&self, value: &str) -> bool {
        matches!(self.origins.get(value), Some(Origin::Node(_)))
    }

    /// Extracts the nodes that compute `writes` from `args`. `types` has the types of the arguments that
    /// nodes compute.
    ///
    /// # Errors
    /// [`ExtractError::UnknownValue`], [`ExtractError::MissingArgument`], [`ExtractError::Untyped`].
    pub fn extract(
        &self,
        args: &[String],
        writes: &[String],
        types: &HashMap<String, ValueType>,
    ) -> Result<ExtractedModel, ExtractError> {
        let needed = self.needed(args, writes)?;
        let mut input = args.iter().map(|arg| self.argument(arg, types)).collect::<Result<Vec<_>, _>>()?;
        let weights: Vec<_> = needed.weights.iter().map(|name| self.weights[name].clone()).collect();
        input.extend(self.graph.input.iter().filter(|input| needed.weights.contains(input.name())).cloned());
        let mut node: Vec<_> = needed.nodes.iter().map(|&index| self.graph.node[index].clone()).collect();
        let outputs = self.outputs(args, writes, &mut node);
        let graph = GraphProto {
            node,
            name: self.graph.name.clone(),
            initializer: needed.constants.iter().map(|&at| self.graph.initializer[at].clone()).collect(),
            input,
            output: outputs.iter().map(|name| untyped(name)).collect(),
            sparse_initializer: Vec::new(),
        };
        Ok(ExtractedModel { onnx: self.encode(graph), outputs, weights })
    }

    /// Returns the nodes, constants and weights from which `writes` follow, each in the graph's order.
    fn needed(&self, args: &[String], writes: &[String]) -> Result<Needed, ExtractError> {
        let args: HashSet<&str> = args.iter().map(String::as_str).collect();
        let mut needed = Needed::default();
        let mut seen = HashSet::new();
        let mut open: Vec<&str> = writes.iter().map(String::as_str).collect();
        while let Some(value) = open.pop() {
            if args.contains(value) || !seen.insert(value) {
                continue;
            }
            if self.weights.contains_key(value) {
                needed.weights.insert(value.to_owned());
                continue;
            }
            match self.origins.get(value) {
                None => return Err(ExtractError::UnknownValue(value.to_owned())),
                Some(Origin::Input(_)) => return Err(ExtractError::MissingArgument(value.to_owned())),
                Some(&Origin::Constant(index)) => needed.constants.push(index),
                Some(&Origin::Node(index)) => {
                    needed.nodes.push(index);
                    open.extend(self.reads[index].iter().map(String::as_str));
                }
            }
        }
        // A node with several outputs is found once for each of them.
        needed.nodes.sort_unstable();
        needed.nodes.dedup();
        needed.constants.sort_unstable();
        Ok(needed)
    }

    /// Declares an argument of a part.
    fn argument(
        &self,
        name: &str,
        types: &HashMap<String, ValueType>,
    ) -> Result<ValueInfoProto, ExtractError> {
        match self.origins.get(name) {
            Some(&Origin::Input(index)) => Ok(self.graph.input[index].clone()),
            Some(Origin::Node(_)) => {
                let found = types.get(name).ok_or_else(|| ExtractError::Untyped(name.to_owned()))?;
                Ok(typed(name, found.element, found.shape.iter().copied()))
            }
            Some(&Origin::Constant(index)) => {
                let constant = &self.graph.initializer[index];
                let shape = constant.dims.iter().map(|&dim| u64::try_from(dim).ok());
                Ok(typed(name, constant.data_type.unwrap_or_default(), shape))
            }
            None => {
                let weight = self.graph.input.iter().find(|input| input.name() == name);
                weight.cloned().ok_or_else(|| ExtractError::UnknownValue(name.to_owned()))
            }
        }
    }

    /// Returns the outputs of a part. A written value that no node of the part computes, or that is written
    /// twice, becomes the output of a node that copies the value, because ONNX needs a node for each output.
    fn outputs(&self, args: &[String], writes: &[String], nodes: &mut Vec<NodeProto>) -> Vec<String> {
        let mut outputs = Vec::with_capacity(writes.len());
        for value in writes {
            let computed = self.is_computed(value) && !args.contains(value);
            if computed && !outputs.contains(value) {
                outputs.push(value.clone());
                continue;
            }
            let mut copy = format!("{value}/output{}", outputs.len());
            while self.origins.contains_key(&copy) || self.weights.contains_key(&copy) {
                copy.push('_');
            }
            nodes.push(identity(value, &copy));
            outputs.push(copy);
        }
        outputs
    }

    fn encode(&self, graph: GraphProto) -> Vec<u8> {
        ModelProto { graph: Some(graph), ..self.frame.clone() }.encode_to_vec()
    }
}

/// Nodes, constants and weights of a part.
#[derive(Debug, Default)]
struct Needed {
    nodes: Vec<usize>,
    constants: Vec<usize>,
    weights: std::collections::BTreeSet<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    Top,
    Subgraph,
}

/// The weights that were taken out of a graph.
struct Taken<'a> {
    weights_file: &'a str,
    region_bytes: u64,
    names: HashSet<String>,
    weights: HashMap<String, RegionWeight>,
    inputs: Vec<ValueInfoProto>,
}

impl Taken<'_> {
    /// Turns the weights of a graph and of its subgraphs into inputs of the whole graph.
    fn take_weights(&mut self, graph: &mut GraphProto, depth: Depth) -> Result<(), ExtractError> {
        let is_weight = |tensor: &TensorProto| tensor.data_location == Some(EXTERNAL);
        let (weights, constants) = std::mem::take(&mut graph.initializer).into_iter().partition(is_weight);
        graph.initializer = constants;
        let mut named_again = Vec::new();
        let weights: Vec<TensorProto> = weights;
        for tensor in weights {
            let mut name = tensor.name().to_owned();
            if depth == Depth::Subgraph {
                // Weights of sibling subgraphs may have the same name, and an input needs its own.
                while self.names.contains(&name) {
                    name.push_str("/weight");
                }
                self.names.insert(name.clone());
                named_again.push(identity(&name, tensor.name()));
            }
            let weight = self.weight(&tensor, name)?;
            let shape = weight.shape.iter().map(|&dim| Some(dim as u64));
            self.inputs.push(typed(&weight.name, tensor.data_type.unwrap_or_default(), shape));
            self.weights.insert(weight.name.clone(), weight);
        }
        for node in &mut graph.node {
            for subgraph in node.attribute.iter_mut().filter_map(|attribute| attribute.g.as_mut()) {
                self.take_weights(subgraph, Depth::Subgraph)?;
            }
        }
        graph.node.splice(0..0, named_again);
        Ok(())
    }

    fn weight(&self, tensor: &TensorProto, name: String) -> Result<RegionWeight, ExtractError> {
        let entry = |key: &str| {
            let entry = tensor.external_data.iter().find(|entry| entry.key.as_deref() == Some(key));
            entry.and_then(|entry| entry.value.as_deref())
        };
        let refused = || ExtractError::Weight(tensor.name().to_owned());
        if entry("location") != Some(self.weights_file) {
            return Err(refused());
        }
        let number = |key| entry(key).and_then(|text| text.parse::<u64>().ok());
        let datatype = datatype(tensor.data_type.unwrap_or_default()).ok_or_else(refused)?;
        let dims = tensor.dims.iter().map(|&dim| usize::try_from(dim).ok());
        let shape = dims.collect::<Option<Vec<_>>>().ok_or_else(refused)?;
        let size = shape.iter().try_fold(datatype.size().unwrap_or(0), |all, &dim| all.checked_mul(dim));
        let offset = number("offset").unwrap_or(0);
        let bytes = number("length").filter(|&bytes| size == Some(bytes as usize)).ok_or_else(refused)?;
        let end = offset.checked_add(bytes).ok_or_else(refused)?;
        if end > self.region_bytes {
            return Err(refused());
        }
        Ok(RegionWeight { name, datatype, shape, offset, bytes })
    }
}

/// Returns all names of values in a graph and in its subgraphs.
fn all_names(graph: &GraphProto) -> HashSet<String> {
    let mut names = HashSet::new();
    let mut open = vec![graph];
    while let Some(graph) = open.pop() {
        names.extend(graph.input.iter().map(|input| input.name().to_owned()));
        names.extend(graph.initializer.iter().map(|tensor| tensor.name().to_owned()));
        for node in &graph.node {
            names.extend(node.output.iter().cloned());
            open.extend(node.attribute.iter().filter_map(|attribute| attribute.g.as_deref()));
        }
    }
    names
}

fn identity(from: &str, to: &str) -> NodeProto {
    NodeProto {
        input: vec![from.to_owned()],
        output: vec![to.to_owned()],
        op_type: Some("Identity".to_owned()),
        ..NodeProto::default()
    }
}

fn untyped(name: &str) -> ValueInfoProto {
    ValueInfoProto { name: Some(name.to_owned()), r#type: None }
}

fn typed(name: &str, element: i32, shape: impl Iterator<Item = Option<u64>>) -> ValueInfoProto {
    let dim = |size: Option<u64>| Dimension {
        dim_value: size.and_then(|size| i64::try_from(size).ok()),
        dim_param: None,
    };
    let shape = TensorShapeProto { dim: shape.map(dim).collect() };
    let tensor_type = TensorType { elem_type: Some(element), shape: Some(shape) };
    let r#type = TypeProto { tensor_type: Some(tensor_type), sequence_type: None };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(r#type) }
}

/// Returns the datatype of an element type of ONNX, or `None` if a region cannot hold such elements.
fn datatype(number: i32) -> Option<DataType> {
    Some(match number {
        element::FLOAT => DataType::Fp32,
        element::UINT8 => DataType::Uint8,
        element::INT8 => DataType::Int8,
        element::UINT16 => DataType::Uint16,
        element::INT16 => DataType::Int16,
        element::INT32 => DataType::Int32,
        element::INT64 => DataType::Int64,
        element::FLOAT16 => DataType::Fp16,
        element::DOUBLE => DataType::Fp64,
        element::UINT32 => DataType::Uint32,
        element::UINT64 => DataType::Uint64,
        element::BFLOAT16 => DataType::Bf16,
        _ => return None,
    })
}
