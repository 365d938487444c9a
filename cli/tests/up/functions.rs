//! Functions that are programs: runs the commands of docs/guide/functions.md unchanged, except for the
//! commands that start the server and run cargo. Cargo has built everything by then.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::running::{RunningCluster, repository, wait_gone};

/// The folder of the module that functions in Python import.
pub(crate) const MODULE: &str = "client/function/python";

/// Returns the lines of a page's shell blocks, without the server's commands.
pub(crate) fn commands(page: &str) -> Vec<String> {
    let page = std::fs::read_to_string(repository(page)).unwrap();
    let mut commands = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        match line {
            "```sh" => inside = true,
            "```" => inside = false,
            line if inside && !line.starts_with("cargo ") => commands.push(line.to_owned()),
            _ => {}
        }
    }
    commands
}

/// Returns a file that cargo built, beside this test.
pub(crate) fn built(name: &str) -> Option<PathBuf> {
    let tests = std::env::current_exe().unwrap();
    let deps = tests.parent().unwrap();
    let target = deps.parent().unwrap();
    [target.join(name), deps.join(name)].into_iter().find(|path| path.exists())
}

/// Creates a folder in which the page's paths are valid. Returns `None` if a requirement is
/// missing.
fn folder() -> Option<(TempDir, PathBuf)> {
    let missing = |what: &str| eprintln!("skipped: {what}: run 'cargo test --workspace'");
    let found = |name: &str| {
        let path = built(name);
        if path.is_none() {
            missing(&format!("{name} was not built"));
        }
        path
    };
    let library = found("libmillrace_function.so")?;
    let double = found("examples/double")?;
    let decode = found("examples/decode")?;
    for (program, option) in [("cc", "--version"), ("python3", "--version")] {
        if !Command::new(program).arg(option).output().is_ok_and(|output| output.status.success()) {
            eprintln!("skipped: there is no {program}");
            return None;
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let release = folder.path().join("target/release");
    std::fs::create_dir_all(release.join("examples")).unwrap();
    let library_there = release.join("libmillrace_function.so");
    symlink(library, &library_there).unwrap();
    symlink(double, release.join("examples/double")).unwrap();
    symlink(decode, release.join("examples/decode")).unwrap();
    symlink(repository("client"), folder.path().join("client")).unwrap();
    // Copy the files: a relative path that leaves a linked folder would lead elsewhere.
    for part in ["digits", "functions/rust", "functions/c", "functions/python", "jpeg"] {
        let to = folder.path().join("examples").join(part);
        std::fs::create_dir_all(&to).unwrap();
        for file in std::fs::read_dir(repository(&format!("examples/{part}"))).unwrap() {
            let file = file.unwrap();
            if file.file_type().unwrap().is_file() {
                std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
            }
        }
    }
    Some((folder, library_there))
}

pub(crate) fn run(up: &RunningCluster, folder: &Path, line: &str) -> String {
    let binary = Path::new(env!("CARGO_BIN_EXE_millrace")).parent().unwrap();
    let path = std::env::var("PATH").unwrap();
    let output = Command::new("sh")
        .args(["-ec", line])
        .current_dir(folder)
        .env("PATH", format!("{}:{path}", binary.display()))
        .env("MILLRACE_ENDPOINTS", &up.client)
        .env("HOME", "/nonexistent")
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let said = text(output.stdout);
    let errors = text(output.stderr);
    assert!(output.status.success(), "{line}: {said}{errors}{}", up.said());
    said
}

/// Stops the cluster, and checks that no process is left.
pub(crate) fn stop(up: RunningCluster) {
    let below = up.descendants();
    up.signal(Signal::TERM);
    let (status, said) = up.ended();
    assert!(status.success(), "{said}");
    wait_gone(&below);
}

#[test]
fn documented_functions_in_three_languages_answer_alone_and_in_a_workflow() {
    let Some((folder, library)) = folder() else { return };
    let module = folder.path().join(MODULE);
    let variables = [("FUNCTION_LIBRARY", library.as_path()), ("PYTHONPATH", module.as_path())];
    let up = RunningCluster::ephemeral_with(&["--allow", "processes"], &variables);
    let mut said = Vec::new();
    for line in commands("docs/guide/functions.md") {
        said.push((line.clone(), run(&up, folder.path(), &line)));
    }
    let mut doubled = 0;
    for (line, said) in &said {
        if line.contains("invoke double-") {
            doubled += 1;
            for value in ["2", "4", "7", "6.5"] {
                assert!(said.contains(value), "{line}: {said}");
            }
        }
    }
    assert_eq!(doubled, 3);
    let (_, sentence) = said.last().unwrap();
    assert!(sentence.starts_with("this is a 3, with "), "{sentence}");

    // An input that the manifest does not declare is refused by the gateway, as for any function.
    let wrong = up.run(&["invoke", "double-c", "--json", r#"{"z": [1]}"#]);
    assert!(!wrong.status.success(), "{wrong:?}");
    let shown = up.ok(&["describe", "function/double-c"]);
    assert!(shown.contains("process"), "{shown}");
    up.ok(&["delete", "workflow/read-digit"]);
    up.ok(&["delete", "function/double-rust"]);
    stop(up);
}

#[test]
fn programs_are_refused_unless_the_cluster_allows_them() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("f.sh"), "#!/bin/sh\n").unwrap();
    let manifest = "\
apiVersion: millrace/v1
kind: Function
metadata: {name: f}
spec:
  runtime: process
  program:
    file: f.sh
    inputs: [{name: x, datatype: FP32, shape: [-1]}]
    outputs: [{name: y, datatype: FP32, shape: [-1]}]
";
    let file = folder.path().join("f.yaml");
    std::fs::write(&file, manifest).unwrap();
    let up = RunningCluster::ephemeral(&[]);
    let refused = up.refused(1, &["apply", "-f", file.to_str().unwrap()]);
    assert!(refused.contains("--allow processes"), "{refused}");
    stop(up);
}
