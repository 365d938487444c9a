//! Reads a model's versions, and its inputs and outputs as the serving protocol shows them.

use std::collections::BTreeSet;

use millrace_types::{DataType, Dim, TensorSpec};

use crate::error::ModelError;
use crate::onnx::{Dimension, GraphProto, ModelProto, TensorType, ValueInfoProto, element};
use crate::versions::{MAX_IR_VERSION, MAX_OPSET, MIN_IR_VERSION, MIN_OPSET};

/// Most inputs, and most outputs, of a model. Each request looks up each of its tensors among them.
pub const MAX_TENSORS: usize = 1_024;

/// Element types that an input or output may have.
const SERVED: &[&str] = &["FLOAT", "INT64", "INT32", "INT8", "UINT8", "BOOL"];

/// Checks the format version, and returns the opset of ONNX's own domain.
///
/// # Errors
/// Returns [`ModelError::IrVersion`] or [`ModelError::Opset`].
pub(crate) fn opset(model: &ModelProto) -> Result<u32, ModelError> {
    let found = model.ir_version.unwrap_or_default();
    if !(MIN_IR_VERSION..=MAX_IR_VERSION).contains(&found) {
        return Err(ModelError::IrVersion { found });
    }
    let own = |domain: Option<&str>| matches!(domain, None | Some("" | "ai.onnx"));
    let found = model.opset_import.iter().find(|set| own(set.domain.as_deref())).and_then(|set| set.version);
    match found {
        Some(version @ MIN_OPSET..=MAX_OPSET) => Ok(u32::try_from(version).unwrap_or(u32::MAX)),
        _ => Err(ModelError::Opset { found }),
    }
}

/// The inputs and outputs, in the file's order.
pub(crate) struct ModelSignature {
    pub(crate) inputs: Vec<TensorSpec>,
    pub(crate) outputs: Vec<TensorSpec>,
}

/// Reads the declared inputs and outputs of the graph. Their names must already be checked to be unique.
///
/// # Errors
/// Fails if an input or output cannot be served: no shape, a scalar input, a dimension below 1, an
/// element type that the protocol or the runtime lacks, no inputs, no outputs.
pub(crate) fn read(graph: &GraphProto) -> Result<ModelSignature, ModelError> {
    if graph.input.is_empty() {
        return Err(ModelError::NoInputs);
    }
    if graph.output.is_empty() {
        return Err(ModelError::NoOutputs);
    }
    if graph.input.len().max(graph.output.len()) > MAX_TENSORS {
        return Err(ModelError::TooMany { what: "inputs or outputs", limit: MAX_TENSORS });
    }
    let mut symbols = Symbols::of(graph);
    let inputs: Vec<TensorSpec> =
        graph.input.iter().map(|info| spec("input", info, &mut symbols)).collect::<Result<_, _>>()?;
    if let Some(scalar) = inputs.iter().find(|input| input.shape.is_empty()) {
        return Err(ModelError::ScalarInput { name: scalar.name.clone() });
    }
    let outputs =
        graph.output.iter().map(|info| spec("output", info, &mut symbols)).collect::<Result<_, _>>()?;
    Ok(ModelSignature { inputs, outputs })
}

fn spec(what: &'static str, info: &ValueInfoProto, symbols: &mut Symbols) -> Result<TensorSpec, ModelError> {
    let name = info.name();
    let Some(tensor) = info.r#type.as_ref().and_then(|kind| kind.tensor_type.as_ref()) else {
        return Err(ModelError::NotATensor { what, name: name.to_owned() });
    };
    let datatype = datatype(what, name, tensor)?;
    let shape = tensor.shape.as_ref().ok_or_else(|| ModelError::NoShape { what, name: name.to_owned() })?;
    let dims = shape.dim.iter().enumerate().map(|(axis, dim)| match dim.dim_value {
        Some(found) => match u64::try_from(found) {
            Ok(size @ 1..) => Ok(Dim::Fixed(size)),
            _ => Err(ModelError::Dimension { what, name: name.to_owned(), axis, found }),
        },
        None => Ok(Dim::Symbol(symbols.name(dim, name, axis))),
    });
    Ok(TensorSpec { name: name.to_owned(), datatype, shape: dims.collect::<Result<_, _>>()? })
}

fn datatype(what: &'static str, name: &str, tensor: &TensorType) -> Result<DataType, ModelError> {
    Ok(match tensor.elem_type.unwrap_or_default() {
        element::FLOAT => DataType::Fp32,
        element::INT64 => DataType::Int64,
        element::INT32 => DataType::Int32,
        element::INT8 => DataType::Int8,
        element::UINT8 => DataType::Uint8,
        element::BOOL => DataType::Bool,
        other => {
            let name = name.to_owned();
            let found = element::name(other);
            return Err(ModelError::ElementType { what, name, found, supported: SERVED });
        }
    })
}

/// The symbols of dimensions in use, so that nameless dimensions get new symbols.
struct Symbols(BTreeSet<String>);

impl Symbols {
    fn of(graph: &GraphProto) -> Self {
        let infos = graph.input.iter().chain(&graph.output);
        let tensors = infos.filter_map(|info| info.r#type.as_ref()?.tensor_type.as_ref()?.shape.as_ref());
        Self(tensors.flat_map(|shape| &shape.dim).filter_map(|dim| dim.dim_param.clone()).collect())
    }

    fn name(&mut self, dim: &Dimension, tensor: &str, axis: usize) -> String {
        match dim.dim_param.as_deref() {
            Some(symbol) if !symbol.is_empty() => symbol.to_owned(),
            _ => {
                let mut fresh = format!("{tensor}.{axis}");
                while !self.0.insert(fresh.clone()) {
                    fresh.push('\'');
                }
                fresh
            }
        }
    }
}
