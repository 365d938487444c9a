//! Unmodified clients of other projects, against the whole server.

use std::process::Command;

use tempfile::tempdir;

use crate::running::{RunningCluster, repository};

/// Returns the interpreter of `OIP_CLIENTS_PYTHON`, or the machine's own.
fn python() -> String {
    std::env::var("OIP_CLIENTS_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

/// Runs the scripts whose Python modules are installed.
fn pass(up: &RunningCluster, model: &str, scripts: &[(&str, &str)]) {
    for (script, module) in scripts {
        let has = Command::new(python()).args(["-c", &format!("import {module}")]).output();
        if !has.is_ok_and(|output| output.status.success()) {
            eprintln!("SKIPPED {script}: {} cannot import {module}; see tests/python/setup.sh", python());
            continue;
        }
        let file = repository(&format!("gateway/tests/python/{script}.py"));
        let output = Command::new(python()).args([&file, &up.client, "--model", model]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {said}");
    }
}

#[test]
fn tritonclient_and_kserve_work_unmodified() {
    let up = RunningCluster::ephemeral(&[]);
    up.apply_digits();
    let scripts = [
        ("tritonclient_grpc", "tritonclient.grpc"),
        ("tritonclient_http", "tritonclient.http"),
        ("kserve_sdk", "kserve"),
    ];
    pass(&up, "digits", &scripts);
}

/// Publishes the counter.
fn apply_counter(up: &RunningCluster) {
    let dir = tempdir().unwrap();
    let model = dir.path().join("counter.onnx");
    let manifest = dir.path().join("counter.yaml");
    let written = up.ok(&["synth", "counter", "--function", "--out", model.to_str().unwrap()]);
    std::fs::write(&manifest, written).unwrap();
    up.ok(&["apply", "-f", manifest.to_str().unwrap()]);
}

#[test]
fn invoke_keeps_state_in_sequences() {
    let up = RunningCluster::ephemeral(&["--keep-spans", "1000"]);
    apply_counter(&up);
    let counted = |more: &[&str]| {
        let words = ["invoke", "counter", "--json", "[[1, 1, 1, 1]]", "--sequence", "42"];
        up.json(&[words.as_slice(), more].concat())["outputs"][0]["data"][0].as_f64()
    };
    assert_eq!(counted(&["--sequence-start", "--request-id", "first"]), Some(2.0));
    let trace = up.json(&["trace", "first"]);
    let spans = trace["spans"].as_array().unwrap();
    let named = |name: &str| spans.iter().find(|span| span["name"] == name);
    assert_eq!(named("turn").unwrap()["parent"], named("worker.invoke").unwrap()["id"], "{trace}");
    assert_eq!((counted(&[]), counted(&["--sequence-end"])), (Some(3.0), Some(3.5)));
    let over = up.run(&["invoke", "counter", "--json", "[[1, 1, 1, 1]]", "--sequence", "42"]);
    assert!(String::from_utf8_lossy(&over.stderr).contains("SEQUENCE_NOT_FOUND"), "{over:?}");
}

#[test]
fn tritonclient_keeps_state_in_sequences() {
    let up = RunningCluster::ephemeral(&[]);
    apply_counter(&up);
    let shown = up.ok(&["describe", "function", "counter"]);
    assert!(shown.contains("Sequences:   h_out -> h_in kept for up to 64 sequences"), "{shown}");
    assert_eq!(up.json(&["describe", "function", "counter"])["spec"]["sequences"]["max"], 64);
    pass(&up, "counter", &[("tritonclient_sequences", "tritonclient.grpc, tritonclient.http")]);
}
