//! The request of a run: random tensors of the model's shapes, encoded once. The position in a
//! sequence is added for each request.

use bytes::{BufMut as _, Bytes, BytesMut};
use millrace_client::{ModelMetadata, Tensor, TensorMetadata};
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::inference::model_infer_request::InferInputTensor;
use millrace_proto::inference::{InferParameter, ModelInferRequest};
use millrace_types::DataType;
use millrace_types::tensor::element_count;
use prost::Message as _;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Map, Value, json};

use crate::failure::CommandFailure;
use crate::load::args::{HttpTensorEncoding, InputShape};
use crate::load::sequence::SequencePosition;
use crate::load::target::LoadTarget;
use crate::output::responses;
use crate::tensors::{declared, shape};

/// The prefix of a gRPC message in bytes: a flag and the message's length.
const PREFIX: usize = 5;

/// Returns a random tensor for each input. The shape is the given one, or the declared one with 1
/// for each variable dimension. The same seed gives the same values.
pub(super) fn tensors(
    model: &ModelMetadata,
    shapes: &[InputShape],
    seed: u64,
) -> Result<Vec<Tensor>, CommandFailure> {
    for shape in shapes {
        declared(model, &shape.name)?;
    }
    let mut random = SmallRng::seed_from_u64(seed);
    let tensor = |input: &TensorMetadata| {
        let given = shapes.iter().find(|shape| shape.name == input.name).map(|shape| shape.dims.clone());
        let dims = match given {
            Some(dims) => shape::fit(input, &dims)?,
            None => input.shape.iter().map(|&dim| if dim < 0 { 1 } else { dim }).collect(),
        };
        let count =
            element_count(&dims).ok_or_else(|| CommandFailure::usage(format!("{dims:?} is too large")))?;
        let data = values(input.datatype, count, &mut random);
        Ok(Tensor::new(&input.name, input.datatype, dims, data).map_err(millrace_client::Error::from)?)
    };
    model.inputs.iter().map(tensor).collect()
}

/// Returns random values: floats from 0 to 1, and integers 0 or 1, which are valid as token ids and
/// as masks.
fn values(datatype: DataType, count: usize, random: &mut SmallRng) -> Bytes {
    let mut data = BytesMut::new();
    for _ in 0..count {
        match datatype {
            DataType::Fp32 => data.put_f32_le(random.random()),
            DataType::Fp64 => data.put_f64_le(random.random()),
            // A half-precision number from 0 to 1 has a clear sign and clear top exponent bits:
            // 0x0000..=0x3bff.
            DataType::Fp16 => data.put_u16_le(random.random_range(0..0x3c00)),
            DataType::Bf16 => data.put_u16_le(random.random_range(0..0x3f80)),
            DataType::Bytes => {
                data.put_u32_le(1);
                data.put_u8(b'a' + random.random_range(0..26));
            }
            DataType::Bool
            | DataType::Int8
            | DataType::Uint8
            | DataType::Int16
            | DataType::Uint16
            | DataType::Int32
            | DataType::Uint32
            | DataType::Int64
            | DataType::Uint64 => {
                let size = datatype.size().unwrap_or(1);
                data.put_u8(random.random_range(0..2));
                data.put_bytes(0, size - 1);
            }
        }
    }
    data.freeze()
}

/// Returns the request as a gRPC message with its five-byte prefix.
pub(super) fn grpc_frame(target: &LoadTarget, tensors: &[Tensor]) -> Bytes {
    let input = |tensor: &Tensor| InferInputTensor {
        name: tensor.name().to_owned(),
        datatype: tensor.datatype().to_string(),
        shape: tensor.shape().to_vec(),
        ..Default::default()
    };
    let message = ModelInferRequest {
        model_name: target.model.clone(),
        model_version: target.version.clone(),
        inputs: tensors.iter().map(input).collect(),
        raw_input_contents: tensors.iter().map(|tensor| tensor.data().clone()).collect(),
        ..Default::default()
    };
    framed(message.encoded_len(), |frame| frame.put_slice(&message.encode_to_vec()))
}

fn framed(len: usize, put: impl FnOnce(&mut BytesMut)) -> Bytes {
    let mut frame = BytesMut::with_capacity(PREFIX + len);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(len).unwrap_or(u32::MAX));
    put(&mut frame);
    frame.freeze()
}

