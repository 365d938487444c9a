//! ONNX's protobuf messages, as far as running a model needs them, with the field numbers of
//! onnx.proto. Fields that only describe the model (doc strings, quantization hints, training) are
//! left out, so decoding drops them.
//!
//! Repeated numbers outside the packed `*_data` fields are written unpacked, as ONNX declares them,
//! because rten reads no other form. Decoding accepts both forms.

use bytes::Bytes;

/// The element types of `TensorProto.DataType`, by number.
pub(crate) mod element {
    pub(crate) const FLOAT: i32 = 1;
    pub(crate) const UINT8: i32 = 2;
    pub(crate) const INT8: i32 = 3;
    pub(crate) const UINT16: i32 = 4;
    pub(crate) const INT16: i32 = 5;
    pub(crate) const INT32: i32 = 6;
    pub(crate) const INT64: i32 = 7;
    pub(crate) const BOOL: i32 = 9;
    pub(crate) const FLOAT16: i32 = 10;
    pub(crate) const DOUBLE: i32 = 11;
    pub(crate) const UINT32: i32 = 12;
    pub(crate) const UINT64: i32 = 13;
    pub(crate) const BFLOAT16: i32 = 16;

    const NAMES: [&str; 26] = [
        "UNDEFINED",
        "FLOAT",
        "UINT8",
        "INT8",
        "UINT16",
        "INT16",
        "INT32",
        "INT64",
        "STRING",
        "BOOL",
        "FLOAT16",
        "DOUBLE",
        "UINT32",
        "UINT64",
        "COMPLEX64",
        "COMPLEX128",
        "BFLOAT16",
        "FLOAT8E4M3FN",
        "FLOAT8E4M3FNUZ",
        "FLOAT8E5M2",
        "FLOAT8E5M2FNUZ",
        "UINT4",
        "INT4",
        "FLOAT4E2M1",
        "FLOAT8E8M0",
        "UINT2",
    ];

    /// Returns ONNX's name for an element type.
    pub(crate) fn name(number: i32) -> String {
        let known = usize::try_from(number).ok().and_then(|index| NAMES.get(index));
        known.map_or_else(|| format!("number {number}"), ToString::to_string)
    }
}

/// The value of `TensorProto.DataLocation.EXTERNAL`.
pub(crate) const EXTERNAL: i32 = 1;

/// The types of `AttributeProto.AttributeType`, by number.
pub(crate) mod attribute {
    pub(crate) const FLOAT: i32 = 1;
    pub(crate) const INT: i32 = 2;
    pub(crate) const INTS: i32 = 7;
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ModelProto {
    #[prost(int64, optional, tag = "1")]
    pub(crate) ir_version: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(crate) producer_name: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub(crate) producer_version: Option<String>,
    #[prost(message, optional, tag = "7")]
    pub(crate) graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    pub(crate) opset_import: Vec<OperatorSetIdProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct OperatorSetIdProto {
    #[prost(string, optional, tag = "1")]
    pub(crate) domain: Option<String>,
    #[prost(int64, optional, tag = "2")]
    pub(crate) version: Option<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub(crate) node: Vec<NodeProto>,
    #[prost(string, optional, tag = "2")]
    pub(crate) name: Option<String>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    pub(crate) input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub(crate) output: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "15")]
    pub(crate) sparse_initializer: Vec<SparseTensorProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub(crate) input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(crate) output: Vec<String>,
    #[prost(string, optional, tag = "3")]
    pub(crate) name: Option<String>,
    #[prost(string, optional, tag = "4")]
    pub(crate) op_type: Option<String>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) attribute: Vec<AttributeProto>,
    #[prost(string, optional, tag = "7")]
    pub(crate) domain: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AttributeProto {
    #[prost(string, optional, tag = "1")]
    pub(crate) name: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub(crate) f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    pub(crate) i: Option<i64>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub(crate) s: Option<Bytes>,
    // Boxed because most attributes have neither a tensor nor a graph, and each attribute would
    // otherwise reserve space for both.
    #[prost(message, optional, boxed, tag = "5")]
    pub(crate) t: Option<Box<TensorProto>>,
    #[prost(message, optional, boxed, tag = "6")]
    pub(crate) g: Option<Box<GraphProto>>,
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub(crate) floats: Vec<f32>,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub(crate) ints: Vec<i64>,
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub(crate) strings: Vec<Bytes>,
    #[prost(int32, optional, tag = "20")]
    pub(crate) r#type: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub(crate) dims: Vec<i64>,
    #[prost(int32, optional, tag = "2")]
    pub(crate) data_type: Option<i32>,
    #[prost(float, repeated, tag = "4")]
    pub(crate) float_data: Vec<f32>,
    #[prost(int32, repeated, tag = "5")]
    pub(crate) int32_data: Vec<i32>,
    #[prost(int64, repeated, tag = "7")]
    pub(crate) int64_data: Vec<i64>,
    #[prost(string, optional, tag = "8")]
    pub(crate) name: Option<String>,
    #[prost(bytes = "bytes", optional, tag = "9")]
    pub(crate) raw_data: Option<Bytes>,
    #[prost(double, repeated, tag = "10")]
    pub(crate) double_data: Vec<f64>,
    #[prost(message, repeated, tag = "13")]
    pub(crate) external_data: Vec<StringStringEntryProto>,
    #[prost(int32, optional, tag = "14")]
    pub(crate) data_location: Option<i32>,
}

/// A sparse weight. Only the name is read, for the error message.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SparseTensorProto {
    #[prost(message, optional, tag = "1")]
    pub(crate) values: Option<TensorProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct StringStringEntryProto {
    #[prost(string, optional, tag = "1")]
    pub(crate) key: Option<String>,
    #[prost(string, optional, tag = "2")]
    pub(crate) value: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ValueInfoProto {
    #[prost(string, optional, tag = "1")]
    pub(crate) name: Option<String>,
    #[prost(message, optional, tag = "2")]
    pub(crate) r#type: Option<TypeProto>,
}

/// A oneof in ONNX. A type that is neither a tensor nor a sequence decodes as empty.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub(crate) tensor_type: Option<TensorType>,
    #[prost(message, optional, boxed, tag = "4")]
    pub(crate) sequence_type: Option<Box<SequenceType>>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TensorType {
    #[prost(int32, optional, tag = "1")]
    pub(crate) elem_type: Option<i32>,
    #[prost(message, optional, tag = "2")]
    pub(crate) shape: Option<TensorShapeProto>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SequenceType {
    #[prost(message, optional, boxed, tag = "1")]
    pub(crate) elem_type: Option<Box<TypeProto>>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TensorShapeProto {
    #[prost(message, repeated, tag = "1")]
    pub(crate) dim: Vec<Dimension>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Dimension {
    #[prost(int64, optional, tag = "1")]
    pub(crate) dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(crate) dim_param: Option<String>,
}

impl NodeProto {
    /// Returns the node's label in messages: its name, or the name of its first output if it has no name.
    pub(crate) fn label(&self) -> String {
        match self.name.as_deref() {
            Some(name) if !name.is_empty() => name.to_owned(),
            _ => self.output.iter().find(|name| !name.is_empty()).cloned().unwrap_or_default(),
        }
    }

    /// Returns the operator's domain, with the empty string for ONNX's own domain.
    pub(crate) fn operator_domain(&self) -> &str {
        match self.domain.as_deref() {
            None | Some("" | "ai.onnx") => "",
            Some(domain) => domain,
        }
    }
}
