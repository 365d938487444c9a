//! Tests of the allowed dependencies between crates. The tests read whole dependency
//! closures from `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{CargoOpt, DependencyKind, Metadata, MetadataCommand, PackageId};

/// A crate, the crates that must not be in its closure of normal dependencies, and the reason.
const FORBIDDEN: &[(&str, &[&str], &str)] = &[
    ("millrace-types", PURE, "it is data"),
    ("millrace-model", PURE, "it is pure"),
    ("millrace-core", PURE, DECIDES),
    ("millrace-memory", PURE, DECIDES),
    ("millrace-transfers", PURE, DECIDES),
    ("millrace-gpu", PURE, DECIDES),
    ("millrace-scheduling", PURE, DECIDES),
    ("millrace-nodes", PURE, DECIDES),
    ("millrace-workflow", PURE, DECIDES),
    ("millrace-slices", PURE, DECIDES),
    ("millrace-cluster-state", PURE, "apply is deterministic"),
    ("millrace-proto", &["actix", "openraft", "sled"], "it is wire formats"),
    (
        "millrace-transport",
        &["actix", "openraft", "sled", "millrace-types", "millrace-proto"],
        "it serves ports and opens channels for any protocol",
    ),
    ("millrace-raft-store", &["actix", "tonic"], "it is storage"),
    ("millrace-storage", &["actix", "tonic", "tokio", "openraft", "sled"], "it is plain files"),
    (
        "millrace-gateway",
        &["actix", "openraft", "sled", "millrace-cluster-state", "millrace-raft-store", "millrace-model"],
        "the gateway serves any backend",
    ),
    (
        "millrace-controller",
        &["millrace-worker", "actix", "rten"],
        "controller and worker communicate only over the wire",
    ),
    (
        "millrace-worker",
        &["millrace-controller", "millrace-cluster-state", "millrace-raft-store", "openraft", "sled", "rten"],
        "the data plane needs neither the control plane's storage nor an engine: executors have it",
    ),
    (
        "millrace-sim",
        &["millrace-controller", "millrace-gateway", "millrace-raft-store", "openraft", "sled"],
        "it applies the replicated state directly",
    ),
    ("millrace-executor", &["actix", "openraft", "sled"], "it is crash-only and small"),
    (
        "millrace-device",
        &["actix", "openraft", "tonic", "tokio", "rten", "millrace-model"],
        "it is one GPU behind one trait, and knows no models",
    ),
    (
        "millrace-cuda-double",
        &["actix", "openraft", "tonic", "tokio", "rten", "millrace-device"],
        "it stands for a driver, which knows no program",
    ),
    (
        "millrace-gpu-check",
        &["actix", "openraft", "tonic", "tokio", "rten", "millrace-executor"],
        "it is carried to machines with a GPU, and has to be small",
    ),
    ("millrace-engine", &["actix", "openraft", "tonic", "tokio"], "it is one way to run models"),
    ("millrace-client", &["actix", "openraft", "sled", "rten"], "users link it"),
    ("millrace-function", &["actix", "openraft", "sled", "rten"], "users link it"),
    (
        "millrace-chaos",
        &[
            "millrace-cli",
            "millrace-cluster-state",
            "millrace-controller",
            "millrace-device",
            "millrace-executor",
            "millrace-gateway",
            "millrace-model",
            "millrace-core",
            "millrace-gpu",
            "millrace-memory",
            "millrace-nodes",
            "millrace-scheduling",
            "millrace-slices",
            "millrace-transfers",
            "millrace-workflow",
            "millrace-raft-store",
            "millrace-worker",
            "actix",
            "openraft",
            "sled",
        ],
        "it observes a cluster through the users' interfaces",
    ),
];

/// Reason for which the crates of decisions are pure.
const DECIDES: &str = "decisions take `now`; actors carry them out";

const PURE: &[&str] =
    &["tokio", "actix", "actix-rt", "tonic", "rand", "openraft", "sled", "rustix", "chrono"];

/// The only crates that may name each of these libraries.
const SOLE_USERS: &[(&str, &[&str])] = &[
    ("sled", &["millrace-raft-store"]),
    ("openraft", &["millrace-raft-store", "millrace-controller"]),
    ("actix", &["millrace-worker", "millrace-sim"]),
    ("rten", &["millrace-engine"]),
    ("cudarc", &["millrace-device", "millrace-cuda-double"]),
    ("ort", &["millrace-engine"]),
    ("nvml-wrapper", &["millrace-device"]),
];

fn metadata() -> Metadata {
    let mut command = MetadataCommand::new();
    command.manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));
    command.features(CargoOpt::AllFeatures).exec().expect("cargo metadata runs in this workspace")
}

/// Returns the direct normal dependencies of each package.
fn edges(metadata: &Metadata) -> BTreeMap<&PackageId, Vec<&PackageId>> {
    let resolve = metadata.resolve.as_ref().expect("metadata was asked for with dependencies");
    let is_normal =
        |dep: &&cargo_metadata::NodeDep| dep.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal);
    resolve
        .nodes
        .iter()
        .map(|node| (&node.id, node.deps.iter().filter(is_normal).map(|dep| &dep.pkg).collect()))
        .collect()
}

fn closure<'a>(
    edges: &BTreeMap<&'a PackageId, Vec<&'a PackageId>>,
    root: &'a PackageId,
) -> BTreeSet<&'a PackageId> {
    let mut seen = BTreeSet::new();
    let mut open = vec![root];
    while let Some(package) = open.pop() {
        for &dependency in edges.get(package).into_iter().flatten() {
            if seen.insert(dependency) {
                open.push(dependency);
            }
        }
    }
    seen
}

#[test]
fn no_crate_depends_on_a_forbidden_crate() {
    let metadata = metadata();
    let edges = edges(&metadata);
    let mut broken = Vec::new();
    for (name, forbidden, why) in FORBIDDEN {
        let package = metadata.packages.iter().find(|p| p.name.as_str() == *name);
        let package = package
            .unwrap_or_else(|| panic!("crate {name} does not exist: update this test and ARCHITECTURE.md"));
        for reached in closure(&edges, &package.id) {
            let reached = &metadata[reached].name;
            if forbidden.contains(&reached.as_str()) {
                broken.push(format!("{name} → {reached}: forbidden, because {why}"));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn restricted_libraries_are_named_only_by_the_allowed_crates() {
    let metadata = metadata();
    let mut broken = Vec::new();
    for package in metadata.workspace_packages() {
        for dependency in package.dependencies.iter().filter(|d| d.kind == DependencyKind::Normal) {
            for (library, homes) in SOLE_USERS {
                if dependency.name == *library && !homes.contains(&package.name.as_str()) {
                    broken.push(format!("{} names {library}: only {homes:?} may", package.name));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// `cargo run -- demo` of the README runs `millrace`. Cargo refuses the command if a second package names a
/// program to run.
#[test]
fn cargo_run_without_a_package_runs_millrace() {
    let metadata = metadata();
    let named: Vec<_> =
        metadata.workspace_packages().iter().filter_map(|it| it.default_run.clone()).collect();
    assert_eq!(named, ["millrace"]);
}
