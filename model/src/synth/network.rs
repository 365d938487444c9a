//! Writes an ONNX graph node by node.

use bytes::Bytes;
use prost::Message;

use super::random::SplitMix64;
use crate::onnx::{
    AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    TensorShapeProto, TensorType, TypeProto, ValueInfoProto, attribute, element,
};

/// Opset of all networks in this module: the first one with LayerNormalization.
const OPSET: i64 = 17;
const IR_VERSION: i64 = 8;

#[derive(Clone, Copy)]
pub(super) enum DeclaredDim {
    Fixed(usize),
    Named(&'static str),
}

/// An attribute of a node.
pub(super) enum Attribute<'a> {
    Int(&'a str, i64),
    Ints(&'a str, &'a [i64]),
    Float(&'a str, f32),
}

pub(super) struct GraphWriter {
    graph: GraphProto,
    random: SplitMix64,
}

impl GraphWriter {
    pub(super) fn new(name: &str, seed: u64) -> Self {
        let graph = GraphProto { name: Some(name.to_owned()), ..GraphProto::default() };
        Self { graph, random: SplitMix64::new(seed) }
    }

    pub(super) fn float_input(&mut self, name: &str, shape: &[DeclaredDim]) -> String {
        self.graph.input.push(declare(name, element::FLOAT, shape));
        name.to_owned()
    }

    pub(super) fn int64_input(&mut self, name: &str, shape: &[DeclaredDim]) -> String {
        self.graph.input.push(declare(name, element::INT64, shape));
        name.to_owned()
    }

    /// Adds an input of stored pixels, which are bytes.
    pub(super) fn byte_input(&mut self, name: &str, shape: &[DeclaredDim]) -> String {
        self.graph.input.push(declare(name, element::UINT8, shape));
        name.to_owned()
    }

    pub(super) fn byte_output(&mut self, name: &str, shape: &[DeclaredDim]) {
        self.graph.output.push(declare(name, element::UINT8, shape));
    }

    pub(super) fn float_output(&mut self, name: &str, shape: &[DeclaredDim]) {
        self.graph.output.push(declare(name, element::FLOAT, shape));
    }

    pub(super) fn int64_output(&mut self, name: &str, shape: &[DeclaredDim]) {
        self.graph.output.push(declare(name, element::INT64, shape));
    }

    /// Adds a node with the single output `output`, and names the node after its output.
    pub(super) fn node(
        &mut self,
        op_type: &str,
        inputs: &[&str],
        output: &str,
        attributes: &[Attribute<'_>],
    ) -> String {
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(ToString::to_string).collect(),
            output: vec![output.to_owned()],
            name: Some(format!("{output}:{op_type}")),
            op_type: Some(op_type.to_owned()),
            attribute: attributes.iter().map(encode_attribute).collect(),
            domain: None,
        });
        output.to_owned()
    }

    /// Adds a random weight. Its scale preserves the variance of the input through a rectified layer
    /// that sums `fan_in` products (He).
    pub(super) fn weight(&mut self, name: &str, shape: &[usize], fan_in: usize) -> String {
        self.scaled_weight(name, shape, (2.0 / fan_in as f32).sqrt())
    }

    pub(super) fn scaled_weight(&mut self, name: &str, shape: &[usize], deviation: f32) -> String {
        let bytes = self.random.floats(shape.iter().product(), deviation);
        self.constant(name, element::FLOAT, shape, bytes)
    }

    /// Adds a vector of equal numbers, as normalizations have.
    pub(super) fn filled(&mut self, name: &str, len: usize, value: f32) -> String {
        self.constant(name, element::FLOAT, &[len], value.to_le_bytes().repeat(len))
    }

    pub(super) fn scalar(&mut self, name: &str, value: f32) -> String {
        self.constant(name, element::FLOAT, &[], value.to_le_bytes().to_vec())
    }

    /// Adds a weight that is not random.
    pub(super) fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) -> String {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant(name, element::FLOAT, shape, bytes)
    }

    pub(super) fn int64s(&mut self, name: &str, values: &[i64]) -> String {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant(name, element::INT64, &[values.len()], bytes)
    }

    fn constant(&mut self, name: &str, kind: i32, shape: &[usize], bytes: Vec<u8>) -> String {
        self.graph.initializer.push(TensorProto {
            dims: shape.iter().map(|&dim| dim as i64).collect(),
            data_type: Some(kind),
            name: Some(name.to_owned()),
            raw_data: Some(Bytes::from(bytes)),
            ..TensorProto::default()
        });
        name.to_owned()
    }

    pub(super) fn finish(self) -> Vec<u8> {
        let model = ModelProto {
            ir_version: Some(IR_VERSION),
            producer_name: Some("millrace-synth".to_owned()),
            producer_version: None,
            graph: Some(self.graph),
            opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(OPSET) }],
        };
        model.encode_to_vec()
    }
}

fn declare(name: &str, kind: i32, shape: &[DeclaredDim]) -> ValueInfoProto {
    let dims = shape.iter().map(|size| match size {
        DeclaredDim::Fixed(size) => Dimension { dim_value: Some(*size as i64), dim_param: None },
        DeclaredDim::Named(name) => Dimension { dim_value: None, dim_param: Some((*name).to_owned()) },
    });
    let tensor_type =
        TensorType { elem_type: Some(kind), shape: Some(TensorShapeProto { dim: dims.collect() }) };
    let kind = TypeProto { tensor_type: Some(tensor_type), sequence_type: None };
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(kind) }
}

fn encode_attribute(from: &Attribute<'_>) -> AttributeProto {
    let named = |name: &str, kind| AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(kind),
        ..Default::default()
    };
    match *from {
        Attribute::Int(name, i) => AttributeProto { i: Some(i), ..named(name, attribute::INT) },
        Attribute::Ints(name, ints) => AttributeProto { ints: ints.to_vec(), ..named(name, attribute::INTS) },
        Attribute::Float(name, f) => AttributeProto { f: Some(f), ..named(name, attribute::FLOAT) },
    }
}
