use super::super::WorkflowOutput;
use super::*;
use crate::ids::{FunctionKey, TenantName};

type Change<'a> = &'a dyn Fn(&mut WorkflowSpec);

fn name(name: &str) -> FunctionName {
    FunctionName::new(name).unwrap()
}

fn tensor(name: &str, datatype: DataType, shape: &[&str]) -> TensorSpec {
    let dim = |text: &&str| match text.parse() {
        Ok(size) => Dim::Fixed(size),
        Err(_) => Dim::Symbol((*text).to_owned()),
    };
    TensorSpec { name: name.into(), datatype, shape: shape.iter().map(dim).collect() }
}

fn signature(run: &StepTarget) -> Option<&'static Signature> {
    use std::sync::LazyLock;
    static DETECT: LazyLock<Signature> = LazyLock::new(|| Signature {
        inputs: vec![tensor("image", DataType::Fp32, &["1", "3", "64", "64"])],
        outputs: vec![
            tensor("crops", DataType::Fp32, &["n", "3", "8", "8"]),
            tensor("found", DataType::Int64, &["1"]),
        ],
    });
    static NAME: LazyLock<Signature> = LazyLock::new(|| Signature {
        inputs: vec![tensor("crop", DataType::Fp32, &["1", "3", "h", "w"])],
        outputs: vec![tensor("scores", DataType::Fp32, &["1", "10"])],
    });
    static TOTAL: LazyLock<Signature> = LazyLock::new(|| Signature {
        inputs: vec![tensor("x", DataType::Fp32, &["n", "10"])],
        outputs: vec![tensor("sum", DataType::Fp32, &[])],
    });
    match run.name().as_str() {
        "detect" => Some(&DETECT),
        "name" => Some(&NAME),
        "total" => Some(&TOTAL),
        _ => None,
    }
}

fn step(step: &str, run: &str, inputs: &[(&str, &str)]) -> Step {
    let inputs: BTreeMap<_, _> =
        inputs.iter().map(|(input, from)| ((*input).to_owned(), from.parse().unwrap())).collect();
    Step {
        name: name(step),
        run: StepTarget::Function(name(run)),
        inputs,
        each: None,
        when: None,
        deadline: None,
    }
}

/// A workflow that detects objects in a frame and classifies each of them.
fn traffic() -> WorkflowSpec {
    let mut people = step("people", "name", &[("crop", "detect.crops")]);
    people.each = Some("crop".into());
    people.when = Some("detect.found".parse().unwrap());
    let steps = vec![people, step("detect", "detect", &[("image", "input.frame")])];
    let outputs = vec![WorkflowOutput { name: "people".into(), from: "people.scores".parse().unwrap() }];
    let key = FunctionKey { tenant: TenantName::default(), name: name("traffic") };
    WorkflowSpec::new(key, vec!["frame".into()], steps, outputs)
}

#[test]
fn the_signature_of_a_workflow_follows_from_its_functions() {
    let spec = traffic();
    spec.validate().unwrap();
    let expected = Signature {
        inputs: vec![tensor("frame", DataType::Fp32, &["1", "3", "64", "64"])],
        outputs: vec![tensor("people", DataType::Fp32, &["people:rows", "10"])],
    };
    assert_eq!(spec.check(signature), Ok(expected));
    assert_eq!(spec.in_order().iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["detect", "people"]);
}

