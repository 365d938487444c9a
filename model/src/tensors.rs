//! Checks constant tensors, and locates their bytes.

use std::ops::Range;

use bytes::Bytes;

use crate::error::ModelError;
use crate::onnx::{AttributeProto, EXTERNAL, GraphProto, TensorProto, element};

/// Element types of a weight or constant. rten stores the last three as 32-bit numbers.
const SUPPORTED: &[&str] = &["FLOAT", "INT8", "UINT8", "INT32", "INT64", "BOOL", "DOUBLE"];

/// The bytes of a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WeightSource {
    /// The bytes are this range of the ONNX file.
    File(Range<usize>),
    /// The bytes were converted from typed fields, which the file stores in another encoding.
    Owned(Bytes),
}

/// Checks every tensor of a graph, including the tensors of its subgraphs and attributes.
///
/// # Errors
/// Returns an error for the first tensor that is stored in another file, is sparse, has an element
/// type that the runtime lacks, or has data that do not match its dimensions.
pub(crate) fn check_all(graph: &GraphProto) -> Result<(), ModelError> {
    if let Some(sparse) = graph.sparse_initializer.first() {
        let tensor = sparse.values.as_ref().map(|values| values.name().to_owned()).unwrap_or_default();
        return Err(ModelError::SparseWeight { tensor });
    }
    for tensor in &graph.initializer {
        check(tensor, tensor.name())?;
    }
    for node in &graph.node {
        for AttributeProto { t, g, .. } in &node.attribute {
            if let Some(tensor) = t {
                check(tensor, &node.label())?;
            }
            if let Some(graph) = g {
                check_all(graph)?;
            }
        }
    }
    Ok(())
}

fn check(tensor: &TensorProto, label: &str) -> Result<(), ModelError> {
    let label = || label.to_owned();
    if tensor.data_location == Some(EXTERNAL) || !tensor.external_data.is_empty() {
        let entry = tensor.external_data.iter().find(|entry| entry.key.as_deref() == Some("location"));
        let location = entry.and_then(|entry| entry.value.clone()).unwrap_or_default();
        return Err(ModelError::ExternalData { tensor: label(), location });
    }
    let number = tensor.data_type.unwrap_or_default();
    let Some(size) = element_size(number) else {
        let found = element::name(number);
        return Err(ModelError::ElementType { what: "tensor", name: label(), found, supported: SUPPORTED });
    };
    let expected = element_count(&tensor.dims)
        .and_then(|count| count.checked_mul(size))
        .filter(|&bytes| isize::try_from(bytes).is_ok())
        .ok_or_else(|| ModelError::TensorShape { tensor: label(), dims: tensor.dims.clone() })?;
    let found = match &tensor.raw_data {
        Some(raw) => raw.len() as u64,
        None => typed_count(tensor, number) as u64 * size,
    };
    if found == expected { Ok(()) } else { Err(ModelError::TensorData { tensor: label(), expected, found }) }
}

/// Returns the bytes of an element in `raw_data`, or `None` if the runtime lacks the type.
fn element_size(number: i32) -> Option<u64> {
    match number {
        element::UINT8 | element::INT8 | element::BOOL => Some(1),
        element::FLOAT | element::INT32 => Some(4),
        element::INT64 | element::DOUBLE => Some(8),
        _ => None,
    }
}

/// Returns the number of elements of a shape. Returns `None` if a dimension is negative, or if the
/// other dimensions of an empty tensor already overflow, because strides would overflow too.
fn element_count(dims: &[i64]) -> Option<u64> {
    let strides =
        dims.iter().try_fold(1u64, |count, &dim| count.checked_mul(u64::try_from(dim).ok()?.max(1)))?;
    isize::try_from(strides).ok()?;
    Some(if dims.contains(&0) { 0 } else { strides })
}

/// Returns the number of elements in the typed field of an element type.
fn typed_count(tensor: &TensorProto, number: i32) -> usize {
    match number {
        element::FLOAT => tensor.float_data.len(),
        element::INT64 => tensor.int64_data.len(),
        element::DOUBLE => tensor.double_data.len(),
        _ => tensor.int32_data.len(),
    }
}

/// Returns the number of elements of a checked tensor.
pub(crate) fn elements(tensor: &TensorProto) -> u64 {
    element_count(&tensor.dims).unwrap_or_default()
}

/// Returns the number of bytes of a checked tensor.
pub(crate) fn byte_len(tensor: &TensorProto) -> u64 {
    elements(tensor) * element_size(tensor.data_type.unwrap_or_default()).unwrap_or_default()
}

/// Takes the bytes out of a checked tensor. `file` is the buffer from which the tensor was decoded.
pub(crate) fn take_bytes(tensor: &mut TensorProto, file: &Bytes) -> WeightSource {
    if let Some(raw) = tensor.raw_data.take() {
        let start = (raw.as_ptr() as usize).wrapping_sub(file.as_ptr() as usize);
        return match start.checked_add(raw.len()) {
            Some(end) if end <= file.len() => WeightSource::File(start..end),
            // The bytes come from a number of a Constant node, and not from the file.
            _ => WeightSource::Owned(raw),
        };
    }
    let floats = std::mem::take(&mut tensor.float_data);
    let numbers = std::mem::take(&mut tensor.int32_data);
    WeightSource::Owned(match tensor.data_type {
        Some(element::FLOAT) => floats.iter().flat_map(|value| value.to_le_bytes()).collect(),
        // 8-bit types: each number has a value in its low byte.
        _ => numbers.iter().map(|value| value.to_le_bytes()[0]).collect(),
    })
}
