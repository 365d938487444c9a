//! The output of `get` for functions and workflows, applied again.

use millrace_model::synth;

use crate::running::RunningCluster;

const MANIFESTS: &str = "\
apiVersion: millrace/v1
kind: Function
metadata: {name: net, labels: {of: vision}}
spec:
  model: {file: net.onnx}
  slo: {deadline: 2s}
  timeout: 20s
  priority: 2
  residency: {minWarm: 1}
---
apiVersion: millrace/v1
kind: Function
metadata: {name: program}
spec:
  runtime: process
  program:
    file: program.sh
    inputs: [{name: x, datatype: FP32, shape: [-1]}]
    outputs: [{name: y, datatype: FP32, shape: [-1]}]
---
apiVersion: millrace/v1
kind: Workflow
metadata: {name: one}
spec:
  inputs: [x]
  steps: [{name: only, function: net, inputs: {x: input.x}}]
  outputs: {y: only.y}
";

#[test]
fn printed_functions_and_workflows_can_be_applied_again_without_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let first =
        [("net.onnx", synth::mlp()), ("program.sh", b"#!/bin/sh\n".to_vec()), ("all.yaml", MANIFESTS.into())];
    for (name, content) in &first {
        std::fs::write(path(name), content).unwrap();
    }
    let up = RunningCluster::ephemeral(&["--allow", "processes"]);
    // The program exits at once, so the function never becomes ready.
    up.ok(&["apply", "--no-wait", "-f", &path("all.yaml")]);
    for (name, _) in &first {
        std::fs::remove_file(path(name)).unwrap();
    }
    let apply = |text: &str, more: &[&str]| {
        std::fs::write(path("shown.yaml"), text).unwrap();
        up.ok(&[&["apply", "-f", &path("shown.yaml")], more].concat())
    };

    let functions = up.ok(&["get", "functions", "-o", "yaml"]);
    let workflows = up.ok(&["get", "workflows", "-o", "yaml"]);
    let unchanged = "function/net unchanged\nfunction/program unchanged\nworkflow/one unchanged\n";
    assert_eq!(apply(&format!("{functions}---\n{workflows}"), &["--no-wait"]), unchanged);
    let slower = functions.replace("timeout: 20s", "timeout: 30s");
    assert_eq!(apply(&slower, &["--no-wait"]), "function/net configured\nfunction/program unchanged\n");

    let net = up.ok(&["get", "function", "net", "-o", "yaml"]);
    assert_eq!(apply(&net.replace("  name: net", "  name: copy"), &[]), "function/copy created\n");
    std::fs::write(path("x.bin"), [0_u8; 256]).unwrap();
    let x = format!("x={}:FP32:1x64", path("x.bin"));
    let answers = ["net", "copy"].map(|name| up.json(&["invoke", name, "--raw", &x])["outputs"].clone());
    assert!(answers[0].is_array() && answers[0] == answers[1], "{answers:?}");
}
