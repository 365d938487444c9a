//! The accepted and refused output sizes, by the origin of the size.

use super::*;
use crate::compile;

/// Returns a constant with these integers.
fn numbers(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        dims: vec![values.len() as i64],
        data_type: Some(element::INT64),
        int64_data: values.to_vec(),
        ..TensorProto::default()
    }
}

/// Returns a scalar constant.
fn number(name: &str, value: i64) -> TensorProto {
    TensorProto { dims: vec![], ..numbers(name, &[value]) }
}

/// Compiles a graph with the input `x` of [N, 4], the input `n` of [2], these constants and these
/// nodes. The last node makes `y`.
fn outcome(constants: Vec<TensorProto>, nodes: Vec<NodeProto>) -> Result<(), String> {
    let model = with(|graph| {
        graph.input.push(value("n", element::INT64, &["2"]));
        graph.initializer = constants;
        graph.node = nodes;
    });
    compile(&bytes(&model)).map(drop).map_err(|error| error.to_string())
}

#[track_caller]
fn refused(says: &str, constants: Vec<TensorProto>, nodes: Vec<NodeProto>) {
    let message = outcome(constants, nodes).unwrap_err();
    assert!(message.contains(says), "{message}");
}

#[test]
fn an_output_with_a_too_large_size_in_the_file_is_refused() {
    let large = "makes more than 4294967296 bytes";
    let square = || vec![numbers("s", &[1 << 20, 1 << 20])];
    for op_type in ["Expand", "Tile"] {
        refused(large, square(), vec![node(op_type, &["x", "s"], &["y"])]);
    }
    refused(large, square(), vec![node("ConstantOfShape", &["s"], &["y"])]);
    let raw = TensorProto {
        raw_data: Some((1i64 << 40).to_le_bytes().to_vec().into()),
        int64_data: vec![],
        ..numbers("s", &[0])
    };
    refused(large, vec![raw], vec![node("ConstantOfShape", &["s"], &["y"])]);
    let through = vec![node("Cast", &["s"], &["t"]), node("ConstantOfShape", &["t"], &["y"])];
    refused(large, square(), through);
    let range = vec![number("first", 0), number("end", -(1 << 40)), number("step", -1)];
    refused(large, range, vec![node("Range", &["first", "end", "step"], &["y"])]);
    let pads = vec![numbers("s", &[0, 1 << 40, 0, 0])];
    refused(large, pads, vec![node("Pad", &["x", "s"], &["y"])]);
    let depth = vec![number("s", 1 << 40), numbers("on", &[0, 1])];
    refused(large, depth, vec![node("OneHot", &["n", "s", "on"], &["y"])]);
    let scales = weight("s", &[2]);
    let scales = TensorProto { raw_data: None, float_data: vec![1e6, 1e6], ..scales };
    refused(large, vec![scales], vec![node("Resize", &["x", "", "s"], &["y"])]);
    refused(large, square(), vec![node("Resize", &["x", "", "", "s"], &["y"])]);
}

#[test]
fn an_output_sized_by_the_contents_of_an_input_is_refused() {
    let says = "takes the size of its output from the contents of an input";
    refused(says, vec![], vec![node("ConstantOfShape", &["n"], &["y"])]);
    refused(says, vec![], vec![node("Expand", &["x", "n"], &["y"])]);
    let ends = vec![number("first", 0), number("step", 1), number("place", 0)];
    let range =
        vec![node("Gather", &["n", "place"], &["end"]), node("Range", &["first", "end", "step"], &["y"])];
    refused(says, ends, range);
    let doubled = vec![node("Mul", &["n", "two"], &["s"]), node("Tile", &["x", "s"], &["y"])];
    refused(says, vec![number("two", 2)], doubled);
}

#[test]
fn an_output_sized_by_a_shape_or_a_limited_number_is_accepted() {
    let most = || numbers("most", &[64, 64]);
    outcome(vec![most()], vec![node("Min", &["n", "most"], &["s"]), node("ConstantOfShape", &["s"], &["y"])])
        .unwrap();
    let clip = vec![node("Clip", &["n", "", "most"], &["s"]), node("Expand", &["x", "s"], &["y"])];
    outcome(vec![number("most", 64)], clip).unwrap();
    let shaped = vec![
        node("Shape", &["x"], &["shape"]),
        node("Gather", &["shape", "place"], &["rows"]),
        node("Range", &["first", "rows", "step"], &["y"]),
    ];
    outcome(vec![number("place", 0), number("first", 0), number("step", 1)], shaped).unwrap();
    outcome(vec![numbers("s", &[1 << 40, 0])], vec![node("ConstantOfShape", &["s"], &["y"])]).unwrap();
    let found = vec![
        node("NonZero", &["x"], &["places"]),
        node("Shape", &["places"], &["s"]),
        node("ConstantOfShape", &["s"], &["y"]),
    ];
    outcome(vec![], found).unwrap();
}

#[test]
fn sizes_within_branches_and_loops_are_checked_too() {
    let says = "takes the size of its output from the contents of an input";
    let branch = |name: &str, node: NodeProto| {
        let output = vec![value(&node.output[0], element::FLOAT, &["N", "4"])];
        subgraph(name, GraphProto { node: vec![node], output, ..GraphProto::default() })
    };
    let choice = |size: &str| NodeProto {
        attribute: vec![
            branch("then_branch", node("Expand", &["x", size], &["t"])),
            branch("else_branch", node("Relu", &["x"], &["e"])),
        ],
        ..node("If", &["flag"], &["y"])
    };
    let flag = || number("flag", 1);
    refused(says, vec![flag()], vec![choice("n")]);
    outcome(vec![flag(), numbers("s", &[2, 4])], vec![choice("s")]).unwrap();

    let body = |outputs: &[&str]| GraphProto {
        input: vec![
            value("step", element::INT64, &[]),
            value("again", element::BOOL, &[]),
            value("carried", element::FLOAT, &["N", "4"]),
        ],
        node: vec![
            node("Identity", &["again"], &["goes_on"]),
            node("Relu", &["carried"], &["next"]),
            node("Relu", &["next"], &["row"]),
        ],
        output: outputs.iter().map(|name| value(name, element::FLOAT, &["N", "4"])).collect(),
        ..GraphProto::default()
    };
    let repeat = |trips: &str, body: GraphProto, made: &[&str]| NodeProto {
        attribute: vec![subgraph("body", body)],
        ..node("Loop", &[trips, "", "x"], made)
    };
    let trips = || vec![node("Gather", &["n", "place"], &["trips"])];
    let rows = repeat("trips", body(&["goes_on", "next", "row"]), &["last", "y"]);
    refused(says, vec![number("place", 0)], [trips(), vec![rows]].concat());
    let carried = repeat("trips", body(&["goes_on", "next"]), &["y"]);
    outcome(vec![number("place", 0)], [trips(), vec![carried]].concat()).unwrap();
}
