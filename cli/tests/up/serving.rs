//! Publishing and serving functions through the binary, including refusals.

use std::path::{Path, PathBuf};

use millrace_model::synth;
use serde_json::Value;

use crate::running::{RunningCluster, eventually, repository};

/// A folder with a manifest for each model in it.
struct Models(tempfile::TempDir);

impl Models {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a model and a manifest. Returns the manifest's path.
    fn function(&self, name: &str, model: &[u8]) -> String {
        self.manifest(name, &format!("{name}.onnx"), model, "")
    }

    fn manifest(&self, name: &str, file: &str, model: &[u8], more: &str) -> String {
        std::fs::write(self.path(file), model).unwrap();
        let text = format!(
            "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: {name}}}\n\
             spec:\n  model: {{file: {file}}}\n{more}"
        );
        let path = self.path(&format!("{name}.yaml"));
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

/// Lists all files below a folder, to check that a refusal left none.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

#[test]
fn a_function_is_published_invoked_listed_and_deleted() {
    let up = RunningCluster::ephemeral(&[]);
    assert_eq!(up.apply_digits(), "function/digits created\n");
    assert_eq!(up.apply_digits(), "function/digits unchanged\n");
    let image = repository("examples/digits/images/digit-3.png");
    let answer = up.ok(&["invoke", "digits", "--image", &image, "--request-id", "mine"]);
    assert!(answer.contains("digit-3.png: 3 ("), "{answer}");
    assert!(answer.contains("request mine") && answer.contains("= queue"), "{answer}");
    // The state of GPUs may lag a moment behind.
    eventually("ps lists the model", || up.json(&["ps"])[0]["functions"][0] == "default/digits@1");
    up.ok(&["delete", "function", "digits"]);
    assert_eq!(up.json(&["get", "functions"]), Value::Array(vec![]));
    let stderr = up.refused(3, &["invoke", "digits", "--image", &image]);
    assert!(stderr.contains("FUNCTION_NOT_FOUND"), "{stderr}");
}

#[test]
fn requests_are_billed_even_after_their_function_is_deleted() {
    let up = RunningCluster::ephemeral(&[]);
    up.apply_digits();
    let image = repository("examples/digits/images/digit-3.png");
    for _ in 0..3 {
        up.ok(&["invoke", "digits", "--image", &image]);
    }
    let bill = || up.json(&["billing"])["items"][0].clone();
    eventually("three requests are billed", || bill()["requests"] == 3);
    let owed = bill();
    let number = |field: &str| owed[field].as_f64().unwrap();
    let busy = number("busySeconds");
    let idle = number("idleSeconds");
    let charge = number("chargeGpuSeconds");
    assert!(busy >= 0.003, "at least a millisecond per request: {owed}");
    assert!((charge - (busy + 0.1 * idle)).abs() < 1e-9, "{owed}");
    up.ok(&["delete", "function", "digits"]);
    let left = bill();
    assert_eq!(
        (&left["function"], &left["deleted"], &left["requests"]),
        (&"digits".into(), &true.into(), &3.into())
    );
    assert!(left["chargeGpuSeconds"].as_f64().unwrap() >= charge, "{left}");
    let table = up.ok(&["billing", "--price-per-gpu-hour", "2.49"]);
    assert!(table.starts_with("TENANT    FUNCTION ") && table.contains("digits (deleted)"), "{table}");
}

#[test]
fn a_tenant_is_served_within_its_caps_and_refused_if_no_model_fits_them() {
    let up = RunningCluster::ephemeral(&["--gpus", "2", "--gpu-memory", "64MiB"]);
    up.apply_digits();
    let image = repository("examples/digits/images/digit-3.png");
    up.ok(&["tenant", "set", "default", "--gpus-max", "1", "--gpu-share", "0.5"]);
    assert!(up.ok(&["invoke", "digits", "--image", &image]).contains("digit-3.png: 3 ("));
    let tenants = up.json(&["get", "tenants"]);
    let shown = (&tenants[0]["spec"]["gpusMax"], &tenants[0]["status"]["functions"]);
    assert_eq!(shown, (&1.into(), &1.into()), "{tenants}");
    // The share is less than any model needs. The worker reports that as soon as it receives the
    // cap.
    up.ok(&["tenant", "set", "default", "--memory-share", "0.000001"]);
    eventually("the share of the memory holds", || {
        let refused = up.run(&["invoke", "digits", "--image", &image]);
        let told = String::from_utf8_lossy(&refused.stderr);
        told.contains("NO_GPU_MEMORY") && told.contains("millrace get tenants")
    });
    up.ok(&["tenant", "set", "default", "--no-caps"]);
    eventually("no cap applies any longer", || {
        up.run(&["invoke", "digits", "--image", &image]).status.success()
    });
}

#[test]
fn models_that_do_not_fit_together_are_swapped_on_one_gpu() {
    let up = RunningCluster::ephemeral(&["--gpus", "1", "--gpu-memory", "16MiB"]);
    let models = Models::new();
    for name in ["a", "b", "c"] {
        up.ok(&["apply", "-f", &models.function(name, &synth::transformer_block())]);
    }
    // The functions have the same file, and so share one artifact and one resident model.
    let block = up.json(&["describe", "function", "a"]);
    assert!(block.to_string().contains("sha256:"), "{block}");
    for (name, layers) in [("x", 2), ("y", 3), ("z", 4)] {
        let encoder = synth::Encoder { layers, ..synth::Encoder::TINY };
        up.ok(&["apply", "-f", &models.function(name, &synth::bert_like(encoder))]);
    }
    let body = r#"{"input_ids": [[1, 2, 3, 4]]}"#;
    let ask = |name: &str| up.ok(&["invoke", name, "--json", body]).lines().next().map(str::to_owned);
    let first: Vec<_> = ["x", "y", "z"].map(ask).into();
    for _ in 0..3 {
        let again: Vec<_> = ["x", "y", "z"].map(ask).into();
        assert_eq!(again, first);
    }
}

#[test]
fn every_unservable_model_is_refused_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let up = RunningCluster::in_dir(dir.path());
    let models = Models::new();
    let mlp = synth::mlp();
    let artifacts = || -> Vec<_> {
        files(dir.path()).into_iter().filter(|path| path.to_string_lossy().contains("artifacts")).collect()
    };
    let before = artifacts();
    let refusals = [
        ("notonnx", b"# a readme, no model\n".to_vec(), "ONNX"),
        ("truncated", mlp[..mlp.len() / 2].to_vec(), "cut short"),
        ("empty", Vec::new(), "ONNX"),
        // Replace the operator's type, not the node's name.
        ("strange", replace(&mlp, b"\"\x04Relu", b"\"\x04Rolu"), "Rolu"),
    ];
    for (name, model, says) in refusals {
        let stderr = up.refused(2, &["apply", "-f", &models.function(name, &model)]);
        assert!(stderr.contains(says), "{name}: {stderr}");
    }
    assert_eq!(up.json(&["get", "functions"]), Value::Array(vec![]));
    assert_eq!(artifacts(), before);
}

#[test]
fn a_model_larger_than_every_gpu_is_refused_with_both_sizes() {
    let up = RunningCluster::ephemeral(&["--gpu-memory", "4MiB"]);
    let models = Models::new();
    let stderr = up.refused(1, &["apply", "-f", &models.function("big", &synth::tiny_cnn())]);
    assert!(stderr.contains("MODEL_TOO_LARGE") && stderr.contains("4.0 MiB"), "{stderr}");
    assert_eq!(up.json(&["get", "functions"]), Value::Array(vec![]));
}

#[test]
fn a_model_without_host_memory_reports_that_until_memory_is_free() {
    let up = RunningCluster::ephemeral(&["--gpus", "1", "--host-memory", "12MiB"]);
    let models = Models::new();
    up.ok(&["apply", "-f", &models.function("first", &synth::tiny_cnn())]);
    let second = models.function("second", &synth::transformer_block());
    let stderr = up.refused(5, &["apply", "-f", &second, "--wait=1s"]);
    assert!(stderr.contains("of host memory") && stderr.contains("--host-memory"), "{stderr}");
    // The request is refused at once with the reason.
    let x = format!("{:?}", [[[0.5; 384]]]);
    let stderr = up.refused(1, &["invoke", "second", "--json", &x]);
    assert!(stderr.contains("FUNCTION_NOT_READY") && stderr.contains("of host memory"), "{stderr}");
    // A model that fits beside the first is served. The second is served once the first is deleted.
    up.ok(&["apply", "-f", &models.function("third", &synth::mlp())]);
    up.ok(&["delete", "function/first"]);
    up.ok(&["apply", "-f", &second]);
    up.ok(&["invoke", "second", "--json", &x]);
}

#[test]
fn models_beyond_host_memory_take_turns_and_cold_starts_are_reported_apart_from_swaps() {
    let up =
        RunningCluster::ephemeral(&["--gpus", "1", "--host-memory", "12MiB", "--model-storage", "64MiB"]);
    let models = Models::new();
    up.ok(&["apply", "-f", &models.function("first", &synth::tiny_cnn())]);
    up.ok(&["apply", "-f", &models.function("second", &synth::transformer_block())]);
    let x = format!("{:?}", [[[0.5; 384]]]);
    let picture = models.path("x.json");
    std::fs::write(&picture, format!("{:?}", [[[[0.5; 32]; 32]; 3]])).unwrap();
    let picture = format!("@{}", picture.display());
    // Alternating requests cause a cold start, whichever model is in memory.
    let mut told = String::new();
    for _ in 0..2 {
        told += &up.ok(&["invoke", "first", "--json", &picture]);
        told += &up.ok(&["invoke", "second", "--json", &x]);
    }
    assert!(told.contains("cold start ") && told.contains("swap "), "{told}");
    eventually("the node reports its cold starts", || {
        up.json(&["get", "nodes"])[0]["coldStarts"].as_u64() > Some(1)
    });
    eventually("the model is on the disk", || {
        up.ok(&["describe", "function/first"]).contains("a cold start")
    });
    // The model is larger than the whole host memory, so none is evicted for it, and the refusal
    // has the reason.
    let third = models.function("third", &synth::resnet50_like());
    let stderr = up.refused(5, &["apply", "-f", &third, "--wait=1s"]);
    assert!(stderr.contains("host memory"), "{stderr}");
}

#[test]
fn an_objective_below_the_run_time_is_reported_with_the_measured_time() {
    let up = RunningCluster::ephemeral(&["--gpus", "1"]);
    let models = Models::new();
    let slo = "  slo: {deadline: 1ms, percentile: 0.5}\n";
    up.ok(&["apply", "-f", &models.manifest("slow", "slow.onnx", &synth::resnet50_like(), slo)]);
    assert!(up.ok(&["describe", "function/slow"]).contains("NoRequests"));
    let picture = models.path("x.json");
    std::fs::write(&picture, format!("{:?}", vec![vec![vec![vec![0.5; 224]; 224]; 3]; 1])).unwrap();
    let picture = format!("@{}", picture.display());
    up.ok(&["invoke", "slow", "--json", &picture]);
    // The counts arrive with the worker's next checkpoint.
    eventually("the missed objective is reported with its reason", || {
        let told = up.ok(&["describe", "function/slow"]);
        told.contains("RunsTooLong") && told.contains("0 of 1 requests") && told.contains("slo.deadline")
    });
}

#[test]
fn the_load_generator_measures_both_protocols() {
    let up = RunningCluster::ephemeral(&[]);
    up.ok(&["apply", "-f", &Models::new().function("mlp", &synth::mlp())]);
    for protocol in ["grpc", "http"] {
        let url = format!("{protocol}://{}", up.client);
        let report = up.json(&[
            "load",
            "--url",
            &url,
            "--model",
            "mlp",
            "--requests",
            "200",
            "--concurrency",
            "4",
            "--warm-up",
            "0s",
        ]);
        assert_eq!((&report["answered"], &report["failed"]), (&200.into(), &0.into()), "{report}");
        assert!(report["server_us"]["run"]["p50"].as_f64().unwrap() > 0.0, "{report}");
    }
}

/// Replaces bytes by other bytes of the same length.
fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from).expect("the model has it");
    let mut replaced = bytes.to_vec();
    replaced[at..at + to.len()].copy_from_slice(to);
    replaced
}
