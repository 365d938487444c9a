//! The command lines that the binary refuses before it connects to a server.

use millrace_types::manifest::ModelSource;

use crate::support::{Sandbox, manifest};

/// Runs a line that must be refused as bad usage, with these texts in the message.
async fn refused(sandbox: &Sandbox, line: &str, says: &[&str]) {
    let run = sandbox.run(line).await;
    assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{line}: {run:?}");
    assert!(run.stderr.starts_with("error: "), "{line}: {}", run.stderr);
    for text in says {
        assert!(run.stderr.contains(text), "{line}: {text:?} is not in {}", run.stderr);
    }
}

#[tokio::test]
async fn each_malformed_manifest_is_refused_with_advice() {
    let sandbox = Sandbox::new();
    sandbox.write_function("good");
    let good = manifest("digits", "mlp.onnx");
    let with_slo = |slo: &str| good.replace("spec: {", &format!("spec: {{slo: {slo}, "));
    for (name, text, says) in [
        ("unknown-key", good.replace("spec:", "sepc:"), "sepc"),
        ("bad-name", manifest("Digits", "mlp.onnx"), "lower-case"),
        ("twice", format!("{good}---\n{good}"), "already"),
        ("percentile", with_slo("{deadline: 50ms, percentile: 1.0}"), "strictly between 0 and 1"),
        ("deadline", with_slo("{deadline: 0ms}"), "deadline is zero"),
        ("missing-model", manifest("digits", "none.onnx"), "relative to the manifest"),
        ("empty", String::new(), "apiVersion"),
    ] {
        let file = format!("{name}.yaml");
        sandbox.write(&file, text);
        // The manifest is beside a valid one: neither may be sent.
        refused(&sandbox, &format!("apply -f good.yaml -f {file}"), &[&file, says]).await;
    }
}

#[tokio::test]
async fn each_malformed_model_is_refused_with_its_file() {
    let sandbox = Sandbox::new();
    let whole = millrace_model::synth::mlp();
    for (name, content, says) in [
        ("text.onnx", b"not a model".as_slice(), "not an ONNX model"),
        ("cut.onnx", &whole[..whole.len() / 2], "cut short"),
        ("empty.onnx", b"", ""),
    ] {
        sandbox.write(name, content);
        sandbox.write("f.yaml", manifest("digits", name));
        refused(&sandbox, "apply -f f.yaml", &[name, says]).await;
    }
}

#[tokio::test]
async fn the_same_function_in_two_files_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.write_function("a");
    sandbox.write("b.yaml", manifest("a", "mlp.onnx"));
    refused(&sandbox, "apply -f a.yaml -f b.yaml", &["b.yaml", "a.yaml", "hint: rename"]).await;
}

#[tokio::test]
async fn a_manifest_is_read_from_standard_input() {
    let sandbox = Sandbox::new();
    let run = sandbox.run_with(&["apply", "-f", "-"], &manifest("a", "none.onnx")).await;
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("standard input: function a: cannot read none.onnx"), "{}", run.stderr);
}

#[tokio::test]
async fn an_unreachable_cluster_has_its_own_exit_code_and_a_hint() {
    let sandbox = Sandbox::new();
    // Port 1 is reserved, so no process listens on it.
    for verb in ["ps", "get functions", "describe function x", "invoke x --json [1]", "version", "load x"] {
        let run = sandbox.run(&format!("{verb} --endpoint 127.0.0.1:1")).await;
        assert_eq!(run.code, 4, "{verb}: {run:?}");
        assert!(run.stderr.contains("error: cannot reach 127.0.0.1:1: "), "{verb}: {}", run.stderr);
        assert!(
            run.stderr.contains("hint: start a cluster here with 'millrace up'"),
            "{verb}: {}",
            run.stderr
        );
    }
    let run = sandbox.run("load http://127.0.0.1:1 --model x").await;
    assert_eq!(run.code, 4, "{run:?}");
}

#[tokio::test]
async fn malformed_and_unknown_settings_are_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("bad.toml", "endpiont = \"a:1\"");
    refused(&sandbox, "ps --config bad.toml", &["endpiont", "bad.toml"]).await;
    refused(&sandbox, "ps --config none.toml", &["the settings file none.toml does not exist"]).await;
    refused(&sandbox, "ps --log a=b=c", &["--log"]).await;
    refused(&sandbox, "ps --endpoint nowhere", &["write host:port"]).await;
    refused(&sandbox, "ps --tenant Bad", &["lower-case"]).await;
    refused(&sandbox, "ps -o csv", &["possible values: table, wide, json, yaml"]).await;
}

