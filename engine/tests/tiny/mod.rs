//! The smallest ONNX models with weights in an external file. The field numbers are those of onnx.proto.

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
    #[prost(message, repeated, tag = "5")]
    attribute: Vec<Attribute>,
}

#[derive(Clone, PartialEq, Message)]
struct Attribute {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "6")]
    g: Option<Graph>,
    #[prost(int32, tag = "20")]
    r#type: i32,
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
    #[prost(message, optional, tag = "2")]
    r#type: Option<Type>,
}

#[derive(Clone, PartialEq, Message)]
struct Type {
    #[prost(message, optional, tag = "1")]
    tensor_type: Option<TensorType>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorType {
    #[prost(int32, tag = "1")]
    elem_type: i32,
}

const FLOAT: i32 = 1;
const INT64: i32 = 7;
const BOOL: i32 = 9;
const FLOAT16: i32 = 10;
const EXTERNAL: i32 = 1;
/// Number of the attribute type of a subgraph.
const GRAPH: i32 = 5;

/// Returns a tensor of `elements` elements in `file`.
fn external(name: &str, data_type: i32, file: &str, bytes: std::ops::Range<u64>, elements: u64) -> Tensor {
    let entry = |key: &str, value: String| Entry { key: key.to_owned(), value };
    Tensor {
        dims: vec![elements as i64],
        data_type,
        name: name.to_owned(),
        external_data: vec![
            entry("location", file.to_owned()),
            entry("offset", bytes.start.to_string()),
            entry("length", (bytes.end - bytes.start).to_string()),
        ],
        data_location: EXTERNAL,
    }
}

fn node(op_type: &str, inputs: [&str; 2], output: &str) -> Node {
    let input = inputs.map(str::to_owned).into();
    Node { input, output: vec![output.to_owned()], op_type: op_type.to_owned(), attribute: vec![] }
}

fn model(node: Vec<Node>, initializer: Vec<Tensor>, output: &str) -> Vec<u8> {
    let input = vec![value("input", FLOAT)];
    let graph =
        Graph { node, name: "tiny".to_owned(), initializer, input, output: vec![value(output, FLOAT)] };
    encode(graph)
}

fn value(name: &str, elem_type: i32) -> ValueInfo {
    let tensor_type = Some(TensorType { elem_type });
    ValueInfo { name: name.to_owned(), r#type: Some(Type { tensor_type }) }
}

fn encode(graph: Graph) -> Vec<u8> {
    let opset_import = vec![Opset { domain: String::new(), version: 17 }];
    Model { ir_version: 8, graph: Some(graph), opset_import }.encode_to_vec()
}

/// Returns a model with `sum = input + first` and `total = sum + second`. The weights are two FP32
/// vectors of `elements` elements, stored one after the other in `file`.
pub(crate) fn two_adds(file: &str, elements: u64) -> Vec<u8> {
    let weight = |name, index: u64| {
        external(name, FLOAT, file, index * elements * 4..(index + 1) * elements * 4, elements)
    };
    let nodes = vec![node("Add", ["input", "first"], "sum"), node("Add", ["sum", "second"], "total")];
    model(nodes, vec![weight("first", 0), weight("second", 1)], "total")
}

/// Returns a model with `picked = input[indices]`. `indices` is an INT64 vector of `elements`
/// elements in `file`, which rten stores as i32.
pub(crate) fn pick(file: &str, elements: u64) -> Vec<u8> {
    let indices = external("indices", INT64, file, 0..elements * 8, elements);
    model(vec![node("Gather", ["input", "indices"], "picked")], vec![indices], "picked")
}

/// Returns a model of FP16 with `sum = input + weight`. The weight is a vector of `elements` elements in `file`.
pub(crate) fn half_add(file: &str, elements: u64) -> Vec<u8> {
    encode(Graph {
        node: vec![node("Add", ["input", "weight"], "sum")],
        name: "tiny".to_owned(),
        initializer: vec![external("weight", FLOAT16, file, 0..elements * 2, elements)],
        input: vec![value("input", FLOAT16)],
        output: vec![value("sum", FLOAT16)],
    })
}

/// Returns a model that adds to `doubled = input + input` a vector that `flag` chooses. Both branches name
/// their vector `chosen`; the vectors are those of [`two_adds`].
pub(crate) fn choose(file: &str, elements: u64) -> Vec<u8> {
    let branch = |name: &str, output: &str, index: u64| {
        let bytes = index * elements * 4..(index + 1) * elements * 4;
        let graph = Graph {
            node: vec![node("Add", ["doubled", "chosen"], output)],
            name: name.to_owned(),
            initializer: vec![external("chosen", FLOAT, file, bytes, elements)],
            input: vec![],
            output: vec![value(output, FLOAT)],
        };
        Attribute { name: name.to_owned(), g: Some(graph), r#type: GRAPH }
    };
    let attribute = vec![branch("then_branch", "first", 0), branch("else_branch", "second", 1)];
    let choice = Node {
        input: vec!["flag".to_owned()],
        output: vec!["sum".to_owned()],
        op_type: "If".to_owned(),
        attribute,
    };
    encode(Graph {
        node: vec![node("Add", ["input", "input"], "doubled"), choice],
        name: "tiny".to_owned(),
        initializer: vec![],
        input: vec![value("input", FLOAT), value("flag", BOOL)],
        output: vec![value("sum", FLOAT)],
    })
}
