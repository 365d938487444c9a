//! The digests of decisions, compared with `decisions.txt`: a commit that means to change no behaviour leaves that
//! file as it is. To write the file anew, and to say in the commit why:
//!
//! ```text
//! MILLRACE_WRITE_DECISIONS=1 cargo test -p millrace-sim --test decisions
//! ```

#![allow(clippy::unwrap_used)]

use std::env;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use millrace_policy::dispatch::PolicyConfig;
use millrace_policy::gpu::Eviction;
use millrace_policy::gpu::isolation::Isolation;
use millrace_policy::paths::HostLinks;
use millrace_policy::rates::Sharing;
use millrace_sim::models::{self, TORPOR_PCIE};
use millrace_sim::run;
use millrace_sim::scenario::{Fault, Function, NodeSpec, Scenario};
use millrace_sim::workload::{minutes, rates};
use millrace_types::topology::{Gpu, Link, LinkId, LinkKind, Topology};
use millrace_types::{Bytes, GpuIndex, Slo, Timestamp};

const WRITE: &str = "MILLRACE_WRITE_DECISIONS";
const PRESETS: [(&str, &str); 6] = [
    ("unified", "torpor"),
    ("torpor", "torpor"),
    ("torpor", "lru"),
    ("lalb-o3", "lru"),
    ("lalb", "replicas"),
    ("fifo", "lru"),
];
/// The change that makes a scenario of the common one.
type Change = fn(&mut Scenario);

const SCENARIOS: [(&str, Change); 4] = [
    ("swapping", |_| {}),
    ("executors that die", |scenario| {
        let fault = |second: u64| Fault {
            at: Timestamp(second * 1_000_000_000),
            node: (second % 2) as usize,
            gpu: GpuIndex((second % 3) as u32),
        };
        scenario.faults = (5..55).step_by(10).map(fault).collect();
    }),
    ("shared links", |scenario| {
        for node in &mut scenario.nodes {
            (node.sharing, node.host_links) = (Sharing::FaasTube, HostLinks::All);
        }
    }),
    ("processes of models", |scenario| {
        for node in &mut scenario.nodes {
            node.isolation = Isolation::Model;
        }
    }),
];
const SEED: u64 = 1;
const FUNCTIONS: usize = 80;

/// Two GPUs under one switch and one alone.
fn topology() -> Topology {
    let gpu = |index: u32, path: &[u32]| Gpu {
        index: GpuIndex(index),
        gpu_type: "modelled".to_owned(),
        memory: Bytes::gib(2),
        host_path: path.iter().copied().map(LinkId).collect(),
    };
    let link = |kind| Link { kind, rate: TORPOR_PCIE };
    Topology {
        name: "test".to_owned(),
        gpus: vec![gpu(0, &[0, 3]), gpu(1, &[1, 3]), gpu(2, &[2])],
        links: [LinkKind::Pcie, LinkKind::Pcie, LinkKind::Pcie, LinkKind::PcieUplink].map(link).to_vec(),
    }
}

/// Two nodes under a minute of load.
fn scenario(dispatch: PolicyConfig, eviction: Eviction, seed: u64) -> Scenario {
    let table = models::torpor();
    let slo = Slo { deadline: Duration::from_millis(200), percentile: 0.98 };
    let function = |place: usize| {
        let replicas = 1 + (place % 2) as u32;
        Function { replicas, ..Function::new(table[place % table.len()].clone(), Some(slo)) }
    };
    let functions = (0..FUNCTIONS).map(function).collect();
    let counts = rates::by_minute(&rates::torpor(), FUNCTIONS, 1, seed as usize);
    let node = NodeSpec { eviction, ..NodeSpec::new(topology(), dispatch) };
    Scenario {
        traced: true,
        timeout: Duration::from_secs(60),
        ..Scenario::new(vec![node; 2], functions, minutes::arrivals(&counts, seed), seed)
    }
}

fn digests() -> String {
    let mut text = String::new();
    for (name, change) in SCENARIOS {
        for (dispatch, eviction) in PRESETS {
            let mut scenario = scenario(dispatch.parse().unwrap(), eviction.parse().unwrap(), SEED);
            change(&mut scenario);
            let (count, digest) = run(&scenario).unwrap().decisions();
            let preset = format!("{dispatch}, {eviction}");
            writeln!(text, "{name}; {preset}; seed {SEED}: {count} decisions, {digest:016x}").unwrap();
        }
    }
    text
}

#[test]
fn decisions_are_those_of_the_committed_file() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/decisions.txt");
    let now = digests();
    if env::var_os(WRITE).is_some() {
        std::fs::write(&file, &now).unwrap();
    }
    print!("{now}");
    let committed = std::fs::read_to_string(&file).unwrap();
    let changed: Vec<_> = now.lines().filter(|line| !committed.lines().any(|it| it == *line)).collect();
    assert!(
        changed.is_empty() && now.lines().count() == committed.lines().count(),
        "these decisions are not those of {}; if the commit means to change them, write it anew with {WRITE}=1:\n{}",
        file.display(),
        changed.join("\n")
    );
}
