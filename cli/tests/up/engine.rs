//! The engine of the executors. Tests that need the library of ONNX Runtime are skipped without
//! `ORT_DYLIB_PATH`.

use std::path::Path;

use crate::running::{RunningCluster, millrace, repository};

const VARIABLE: &str = "ORT_DYLIB_PATH";

#[test]
fn digits_are_served_by_onnx_runtime() {
    let Some(library) = std::env::var_os(VARIABLE) else {
        eprintln!("skipped: {VARIABLE} does not name a library of ONNX Runtime");
        return;
    };
    let variables = [(VARIABLE, Path::new(&library))];
    let up = RunningCluster::ephemeral_with(&["--engine", "ort", "--gpus", "1"], &variables);
    assert_eq!(up.apply_digits(), "function/digits created\n");
    for digit in [3, 7] {
        let image = repository(&format!("examples/digits/images/digit-{digit}.png"));
        let answer = up.ok(&["invoke", "digits", "--image", &image]);
        assert!(answer.contains(&format!("digit-{digit}.png: {digit} (")), "{answer}");
    }
    assert!(up.said().contains("engine=ort"), "{}", up.said());
}

#[test]
fn a_server_without_the_library_is_refused_before_it_starts() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    let data = ["--data-dir", dir.to_str().unwrap()];
    let hint = "hint: install the Python package onnxruntime (1.24 or newer) and set ORT_DYLIB_PATH to the \
                libonnxruntime.so in its folder capi, or start with --engine rten";
    let worker = ["worker", "--name", "w", "--controllers", "127.0.0.1:1"];
    for command in [&["up"][..], &["up", "--controllers", "3"], &worker] {
        for (path, fault) in [
            (None, "ORT_DYLIB_PATH is not set: set it to the path of libonnxruntime.so"),
            (Some("/no/such/library.so"), "there is no file /no/such/library.so"),
            (Some("/etc/hostname"), "/etc/hostname is no library of ONNX Runtime"),
        ] {
            let mut server = millrace();
            server.args(command).args(data).args(["--engine", "ort"]);
            server.envs(path.map(|path| (VARIABLE, path)));
            let output = server.output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            let error = format!("error: --engine ort: cannot use ONNX Runtime: {fault}");
            assert_eq!(said.lines().collect::<Vec<_>>(), [error.as_str(), hint], "{command:?}");
            assert_eq!(output.status.code(), Some(1), "{command:?}");
        }
    }
}

#[test]
fn gpus_that_cannot_be_used_are_refused_before_the_start() {
    if Path::new("/proc/driver/nvidia").exists() {
        eprintln!("skipped: this machine has an NVIDIA driver");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("data");
    let data = ["--data-dir", dir.to_str().unwrap()];
    let worker = ["worker", "--name", "w", "--controllers", "127.0.0.1:1"];
    for command in [&["up"][..], &["up", "--controllers", "3"], &worker] {
        let output = millrace().args(command).args(data).args(["--device", "cuda"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let due = [
            "error: no NVIDIA driver on this machine: libnvidia-ml.so.1 cannot be opened",
            "hint: install an NVIDIA driver (580 or newer), or start with --device emulated",
        ];
        assert_eq!(said.lines().collect::<Vec<_>>(), due, "{command:?}");
        assert_eq!(output.status.code(), Some(1), "{command:?}");
    }
    for (options, reason) in [
        (&["--workers", "2"][..], "several workers on a machine"),
        (&["--isolation", "model"], "--isolation model"),
        (&["--engine", "rten"], "--engine rten"),
    ] {
        let output =
            millrace().arg("up").args(data).args(["--device", "cuda"]).args(options).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let error = format!("error: --device cuda cannot be used with {reason}");
        assert!(said.starts_with(&error), "{said}");
        assert_eq!(output.status.code(), Some(2), "{said}");
    }
}
