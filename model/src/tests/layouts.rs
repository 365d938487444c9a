//! The results of compiling: the order, the positions, the launches, and the remaining graph.

use millrace_types::{DataType, Dim, TensorSpec};

use super::runner::region;
use super::*;
use crate::{CompiledModel, Launch, WeightSource, compile};

#[track_caller]
fn compiled(model: &ModelProto) -> (CompiledModel, Bytes) {
    let file = bytes(model);
    (compile(&file).unwrap(), file)
}

fn names(compiled: &CompiledModel) -> Vec<&str> {
    compiled.weights.iter().map(|weight| weight.name.as_str()).collect()
}

fn left(compiled: &CompiledModel) -> GraphProto {
    ModelProto::decode(compiled.graph.as_slice()).unwrap().graph.unwrap()
}

#[test]
fn summary_lists_the_inputs_and_outputs_of_the_model() {
    let mut model = with(|graph| {
        graph.input[0] = value("x", element::FLOAT, &["", "4"]);
        graph.output[0] = value("y", element::FLOAT, &["N", "4"]);
    });
    model.producer_name = Some("pytorch".into());
    model.producer_version = Some("2.9".into());
    let summary = compiled(&model).0.summary;
    let spec = |name: &str, symbol: &str| TensorSpec {
        name: name.into(),
        datatype: DataType::Fp32,
        shape: vec![Dim::Symbol(symbol.into()), Dim::Fixed(4)],
    };
    assert_eq!(summary.inputs, [spec("x", "x.0")]);
    assert_eq!(summary.outputs, [spec("y", "N")]);
    assert_eq!((summary.parameters, summary.weights_bytes, summary.opset), (16, 64, 17));
    assert_eq!(summary.producer, "pytorch 2.9");
}

#[test]
fn a_weight_is_a_range_of_the_file_and_no_copy() {
    let (compiled, file) = compiled(&model());
    let WeightSource::File(range) = compiled.weights[0].source.clone() else { panic!("owned") };
    assert_eq!(file[range], weight("w", &[4, 4]).raw_data.unwrap());
}

#[test]
fn weights_are_placed_once_in_the_order_of_first_use() {
    let (compiled, file) = compiled(&with(|graph| {
        graph.initializer =
            vec![weight("late", &[4, 5]), weight("unused", &[9, 9]), weight("early", &[4, 4])];
        graph.node = vec![
            // These nodes are not in the order of execution.
            node("MatMul", &["b", "late"], &["y"]),
            node("MatMul", &["x", "early"], &["a"]),
            node("MatMul", &["a", "early"], &["b"]),
            node("MatMul", &["a", "unused"], &["dead"]),
        ];
    }));
    assert_eq!(names(&compiled), ["early", "late"]);
    assert_eq!(compiled.summary.weights_bytes, 64 + 128);
    let region = region(&compiled, &file);
    assert_eq!(region[..64], weight("early", &[4, 4]).raw_data.unwrap());
    assert_eq!(region[64..144], weight("late", &[4, 5]).raw_data.unwrap());
    let nodes: Vec<String> = left(&compiled).node.iter().map(|node| node.output[0].clone()).collect();
    assert_eq!(nodes, ["a", "b", "y"]);
}

#[test]
fn typed_data_are_placed_as_raw_bytes() {
    let (compiled, file) = compiled(&with(|graph| {
        let floats: Vec<f32> = (0..16).map(|i| i as f32).collect();
        graph.initializer[0].raw_data = None;
        graph.initializer[0].float_data = floats;
    }));
    assert_eq!(region(&compiled, &file)[4..8], 1f32.to_le_bytes());
}

#[test]
fn a_constant_node_is_a_weight_like_any_other() {
    let (compiled, _) = compiled(&with(|graph| {
        let value = AttributeProto {
            name: Some("value".into()),
            t: Some(Box::new(weight("inside", &[4, 4]))),
            ..AttributeProto::default()
        };
        graph.initializer.clear();
        graph.node.insert(0, NodeProto { attribute: vec![value], ..node("Constant", &[], &["w"]) });
    }));
    assert_eq!(names(&compiled), ["w"]);
    assert_eq!(left(&compiled).node.len(), 2);
}

#[test]
fn integers_and_small_constants_stay_in_the_graph() {
    let (compiled, _) = compiled(&with(|graph| {
        graph.initializer.push(weight("small", &[4]));
        let raw = Some(Bytes::from(vec![0; 16 * 8]));
        let kind = Some(element::INT64);
        graph.initializer.push(TensorProto { data_type: kind, raw_data: raw, ..weight("ints", &[16]) });
        graph.node[1] = node("Clip", &["h", "small", "ints"], &["y"]);
    }));
    assert_eq!(names(&compiled), ["w"]);
    let left = left(&compiled);
    let inline: Vec<_> = left.initializer.iter().filter(|tensor| tensor.raw_data.is_some()).collect();
    assert_eq!(inline.iter().map(|tensor| tensor.name()).collect::<Vec<_>>(), ["small", "ints"]);
}

#[test]
fn a_launch_reads_the_captured_values_and_weights_of_its_subgraphs() {
    let (compiled, _) = compiled(&choosing());
    assert_eq!(names(&compiled), ["w", "own"]);
    let whole = 0..128;
    assert_eq!(
        compiled.launches,
        [Launch { writes: vec!["y".into()], args: vec!["x".into(), "flag".into()], reads: vec![whole] }]
    );
}

#[test]
fn weights_listed_as_inputs_are_not_inputs_of_a_request() {
    let (compiled, _) = compiled(&with(|graph| graph.input.push(value("w", element::FLOAT, &["4", "4"]))));
    assert_eq!(compiled.summary.inputs.len(), 1);
}
