//! The faults that prevent serving a file, and their messages.

use super::*;
use crate::compile;
use crate::onnx::{EXTERNAL, SparseTensorProto, StringStringEntryProto};
use crate::{MAX_CHAIN, MAX_NODES, MAX_TENSORS, ModelError};

#[track_caller]
fn refused(model: &ModelProto, says: &str) {
    let message = compile(&bytes(model)).unwrap_err().to_string();
    assert!(message.contains(says), "{message}");
}

#[track_caller]
fn refused_graph(says: &str, change: impl FnOnce(&mut GraphProto)) {
    refused(&with(change), says);
}

#[test]
fn the_unchanged_base_model_compiles() {
    compile(&bytes(&model())).unwrap();
}

#[test]
fn files_that_are_not_onnx_are_refused() {
    for (file, says) in [
        (&b""[..], "the file is empty"),
        (b"PK\x03\x04 a PyTorch checkpoint", "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "git lfs pull"),
        (b"\x08\x08\x12\x07pytorch", "no graph"),
    ] {
        let message = compile(&Bytes::from_static(file)).unwrap_err().to_string();
        assert!(message.contains(says), "{message}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = bytes(&model());
    for end in 0..whole.len() {
        assert!(compile(&whole.slice(..end)).is_err(), "cut at {end}");
    }
    let message = compile(&whole.slice(..whole.len() / 2)).unwrap_err().to_string();
    assert!(message.contains("cut short"), "{message}");
}

#[test]
fn unknown_format_versions_and_opsets_are_refused() {
    refused(&ModelProto { ir_version: Some(2), ..model() }, "IR version 2");
    refused(&ModelProto { ir_version: Some(99), ..model() }, "IR version 99");
    let opset = |domain: &str, version| {
        let set = OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
        ModelProto { opset_import: vec![set], ..model() }
    };
    refused(&opset("", 12), "opset 12 is not supported: export the model with opset 13 to 26");
    refused(&opset("ai.onnx", 99), "opset 99");
    refused(&opset("ai.onnx.ml", 3), "the file names none");
}

#[test]
fn all_unsupported_operators_are_listed_in_one_error() {
    let message = "unsupported operators: Dropout (node \"Dropout-d\" and 1 more), \
                   com.acme::Fancy (node \"Fancy-f\"), Det (node \"Det-i\")";
    refused_graph(message, |graph| {
        graph.node.push(node("Dropout", &["y"], &["d"]));
        graph.node.push(NodeProto { domain: Some("com.acme".into()), ..node("Fancy", &["d"], &["f"]) });
        graph.node.push(node("Dropout", &["y"], &["e"]));
        let branch = GraphProto { node: vec![node("Det", &["y"], &["i"])], ..GraphProto::default() };
        let mut choice = node("If", &["y"], &["c"]);
        choice.attribute = vec![subgraph("then_branch", branch)];
        graph.node.push(choice);
    });
}

#[test]
fn weights_outside_the_file_or_in_unsupported_forms_are_refused() {
    refused_graph("tensor \"w\" refers to another file, \"w.bin\"", |graph| {
        let entry = StringStringEntryProto { key: Some("location".into()), value: Some("w.bin".into()) };
        graph.initializer[0].data_location = Some(EXTERNAL);
        graph.initializer[0].external_data = vec![entry];
    });
    refused_graph("tensor \"w\" has element type FLOAT16: convert it to one of FLOAT", |graph| {
        graph.initializer[0].data_type = Some(10);
    });
    refused_graph("element type STRING", |graph| graph.initializer[0].data_type = Some(8));
    refused_graph("weight \"w\" is sparse", |graph| {
        graph.sparse_initializer = vec![SparseTensorProto { values: Some(weight("w", &[1])) }];
    });
}

#[test]
fn weights_with_data_of_another_size_than_their_dimensions_are_refused() {
    refused_graph("should have 80 bytes of data and has 64", |graph| graph.initializer[0].dims = vec![4, 5]);
    refused_graph("should have 64 bytes of data and has 0", |graph| graph.initializer[0].raw_data = None);
    for dims in [&[i64::MAX, i64::MAX][..], &[-4, -4], &[0, i64::MAX, i64::MAX], &[i64::MAX]] {
        refused_graph("which do not fit in memory", |graph| graph.initializer[0].dims = dims.to_vec());
    }
}

#[test]
fn inputs_and_outputs_that_cannot_be_served_are_refused() {
    let float = element::FLOAT;
    refused_graph("input \"x\" has element type FLOAT16", |graph| {
        graph.input[0] = value("x", 10, &["N", "4"])
    });
    refused_graph("output \"y\" has element type STRING", |graph| graph.output[0] = value("y", 8, &["N"]));
    refused_graph("input \"x\" has no shape, so no dynamic or batch dimension", |graph| {
        let kind = graph.input[0].r#type.as_mut().unwrap();
        kind.tensor_type.as_mut().unwrap().shape = None;
    });
    refused_graph("output \"y\" is not a tensor", |graph| graph.output[0].r#type = None);
    refused_graph("input \"x\" is a scalar", |graph| graph.input[0] = value("x", float, &[]));
    refused_graph("dimension 1 of input \"x\" is 0", |graph| graph.input[0] = value("x", float, &["N", "0"]));
    refused_graph("dimension 0 of output \"y\" is -1", |graph| graph.output[0] = value("y", float, &["-1"]));
    refused_graph("the model has no outputs", |graph| graph.output.clear());
    refused_graph("the model has no inputs", |graph| {
        graph.input.clear();
        graph.node = vec![node("Relu", &["w"], &["y"])];
    });
    refused_graph("an input has no name", |graph| graph.input[0].name = None);
}

#[test]
fn inconsistent_graphs_are_refused() {
    refused_graph("node \"Relu-y\" reads \"ghost\"", |graph| graph.node[1].input[0] = "ghost".into());
    refused_graph("output \"z\" has no node that makes it", |graph| graph.output[0].name = Some("z".into()));
    refused_graph("value \"h\" is defined more than once", |graph| graph.node[1].output[0] = "h".into());
    refused_graph("value \"w\" is defined more than once", |graph| graph.initializer.push(weight("w", &[1])));
    refused_graph("value \"y\" is defined more than once", |graph| {
        graph.output.push(graph.output[0].clone())
    });
    refused_graph("node \"MatMul-h\" depends on its own output", |graph| graph.node[0].input[0] = "y".into());
    refused_graph("depends on its own output", |graph| graph.node[0].input[0] = "h".into());
    refused_graph("no output of the model is computed", |graph| graph.output[0].name = Some("x".into()));
    refused_graph("constant \"Constant-c\" has no value", |graph| {
        graph.node.push(node("Constant", &[], &["c"]));
    });
}

#[test]
fn a_subgraph_may_not_reuse_a_name_of_the_outer_graph() {
    refused_graph("value \"h\" is defined more than once", |graph| {
        let branch = GraphProto {
            node: vec![node("Relu", &["x"], &["h"])],
            output: vec![value("h", element::FLOAT, &["N", "4"])],
            ..GraphProto::default()
        };
        graph.node[1].attribute = vec![subgraph("then_branch", branch)];
    });
}

#[test]
fn a_chain_longer_than_the_runtime_can_plan_is_refused() {
    let chain = |length: usize| {
        with(|graph| {
            let name = |index: usize| format!("v{index}");
            let link = |index| node("Relu", &[&name(index)], &[&name(index + 1)]);
            graph.node = (0..length).map(link).collect();
            graph.input[0].name = Some(name(0));
            graph.output[0].name = Some(name(length));
        })
    };
    compile(&bytes(&chain(MAX_CHAIN))).unwrap();
    refused(&chain(MAX_CHAIN + 1), "more than 2048 nodes in a row");
}

#[test]
fn more_nodes_or_tensors_than_the_bounds_are_refused() {
    refused_graph("more than 32768 nodes", |graph| {
        let copies = (0..=MAX_NODES).map(|index| node("Relu", &["x"], &[&format!("v{index}")]));
        graph.node.extend(copies);
    });
    refused_graph("more than 1024 inputs or outputs", |graph| {
        graph.input.extend((0..MAX_TENSORS).map(|index| value(&format!("x{index}"), element::FLOAT, &["N"])));
    });
}

#[test]
fn messages_nested_too_deep_are_refused() {
    let mut inner = GraphProto::default();
    for _ in 0..20 {
        let mut outer = node("If", &["x"], &["y"]);
        outer.attribute = vec![subgraph("then_branch", inner)];
        inner = GraphProto { node: vec![outer], ..GraphProto::default() };
    }
    let deep = ModelProto { graph: Some(inner), ..model() };
    assert!(matches!(compile(&bytes(&deep)), Err(ModelError::TooDeep { .. })));
}
