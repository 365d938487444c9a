//! Turns `Constant` nodes into initializers, so that a large constant is an ordinary weight and later
//! stages handle a single kind of constants.

use crate::error::ModelError;
use crate::onnx::{AttributeProto, GraphProto, NodeProto, TensorProto, element};

/// Hoists every `Constant` of a graph and of its subgraphs. The tensors must already be checked.
///
/// # Errors
/// Returns [`ModelError::ConstantValue`] if the value is text, is sparse, is missing or is given twice.
pub(crate) fn hoist(graph: &mut GraphProto) -> Result<(), ModelError> {
    for node in &mut graph.node {
        for attribute in &mut node.attribute {
            if let Some(subgraph) = &mut attribute.g {
                hoist(subgraph)?;
            }
        }
    }
    let (constants, others) = std::mem::take(&mut graph.node)
        .into_iter()
        .partition(|node: &NodeProto| node.op_type() == "Constant" && node.operator_domain().is_empty());
    graph.node = others;
    for constant in constants {
        graph.initializer.push(initializer(constant)?);
    }
    Ok(())
}

fn initializer(mut node: NodeProto) -> Result<TensorProto, ModelError> {
    let refused = ModelError::ConstantValue { node: node.label() };
    if node.output.len() != 1 || node.attribute.len() != 1 {
        return Err(refused);
    }
    let (Some(output), Some(attribute)) = (node.output.pop(), node.attribute.pop()) else {
        return Err(refused);
    };
    let tensor = value(attribute).ok_or(refused)?;
    Ok(TensorProto { name: Some(output), ..tensor })
}

fn value(attribute: AttributeProto) -> Option<TensorProto> {
    let number = |data_type, dims: Vec<i64>| TensorProto {
        data_type: Some(data_type),
        dims,
        ..TensorProto::default()
    };
    let count = |len: usize| i64::try_from(len).ok();
    Some(match attribute.name.as_deref()? {
        "value" => *attribute.t?,
        "value_int" => TensorProto { int64_data: vec![attribute.i?], ..number(element::INT64, vec![]) },
        "value_ints" => {
            let dims = vec![count(attribute.ints.len())?];
            TensorProto { int64_data: attribute.ints, ..number(element::INT64, dims) }
        }
        "value_float" => TensorProto { float_data: vec![attribute.f?], ..number(element::FLOAT, vec![]) },
        "value_floats" => {
            let dims = vec![count(attribute.floats.len())?];
            TensorProto { float_data: attribute.floats, ..number(element::FLOAT, dims) }
        }
        _ => return None,
    })
}
