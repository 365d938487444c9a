//! Tests of [`compile`](crate::compile()) as a whole, on graphs that are written message by message.

mod digits;
mod extract;
mod hostile;
mod layouts;
mod refusals;
mod runner;
mod running;
mod scenes;
mod sizes;
mod synthetic;
mod traffic;

use bytes::Bytes;
use prost::Message;

use crate::onnx::{
    AttributeProto, Dimension, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    TensorShapeProto, TensorType, TypeProto, ValueInfoProto, element,
};

/// Returns a weight with raw data.
fn weight(name: &str, dims: &[i64]) -> TensorProto {
    let count: i64 = dims.iter().product();
    let raw: Vec<u8> = (0..count).flat_map(|i| (i as f32 / 8.0).to_le_bytes()).collect();
    TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(element::FLOAT),
        raw_data: Some(Bytes::from(raw)),
        ..TensorProto::default()
    }
}

fn node(op_type: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.into()),
        name: Some(format!("{op_type}-{}", outputs.join("-"))),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: outputs.iter().map(ToString::to_string).collect(),
        ..NodeProto::default()
    }
}

/// Returns an input or output. A dimension that is not a number becomes a symbol.
fn value(name: &str, kind: i32, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| match text.parse() {
        Ok(size) => Dimension { dim_value: Some(size), dim_param: None },
        Err(_) => Dimension { dim_value: None, dim_param: Some((*text).to_owned()) },
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor_type = Some(TensorType { elem_type: Some(kind), shape });
    let kind = TypeProto { tensor_type, sequence_type: None };
    ValueInfoProto { name: Some(name.into()), r#type: Some(kind) }
}

fn subgraph(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        g: Some(Box::new(graph)),
        r#type: Some(5),
        ..AttributeProto::default()
    }
}

/// Returns a model that chooses between two subgraphs. The subgraphs capture `x` and `h`, and one has
/// a weight of its own. The choice precedes the node that makes `h`, so the file's order is not
/// valid.
fn choosing() -> ModelProto {
    let branch = |weights: Vec<TensorProto>, node: NodeProto| GraphProto {
        output: vec![value(&node.output[0], element::FLOAT, &["N", "4"])],
        node: vec![node],
        initializer: weights,
        ..GraphProto::default()
    };
    with(|graph| {
        graph.input.push(value("flag", element::BOOL, &["1"]));
        let mut choice = node("If", &["flag"], &["y"]);
        let then = branch(vec![weight("own", &[4, 4])], node("MatMul", &["h", "own"], &["t"]));
        let otherwise = branch(vec![], node("Add", &["x", "h"], &["e"]));
        choice.attribute = vec![subgraph("then_branch", then), subgraph("else_branch", otherwise)];
        graph.node = vec![choice, node("MatMul", &["x", "w"], &["h"])];
    })
}

/// Returns a model of `y = relu(x · w)`, with x of [N, 4].
fn model() -> ModelProto {
    let graph = GraphProto {
        node: vec![node("MatMul", &["x", "w"], &["h"]), node("Relu", &["h"], &["y"])],
        initializer: vec![weight("w", &[4, 4])],
        input: vec![value("x", element::FLOAT, &["N", "4"])],
        output: vec![value("y", element::FLOAT, &["N", "4"])],
        ..GraphProto::default()
    };
    ModelProto {
        ir_version: Some(9),
        graph: Some(graph),
        opset_import: vec![OperatorSetIdProto { domain: None, version: Some(17) }],
        ..ModelProto::default()
    }
}

fn bytes(model: &ModelProto) -> Bytes {
    Bytes::from(model.encode_to_vec())
}

/// Returns [`model`] with a changed graph.
fn with(change: impl FnOnce(&mut GraphProto)) -> ModelProto {
    let mut model = model();
    change(model.graph.as_mut().unwrap());
    model
}
