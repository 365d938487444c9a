//! A controller with a full disk: its process ends and reports the reason.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::running::{eventually, free, millrace, repository};

/// The largest file that the controller may write, in the shell's units of 512 bytes or 1 KiB.
const FILE_BLOCKS: &str = "1024";
/// The number of labels of a change. With `LABEL_LEN`, it gives the least size of the change in the
/// log.
const LABELS: usize = 60;
/// The length of each label's key and value in bytes.
const LABEL_LEN: usize = 240;
/// A number of changes that do not fit on the disk.
const CHANGES: usize = 128;

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Both calls fail if the process has already ended.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Starts a controller with a cluster of its own. At the file size limit, a process that ignores
/// SIGXFSZ gets an error from the same call as on a full disk.
fn start(dir: &Path, said: &Path, file_blocks: &str) -> (KillOnDrop, Value) {
    let free = free();
    let limited = format!("trap '' XFSZ; ulimit -f {file_blocks}; exec \"$0\" \"$@\"");
    let mut child = Command::new("sh")
        .args(["-c", &limited, env!("CARGO_BIN_EXE_millrace"), "controller", "--bootstrap", "--grace", "5s"])
        .args(["--listen", &free, "--internal-listen", &free, "--data-dir"])
        .arg(dir)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("HOME", "/nonexistent")
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(said).unwrap())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let started = KillOnDrop(child);
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let ready = serde_json::from_str(&line)
        .unwrap_or_else(|_| panic!("no ready line: {line:?}; {}", std::fs::read_to_string(said).unwrap()));
    (started, ready)
}

/// Applies a function with large labels. Returns whether the apply was accepted.
fn apply(client: &str, file: &Path, change: usize) -> bool {
    let long = "x".repeat(LABEL_LEN);
    let labels: Vec<_> = (0..LABELS).map(|label| format!("{label}-{long}: {change}-{long}")).collect();
    let labels = labels.join(", ");
    let model = repository("examples/digits/digits.onnx");
    let function = format!(
        "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: digits, labels: {{{labels}}}}}\nspec: {{runtime: onnx, model: {{file: {model}}}}}\n"
    );
    std::fs::write(file, function).unwrap();
    let output = millrace().args(["apply", "--no-wait", "-e", client, "-f"]).arg(file).output().unwrap();
    output.status.success()
}

#[test]
fn a_controller_with_a_full_disk_ends_with_the_reason_and_resumes_with_space() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("c");
    let said = folder.path().join("log");
    let file = folder.path().join("f.yaml");
    let (mut controller, ready) = start(&dir, &said, FILE_BLOCKS);
    let client = ready["client"].as_str().unwrap();
    let taken = (0..CHANGES).take_while(|&change| apply(client, &file, change)).count();
    assert!((1..CHANGES).contains(&taken), "{taken} changes were taken");
    let mut ended = None;
    eventually("the process ends by itself", || {
        ended = controller.0.try_wait().unwrap();
        ended.is_some()
    });
    let said_last = std::fs::read_to_string(&said).unwrap();
    assert_eq!(ended.unwrap().code(), Some(1), "{said_last}");
    let error = said_last
        .split_once("error: controller: raft has halted")
        .expect("the controller reports that it halted")
        .1;
    assert!(error.contains(dir.to_str().unwrap()) && error.contains("File too large"), "{error}");
    assert!(error.contains("hint: no acknowledged write is lost"), "{error}");

    let (again, ready) = start(&dir, &said, "unlimited");
    let client = ready["client"].as_str().unwrap();
    let read = millrace().args(["get", "functions", "-o", "json", "-e", client]).output().unwrap();
    let functions: Value = serde_json::from_slice(&read.stdout).unwrap();
    // The change without an acknowledgement may be in effect.
    let generation = functions["items"][0]["metadata"]["generation"].as_u64().unwrap();
    assert!((taken as u64..=taken as u64 + 1).contains(&generation), "{generation} of {taken}: {functions}");
    assert!(apply(client, &file, CHANGES));
    kill_process(Pid::from_child(&again.0), Signal::TERM).unwrap();
}
