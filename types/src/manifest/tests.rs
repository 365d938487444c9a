mod operators;

use std::time::Duration;

use super::*;
use crate::digest::Digest;
use crate::function::{DEFAULT_PERCENTILE, FunctionSpec, Runtime, Slo};
use crate::ids::{FunctionKey, FunctionName, TenantName};
use crate::policy::{DispatchName, PolicySpec};
use crate::sequences::{IDLE_DEFAULT, SEQUENCES_DEFAULT, SequenceSpec, StatePair};
use crate::serving::{BatchingOptions, Priority, ResidencyOptions, SchedulingOptions};
use crate::slices::{AskedSlices, Permille, Terms};
use crate::tenancy::Quota;
use crate::tensor::{DataType, Dim, TensorSpec};
use crate::units::Bytes;
use crate::workflow::{Signature, Step, StepTarget, TensorSource, WorkflowOutput, WorkflowSpec};

const GOOD: &str = "\
apiVersion: millrace/v1
kind: Function
metadata: {name: digits, labels: {team: vision}}
spec:
  model: {file: digits.onnx}
  slo: {deadline: 50ms, percentile: 0.95}
  resources: {gpuMemory: 64MiB}
  replicas: 2
  priority: 2
  residency: {minWarm: 1, evictAfter: 10m}
  batching: {maxSize: 8, maxWait: 2ms}
";

fn refusal(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "{from}");
    parse(&GOOD.replace(from, to)).unwrap_err().to_string()
}

