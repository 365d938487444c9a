//! Finds circles in production code: between the modules at the top of a crate, and between files.
//!
//! A file depends on the file that defines a name which the first file uses. A re-export (`pub use`)
//! is no dependency: the name leads on to the file that defines it. Tests are left out. The compiler
//! refuses circles between crates.

mod graph;
mod resolve;
mod source;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use cargo_metadata::{MetadataCommand, Target};

use graph::Edges;
use source::Crate;

/// Returns every library and binary of the workspace: its name and the path of its root file.
fn roots() -> Vec<(String, std::path::PathBuf)> {
    let mut command = MetadataCommand::new();
    command.manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml")).no_deps();
    let metadata = command.exec().expect("cargo metadata runs in this workspace");
    let mut roots = Vec::new();
    for package in metadata.workspace_packages() {
        let of_tests = |target: &&Target| {
            target.is_test() || target.is_bench() || target.is_example() || target.is_custom_build()
        };
        for target in package.targets.iter().filter(|target| !of_tests(target)) {
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
        let from = top(from);
        let to = top(to);
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

#[test]
fn no_modules_of_a_crate_depend_on_each_other_in_a_circle() {
    let mut text = String::new();
    for (name, root) in roots() {
        let krate = Crate::read(Path::new(&root));
        let files = resolve::file_edges(&krate);
        for edges in [between_top_modules(&files), files] {
            for circle in graph::circles(&edges) {
                text.push_str(&describe(&name, &circle, &edges));
            }
        }
    }
    assert!(text.is_empty(), "{text}\nBreak these circles: move what both need into a file below both");
}
