//! Torpor's alpha and the functions' counts outlive the worker that counted and the leader that
//! committed both (T16, T20).

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use crate::metrics::metrics;
use crate::running::{RunningCluster, eventually, repository};

/// Two periods of alpha's adjustment, and some seconds.
const TWO_PERIODS: Duration = Duration::from_secs(85);
/// Functions with their deadlines. No request is ever answered within a microsecond.
const FUNCTIONS: [(&str, &str); 4] =
    [("fine-a", "30s"), ("fine-b", "30s"), ("late-a", "1us"), ("late-b", "1us")];

/// Returns the values of a worker's metric, by its labels.
fn values(up: &RunningCluster, worker: &str, metric: &str) -> BTreeMap<String, f64> {
    let address = up.json(&["get", "node", worker])["address"].as_str().unwrap().to_owned();
    let text = metrics(&address);
    let values = text.lines().filter_map(|line| line.strip_prefix(metric)?.rsplit_once(' '));
    values.map(|(labels, value)| (labels.to_owned(), value.parse().unwrap())).collect()
}

/// The functions and the alpha decide alone which functions are prioritised.
fn standing(up: &RunningCluster, worker: &str) -> [BTreeMap<String, f64>; 2] {
    ["millrace_function_required_requests{", "millrace_dispatch_alpha{"].map(|it| values(up, worker, it))
}

#[test]
#[ignore = "takes more than two periods of 40 s: scripts/nightly"]
#[allow(clippy::disallowed_methods, reason = "real processes in real time")]
fn the_next_worker_and_the_next_leader_prioritise_the_same_functions() {
    let up = RunningCluster::group(None, 2, &["--preset", "torpor"]);
    up.ok(&["cordon", "worker-2"]);
    let folder = tempfile::tempdir().unwrap();
    let model = repository("examples/digits/digits.onnx");
    for (name, deadline) in FUNCTIONS {
        let path = folder.path().join(name).to_str().unwrap().to_owned();
        let spec = format!("model: {{file: {model}}}, slo: {{deadline: {deadline}}}");
        let manifest = format!(
            "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\n"
        );
        std::fs::write(&path, manifest).unwrap();
        up.ok(&["apply", "-f", &path]);
    }
    for _ in 0..3 {
        for (name, _) in FUNCTIONS {
            up.ok(&["invoke", name, "--image", &repository("examples/digits/images/digit-7.png")]);
        }
    }
    // Half of the functions comply, so alpha halves at the end of the first period.
    let committed = |worker: &str| up.json(&["get", "node", worker])["alphas"].clone();
    eventually("alpha falls", || committed("worker-1") == json!({"4": 0.5}));
    let before = standing(&up, "worker-1");
    assert!(before[0].values().filter(|&&count| count > 0.0).count() == 2, "{before:?}");

    up.ok(&["uncordon", "worker-2"]);
    up.part("worker-1").signal(Signal::KILL);
    let leader = up.json(&["cluster", "status"])["leader"].as_u64().unwrap();
    up.part(&format!("controller-{leader}")).signal(Signal::KILL);
    eventually("the other worker takes over", || {
        up.json(&["get", "node", "worker-2"])["placements"] == FUNCTIONS.len()
            && standing(&up, "worker-2") == before
    });
    std::thread::sleep(TWO_PERIODS);
    assert_eq!(standing(&up, "worker-2"), before);
    assert_eq!(committed("worker-2"), json!({"4": 0.5}));
}
