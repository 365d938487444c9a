//! Inputs from JSON: a request body of the Open Inference Protocol, an object of inputs by name, or
//! the values of a model's only input.

use bytes::{BufMut as _, Bytes, BytesMut};
use millrace_client::{ModelMetadata, Tensor, TensorMetadata};
use millrace_types::DataType;
use serde::Deserialize;
use serde_json::Value;

use crate::failure::CommandFailure;
use crate::tensors::{declared, only_input, shape};

/// The parts of a request that a JSON text sets.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct JsonRequest {
    pub(crate) id: Option<String>,
    pub(crate) priority: u64,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) outputs: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    id: Option<String>,
    #[serde(default)]
    parameters: Parameters,
    inputs: Vec<Input>,
    #[serde(default)]
    outputs: Vec<Output>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Parameters {
    #[serde(default)]
    priority: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    name: String,
    datatype: Option<String>,
    shape: Option<Vec<i64>>,
    data: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Output {
    name: String,
}

/// Parses a JSON text.
pub(crate) fn read(text: &str, model: &ModelMetadata) -> Result<JsonRequest, CommandFailure> {
    let value: Value = serde_json::from_str(text).map_err(|error| {
        CommandFailure::usage(format!("--json is not JSON: {error}"))
            .hint("put the JSON in single quotes, or use --json @FILE")
    })?;
    match value {
        Value::Object(object) if is_body(&object) => body(Value::Object(object), model),
        Value::Object(object) => {
            let input = |(name, data): (&String, &Value)| tensor(declared(model, name)?, data);
            Ok(JsonRequest {
                inputs: object.iter().map(input).collect::<Result<_, _>>()?,
                ..JsonRequest::default()
            })
        }
        data => {
            Ok(JsonRequest { inputs: vec![tensor(only_input(model)?, &data)?], ..JsonRequest::default() })
        }
    }
}

/// Returns whether an object is the protocol's body, rather than a model's input of the name
/// `inputs`.
fn is_body(object: &serde_json::Map<String, Value>) -> bool {
    let Some(Value::Array(inputs)) = object.get("inputs") else { return false };
    inputs.iter().all(Value::is_object)
}

fn body(value: Value, model: &ModelMetadata) -> Result<JsonRequest, CommandFailure> {
    let body: Body = serde_json::from_value(value).map_err(|error| {
        CommandFailure::usage(format!("--json: {error}"))
            .hint("see the Open Inference Protocol, or write only {\"INPUT\": [...]}")
    })?;
    let input = |input: Input| {
        let declared = declared(model, &input.name)?;
        let datatype = match input.datatype {
            None => declared.datatype,
            Some(name) => name.parse().map_err(|error: millrace_types::tensor::UnknownDataType| {
                CommandFailure::usage(format!("--json, input {:?}: {error}", input.name))
            })?,
        };
        let Some(shape) = input.shape else {
            return tensor(&TensorMetadata { datatype, ..declared.clone() }, &input.data);
        };
        let (_, data) = elements(&input.name, datatype, &input.data)?;
        Ok(Tensor::new(input.name, datatype, shape, data).map_err(millrace_client::Error::from)?)
    };
    Ok(JsonRequest {
        id: body.id,
        priority: body.parameters.priority,
        inputs: body.inputs.into_iter().map(input).collect::<Result<_, CommandFailure>>()?,
        outputs: body.outputs.into_iter().map(|output| output.name).collect(),
    })
}

/// Converts nested or flat values to the tensor that a model declares. Nested values have their own
/// shape; a flat list fills the declared shape.
fn tensor(input: &TensorMetadata, value: &Value) -> Result<Tensor, CommandFailure> {
    let (nested, data) = elements(&input.name, input.datatype, value)?;
    let shape = match shape::fit(input, &nested) {
        Ok(shape) => shape,
        Err(_) if nested.len() == 1 => shape::fill(input, usize::try_from(nested[0]).unwrap_or(usize::MAX))?,
        Err(failure) => return Err(failure),
    };
    Ok(Tensor::new(&input.name, input.datatype, shape, data).map_err(millrace_client::Error::from)?)
}

/// Returns the shape of nested lists and their elements as bytes.
fn elements(name: &str, datatype: DataType, value: &Value) -> Result<(Vec<i64>, Bytes), CommandFailure> {
    let mut shape = Vec::new();
    let mut level = value;
    while let Value::Array(items) = level {
        shape.push(i64::try_from(items.len()).unwrap_or(i64::MAX));
        match items.first() {
            Some(first) => level = first,
            None => break,
        }
    }
    let mut data = BytesMut::new();
    put(value, &shape, datatype, &mut data)
        .map_err(|problem| CommandFailure::usage(format!("{name}: {problem}")))?;
    Ok((shape, data.freeze()))
}

fn put(value: &Value, shape: &[i64], datatype: DataType, data: &mut BytesMut) -> Result<(), String> {
    match (value, shape) {
        (Value::Array(items), [length, rest @ ..]) => {
            if i64::try_from(items.len()) != Ok(*length) {
                return Err(format!("adjacent lists have {length} and {} values", items.len()));
            }
            items.iter().try_for_each(|item| put(item, rest, datatype, data))
        }
        (Value::Array(_), []) | (_, [_, ..]) => Err("lists are nested to different depths".to_owned()),
        (value, []) => put_element(value, datatype, data),
    }
}

fn put_element(value: &Value, datatype: DataType, data: &mut BytesMut) -> Result<(), String> {
    let wrong = || format!("{value} is not a {datatype}");
    let integer =
        |min: i64, max: i64| value.as_i64().filter(|number| (min..=max).contains(number)).ok_or_else(wrong);
    let real = || value.as_f64().ok_or_else(wrong);
    match datatype {
        DataType::Bool => match value {
            Value::Bool(flag) => data.put_u8(u8::from(*flag)),
            _ => data.put_u8(u8::try_from(integer(0, 1)?).map_err(|_| wrong())?),
        },
        DataType::Int8 => data.put_i8(integer(i8::MIN.into(), i8::MAX.into())? as i8),
        DataType::Int16 => data.put_i16_le(integer(i16::MIN.into(), i16::MAX.into())? as i16),
        DataType::Int32 => data.put_i32_le(integer(i32::MIN.into(), i32::MAX.into())? as i32),
        DataType::Int64 => data.put_i64_le(integer(i64::MIN, i64::MAX)?),
        DataType::Uint8 => data.put_u8(integer(0, u8::MAX.into())? as u8),
        DataType::Uint16 => data.put_u16_le(integer(0, u16::MAX.into())? as u16),
        DataType::Uint32 => data.put_u32_le(integer(0, u32::MAX.into())? as u32),
        DataType::Uint64 => data.put_u64_le(value.as_u64().ok_or_else(wrong)?),
        DataType::Fp32 => data.put_f32_le(real()? as f32),
        DataType::Fp64 => data.put_f64_le(real()?),
        DataType::Bytes => {
            let text = value.as_str().ok_or_else(wrong)?;
            data.put_u32_le(u32::try_from(text.len()).map_err(|_| wrong())?);
            data.put_slice(text.as_bytes());
        }
        DataType::Fp16 | DataType::Bf16 => {
            return Err(format!("JSON cannot encode {datatype}: send the bytes with --raw"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::model_of;

    fn model() -> ModelMetadata {
        model_of(&[("x", DataType::Fp32, &[-1, 2])])
    }

    fn floats(text: &str) -> (Vec<i64>, Vec<f32>) {
        let asked = read(text, &model()).unwrap();
        let [tensor] = asked.inputs.as_slice() else { panic!("{asked:?}") };
        (tensor.shape().to_vec(), tensor.to_f32().unwrap())
    }

    #[test]
    fn every_json_form_gives_the_same_tensor() {
        let expected = (vec![2, 2], vec![1.0, 2.0, 3.0, 4.5]);
        for text in [
            r#"{"inputs": [{"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4.5]}]}"#,
            r#"{"inputs": [{"name": "x", "shape": [2, 2], "data": [[1, 2], [3, 4.5]]}]}"#,
            r#"{"inputs": [{"name": "x", "data": [1, 2, 3, 4.5]}]}"#,
            r#"{"x": [[1, 2], [3, 4.5]]}"#,
            r#"{"x": [1, 2, 3, 4.5]}"#,
            "[[1, 2], [3, 4.5]]",
            "[1, 2, 3, 4.5]",
        ] {
            assert_eq!(floats(text), expected, "{text}");
        }
        assert_eq!(floats("[1, 2]"), (vec![1, 2], vec![1.0, 2.0]));
    }

    #[test]
    fn a_body_carries_id_priority_and_outputs() {
        let text = r#"{"id": "r", "parameters": {"priority": 3}, "inputs": [], "outputs": [{"name": "y"}]}"#;
        let asked = read(text, &model()).unwrap();
        assert_eq!((asked.id.as_deref(), asked.priority), (Some("r"), 3));
        assert_eq!(asked.outputs, ["y"]);
    }

    #[test]
    fn an_input_named_inputs_is_not_a_body() {
        let model = model_of(&[("inputs", DataType::Int64, &[-1])]);
        assert_eq!(read(r#"{"inputs": [1, 2]}"#, &model).unwrap().inputs[0].shape(), [2]);
    }

    #[test]
    fn each_malformed_input_is_refused_with_its_fault() {
        for (text, says) in [
            ("{", "not JSON"),
            (r#"{"y": [1, 2]}"#, "no input \"y\""),
            ("[[1, 2], [3]]", "have 2 and 1 values"),
            ("[[1, 2], 3]", "different depths"),
            ("[[1, 2, 3]]", "does not fit [N, 2]"),
            ("[1, 2, 3]", "do not fill shape [N, 2]"),
            (r#"[[1, "a"]]"#, "\"a\" is not a FP32"),
            (r#"{"inputs": [{"name": "x", "data": [], "shap": [1]}]}"#, "shap"),
            (r#"{"inputs": [{"name": "x", "shape": [3, 2], "data": [1, 2]}]}"#, "24 bytes"),
            (r#"{"inputs": [{"name": "x", "datatype": "FLOAT", "data": [1]}]}"#, "FLOAT"),
        ] {
            let message = read(text, &model()).unwrap_err().message.unwrap();
            assert!(message.contains(says), "{text}: {message}");
        }
    }

    #[test]
    fn integers_are_range_checked_and_texts_keep_their_bytes() {
        let check = |datatype, text: &str| {
            read(text, &model_of(&[("x", datatype, &[-1])])).map(|asked| asked.inputs[0].data().to_vec())
        };
        assert_eq!(check(DataType::Int8, "[-128, 127]"), Ok(vec![128, 127]));
        assert!(check(DataType::Int8, "[128]").is_err());
        assert!(check(DataType::Uint8, "[-1]").is_err());
        assert!(check(DataType::Int32, "[1.5]").is_err());
        assert_eq!(check(DataType::Uint64, "[18446744073709551615]"), Ok(vec![255; 8]));
        assert_eq!(check(DataType::Bool, "[true, 0]"), Ok(vec![1, 0]));
        assert_eq!(check(DataType::Bytes, r#"["hé"]"#), Ok(b"\x03\0\0\0h\xc3\xa9".to_vec()));
        assert!(check(DataType::Fp16, "[1]").is_err());
    }

    #[test]
    fn a_model_with_two_inputs_needs_names() {
        let model = model_of(&[("a", DataType::Fp32, &[-1]), ("b", DataType::Fp32, &[-1])]);
        assert!(read("[1]", &model).unwrap_err().hint.unwrap().contains("a, b"));
        assert_eq!(read(r#"{"b": [1], "a": [2]}"#, &model).unwrap().inputs.len(), 2);
    }
}
