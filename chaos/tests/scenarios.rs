//! The cheapest scenarios against real processes, so that neither the harness nor what it promises
//! rots between runs by hand. They need the `millrace` binary beside this test's, which
//! `cargo build -p millrace-cli` makes (`cargo test --workspace` does too); without it they say so.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// A cluster is eight processes: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// What `millrace-chaos` says when it finds no binary to test.
const NOT_BUILT: &str = "no millrace binary";

/// Runs a scenario for one round; `None` where there is nothing to test.
fn run(words: &[&str]) -> Option<Value> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace-chaos"));
    // A seed of its own each time would find more, and fail where nobody changed anything.
    command.arg("run").args(words).args(["--seed", "1", "--rounds", "1", "--output", "json"]);
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    if complained.contains(NOT_BUILT) {
        eprintln!("skipped: {complained}");
        return None;
    }
    assert!(status.success(), "{words:?}: {status}\n{said}\n{complained}");
    Some(serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}")))
}

/// Every check of a report, by name, with its verdict.
fn verdicts(report: &Value) -> Vec<(&str, &str)> {
    let checks = report["checks"].as_array().unwrap().iter();
    checks.map(|it| (it["name"].as_str().unwrap(), it["verdict"].as_str().unwrap())).collect()
}

#[test]
fn a_leader_that_is_killed_costs_nothing_that_was_promised() {
    let Some(report) = run(&["leader-kill"]) else { return };
    let expected = [
        "writes resume",
        "nobody is left behind",
        "no acknowledged write is lost",
        "reads and writes are linearizable",
        "no idempotent request is lost",
        "every answer is right",
        "no process outlives its parent",
    ];
    assert_eq!(verdicts(&report), expected.map(|name| (name, "pass")));
    assert_eq!((&report["verdict"], &report["seed"]), (&"pass".into(), &1.into()));
}

#[test]
fn an_executor_that_is_killed_on_a_node_that_swaps_leaves_nothing_behind() {
    let Some(report) = run(&["executor-storm", "--functions", "80"]) else { return };
    let expected = [
        "executors come back",
        "the worker's own memory is flat",
        "the shared memory it mapped is flat",
        "its open files are flat",
        "no shared memory is left behind",
        "nobody is left behind",
        "no idempotent request is lost",
        "every answer is right",
        "no process outlives its parent",
    ];
    assert_eq!(verdicts(&report), expected.map(|name| (name, "pass")));
}

#[test]
fn a_damaged_store_is_refused_or_does_no_harm() {
    let Some(report) = run(&["torn-store"]) else { return };
    assert!(verdicts(&report).iter().all(|&(_, verdict)| verdict == "pass"), "{report}");
    let events = report["timeline"].as_array().unwrap().iter();
    let said: Vec<_> = events.filter_map(|event| event["what"].as_str()).collect();
    assert!(said.iter().any(|it| it.contains("refuses") || it.contains("with nothing lost")), "{said:?}");
}

#[test]
fn a_full_disk_is_named_or_the_scenario_says_why_this_machine_has_none() {
    let Some(report) = run(&["full-disk"]) else { return };
    match report["verdict"].as_str().unwrap() {
        "skipped" => assert!(report["reason"].as_str().unwrap().contains("the right to mount"), "{report}"),
        verdict => assert_eq!(verdict, "pass", "{report}"),
    }
}
