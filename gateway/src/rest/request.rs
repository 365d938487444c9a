//! An inference request over REST: JSON, followed by binary tensors.

use bytes::Bytes;
use http::HeaderMap;
use millrace_proto::decoding::{DECODED_MARGIN_BYTES, DECODED_RATIO_MAX};
use millrace_types::tensor::Dim;
use millrace_types::{Failure, Reason, TensorSpec};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::elements;
use super::json::{self, Bounded, JsonParameters};
use crate::backend::{ModelRevision, NamedTensor, RequestContents};
use crate::budget::ByteCharge;
use crate::handler::{
    ClaimedInput, REQUEST_TENSORS_MAX, SHAPE_RANK_MAX, check_named, check_requested, check_size,
};
use crate::parameters::{BINARY, BINARY_SIZE, ParameterValue, RequestParameters, flag, refuse_unserved};

/// Header with the length of the JSON before binary tensors, in requests and responses.
pub(crate) const HEADER_LENGTH: &str = "inference-header-content-length";

/// A request's JSON, with known keys only.
#[derive(Deserialize)]
struct Request<'a> {
    id: Option<String>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
    #[serde(borrow)]
    inputs: Bounded<Input<'a>, REQUEST_TENSORS_MAX>,
    #[serde(borrow)]
    outputs: Option<Bounded<Output<'a>, REQUEST_TENSORS_MAX>>,
}

#[derive(Deserialize)]
struct Input<'a> {
    name: String,
    datatype: String,
    shape: Bounded<i64, SHAPE_RANK_MAX>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Output<'a> {
    name: String,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

/// The form in which a response is to be written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ResponseForm {
    pub(crate) id: Option<String>,
    /// Whether each output is sent in binary, in the order of the outputs.
    pub(crate) binary: Vec<bool>,
}

/// A body that is split into the JSON and the binary tensors after the JSON.
#[derive(Debug, PartialEq)]
pub(crate) struct SplitBody {
    json: Bytes,
    /// Binary tensors. `None` if the client did not send the header that announces binary tensors.
    binary: Option<Bytes>,
}

impl SplitBody {
    pub(crate) fn json_len(&self) -> usize {
        self.json.len()
    }
}

/// Splits a body at the position that the header gives.
pub(crate) fn cut(headers: &HeaderMap, mut body: Bytes) -> Result<SplitBody, Failure> {
    let Some(length) = headers.get(HEADER_LENGTH) else { return Ok(SplitBody { json: body, binary: None }) };
    let text = String::from_utf8_lossy(length.as_bytes());
    let digits = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    let length: usize = text.parse().ok().filter(|_| digits).ok_or_else(|| {
        Failure::malformed(format!("Inference-Header-Content-Length {text:?} is not a length in bytes"))
    })?;
    if length > body.len() {
        let message =
            format!("Inference-Header-Content-Length is {length}, but the body has {} bytes", body.len());
        return Err(Failure::malformed(message));
    }
    let json = body.split_to(length);
    Ok(SplitBody { json, binary: Some(body) })
}

/// Reads a request, and checks it against the model. `charge` is the charge of the body, and grows by
/// the elements of JSON.
pub(crate) fn read_request(
    model: &ModelRevision,
    cut: SplitBody,
    len_max: usize,
    charge: &mut ByteCharge,
) -> Result<(RequestContents, ResponseForm), Failure> {
    match cut {
        SplitBody { json, binary: Some(tensor) } if json.is_empty() => lone_tensor(model, tensor),
        SplitBody { json, binary } => announced(model, &json, binary, len_max, charge),
    }
}

fn announced(
    model: &ModelRevision,
    json: &[u8],
    binary: Option<Bytes>,
    len_max: usize,
    charge: &mut ByteCharge,
) -> Result<(RequestContents, ResponseForm), Failure> {
    let Request { id, parameters, inputs: Bounded(inputs), outputs } = json::read(json)?;
    let Bounded(outputs) = outputs.unwrap_or_default();
    let parameters = JsonParameters::read(parameters)?;
    let parameters = RequestParameters::read(parameters.iter())?;
    let mut binary_sizes = Vec::new();
    for input in &inputs {
        let own = JsonParameters::read(input.parameters)?;
        refuse_unserved(&input.name, own.iter())?;
        let announced = own.get(BINARY_SIZE).map(|size| match size {
            ParameterValue::Count(size) => usize::try_from(size).ok(),
            _ => None,
        });
        binary_sizes.push(announced);
    }
    let mut binary_outputs = Vec::new();
    for output in &outputs {
        let own = JsonParameters::read(output.parameters)?;
        refuse_unserved(&output.name, own.iter())?;
        binary_outputs.push(own.get(BINARY).map(|own| flag(BINARY, own)));
    }
    let requested = check_requested(model, outputs.iter().map(|output| output.name.as_str()))?;
    let binary_wanted = binary_wanted(model, &requested, binary_outputs, &parameters)?;
    let named: Vec<_> = inputs
        .iter()
        .map(|input| ClaimedInput { name: &input.name, datatype: &input.datatype, shape: &input.shape.0 })
        .collect();
    let expected = check_named(&model.inputs, &named, len_max)?;
    let in_json = inputs.iter().zip(&expected).filter_map(|(input, (datatype, size))| {
        Some(elements::bytes_max(input.data?, *datatype).min(*size) as u64)
    });
    charge_elements(in_json.sum(), json.len() as u64, charge)?;
    let mut binary = Binary { left: binary };
    let mut tensors = Vec::new();
    for ((input, (datatype, size)), binary_size) in inputs.into_iter().zip(expected).zip(binary_sizes) {
        let Input { name, shape: Bounded(shape), data, .. } = input;
        let invalid = |why: &str| Failure::new(Reason::InvalidInput, format!("input {name:?}: {why}"));
        let data = match (binary_size, data) {
            (Some(_), Some(_)) => {
                return Err(invalid("both data and binary_data_size are present: send one"));
            }
            (Some(announced), None) => binary.take(&name, announced, size)?,
            (None, Some(data)) => elements::read(data, datatype, &shape).map_err(|why| invalid(&why))?.into(),
            (None, None) => return Err(invalid("neither data nor binary_data_size is present: send one")),
        };
        tensors.push(NamedTensor { name, datatype, shape, data });
    }
    binary.finish()?;
    Ok((
        RequestContents { inputs: tensors, outputs: requested, parameters },
        ResponseForm { id, binary: binary_wanted },
    ))
}

