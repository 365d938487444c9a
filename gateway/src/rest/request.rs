//! An inference request over REST: JSON, and binary tensors after it.

use bytes::Bytes;
use http::HeaderMap;
use millrace_types::tensor::Dim;
use millrace_types::{Failure, Reason, TensorSpec};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value as Json};

use super::elements;
use crate::backend::{Model, Tensor};
use crate::front::{Named, Question, check_named, check_requested, check_size};
use crate::parameters::{Parameters, Value, flag, refuse_unserved};

/// The length of the JSON before binary tensors, in requests and responses.
pub(crate) const HEADER_LENGTH: &str = "inference-header-content-length";
const BINARY_SIZE: &str = "binary_data_size";
const BINARY: &str = "binary_data";

#[derive(Deserialize)]
struct Request<'a> {
    id: Option<String>,
    parameters: Option<Map<String, Json>>,
    #[serde(borrow)]
    inputs: Vec<Input<'a>>,
    outputs: Option<Vec<Output>>,
}

#[derive(Deserialize)]
struct Input<'a> {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    parameters: Option<Map<String, Json>>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Output {
    name: String,
    parameters: Option<Map<String, Json>>,
}

/// How an answer is to be written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Form {
    /// The id to echo.
    pub(crate) id: Option<String>,
    /// Whether each output is wanted in binary, in the order of the outputs.
    pub(crate) binary: Vec<bool>,
}

/// A body cut into its JSON and the binary tensors after it.
#[derive(Debug, PartialEq)]
pub(crate) struct Cut {
    json: Bytes,
    /// None when the header that announces binary tensors was not sent.
    binary: Option<Bytes>,
}

/// Cuts a body where its header says.
pub(crate) fn cut(headers: &HeaderMap, mut body: Bytes) -> Result<Cut, Failure> {
    let Some(length) = headers.get(HEADER_LENGTH) else { return Ok(Cut { json: body, binary: None }) };
    let text = String::from_utf8_lossy(length.as_bytes());
    let digits = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    let length: usize = text.parse().ok().filter(|_| digits).ok_or_else(|| {
        Failure::malformed(format!("Inference-Header-Content-Length {text:?} is no length in bytes"))
    })?;
    if length > body.len() {
        let message =
            format!("Inference-Header-Content-Length is {length}, and the body has {} bytes", body.len());
        return Err(Failure::malformed(message));
    }
    let json = body.split_to(length);
    Ok(Cut { json, binary: Some(body) })
}

/// Reads a request against its model.
pub(crate) fn question(model: &Model, cut: Cut) -> Result<(Question, Form), Failure> {
    match cut {
        Cut { json, binary: Some(tensor) } if json.is_empty() => lone_tensor(model, tensor),
        Cut { json, binary } => announced(model, &json, binary),
    }
}

fn announced(model: &Model, json: &[u8], binary: Option<Bytes>) -> Result<(Question, Form), Failure> {
    let Request { id, parameters, inputs, outputs } = serde_json::from_slice(json)
        .map_err(|error| Failure::malformed(format!("the request is not what the protocol asks: {error}")))?;
    let outputs = outputs.unwrap_or_default();
    let parameters = Parameters::read(values(parameters.as_ref()))?;
    for input in &inputs {
        refuse_unserved(&input.name, values(input.parameters.as_ref()))?;
    }
    for output in &outputs {
        refuse_unserved(&output.name, values(output.parameters.as_ref()))?;
    }
    let requested = check_requested(model, outputs.iter().map(|output| output.name.as_str()))?;
    let binary_wanted = binary_wanted(model, &outputs, &parameters)?;
    let named: Vec<_> = inputs
        .iter()
        .map(|input| Named { name: &input.name, datatype: &input.datatype, shape: &input.shape })
        .collect();
    let expected = check_named(&model.inputs, &named)?;
    let mut binary = Binary { left: binary };
    let mut tensors = Vec::with_capacity(inputs.len());
    for (input, (datatype, size)) in inputs.into_iter().zip(expected) {
        let invalid =
            |why: String| Failure::new(Reason::InvalidInput, format!("input {:?}: {why}", input.name));
        let binary_size = input.parameters.as_ref().and_then(|parameters| parameters.get(BINARY_SIZE));
        let data = match (binary_size, input.data) {
            (Some(_), Some(_)) => {
                return Err(invalid("it has both data and binary_data_size: send one".to_owned()));
            }
            (Some(announced), None) => binary.take(&input.name, announced, size)?,
            (None, Some(data)) => elements::read(data, datatype, &input.shape).map_err(invalid)?.freeze(),
            (None, None) => return Err(invalid("it has neither data nor binary_data_size".to_owned())),
        };
        tensors.push(Tensor { name: input.name, datatype, shape: input.shape, data });
    }
    binary.finish()?;
    Ok((Question { inputs: tensors, outputs: requested, parameters }, Form { id, binary: binary_wanted }))
}

