//! Workflows on real workers: data that passes between workers, and workers that are killed.

use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::running::{RunningCluster, eventually, millrace};

/// A number of rows for which a worker stores the output as an object.
const ROWS: usize = 512;

/// Writes a separate perceptron for each function, and the workflow of both.
fn folder(replicas: u32) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut text = String::new();
    for (name, seed) in [("first", "1"), ("second", "2")] {
        let file = folder.path().join(format!("{name}.onnx"));
        let made = millrace().args(["synth", "mlp", "--seed", seed, "--out"]).arg(&file).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        text += &format!(
            "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: {name}}}\nspec: {{replicas: {replicas}, model: {{file: {name}.onnx}}}}\n---\n"
        );
    }
    text += "\
apiVersion: millrace/v1
kind: Workflow
metadata: {name: both}
spec:
  inputs: [x]
  steps:
    - {name: one, function: first, inputs: {x: input.x}}
    - {name: two, function: second, inputs: {x: one.y}}
  outputs: {y: two.y}
";
    std::fs::write(folder.path().join("both.yaml"), &text).unwrap();
    write_rows(folder.path(), ROWS);
    folder
}

fn write_rows(folder: &Path, rows: usize) {
    let rows: Vec<u8> = (0..rows * 64).flat_map(|at| ((at % 97) as f32 / 97.0 - 0.5).to_le_bytes()).collect();
    std::fs::write(folder.join("x.bin"), rows).unwrap();
}

fn invoke(up: &RunningCluster, name: &str, folder: &Path) -> Value {
    invoke_rows(up, name, folder, ROWS)
}

fn invoke_rows(up: &RunningCluster, name: &str, folder: &Path, rows: usize) -> Value {
    let raw = format!("x={}:FP32:{rows}x64", folder.join("x.bin").display());
    up.json(&["invoke", name, "--raw", &raw])
}

#[test]
fn an_output_of_one_worker_is_fetched_directly_by_the_other() {
    let up = RunningCluster::group(None, 2, &["--keep-spans", "1000"]);
    up.ok(&["cluster", "wait", "--voters", "3", "--nodes", "2", "--timeout", "30s"]);
    let folder = folder(1);
    // Apply and use the functions before the workflow. A function that ran stays on its node;
    // applied with the workflow, both functions would be placed on the same node.
    let both = std::fs::read_to_string(folder.path().join("both.yaml")).unwrap();
    let (functions, _) = both.rsplit_once("---\n").unwrap();
    let file = folder.path().join("functions.yaml");
    std::fs::write(&file, functions).unwrap();
    up.ok(&["apply", "-f", file.to_str().unwrap()]);
    std::fs::remove_file(&file).unwrap();
    invoke(&up, "first", folder.path());
    invoke(&up, "second", folder.path());
    eventually("the bills show that both functions ran", || {
        let bills = up.json(&["billing"]);
        let ran = |bill: &&Value| bill["requests"].as_u64() > Some(0);
        bills["items"].as_array().unwrap().iter().filter(ran).count() == 2
    });
    up.ok(&["apply", "-f", folder.path().to_str().unwrap()]);
    let nodes = up.json(&["get", "nodes"]);
    let placed: Vec<_> = nodes.as_array().unwrap().iter().map(|node| node["placements"].clone()).collect();
    assert_eq!(placed, [1, 1], "each node has one of the functions");

    let answer = invoke(&up, "both", folder.path());
    // Run the same steps by hand: the first function's output is the second function's input.
    let once = invoke(&up, "first", folder.path());
    let values = once["outputs"][0]["data"].as_array().unwrap();
    let bytes: Vec<u8> = values.iter().flat_map(|it| (it.as_f64().unwrap() as f32).to_le_bytes()).collect();
    std::fs::write(folder.path().join("x.bin"), bytes).unwrap();
    let by_hand = invoke(&up, "second", folder.path());
    assert_eq!(answer["outputs"][0]["shape"], by_hand["outputs"][0]["shape"]);
    assert_eq!(answer["outputs"][0]["data"], by_hand["outputs"][0]["data"]);

    let id = answer["id"].as_str().unwrap();
    let trace = up.json(&["trace", id]);
    let fetches: Vec<_> =
        trace["spans"].as_array().unwrap().iter().filter(|span| span["name"] == "fetch").collect();
    let [fetch] = &fetches[..] else { panic!("one fetch: {trace}") };
    assert_eq!(fetch["attributes"]["millrace.fetch.method"], "inter-node");
    assert_eq!(fetch["attributes"]["millrace.bytes"], (ROWS * 64 * 4).to_string());
}

