//! Finds circles in production code: between the modules at the top of a crate, and between files.
//!
//! A file depends on the file that defines a name which the first file uses. A re-export (`pub use`)
//! is no dependency: the name leads on to the file that defines it. Tests are left out. The compiler
//! refuses circles between crates.

mod graph;
mod resolve;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use cargo_metadata::MetadataCommand;

use graph::Edges;
use source::Crate;

/// Circles that stay, each of two files, and the reason.
const ALLOWED: &[(&str, [&str; 2], &str)] = &[];

/// Crates whose circles are not resolved yet, with the number of files in circles. The number only goes
/// down: a crate without circles leaves this list.
const OPEN: &[(&str, usize)] = &[
    ("millrace", 66),
    ("millrace_chaos", 50),
    ("millrace_client", 6),
    ("millrace_cluster_state", 23),
    ("millrace_controller", 60),
    ("millrace_core", 6),
    ("millrace_device", 4),
    ("millrace_executor", 24),
    ("millrace_experiments", 19),
    ("millrace_gateway", 12),
    ("millrace_gpu", 9),
    ("millrace_memory", 2),
    ("millrace_model", 8),
    ("millrace_nodes", 12),
    ("millrace_proto", 2),
    ("millrace_raft_store", 13),
    ("millrace_scheduling", 22),
    ("millrace_sim", 9),
    ("millrace_transfers", 12),
    ("millrace_transport", 14),
    ("millrace_types", 13),
    ("millrace_worker", 87),
];

/// Returns every library and binary of the workspace: its name and the path of its root file.
fn roots() -> Vec<(String, std::path::PathBuf)> {
    let mut command = MetadataCommand::new();
    command.manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml")).no_deps();
    let metadata = command.exec().expect("cargo metadata runs in this workspace");
    let mut roots = Vec::new();
    for package in metadata.workspace_packages() {
        for target in package.targets.iter().filter(|target| target.is_lib() || target.is_bin()) {
            roots.push((target.name.replace('-', "_"), target.src_path.clone().into_std_path_buf()));
        }
    }
    roots
}

/// Returns the edges between the modules at the top of a crate.
fn between_top_modules(files: &Edges) -> Edges {
    let top = |module: &str| module.split("::").nth(1).unwrap_or("").to_owned();
    let mut edges = Edges::new();
    for ((from, to), names) in files {
        let (from, to) = (top(from), top(to));
        if from != to && !from.is_empty() && !to.is_empty() {
            edges.entry((from, to)).or_default().extend(names.iter().cloned());
        }
    }
    edges
}

/// Describes a circle, with the names that tie it.
fn describe(krate: &str, circle: &BTreeSet<String>, edges: &Edges) -> String {
    let mut text = format!("{krate}: {} in a circle\n", circle.len());
    for ((from, to), names) in edges {
        if circle.contains(from) && circle.contains(to) {
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            writeln!(text, "  {from} uses {} of {to}", names.join(", ")).expect("a string");
        }
    }
    text
}

fn is_allowed(krate: &str, circle: &BTreeSet<String>) -> bool {
    ALLOWED.iter().any(|(name, files, _)| {
        *name == krate && circle.len() == 2 && files.iter().all(|file| circle.contains(*file))
    })
}

#[test]
fn no_modules_of_a_crate_depend_on_each_other_in_a_circle() {
    let mut found = BTreeMap::new();
    let mut text = String::new();
    for (name, root) in roots() {
        let krate = Crate::read(Path::new(&root));
        let files = resolve::file_edges(&krate);
        for edges in [between_top_modules(&files), files] {
            for circle in graph::circles(&edges) {
                if !is_allowed(&name, &circle) {
                    *found.entry(name.clone()).or_insert(0) += circle.len();
                    text.push_str(&describe(&name, &circle, &edges));
                }
            }
        }
    }
    let open: BTreeMap<_, _> = OPEN.iter().map(|&(name, count)| (name.to_owned(), count)).collect();
    assert_eq!(found, open, "{text}\nBreak these circles: move what both need into a file below both");
    assert!(ALLOWED.len() <= 6, "at most six circles of two files stay");
}