/// Returns the request with a position in a sequence. Protobuf merges bytes after a message into
/// the message, so the parameters are simply appended.
pub(super) fn grpc_frame_of(frame: &Bytes, SequencePosition { id, start, end }: SequencePosition) -> Bytes {
    let parameter = |(name, choice): (&str, ParameterChoice)| {
        (name.to_owned(), InferParameter { parameter_choice: Some(choice) })
    };
    let parameters = [
        // Triton's clients send the id as an Int64.
        ("sequence_id", ParameterChoice::Int64Param(id)),
        ("sequence_start", ParameterChoice::BoolParam(start)),
        ("sequence_end", ParameterChoice::BoolParam(end)),
    ];
    let parameters = parameters.into_iter().map(parameter).collect();
    let more = ModelInferRequest { parameters, ..Default::default() }.encode_to_vec();
    let message = &frame[PREFIX..];
    framed(message.len() + more.len(), |frame| {
        frame.put_slice(message);
        frame.put_slice(&more);
    })
}

/// An HTTP body, and the length of its JSON if binary data follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HttpBody {
    pub(super) bytes: Bytes,
    pub(super) json_bytes: Option<usize>,
}

impl HttpBody {
    /// Returns the request with a position in a sequence, among the parameters of its JSON.
    pub(super) fn of_sequence(&self, SequencePosition { id, start, end }: SequencePosition) -> Self {
        let place = format!(r#""sequence_id":{id},"sequence_start":{start},"sequence_end":{end}"#);
        // A binary body already has parameters, which are last in the JSON; a JSON body has none.
        let (at, place) = match self.json_bytes {
            Some(json_bytes) => (json_bytes - "}}".len(), format!(",{place}")),
            None => (self.bytes.len() - "}".len(), format!(r#","parameters":{{{place}}}"#)),
        };
        let (before, behind) = self.bytes.split_at(at);
        let bytes = [before, place.as_bytes(), behind].concat().into();
        Self { bytes, json_bytes: self.json_bytes.map(|json_bytes| json_bytes + place.len()) }
    }
}

/// Returns the request as an HTTP body.
pub(super) fn http_body(tensors: &[Tensor], wire: HttpTensorEncoding) -> Result<HttpBody, CommandFailure> {
    let half = |tensor: &&Tensor| matches!(tensor.datatype(), DataType::Fp16 | DataType::Bf16);
    if wire == HttpTensorEncoding::Json
        && let Some(tensor) = tensors.iter().find(half)
    {
        return Err(CommandFailure::usage(format!(
            "{}: JSON cannot encode {}",
            tensor.name(),
            tensor.datatype()
        ))
        .hint("omit --http-json"));
    }
    let input = |tensor: &Tensor| {
        let mut input = Map::new();
        input.insert("name".into(), json!(tensor.name()));
        input.insert("shape".into(), json!(tensor.shape()));
        input.insert("datatype".into(), json!(tensor.datatype().as_str()));
        match wire {
            HttpTensorEncoding::Binary => {
                input.insert("parameters".into(), json!({ "binary_data_size": tensor.data().len() }))
            }
            HttpTensorEncoding::Json => {
                input.insert("data".into(), Value::Array(responses::elements(tensor)))
            }
        };
        Value::Object(input)
    };
    let inputs: Vec<Value> = tensors.iter().map(input).collect();
    let body = match wire {
        HttpTensorEncoding::Binary => {
            json!({ "inputs": inputs, "parameters": { "binary_data_output": true } })
        }
        HttpTensorEncoding::Json => json!({ "inputs": inputs }),
    };
    let json = body.to_string();
    let json_bytes = (wire == HttpTensorEncoding::Binary).then_some(json.len());
    let mut bytes = BytesMut::from(json.as_bytes());
    if wire == HttpTensorEncoding::Binary {
        tensors.iter().for_each(|tensor| bytes.put_slice(tensor.data()));
    }
    Ok(HttpBody { bytes: bytes.freeze(), json_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::target::Protocol;
    use crate::tensors::model_of;

    fn target() -> LoadTarget {
        LoadTarget {
            protocol: Protocol::Grpc,
            addresses: vec!["h:1".parse().unwrap()],
            model: "m".into(),
            version: String::new(),
            tenant: "default".into(),
        }
    }

    #[test]
    fn free_dimensions_are_one_unless_a_shape_is_given() {
        let model = model_of(&[("x", DataType::Fp32, &[-1, 4])]);
        let of = |shapes: &[&str]| {
            let shapes: Vec<InputShape> = shapes.iter().map(|text| text.parse().unwrap()).collect();
            tensors(&model, &shapes, 0).map(|tensors| tensors[0].shape().to_vec())
        };
        assert_eq!(of(&[]), Ok(vec![1, 4]));
        assert_eq!(of(&["x=3x4"]), Ok(vec![3, 4]));
        assert!(of(&["x=3x5"]).is_err());
        assert!(of(&["y=3x4"]).is_err());
        assert!("x".parse::<InputShape>().is_err());
    }

    #[test]
    fn values_are_the_same_for_the_same_seed_and_fit_every_type() {
        for datatype in DataType::ALL {
            let model = model_of(&[("x", datatype, &[-1, 5])]);
            let of = |seed| tensors(&model, &[], seed).unwrap();
            assert_eq!(of(1), of(1), "{datatype}");
            if datatype.size().is_none_or(|size| size > 1) && datatype != DataType::Bytes {
                assert_ne!(of(1), of(9), "{datatype}");
            }
        }
    }

    #[test]
    fn the_grpc_frame_decodes_to_the_request() {
        let tensors = tensors(&model_of(&[("x", DataType::Int64, &[2])]), &[], 3).unwrap();
        let frame = grpc_frame(&target(), &tensors);
        assert_eq!(frame[0], 0);
        assert_eq!(u32::from_be_bytes(frame[1..5].try_into().unwrap()) as usize, frame.len() - 5);
        let message = ModelInferRequest::decode(frame.slice(5..)).unwrap();
        assert_eq!(message.model_name, "m");
        assert_eq!(message.raw_input_contents, [tensors[0].data().clone()]);
    }

    #[test]
    fn a_place_in_a_sequence_is_among_the_parameters() {
        let tensors = tensors(&model_of(&[("x", DataType::Uint8, &[2])]), &[], 3).unwrap();
        let place = SequencePosition { id: 7, start: true, end: false };

        let plain = grpc_frame(&target(), &tensors);
        let frame = grpc_frame_of(&plain, place);
        assert_eq!(u32::from_be_bytes(frame[1..5].try_into().unwrap()) as usize, frame.len() - 5);
        let mut message = ModelInferRequest::decode(frame.slice(5..)).unwrap();
        let mut given = |name: &str| message.parameters.remove(name).unwrap().parameter_choice.unwrap();
        assert_eq!(given("sequence_id"), ParameterChoice::Int64Param(7));
        assert_eq!(given("sequence_start"), ParameterChoice::BoolParam(true));
        assert_eq!(given("sequence_end"), ParameterChoice::BoolParam(false));
        assert_eq!(message, ModelInferRequest::decode(plain.slice(5..)).unwrap(), "the rest is unchanged");

        for wire in [HttpTensorEncoding::Binary, HttpTensorEncoding::Json] {
            let plain = http_body(&tensors, wire).unwrap();
            let body = plain.of_sequence(place);
            let end = body.json_bytes.unwrap_or(body.bytes.len());
            let json: Value = serde_json::from_slice(&body.bytes[..end]).unwrap();
            let parameters = &json["parameters"];
            assert_eq!(
                (&parameters["sequence_id"], &parameters["sequence_start"]),
                (&7.into(), &true.into())
            );
            assert_eq!(parameters["sequence_end"], false);
            assert_eq!(parameters.get("binary_data_output").is_some(), wire == HttpTensorEncoding::Binary);
            assert_eq!(json["inputs"][0]["name"], "x");
            assert_eq!(body.bytes[end..], plain.bytes[plain.json_bytes.unwrap_or(plain.bytes.len())..]);
        }
    }

    #[test]
    fn http_bodies_are_json_or_json_and_binary() {
        let tensors = [Tensor::new("x", DataType::Uint8, vec![1, 2], Bytes::from_static(&[7, 8])).unwrap()];
        let binary = http_body(&tensors, HttpTensorEncoding::Binary).unwrap();
        let json = r#"{"inputs":[{"name":"x","shape":[1,2],"datatype":"UINT8","parameters":{"binary_data_size":2}}],"parameters":{"binary_data_output":true}}"#;
        assert_eq!(binary.json_bytes, Some(json.len()));
        assert_eq!(binary.bytes, [json.as_bytes(), &[7, 8]].concat());
        let text = http_body(&tensors, HttpTensorEncoding::Json).unwrap();
        assert_eq!(text.json_bytes, None);
        assert_eq!(
            text.bytes,
            r#"{"inputs":[{"name":"x","shape":[1,2],"datatype":"UINT8","data":[7,8]}]}"#.as_bytes()
        );
    }
}