/// A step's output does not fit on its GPU: the trace shows the copy to host memory batch by batch.
#[test]
fn the_copy_of_an_output_to_host_memory_is_in_the_trace() {
    // A quarter of the GPU is for objects, which share a single block.
    let up = RunningCluster::ephemeral(&["--gpus", "1", "--gpu-memory", "8MiB", "--keep-spans", "1000"]);
    let folder = folder(1);
    up.ok(&["apply", "-f", folder.path().to_str().unwrap()]);
    let rows = 9_000;
    let bytes = (rows * 64 * 4).to_string();
    write_rows(folder.path(), rows);
    let answer = invoke_rows(&up, "both", folder.path(), rows);
    let trace = up.json(&["trace", answer["id"].as_str().unwrap()]);
    let spans = trace["spans"].as_array().unwrap();
    let of = |name: &str| spans.iter().filter(|span| span["name"] == name).collect::<Vec<_>>();
    let [keep] = of("keep")[..] else { panic!("one of two outputs passes to a step: {trace}") };
    let attributes = |span: &Value| {
        ["millrace.gpu", "millrace.link", "millrace.bytes"].map(|name| span["attributes"][name].clone())
    };
    assert_eq!(attributes(keep), [Value::from("0"), Value::Null, Value::from(bytes.as_str())]);
    let parent = spans.iter().find(|span| span["id"] == keep["parent"]).unwrap();
    assert_eq!(parent["name"], "worker.invoke");
    assert_eq!(parent["attributes"]["millrace.function"], "default/first");
    let copies: Vec<_> = of("copy").into_iter().filter(|copy| copy["parent"] == keep["id"]).collect();
    let [copy] = copies[..] else { panic!("one batch: {trace}") };
    assert_eq!(attributes(copy), [Value::Null, Value::from("0"), Value::from(bytes.as_str())]);
    // The response waits for the copy.
    let times = |span: &Value| (span["startMs"].as_f64().unwrap(), span["durationMs"].as_f64().unwrap());
    let (kept, keeping) = times(keep);
    let (began, took) = times(parent);
    assert!(kept >= began && kept + keeping <= began + took, "{trace}");
    assert!(times(copy).1 <= keeping, "{trace}");
}

#[test]
fn workflows_return_the_same_results_when_a_worker_is_killed_during_them() {
    let up = RunningCluster::group(None, 2, &[]);
    up.ok(&["cluster", "wait", "--voters", "3", "--nodes", "2", "--timeout", "30s"]);
    let folder = folder(2);
    up.ok(&["apply", "-f", folder.path().to_str().unwrap()]);
    eventually("both workers hold both", || {
        let nodes = up.json(&["get", "nodes"]);
        nodes.as_array().unwrap().iter().all(|node| node["hostTierBytes"].as_u64() > Some(40_000))
    });
    let before = invoke(&up, "both", folder.path())["outputs"].clone();
    std::thread::scope(|scope| {
        let asking: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    (0..10).map(|_| invoke(&up, "both", folder.path())["outputs"].clone()).collect::<Vec<_>>()
                })
            })
            .collect();
        // Kill the worker in the middle of the requests.
        invoke(&up, "both", folder.path());
        up.part("worker-1").signal(Signal::KILL);
        for answers in asking {
            assert!(answers.join().unwrap().iter().all(|answer| *answer == before));
        }
    });
    eventually("the end is reported", || up.said().contains("1 of 2 workers are left"));
}

#[test]
fn a_workflow_is_deleted_before_its_functions_by_its_manifest() {
    let up = RunningCluster::ephemeral(&[]);
    let folder = folder(1);
    let path = folder.path().to_str().unwrap();
    let created = |suffix: &str| {
        ["function/first", "function/second", "workflow/both"]
            .map(|title| format!("{title} created{suffix}\n"))
            .concat()
    };
    assert_eq!(up.ok(&["apply", "-f", path, "--dry-run"]), created(" (dry run)"));
    assert_eq!(up.ok(&["apply", "-f", path]), created(""));
    assert_eq!(up.ok(&["apply", "-f", path]).matches("unchanged").count(), 3);
    let pictures = tempfile::tempdir().unwrap();
    std::fs::write(pictures.path().join("cnn.onnx"), millrace_model::synth::tiny_cnn()).unwrap();
    let other = pictures.path().join("first.yaml");
    let text =
        "apiVersion: millrace/v1\nkind: Function\nmetadata: {name: first}\nspec: {model: {file: cnn.onnx}}\n";
    std::fs::write(&other, text).unwrap();
    let refused = up.refused(2, &["apply", "-f", other.to_str().unwrap()]);
    for says in ["first.yaml: function first: the stored workflow both", "delete workflow both"] {
        assert!(refused.contains(says), "{says}: {refused}");
    }
    let refused = up.refused(1, &["delete", "function/first"]);
    assert!(refused.contains("run by workflow both") && refused.contains("IN_USE"), "{refused}");
    let refused = up.refused(2, &["invoke", "both", "--json", "{\"x\": [[1, 2]]}"]);
    assert!(refused.contains("x: shape [1, 2] does not fit"), "{refused}");
    let said = up.ok(&["delete", "-f", path]);
    assert_eq!(said, "workflow/both deleted\nfunction/first deleted\nfunction/second deleted\n");
    let missing = up.refused(3, &["describe", "workflow/both"]);
    assert!(missing.contains("no workflow default/both"), "{missing}");
}