#[test]
fn each_refusal_names_the_edge() {
    let checks: &[(&str, Change<'_>)] = &[
        ("step \"detect\" runs function \"yolo\", which does not exist", &|it| {
            it.steps[1].run = StepTarget::Function(name("yolo"));
        }),
        ("step \"people\": function \"name\" has no input \"x\": it has crop", &|it| {
            it.steps[0].inputs.insert("x".into(), "detect.crops".parse().unwrap());
        }),
        ("has no output \"boxes\": it has crops, found", &|it| {
            it.steps[0].inputs.insert("crop".into(), "detect.boxes".parse().unwrap());
        }),
        ("has no output \"none\"", &|it| it.steps[0].when = Some("detect.none".parse().unwrap())),
        ("has no source: give it FP32 of shape [1, 3, h, w]", &|it| {
            it.steps[0].inputs.clear();
            it.steps[0].each = None;
        }),
        ("detect.found is INT64, but input \"crop\" of step \"people\" takes FP32", &|it| {
            it.steps[0].inputs.insert("crop".into(), "detect.found".parse().unwrap());
        }),
        ("input.frame has shape [1, 3, 64, 64], but input \"x\" of step \"sum\" takes [n, 10]", &|it| {
            it.steps.push(step("sum", "total", &[("x", "input.frame")]));
            it.outputs[0].from = "sum.sum".parse().unwrap();
        }),
        ("output \"sum\" of step \"sum\" is a scalar", &|it| {
            it.steps.push(step("sum", "total", &[("x", "people.scores")]));
            it.outputs[0].from = "sum.sum".parse().unwrap();
        }),
        ("has no output \"boxes\": it has scores", &|it| {
            it.outputs[0].from = "people.boxes".parse().unwrap();
        }),
    ];
    for (says, change) in checks {
        let mut spec = traffic();
        change(&mut spec);
        let message = spec.check(signature).unwrap_err().to_string();
        assert!(message.contains(says), "{says:?}: {message}");
    }
}

#[test]
fn an_input_that_two_steps_read_has_the_sizes_that_either_fixes() {
    let mut spec = traffic();
    spec.steps =
        vec![step("a", "name", &[("crop", "input.x")]), step("b", "detect", &[("image", "input.x")])];
    spec.inputs = vec!["x".into()];
    spec.outputs = ["a.scores", "b.crops"]
        .map(|from| WorkflowOutput { name: from.into(), from: from.parse().unwrap() })
        .to_vec();
    let found = spec.check(signature).unwrap();
    assert_eq!(found.inputs, [tensor("x", DataType::Fp32, &["1", "3", "64", "64"])]);
}

#[test]
fn equal_symbols_of_two_functions_stay_distinct() {
    let mut spec = traffic();
    spec.steps = vec![step("a", "name", &[("crop", "input.x")]), step("b", "name", &[("crop", "input.y")])];
    spec.inputs = vec!["x".into(), "y".into()];
    spec.outputs = ["a.scores", "b.scores"]
        .map(|from| WorkflowOutput { name: from.into(), from: from.parse().unwrap() })
        .to_vec();
    let input = |name, step: &str| {
        let [h, w] = ["h", "w"].map(|symbol| format!("{step}.{symbol}"));
        tensor(name, DataType::Fp32, &["1", "3", &h, &w])
    };
    assert_eq!(spec.check(signature).unwrap().inputs, [input("x", "a"), input("y", "b")]);
}

#[test]
fn a_chain_with_doubled_edges_is_checked_in_linear_time() {
    let mut spec = traffic();
    let two = |at: usize| {
        let from = if at == 0 { "input.x".to_owned() } else { format!("s{}.y", at - 1) };
        step(&format!("s{at}"), "add", &[("a", &from), ("b", &from)])
    };
    spec.steps = (0..crate::limits::STEPS_MAX).map(two).collect();
    spec.inputs = vec!["x".into()];
    spec.outputs = vec![WorkflowOutput { name: "y".into(), from: "s63.y".parse().unwrap() }];
    spec.validate().unwrap();
    let [a, b, y] = ["a", "b", "y"].map(|name| tensor(name, DataType::Fp32, &["n"]));
    let add = Signature { inputs: vec![a, b], outputs: vec![y] };
    // The test would not end if the check followed every path from the first step: there are 2^63.
    assert_eq!(spec.check(|_| Some(&add)).unwrap().inputs.len(), 1);
    assert_eq!(spec.in_order().len(), spec.steps.len());
}

#[test]
fn the_shape_of_an_empty_tensor_has_no_rows() {
    use super::super::empty_shape;
    assert_eq!(empty_shape(&tensor("x", DataType::Fp32, &["1", "3", "h"])), [0, 3, 0]);
    assert_eq!(empty_shape(&tensor("x", DataType::Fp32, &["n"])), [0]);
}

/// Returns the signature of a chain of these steps: each reads the previous step, and the last
/// step's output is the workflow's.
fn chain(runs: &[(&str, &Signature)]) -> Result<Signature, CheckError> {
    let mut spec = traffic();
    let source = |at: usize| if at == 0 { "input.x".to_owned() } else { format!("s{}.y", at - 1) };
    let steps = runs.iter().enumerate();
    spec.steps = steps.map(|(at, (run, _))| step(&format!("s{at}"), run, &[("x", &source(at))])).collect();
    spec.inputs = vec!["x".into()];
    spec.outputs = vec![WorkflowOutput { name: "y".into(), from: source(runs.len()).parse().unwrap() }];
    spec.validate().unwrap();
    let find = |run: &StepTarget| runs.iter().find(|(name, _)| *name == run.name().as_str());
    spec.check(|run| find(run).map(|(_, signature)| *signature))
}

/// Returns the signature of a function with one input and one output of these shapes.
fn from_to(x: &[&str], y: &[&str]) -> Signature {
    Signature { inputs: vec![tensor("x", DataType::Fp32, x)], outputs: vec![tensor("y", DataType::Fp32, y)] }
}

#[test]
fn a_step_with_an_input_that_may_be_empty_has_free_rows() {
    let same = from_to(&["n", "4"], &["n", "4"]);
    let find = from_to(&["n", "4"], &["found", "4"]);
    let one = from_to(&["n", "4"], &["1", "4"]);
    let count = from_to(&["n", "4"], &[]);
    let gives = |runs: &[(&str, &Signature)]| chain(runs).unwrap().outputs[0].shape.clone();
    let shape = |dims: &[&str]| tensor("y", DataType::Fp32, dims).shape;
    // The number of rows is that of the input, which is never empty.
    assert_eq!(gives(&[("same", &same), ("one", &one)]), shape(&["1", "4"]));
    assert_eq!(gives(&[("same", &same), ("count", &count)]), shape(&[]));
    // The result of `find` may be empty although its step always runs.
    assert_eq!(gives(&[("find", &find)]), shape(&["s0.found", "4"]));
    assert_eq!(gives(&[("find", &find), ("one", &one)]), shape(&["s1:rows", "4"]));
    assert_eq!(gives(&[("find", &find), ("one", &one), ("same", &same)]), shape(&["s2:rows", "4"]));
    let scalar = CheckError::Scalar { step: name("s1"), output: "y".into() };
    assert_eq!(chain(&[("find", &find), ("count", &count)]), Err(scalar));
    let nothing = from_to(&["n", "4"], &["0", "4"]);
    assert_eq!(gives(&[("nothing", &nothing), ("one", &one)]), shape(&["s1:rows", "4"]));
}

#[test]
fn a_nested_workflow_follows_the_rule_of_empty_inputs() {
    let same = from_to(&["n", "4"], &["n", "4"]);
    let find = from_to(&["n", "4"], &["found", "4"]);
    let one = from_to(&["n", "4"], &["1", "4"]);
    let count = from_to(&["n", "4"], &[]);
    let surely = chain(&[("a", &same), ("b", &same), ("c", &same)]).unwrap();
    assert_eq!(surely.outputs[0].shape, surely.inputs[0].shape);
    assert_eq!(chain(&[("surely", &surely), ("count", &count)]).unwrap().outputs[0].shape, []);
    for perhaps in [&[("find", &find)][..], &[("find", &find), ("one", &one)]] {
        let perhaps = chain(perhaps).unwrap();
        let scalar = CheckError::Scalar { step: name("s1"), output: "y".into() };
        assert_eq!(chain(&[("perhaps", &perhaps), ("count", &count)]), Err(scalar));
    }
}

#[test]
fn an_output_has_the_size_that_another_step_fixes_for_its_input() {
    let mut spec = traffic();
    spec.steps = vec![step("a", "same", &[("x", "input.x")]), step("b", "four", &[("x", "input.x")])];
    spec.inputs = vec!["x".into()];
    spec.outputs =
        ["a.y", "b.y"].map(|from| WorkflowOutput { name: from.into(), from: from.parse().unwrap() }).to_vec();
    let same = from_to(&["n"], &["n"]);
    let four = from_to(&["4"], &["4"]);
    let found = spec.check(|run| Some(if run.name().as_str() == "same" { &same } else { &four })).unwrap();
    let sizes = found.inputs.iter().chain(&found.outputs).map(|it| it.shape.clone());
    assert_eq!(sizes.collect::<Vec<_>>(), vec![vec![Dim::Fixed(4)]; 3]);
}

#[test]
fn input_symbols_differ_from_the_symbols_of_uncertain_rows() {
    // The input has the name of the step that reads the input by rows, and a symbol is called
    // `rows`.
    let rows = from_to(&["rows", "4"], &["rows", "4"]);
    let mut spec = traffic();
    spec.steps = vec![step("x", "rows", &[("x", "input.x")])];
    spec.steps[0].each = Some("x".into());
    spec.inputs = vec!["x".into()];
    spec.outputs = vec![WorkflowOutput { name: "y".into(), from: "x.y".parse().unwrap() }];
    let found = spec.check(|_| Some(&rows)).unwrap();
    assert_ne!(found.inputs[0].shape[0], found.outputs[0].shape[0]);
}
