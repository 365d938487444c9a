//! The digests of decisions, compared with `decisions.txt`. A commit that should change no behaviour must not
//! change that file. A commit that changes decisions states the reason, and regenerates the file with:
//!
//! ```text
//! MILLRACE_WRITE_DECISIONS=1 cargo test -p millrace-sim --test twin decisions
//! ```

use std::env;
use std::fmt::Write as _;
use std::path::Path;

use millrace_gpu::isolation::ExecutorIsolation;
use millrace_sim::run;
use millrace_sim::scenario::ClusterScenario;
use millrace_transfers::paths::HostLinks;
use millrace_transfers::rates::TransferSharing;

use crate::scenario_of;

const WRITE: &str = "MILLRACE_WRITE_DECISIONS";
const PRESETS: [(&str, &str); 6] = [
    ("unified", "torpor"),
    ("torpor", "torpor"),
    ("torpor", "lru"),
    ("lalb-o3", "lru"),
    ("lalb", "replicas"),
    ("fifo", "lru"),
];
/// A change of the common scenario.
type Change = fn(&mut ClusterScenario);

const SCENARIOS: [(&str, Change); 4] = [
    ("swapping", |scenario| scenario.faults.clear()),
    ("executors that die", |_| {}),
    ("shared links", |scenario| {
        scenario.faults.clear();
        for node in &mut scenario.nodes {
            node.sharing = TransferSharing::FaasTube;
            node.host_links = HostLinks::All;
        }
    }),
    ("processes of models", |scenario| {
        scenario.faults.clear();
        for node in &mut scenario.nodes {
            node.isolation = ExecutorIsolation::Model;
        }
    }),
];
/// The number of functions: enough to keep the GPUs of the scenario busy.
const FUNCTIONS: usize = 80;

fn digests() -> String {
    let mut text = String::new();
    for (seed, (name, change)) in (1..).zip(SCENARIOS) {
        for (dispatch, eviction) in PRESETS {
            let mut scenario = scenario_of(FUNCTIONS, dispatch.parse().unwrap(), seed);
            for node in &mut scenario.nodes {
                node.eviction = eviction.parse().unwrap();
            }
            change(&mut scenario);
            let (count, digest) = run(&scenario).unwrap().decisions();
            let run = format!("{name}; {dispatch}, {eviction}; seed {seed}");
            writeln!(text, "{run}: {count} decisions, {digest:016x}").unwrap();
        }
    }
    text
}

#[test]
fn decisions_match_the_committed_digests() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/twin/decisions.txt");
    let now = digests();
    if env::var_os(WRITE).is_some() {
        std::fs::write(&file, &now).unwrap();
    }
    print!("{now}");
    let committed = std::fs::read_to_string(&file).unwrap();
    let changed: Vec<_> = now.lines().filter(|line| !committed.lines().any(|it| it == *line)).collect();
    assert!(
        now == committed,
        "these decisions differ from {}: if the commit should change decisions, regenerate the file with {WRITE}=1:\n{}",
        file.display(),
        changed.join("\n")
    );
}
