//! The smallest ONNX model with two weights in an external file. Field numbers are onnx.proto's.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
struct Model {
    #[prost(int64, tag = "1")]
    ir_version: i64,
    #[prost(message, optional, tag = "7")]
    graph: Option<Graph>,
    #[prost(message, repeated, tag = "8")]
    opset_import: Vec<Opset>,
}

#[derive(Clone, PartialEq, Message)]
struct Opset {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(int64, tag = "2")]
    version: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Graph {
    #[prost(message, repeated, tag = "1")]
    node: Vec<Node>,
    #[prost(string, tag = "2")]
    name: String,
    #[prost(message, repeated, tag = "5")]
    initializer: Vec<Tensor>,
    #[prost(message, repeated, tag = "11")]
    input: Vec<ValueInfo>,
    #[prost(message, repeated, tag = "12")]
    output: Vec<ValueInfo>,
}

#[derive(Clone, PartialEq, Message)]
struct Node {
    #[prost(string, repeated, tag = "1")]
    input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    output: Vec<String>,
    #[prost(string, tag = "4")]
    op_type: String,
}

#[derive(Clone, PartialEq, Message)]
struct Tensor {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    data_type: i32,
    #[prost(string, tag = "8")]
    name: String,
    #[prost(message, repeated, tag = "13")]
    external_data: Vec<Entry>,
    #[prost(int32, tag = "14")]
    data_location: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, Message)]
struct ValueInfo {
    #[prost(string, tag = "1")]
    name: String,
}

const FLOAT: i32 = 1;
const EXTERNAL: i32 = 1;

/// `sum = input + first`, `total = sum + second`: two FP32 vectors of `elements`, one after the
/// other in `file`.
pub(crate) fn two_adds(file: &str, elements: u64) -> Vec<u8> {
    let entry = |key: &str, value: String| Entry { key: key.to_owned(), value };
    let weight = |name: &str, index: u64| Tensor {
        dims: vec![elements as i64],
        data_type: FLOAT,
        name: name.to_owned(),
        external_data: vec![
            entry("location", file.to_owned()),
            entry("offset", (index * elements * 4).to_string()),
            entry("length", (elements * 4).to_string()),
        ],
        data_location: EXTERNAL,
    };
    let add = |a: &str, b: &str, sum: &str| Node {
        input: vec![a.to_owned(), b.to_owned()],
        output: vec![sum.to_owned()],
        op_type: "Add".to_owned(),
    };
    let value = |name: &str| ValueInfo { name: name.to_owned() };
    let graph = Graph {
        node: vec![add("input", "first", "sum"), add("sum", "second", "total")],
        name: "two adds".to_owned(),
        initializer: vec![weight("first", 0), weight("second", 1)],
        input: vec![value("input")],
        output: vec![value("total")],
    };
    let opset_import = vec![Opset { domain: String::new(), version: 17 }];
    Model { ir_version: 8, graph: Some(graph), opset_import }.encode_to_vec()
}
