//! Parts of a compiled graph as models of their own.

use std::collections::HashMap;

use millrace_types::DataType;

use super::*;
use crate::extract::{ExtractError, ExtractableGraph, ExtractedModel, RegionWeight, ValueType};
use crate::{WEIGHTS_FILE, compile};

fn graph(model: &ModelProto) -> ExtractableGraph {
    let compiled = compile(&bytes(model)).unwrap();
    ExtractableGraph::read(compiled.graph, WEIGHTS_FILE, compiled.summary.weights_bytes).unwrap()
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn decoded(part: &ExtractedModel) -> GraphProto {
    ModelProto::decode(part.onnx.as_slice()).unwrap().graph.unwrap()
}

fn operators(graph: &GraphProto) -> Vec<&str> {
    graph.node.iter().map(|node| node.op_type()).collect()
}

#[test]
fn a_part_has_the_nodes_between_its_values_and_takes_its_weights_as_inputs() {
    let graph = graph(&model());
    let none = HashMap::new();
    let first = graph.extract(&names(&["x"]), &names(&["h"]), &none).unwrap();
    let weight =
        RegionWeight { name: "w".into(), datatype: DataType::Fp32, shape: vec![4, 4], offset: 0, bytes: 64 };
    assert_eq!((&first.weights, &first.outputs), (&vec![weight], &names(&["h"])));
    let first = decoded(&first);
    let inputs: Vec<&str> = first.input.iter().map(|input| input.name()).collect();
    assert_eq!((operators(&first), inputs), (vec!["MatMul"], vec!["x", "w"]));
    assert!(first.initializer.is_empty());

    let untyped = graph.extract(&names(&["h"]), &names(&["y"]), &none);
    assert_eq!(untyped, Err(ExtractError::Untyped("h".into())));
    let types =
        HashMap::from([("h".to_owned(), ValueType { element: element::FLOAT, shape: vec![None, Some(4)] })]);
    let second = graph.extract(&names(&["h"]), &names(&["y"]), &types).unwrap();
    assert_eq!((second.weights.len(), operators(&decoded(&second))), (0, vec!["Relu"]));
}

#[test]
fn unknown_values_and_missing_arguments_are_refused() {
    let graph = graph(&model());
    let extract =
        |args: &[&str], writes: &[&str]| graph.extract(&names(args), &names(writes), &HashMap::new());
    assert_eq!(extract(&["x"], &["z"]), Err(ExtractError::UnknownValue("z".into())));
    assert_eq!(extract(&["x", "z"], &["h"]), Err(ExtractError::UnknownValue("z".into())));
    assert_eq!(extract(&[], &["h"]), Err(ExtractError::MissingArgument("x".into())));
}

#[test]
fn a_written_value_that_no_node_computes_is_copied() {
    let graph = graph(&model());
    let part = graph.extract(&names(&["x"]), &names(&["x", "w", "h", "h"]), &HashMap::new()).unwrap();
    assert_eq!(part.outputs, ["x/output0", "w/output1", "h", "h/output3"]);
    assert_eq!(operators(&decoded(&part)), ["MatMul", "Identity", "Identity", "Identity"]);
}

#[test]
fn weights_of_subgraphs_become_inputs_of_the_whole_part() {
    let graph = graph(&choosing());
    let part = graph.extract(&names(&["x", "flag"]), &names(&["y"]), &HashMap::new()).unwrap();
    let weights: Vec<&str> = part.weights.iter().map(|weight| weight.name.as_str()).collect();
    assert_eq!(weights, ["own/weight", "w"]);
    let whole = decoded(&part);
    let then = whole.node[1].attribute[0].g.as_ref().unwrap();
    assert!(then.initializer.is_empty());
    assert_eq!(operators(then), ["Identity", "MatMul"]);
}

#[test]
fn a_weight_outside_the_region_is_refused() {
    let compiled = compile(&bytes(&model())).unwrap();
    let read = |file, bytes| ExtractableGraph::read(compiled.graph.clone(), file, bytes).map(drop);
    assert_eq!(read(WEIGHTS_FILE, 63), Err(ExtractError::Weight("w".into())));
    assert_eq!(read("other.data", 64), Err(ExtractError::Weight("w".into())));
    assert!(matches!(
        ExtractableGraph::read(b"not a graph".to_vec(), WEIGHTS_FILE, 64),
        Err(ExtractError::Graph(_))
    ));
}