#[tokio::test]
async fn the_default_settings_file_is_read() {
    let sandbox = Sandbox::new();
    std::fs::create_dir_all(sandbox.path().join(".config/millrace")).unwrap();
    sandbox.write(".config/millrace/config.toml", "endpoints = [\"127.0.0.1:1\", \"127.0.0.1:2\"]\n");
    let run = sandbox.run("ps").await;
    assert!(run.stderr.contains("cannot reach 127.0.0.1:1, 127.0.0.1:2: "), "{}", run.stderr);
}

#[tokio::test]
async fn help_and_completions_need_no_cluster() {
    let sandbox = Sandbox::new();
    let help = sandbox.run("--help").await;
    assert_eq!(help.code, 0);
    assert!(help.stdout.contains("Exit codes:") && help.stdout.contains("  4  no server could be reached"));
    assert!(!help.stdout.contains("executor "), "executors are hidden, because only workers start them");
    for shell in ["bash", "zsh", "fish"] {
        let script = sandbox.run(&format!("completions {shell}")).await;
        assert_eq!(script.code, 0);
        assert!(script.stdout.contains("millrace") && script.stdout.contains("invoke"));
    }
    assert_eq!(
        sandbox.run("version --client").await.stdout,
        format!("client   {}\n", env!("CARGO_PKG_VERSION"))
    );
}

#[tokio::test]
async fn synth_writes_a_model_and_a_manifest_that_apply_accepts() {
    let sandbox = Sandbox::new();
    let run = sandbox.run("synth bert --layers 1 --hidden 32 --heads 2 --inner 32 --vocabulary 50 --positions 8 --out b.onnx --function").await;
    assert_eq!(run.code, 0, "{run:?}");
    let read = millrace_types::manifest::parse(&run.stdout).unwrap().remove(0).function().unwrap();
    let ModelSource::File { path, .. } = read.model else { panic!("{read:?}") };
    let file = std::fs::read(sandbox.path().join(path)).unwrap();
    let model = millrace_model::compile(&file.into()).unwrap();
    assert_eq!(model.summary.inputs[0].name, "input_ids");
    let heads = sandbox.run("synth bert --hidden 32 --heads 3").await;
    assert_eq!(heads.code, 2, "{heads:?}");
}

#[tokio::test]
async fn a_closed_output_pipe_causes_no_error_message() {
    let sandbox = Sandbox::new();
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_millrace"))
        .args(["completions", "bash"])
        .env_clear()
        .env("HOME", sandbox.path())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().await.unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[tokio::test]
async fn slices_are_planned_without_a_server() {
    let sandbox = Sandbox::new();
    sandbox.write("pods.yaml", include_str!("../../../examples/slices/pods.yaml"));
    let run = sandbox.run("slices plan -f pods.yaml").await;
    assert_eq!(run.code, 0, "{run:?}");
    for text in [
        "Dry run of the token rule: 2 of 2 GPUs used, 9 of 9 slices placed",
        "Maximal rectangles",
        "resnet/2",
    ] {
        assert!(run.stdout.contains(text), "{text:?} is not in {}", run.stdout);
    }
    let run = sandbox.run("slices plan -f pods.yaml -o json").await;
    let plan: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!((run.code, plan["dryRun"]["gpusUsed"].as_u64()), (0, Some(2)));
}

#[tokio::test]
async fn a_malformed_plan_of_slices_is_refused_with_its_line_and_field() {
    let sandbox = Sandbox::new();
    sandbox.write(
        "pods.yaml",
        "gpus: {count: 1, memory: 16GiB}\norders:\n- {name: a, sm: 120, quotaRequest: 0.3, memory: 1GiB}\n",
    );
    refused(
        &sandbox,
        "slices plan -f pods.yaml",
        &["pods.yaml: order a: line 3: sm: \"120\" is not a share"],
    )
    .await;
    refused(&sandbox, "slices plan -f none.yaml", &["none.yaml: cannot read the file"]).await;
}