#[test]
fn a_misspelled_field_is_refused_with_its_line_and_the_field_that_was_meant() {
    let manifest = |field: &str| {
        format!(
            "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: x}}\nspec:\n  model: {{file: x.onnx}}\n  {field}\n"
        )
    };
    for (field, says) in [
        ("timout: 5s", "line 6, column 3: there is no field \"timout\" here: did you mean \"timeout\"?"),
        ("gpus: 2", "line 6, column 3: there is no field \"gpus\" here: the fields are runtime, model, "),
        ("model: {file: y.onnx}", "line 6, column 3: \"model\" appears twice: remove one of the two"),
        ("replicas: two", "line 6, column 13: not a whole number: replicas: two"),
        ("timeout: 50x", "\"50x\" is not a duration: write a number with ms, s, m or h, such as 50ms or 2s"),
    ] {
        let message = parse(&manifest(field)).unwrap_err().to_string();
        assert!(message.contains(says), "{field}: {message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

#[test]
fn aliases_are_bounded_by_the_text_that_they_stand_for() {
    let labels = |count: usize, text: &str| {
        let aliases: Vec<_> = (0..count).map(|at| format!("l{at}: *text")).collect();
        GOOD.replace("team: vision", &format!("team: &text \"{text}\", {}", aliases.join(", ")))
    };
    assert!(parse(&labels(3, "vision")).is_ok());
    let refused = parse(&labels(60, &"x".repeat(100 << 10))).unwrap_err();
    assert!(matches!(refused, ManifestError::Yaml { .. }), "{refused}");
    // Ten aliases of ten aliases of …: a billion scalars in all.
    let mut laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..9 {
        let below = vec![format!("*a{}", level - 1); 10].join(", ");
        laughs += &format!("a{level}: &a{level} [{below}]\n");
    }
    assert!(parse(&laughs).is_err());
    assert!(parse(&format!("{GOOD}{laughs}")).is_err());
}

#[test]
fn every_field_of_a_function_is_parsed() {
    let manifest = parse(GOOD).unwrap().remove(0);
    let mut expected = FunctionSpec::new(FunctionKey {
        tenant: TenantName::default(),
        name: FunctionName::new("digits").unwrap(),
    });
    expected.labels.insert("team".into(), "vision".into());
    expected.slo = Some(Slo { deadline: Duration::from_millis(50), percentile: 0.95 });
    expected.resources.gpu_memory = Some(Bytes::mib(64));
    expected.replicas = 2;
    let evict_after = Some(Duration::from_secs(600));
    let max_wait = Duration::from_millis(2);
    expected.serving = SchedulingOptions {
        priority: Priority::new(2).unwrap(),
        residency: ResidencyOptions { pin: false, min_warm: 1, evict_after },
        batching: Some(BatchingOptions { max_size: 8, max_wait }),
    };
    let model = ModelSource::File { path: "digits.onnx".into(), declared: None };
    assert_eq!(manifest, Manifest::Function(FunctionManifest { spec: expected.clone(), model }));
    let digest = Digest::of(b"model");
    let kept = GOOD.replace("file: digits.onnx", &format!("digest: {digest}"));
    let model = ModelSource::Cluster(digest);
    assert_eq!(parse(&kept).unwrap(), [Manifest::Function(FunctionManifest { spec: expected, model })]);
}

fn slices_of(resources: &str, more: &str) -> Result<Option<AskedSlices>, ManifestError> {
    let text = GOOD.replace("gpuMemory: 64MiB", resources) + more;
    parse(&text).map(|mut manifests| manifests.remove(0).function().unwrap().spec.slices)
}

#[test]
fn slices_are_asked_for_with_shares_of_sms_and_time() {
    let asked = |least, most, request, limit, min| {
        let share = |thousandths| Permille::new(thousandths).unwrap();
        let terms = Terms::new(share(least), share(most), share(request), share(limit)).unwrap();
        Some(AskedSlices::fixed(terms, min))
    };
    for (resources, more, expected) in [
        ("gpuMemory: 1GiB", "", None),
        ("sm: 12%", "", asked(120, 120, 0, 1000, 1)),
        ("sm: 12", "", asked(120, 120, 0, 1000, 1)),
        ("sm: 0.12", "  slices: {min: 3}\n", asked(120, 120, 0, 1000, 3)),
        ("sm: 12%..50%, quotaRequest: 0.3, quotaLimit: 0.8", "", asked(120, 500, 300, 800, 1)),
        ("quotaLimit: 80%", "", asked(1000, 1000, 0, 800, 1)),
        ("quotaRequest: 0.3", "", asked(1000, 1000, 300, 1000, 1)),
    ] {
        assert_eq!(slices_of(resources, more).unwrap(), expected, "{resources}");
    }
    for (more, counts) in
        [("  slices: {max: 8}\n", (1, Some(8))), ("  slices: {min: 2, max: 2}\n", (2, Some(2)))]
    {
        let asked = slices_of("sm: 12%", more).unwrap().unwrap();
        assert_eq!((asked.min, asked.max), counts);
    }
}

#[test]
fn slices_that_no_gpu_can_have_are_refused_with_the_correction() {
    for (resources, more, says) in [
        ("sm: 0", "", "spec.resources: the SM partition is 0%"),
        ("sm: 101", "", "spec.resources.sm: \"101\" is not a share of the SMs"),
        ("sm: 50%..12%", "", "write the smaller share first"),
        ("sm: 12%, quotaLimit: 1.2", "", "spec.resources.quotaLimit: \"1.2\" is not a quota of the time"),
        ("sm: 12%, quotaRequest: 0.9, quotaLimit: 0.8", "", "lower the request or raise the limit"),
        ("sm: 12%, quotaLimit: 0", "", "the quota limit is 0%"),
        ("sm: [12%]", "", "a share, such as 12% or 0.3"),
        ("sm: -1", "", "spec.resources.sm: \"-1\" is not a share of the SMs"),
        ("sm: 12%", "  slices: {min: 0}\n", "slices.min or slices.max is 0: write a number from 1 to 64"),
        ("sm: 12%", "  slices: {max: 65}\n", "slices.min or slices.max is 65"),
        ("sm: 12%", "  slices: {min: 3, max: 2}\n", "slices.max 2 is below slices.min 3"),
        ("gpuMemory: 1GiB", "  slices: {min: 2}\n", "has an effect only with resources.sm"),
    ] {
        let message = slices_of(resources, more).unwrap_err().to_string();
        assert!(message.contains(says), "{resources}: {message}");
    }
}

#[test]
fn each_refusal_of_a_function_names_the_correction() {
    for (from, to, says) in [
        ("millrace/v1", "v2", "write \"millrace/v1\""),
        ("kind: Function", "kind: Pod", "this version has Function, Workflow, Tenant, Policy, and List"),
        ("name: digits", "name: Digits", "lower-case letters"),
        ("  model:", "  modle:", "modle"),
        ("file: digits.onnx", "digest: digits.onnx", "spec.model.digest: \"digits.onnx\" is not a digest"),
        ("file: digits.onnx", "file: a, digest: b", "write model: {file: FILE}"),
        ("{file: digits.onnx}", "{}", "write model: {file: FILE}"),
        ("0.95", "1.0", "strictly between 0 and 1"),
        ("0.95", "0", "strictly between 0 and 1"),
        ("50ms", "0ms", "slo.deadline is zero"),
        ("50ms", "soon", "such as 50ms or 2s"),
        ("64MiB", "lots", "such as 512MiB"),
        ("replicas: 2", "replicas: 0", "a number from 1 to 64"),
        ("replicas: 2", "replicas: 65", "a number from 1 to 64"),
        ("replicas: 2", "replicas: -1", "replicas"),
        ("replicas: 2", "replicas: two", "replicas"),
        ("priority: 2", "priority: 0", "a number from 1 (goes first) to 8"),
        ("minWarm: 1", "minWarm: 65", "a number from 0 to 64"),
        ("minWarm: 1", "pin: true", "exclude each other"),
        ("10m", "0s", "above zero"),
        ("maxSize: 8", "maxSize: 1", "a number from 2 to 64"),
        ("2ms", "2h", "shorten it"),
        ("  batching: {maxSize: 8", "  idempotent: false\n  batching: {maxSize: 8", "needs idempotent: true"),
        ("file: digits.onnx", "file: ''", "name the model's file"),
    ] {
        let message = refusal(from, to);
        assert!(message.contains(says), "{from:?} -> {to:?}: {message}");
    }
}

const COUNTER: &str = "\
apiVersion: millrace/v1
kind: Function
metadata: {name: counter}
spec:
  model: {file: counter.onnx}
  sequences:
    state:
      - {input: h_in, output: h_out}
    idle: 5s
    max: 3
";

#[test]
fn declared_sequences_are_parsed_with_defaults() {
    let read = |text: &str| parse(text).unwrap().remove(0).function().unwrap().spec.sequences;
    let state = vec![StatePair { input: "h_in".into(), output: "h_out".into() }];
    let declared = SequenceSpec { state, idle: Duration::from_secs(5), max: 3 };
    assert_eq!(read(COUNTER), Some(declared.clone()));
    let short = COUNTER.replace("    idle: 5s\n    max: 3\n", "");
    assert_eq!(read(&short), Some(SequenceSpec { idle: IDLE_DEFAULT, max: SEQUENCES_DEFAULT, ..declared }));
    assert_eq!(read(GOOD), None);
}

#[test]
fn each_refusal_of_sequences_names_the_correction() {
    for (from, to, says) in [
        ("      - {input: h_in, output: h_out}\n", "      []\n", "name 1 to 16"),
        ("output: h_out", "outptu: h_out", "outptu"),
        ("idle: 5s", "idle: 0s", "above zero"),
        ("idle: 5s", "idle: soon", "such as 50ms or 2s"),
        ("max: 3", "max: 1025", "a number from 1 to 1024"),
        ("  sequences:", "  replicas: 2\n  sequences:", "runs on one worker"),
        ("  sequences:", "  batching: {maxSize: 8}\n  sequences:", "exclude each other"),
    ] {
        assert!(COUNTER.contains(from), "{from}");
        let message = parse(&COUNTER.replace(from, to)).unwrap_err().to_string();
        assert!(message.contains(says), "{from:?} -> {to:?}: {message}");
    }
    let program = PROGRAM.replace("  program:", "  sequences: {state: [{input: a, output: b}]}\n  program:");
    assert!(parse(&program).unwrap_err().to_string().contains("only to functions with runtime onnx"));
}

const PROGRAM: &str = "\
apiVersion: millrace/v1
kind: Function
metadata: {name: decode}
spec:
  runtime: process
  program:
    file: decode.py
    processes: 2
    inputs: [{name: jpeg, datatype: UINT8, shape: [-1]}]
    outputs: [{name: pixels, datatype: FP32, shape: [N, 64]}]
";

#[test]
fn a_program_is_parsed_with_its_inputs_and_outputs() {
    let read = parse(PROGRAM).unwrap().remove(0).function().unwrap();
    assert_eq!((read.spec.runtime, read.spec.processes), (Runtime::Process, 2));
    let tensor = |name: &str, datatype, shape| TensorSpec { name: name.into(), datatype, shape };
    let symbol = |name: &str| Dim::Symbol(name.into());
    let declared = Signature {
        inputs: vec![tensor("jpeg", DataType::Uint8, vec![symbol("jpeg.0")])],
        outputs: vec![tensor("pixels", DataType::Fp32, vec![symbol("N"), Dim::Fixed(64)])],
    };
    let path = "decode.py".to_owned();
    assert_eq!(read.model, ModelSource::File { path, declared: Some(declared) });
    let (before, _) = PROGRAM.split_once("    inputs").unwrap();
    let digest = Digest::of(b"program");
    let kept = before.replace("file: decode.py", &format!("digest: {digest}"));
    let read = parse(&kept).unwrap().remove(0).function().unwrap();
    assert_eq!((read.model, read.spec.processes), (ModelSource::Cluster(digest), 2));
}

#[test]
fn each_refusal_of_a_program_names_the_correction() {
    for (from, to, says) in [
        ("runtime: process", "runtime: onnx", "has model: {file: FILE}, and no program"),
        ("runtime: process", "runtime: wasm", "\"onnx\" and \"process\""),
        ("  program:", "  model: {file: x}\n  program:", "and no model"),
        ("file: decode.py", "file: ''", "name the program's file"),
        ("    file: decode.py\n", "", "a program has a file, inputs and outputs, or the digest"),
        (
            "    inputs: [{name: jpeg, datatype: UINT8, shape: [-1]}]\n",
            "",
            "write program: {file: FILE, inputs:",
        ),
        ("file: decode.py", "digest: sha256:1", "leave them out, or name the program's file"),
        ("file: decode.py", "digest: sha256:1\n    file: decode.py", "a program has a file, inputs"),
        ("processes: 2", "processes: 0", "a number from 1 to 64"),
        ("UINT8", "BYTE", "such as FP32"),
        ("[-1]", "[0]", "write a number from 1"),
        ("[-1]", "[-2]", "write a number from 1"),
        ("  program:", "  batching: {maxSize: 8}\n  program:", "only to functions with runtime onnx"),
    ] {
        let message = parse(&PROGRAM.replace(from, to)).unwrap_err().to_string();
        assert!(message.contains(says), "{from:?} -> {to:?}: {message}");
    }
}

#[test]
fn a_repeated_name_and_an_empty_file_are_refused() {
    let twice = format!("{GOOD}---\n{GOOD}");
    let at = SourcePosition { document: 2, item: None };
    let subject = ManifestSubject::Model(FunctionKey {
        tenant: TenantName::default(),
        name: FunctionName::new("digits").unwrap(),
    });
    assert_eq!(parse(&twice), Err(ManifestError::Duplicate { at, subject }));
    assert!(parse("").is_err());
}

#[test]
fn several_documents_are_parsed() {
    let two = format!("{GOOD}---\n{}", GOOD.replace("digits", "letters"));
    assert_eq!(parse(&two).unwrap().len(), 2);
}

const WORKFLOW: &str = "\
apiVersion: millrace/v1
kind: Workflow
metadata: {name: traffic}
spec:
  slo: {deadline: 500ms}
  timeout: 10s
  inputs: [frame]
  steps:
    - name: detect
      function: detector
      inputs: {image: input.frame}
    - name: people
      workflow: person
      inputs: {crop: detect.crops}
      each: crop
      when: detect.found
      deadline: 40ms
  outputs: {people: people.scores}
";

#[test]
fn every_field_of_a_workflow_is_parsed() {
    let name = |name: &str| FunctionName::new(name).unwrap();
    let source = |text: &str| text.parse::<TensorSource>().unwrap();
    let step = |step, run, input: &str, from| Step {
        name: name(step),
        run,
        inputs: [(input.to_owned(), source(from))].into(),
        each: None,
        when: None,
        deadline: None,
    };
    let people = Step {
        each: Some("crop".into()),
        when: Some(source("detect.found")),
        deadline: Some(Duration::from_millis(40)),
        ..step("people", StepTarget::Workflow(name("person")), "crop", "detect.crops")
    };
    let expected = WorkflowSpec {
        slo: Some(Slo { deadline: Duration::from_millis(500), percentile: DEFAULT_PERCENTILE }),
        timeout: Duration::from_secs(10),
        ..WorkflowSpec::new(
            FunctionKey { tenant: TenantName::default(), name: name("traffic") },
            vec!["frame".into()],
            vec![step("detect", StepTarget::Function(name("detector")), "image", "input.frame"), people],
            vec![WorkflowOutput { name: "people".into(), from: source("people.scores") }],
        )
    };
    let both = parse(&format!("{GOOD}---\n{WORKFLOW}")).unwrap();
    assert_eq!(both[1], Manifest::Workflow(expected));
}

#[test]
fn each_refusal_of_a_workflow_names_the_correction() {
    for (from, to, says) in [
        ("function: detector", "functoin: detector", "functoin"),
        ("      function: detector\n", "", "write function: NAME or workflow: NAME"),
        ("function: detector", "function: d\n      workflow: e", "not both"),
        ("input.frame", "frame", "write input.NAME"),
        ("detect.crops", "detector.crops", "there is no step \"detector\""),
        ("each: crop", "each: crops", "name one of crop"),
        ("500ms", "0s", "slo.deadline is zero"),
        ("kind: Workflow", "kind: Function", "inputs"),
        ("name: people", "name: People", "step name"),
    ] {
        assert!(WORKFLOW.contains(from), "{from}");
        let message = parse(&WORKFLOW.replace(from, to)).unwrap_err().to_string();
        assert!(message.contains(says), "{from:?} -> {to:?}: {message}");
    }
    let spec_first = "apiVersion: millrace/v1\nspec: {}\nkind: Function\n";
    assert!(parse(spec_first).unwrap_err().to_string().contains("kind is missing before spec"));
}

/// The tenant has the name of the function, which is allowed.
#[test]
fn a_list_is_replaced_by_its_items_and_server_fields_are_ignored() {
    let list = "\
apiVersion: millrace/v1
kind: List
items:
- apiVersion: millrace/v1
  kind: Tenant
  metadata: {name: digits, resourceVersion: 7, updatedAt: '2026-11-22T10:00:00Z', updatedBy: alice}
  spec: {}
  status: {functions: 2}
- apiVersion: millrace/v1
  kind: Policy
  metadata: {name: cluster, generation: 3, createdAt: null}
  spec: {dispatch: torpor}
  status: {nodes: [{node: w, obeys: true}]}
";
    let read = parse(&format!("{GOOD}---\n{list}")).unwrap();
    let torpor = PolicySpec { dispatch: Some(DispatchName::Torpor), ..PolicySpec::NONE };
    let tenant = TenantManifest { name: TenantName::new("digits").unwrap(), quota: Quota::NONE };
    assert_eq!(read[1..], [Manifest::Tenant(tenant), Manifest::Policy(torpor)]);
    for (from, to, says) in [
        ("torpor}", "none}", "document 1, item 2, spec.dispatch"),
        ("  kind: Policy", "  kind: Pod", "document 1, item 2: kind \"Pod\" is not known"),
        ("kind: List\nitems:", "kind: List\nspec: {}\nitems:", "spec"),
        ("kind: List\nitems:", "items:", "kind is missing before items"),
        ("kind: List\nitems:", "kind: Function\nitems:", "items"),
        ("  spec: {}\n", "  spec: {}\n  stats: {}\n", "stats"),
    ] {
        assert!(list.contains(from), "{from}");
        let message = parse(&list.replace(from, to)).unwrap_err().to_string();
        assert!(message.contains(says), "{from:?} -> {to:?}: {message}");
    }
    let inner = "{apiVersion: millrace/v1, kind: List, items: []}";
    let nested = format!("apiVersion: millrace/v1\nkind: List\nitems: [{inner}]\n");
    assert!(parse(&nested).unwrap_err().to_string().contains("item 1, items: is a list in a list"));
    assert_eq!(parse(inner), Err(ManifestError::Empty));
}
