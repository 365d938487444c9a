//! Profiles of functions on real workers: trials, their results, and a leader that is killed meanwhile.

use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value;

use crate::running::{RunningCluster, eventually, millrace};

const SHARED: [&str; 4] = ["policy", "set", "--gpu-sharing", "slices"];

/// Returns the points of the only profile.
fn points(up: &RunningCluster) -> Vec<Value> {
    let profiles = up.json(&["get", "profiles"]);
    let points = profiles.as_array().into_iter().flatten().flat_map(|it| it["points"].as_array());
    points.flatten().cloned().collect()
}

/// Returns the widths and quotas of points.
fn settings(points: &[Value]) -> Vec<(u64, String)> {
    let setting = |it: &Value| (it["smUnits"].as_u64().unwrap(), it["quota"].as_str().unwrap().to_owned());
    points.iter().map(setting).collect()
}

#[test]
fn a_profile_measures_a_function_on_parts_of_a_gpu() {
    let up = RunningCluster::ephemeral(&["--gpus", "1"]);
    up.apply_digits();
    let started = up.ok(&["profile", "digits", "--no-wait"]);
    let id = started.trim().rsplit('/').next().unwrap().to_owned();
    eventually("the profile states what it waits for", || {
        up.ok(&["get", "operation", &id]).contains("--gpu-sharing slices")
    });
    let again = up.refused(1, &["profile", "digits"]);
    assert!(again.contains(&format!("millrace operation cancel {id}")), "{again}");
    up.ok(&["operation", "cancel", &id]);

    up.ok(&SHARED);
    let table = up.ok(&["profile", "digits"]);
    assert!(table.starts_with("TENANT") && table.contains("6.2%") && table.contains("100%"), "{table}");
    let points = points(&up);
    let widths: Vec<_> = settings(&points).into_iter().map(|(units, _)| units).collect();
    assert!(
        widths.starts_with(&[1]) && widths.ends_with(&[16]) && (3..=5).contains(&widths.len()),
        "{widths:?}"
    );
    for point in &points {
        // A trial ends after five seconds, also on a slow machine.
        assert!((5..=200).contains(&point["runs"].as_u64().unwrap()), "{point}");
        assert!(point["requestsPerSecond"].as_f64().unwrap() > 0.0, "{point}");
        assert!(point["p50Ns"].as_u64().unwrap() <= point["p99Ns"].as_u64().unwrap(), "{point}");
    }
    let billed = up.json(&["billing"]).to_string();
    assert!(!billed.contains("\"requests\":2"), "trials are not billed: {billed}");

    up.refused(3, &["profile", "nothing"]);
    assert!(up.ok(&["get", "profiles", "digits"]).contains("digits"));
    let gone = up.refused(2, &["delete", "profile", "digits"]);
    assert!(gone.contains("millrace delete function"), "{gone}");
}

#[test]
fn the_next_leader_goes_on_with_a_profile_and_repeats_no_trial() {
    let up = RunningCluster::group(None, 1, &[]);
    up.ok(&["cluster", "wait", "--voters", "3", "--nodes", "1", "--timeout", "30s"]);
    up.ok(&SHARED);
    up.apply_digits();
    let started = up.ok(&["profile", "digits", "--no-wait"]);
    let id = started.trim().rsplit('/').next().unwrap().to_owned();
    eventually("a trial is done", || !points(&up).is_empty());
    let status = up.json(&["cluster", "status"]);
    let leader = format!("controller-{}", status["leader"].as_u64().unwrap());
    let before = points(&up);
    up.part(&leader).signal(Signal::KILL);
    up.ok(&["operation", "wait", &id, "--timeout", "1m"]);
    let after = points(&up);
    assert!(before.iter().all(|point| after.contains(point)), "{before:?}\n{after:?}");
    let mut once = settings(&after);
    once.dedup();
    assert_eq!(once.len(), after.len());
}

/// Takes about 90 s, because a limited trial measures for seconds.
#[test]
#[ignore = "long: run by scripts/nightly"]
fn the_whole_grid_has_25_points_and_the_throughput_follows_the_quota() {
    let up = RunningCluster::ephemeral(&["--gpus", "1"]);
    up.ok(&SHARED);
    up.apply_digits();
    up.ok(&["profile", "digits", "--grid"]);
    let points = points(&up);
    assert_eq!(points.len(), 25);
    let at = |quota: &str| {
        let is = |it: &&Value| it["smUnits"] == 16 && it["quota"] == quota;
        points.iter().find(is).unwrap()["utilisation"].as_f64().unwrap()
    };
    for (quota, share) in [("20%", 0.2), ("40%", 0.4)] {
        assert!(at(quota) <= share * 1.1, "{quota}: {}", at(quota));
    }
}

#[test]
fn a_function_that_scales_is_profiled_and_gets_slices_by_its_load() {
    let up = RunningCluster::ephemeral(&["--gpus", "1"]);
    up.ok(&SHARED);
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("mlp.onnx");
    let made = millrace().args(["synth", "mlp", "--out"]).arg(&model).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let manifest = folder.path().join("scaled.yaml");
    let text = "apiVersion: millrace/v1\nkind: Function\nmetadata: {name: scaled}\nspec: {model: {file: mlp.onnx}, resources: {sm: 12%}, slices: {max: 3}}\n";
    std::fs::write(&manifest, text).unwrap();
    up.ok(&["apply", "-f", manifest.to_str().unwrap()]);
    let slices = || up.json(&["get", "slices"]).as_array().map_or(0, Vec::len);
    eventually("the leader begins a profile, and it ends", || {
        let operations = up.json(&["get", "operations"]);
        let mut all = operations.as_array().into_iter().flatten();
        all.any(|it| it["kind"] == "ProfileFunction" && it["state"] == "Succeeded")
    });
    assert_eq!(slices(), 1, "no load");
    let mut load = millrace()
        .args(["load", "scaled", "--concurrency", "6", "--duration", "60s", "-e", &up.client])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the load gets more slices", || slices() == 3);
    load.kill().unwrap();
    load.wait().unwrap();
    let events = up.ok(&["events"]);
    assert!(events.contains("SlicesChanged"), "{events}");
}