/// Charges the elements in JSON of `len` bytes, `size` bytes in total. A single digit may become an
/// element of 8 bytes, so a body that needs too much memory for its length is refused.
fn charge_elements(size: u64, len: u64, charge: &mut ByteCharge) -> Result<(), Failure> {
    if size > len.saturating_mul(DECODED_RATIO_MAX).saturating_add(DECODED_MARGIN_BYTES) {
        let message =
            format!("{len} bytes of JSON cannot contain tensors of {size} bytes: send them as binary data");
        return Err(Failure::new(Reason::InvalidInput, message));
    }
    charge.grow(size)
}

/// The binary tensors that are not yet taken.
struct Binary {
    left: Option<Bytes>,
}

impl Binary {
    /// Takes the binary tensor of an input. `announced` is `None` if the parameter is not a size.
    fn take(&mut self, name: &str, announced: Option<usize>, size: usize) -> Result<Bytes, Failure> {
        let announced = announced.ok_or_else(|| {
            Failure::malformed(format!("input {name:?}: binary_data_size is not a size in bytes"))
        })?;
        let Some(left) = &mut self.left else {
            let message = format!(
                "input {name:?} is binary: send Inference-Header-Content-Length, the length of the JSON"
            );
            return Err(Failure::malformed(message));
        };
        if announced > left.len() {
            let message = format!(
                "input {name:?} announces {announced} bytes, but only {} are left of the body",
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

/// Returns whether each output of the response is sent in binary. `own` has the parameters of the
/// requested outputs, in the order of `requested`. Refuses outputs that JSON cannot represent, before
/// the model runs.
fn binary_wanted(
    model: &ModelRevision,
    requested: &[String],
    own: Vec<Option<Result<bool, Failure>>>,
    parameters: &RequestParameters,
) -> Result<Vec<bool>, Failure> {
    let wanted = |spec: &TensorSpec, own: Option<Result<bool, Failure>>| {
        let binary = own.unwrap_or(Ok(parameters.binary_output))?;
        if !binary && !elements::has_json(spec.datatype) {
            let message = format!(
                "output {:?} is {}, which has no JSON form: request binary_data",
                spec.name, spec.datatype
            );
            return Err(Failure::new(Reason::InvalidOutput, message));
        }
        Ok(binary)
    };
    if requested.is_empty() {
        return model.outputs.iter().map(|spec| wanted(spec, None)).collect();
    }
    let named = requested.iter().zip(own).map(|(name, own)| {
        let spec = model.outputs.iter().find(|spec| spec.name == *name);
        spec.map_or(Ok(false), |spec| wanted(spec, own))
    });
    named.collect()
}

/// Reads a body that consists only of the bytes of the model's single input. The shape follows from
/// the size, and the outputs are sent in binary.
fn lone_tensor(model: &ModelRevision, data: Bytes) -> Result<(RequestContents, ResponseForm), Failure> {
    let invalid = |why: String| Failure::new(Reason::InvalidInput, why);
    let [input] = model.inputs.as_slice() else {
        let count = model.inputs.len();
        return Err(invalid(format!(
            "the model takes {count} inputs: a body without JSON can contain only one"
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
    let tensor = NamedTensor { name: input.name.clone(), datatype: input.datatype, shape, data };
    let contents = RequestContents {
        inputs: vec![tensor],
        outputs: Vec::new(),
        parameters: RequestParameters::default(),
    };
    Ok((contents, ResponseForm { id: None, binary: vec![true; model.outputs.len()] }))
}

/// Returns the shape that this input has with `len` bytes. At most one dimension may be free.
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