/// The binary tensors not yet taken.
struct Binary {
    left: Option<Bytes>,
}

impl Binary {
    fn take(&mut self, name: &str, announced: &Json, size: usize) -> Result<Bytes, Failure> {
        let announced = announced.as_u64().and_then(|size| usize::try_from(size).ok());
        let announced = announced.ok_or_else(|| {
            Failure::malformed(format!("input {name:?}: binary_data_size is no size in bytes"))
        })?;
        let Some(left) = &mut self.left else {
            let message = format!(
                "input {name:?} is binary: send Inference-Header-Content-Length, the length of the JSON"
            );
            return Err(Failure::malformed(message));
        };
        if announced > left.len() {
            let message = format!(
                "input {name:?} announces {announced} bytes, and {} are left of the body",
                left.len()
            );
            return Err(Failure::malformed(message));
        }
        check_size(name, size, announced)?;
        Ok(left.split_to(announced))
    }

    fn finish(self) -> Result<(), Failure> {
        match self.left {
            Some(left) if !left.is_empty() => Err(Failure::malformed(format!(
                "the body has {} bytes after the last binary input",
                left.len()
            ))),
            _ => Ok(()),
        }
    }
}

/// For each output there will be, whether it is wanted in binary. Refuses what JSON cannot carry
/// before anything runs.
fn binary_wanted(model: &Model, outputs: &[Output], parameters: &Parameters) -> Result<Vec<bool>, Failure> {
    let wanted = |spec: &TensorSpec, own: Option<&Json>| {
        let binary = match own {
            Some(own) => flag(BINARY, Value::from(own))?,
            None => parameters.binary_output,
        };
        if !binary && !elements::has_json(spec.datatype) {
            let message = format!(
                "output {:?} is {}, which has no JSON form: ask for binary_data",
                spec.name, spec.datatype
            );
            return Err(Failure::new(Reason::InvalidOutput, message));
        }
        Ok(binary)
    };
    if outputs.is_empty() {
        return model.outputs.iter().map(|spec| wanted(spec, None)).collect();
    }
    let named = outputs.iter().map(|output| {
        let own = output.parameters.as_ref().and_then(|parameters| parameters.get(BINARY));
        let spec = model.outputs.iter().find(|spec| spec.name == output.name);
        spec.map_or(Ok(false), |spec| wanted(spec, own))
    });
    named.collect()
}

/// A body that is nothing but the one input's bytes. Its shape follows from its size, and its
/// outputs are binary.
fn lone_tensor(model: &Model, data: Bytes) -> Result<(Question, Form), Failure> {
    let invalid = |why: String| Failure::new(Reason::InvalidInput, why);
    let [input] = model.inputs.as_slice() else {
        let count = model.inputs.len();
        return Err(invalid(format!(
            "the model takes {count} inputs: a body without JSON can bring only one"
        )));
    };
    let shape = lone_shape(input, data.len()).ok_or_else(|| {
        let shape = millrace_types::tensor::shape_text(&input.shape);
        invalid(format!(
            "{} bytes do not determine a {} tensor of shape {shape}: send JSON with it",
            data.len(),
            input.datatype
        ))
    })?;
    let tensor = Tensor { name: input.name.clone(), datatype: input.datatype, shape, data };
    let question = Question { inputs: vec![tensor], outputs: Vec::new(), parameters: Parameters::default() };
    Ok((question, Form { id: None, binary: vec![true; model.outputs.len()] }))
}

/// The shape that makes `len` bytes of this input: at most one dimension may be free.
fn lone_shape(input: &TensorSpec, len: usize) -> Option<Vec<i64>> {
    let size = input.datatype.size()?;
    let fixed = input.shape.iter().try_fold(size, |product, dim| match dim {
        Dim::Fixed(n) => product.checked_mul(usize::try_from(*n).ok()?),
        Dim::Symbol(_) => Some(product),
    })?;
    let free = input.shape.iter().filter(|dim| matches!(dim, Dim::Symbol(_))).count();
    let whole = len > 0 && len.is_multiple_of(fixed) && free <= 1 && (free == 1 || len == fixed);
    let rest = i64::try_from(len / fixed).ok().filter(|_| whole)?;
    Some(
        input.shape.iter().map(|dim| if matches!(dim, Dim::Symbol(_)) { rest } else { dim.wire() }).collect(),
    )
}

fn values(parameters: Option<&Map<String, Json>>) -> impl Iterator<Item = (&str, Value<'_>)> {
    parameters.into_iter().flatten().map(|(name, value)| (name.as_str(), Value::from(value)))
}
