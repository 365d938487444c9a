//! The events that operators see.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::running::{PATIENCE, RunningCluster, eventually, millrace};

/// Returns the events so far, as `reason object`.
fn seen(up: &RunningCluster) -> Vec<String> {
    let lines = up.ok(&["events", "-o", "json"]);
    let events = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    events.map(|event| format!("{} {}", text(&event["reason"]), text(&event["object"]))).collect()
}

#[test]
fn an_apply_and_a_killed_executor_are_reported_in_order() {
    let up = RunningCluster::ephemeral(&["--gpus", "1"]);
    up.apply_digits();
    let applied = ["FunctionApplied function/default/digits", "FunctionReady function/default/digits"];
    let in_order = |seen: &[String], wanted: &[&str]| {
        let mut rest = seen.iter();
        wanted.iter().all(|it| rest.any(|event| event == it))
    };
    eventually("the function's events are reported", || in_order(&seen(&up), &applied));
    let executor = Pid::from_raw(up.executors()[0].cast_signed()).unwrap();
    kill_process(executor, Signal::KILL).unwrap();
    let died = [applied[0], applied[1], "ExecutorRestarted gpu/worker-1/0"];
    eventually("the executor's event is reported", || in_order(&seen(&up), &died));
    let warnings = up.ok(&["events", "--warnings"]);
    assert!(warnings.contains("Warning  ExecutorRestarted  gpu/worker-1/0"), "{warnings}");
    assert!(!warnings.contains("Normal"), "{warnings}");
}

#[test]
fn a_watch_prints_new_events() {
    let up = RunningCluster::ephemeral(&["--gpus", "1"]);
    let mut watch = Watch::start(&up.client);
    up.apply_digits();
    let ready =
        |line: &Value| line["reason"] == "FunctionReady" && line["object"] == "function/default/digits";
    while !ready(&watch.next()) {}
}

/// A `millrace events -f`. Killed when dropped.
struct Watch {
    child: Child,
    lines: Receiver<String>,
}

impl Watch {
    fn start(client: &str) -> Self {
        let words = ["events", "-f", "-o", "json", "-e", client];
        let mut child = millrace().args(words).stdout(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|it| sender.send(it)));
        Self { child, lines }
    }

    fn next(&mut self) -> Value {
        serde_json::from_str(&self.lines.recv_timeout(PATIENCE).expect("an event is printed")).unwrap()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Both calls fail if the process has already ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
