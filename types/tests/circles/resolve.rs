//! Follows names to the files that define them.

use std::collections::BTreeSet;

use crate::graph::Edges;
use crate::source::Crate;

/// Returns the edges between files, with the names that make each edge.
pub(crate) fn file_edges(krate: &Crate) -> Edges {
    let mut edges = Edges::new();
    for (module, file) in &krate.files {
        let private = file.imports.values().filter(|(_, exported)| !exported).map(|(path, _)| path);
        for path in private.chain(&file.paths) {
            let Some((to, name)) = resolve(krate, module, path, &mut BTreeSet::new()) else { continue };
            if to != *module {
                edges.entry((module.clone(), to)).or_default().insert(name);
            }
        }
    }
    edges
}

/// Returns the module whose file defines the item of a path as seen from `module`, and the item's name.
/// `None`: the path leads to a module, out of the crate, or to a local name.
fn resolve(
    krate: &Crate,
    module: &str,
    path: &[String],
    seen: &mut BTreeSet<(String, Vec<String>)>,
) -> Option<(String, String)> {
    if !seen.insert((module.to_owned(), path.to_vec())) {
        return None;
    }
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => descend(krate, "crate", rest, seen),
        "self" => descend(krate, module, rest, seen),
        "super" => descend(krate, module.rsplit_once("::")?.0, rest, seen),
        _ => descend(krate, module, path, seen),
    }
}

fn descend(
    krate: &Crate,
    module: &str,
    path: &[String],
    seen: &mut BTreeSet<(String, Vec<String>)>,
) -> Option<(String, String)> {
    let (first, rest) = path.split_first()?;
    if matches!(first.as_str(), "super" | "self" | "crate") {
        return resolve(krate, module, path, seen);
    }
    let child = format!("{module}::{first}");
    if krate.files.contains_key(&child) {
        return descend(krate, &child, rest, seen);
    }
    let file = krate.files.get(module)?;
    if file.defines.contains(first) {
        return Some((module.to_owned(), first.clone()));
    }
    if let Some((target, _)) = file.imports.get(first).filter(|(target, _)| target[0] != *first) {
        let whole: Vec<String> = target.iter().chain(rest).cloned().collect();
        return resolve(krate, module, &whole, seen);
    }
    file.globs.iter().find_map(|glob| {
        let from = module_of(krate, module, glob)?;
        seen.insert((from.clone(), path.to_vec())).then(|| descend(krate, &from, path, seen))?
    })
}

/// Returns the module that a path leads to, as seen from `module`.
fn module_of(krate: &Crate, module: &str, path: &[String]) -> Option<String> {
    let mut at = module.to_owned();
    for segment in path {
        at = match segment.as_str() {
            "crate" => "crate".to_owned(),
            "self" => at,
            "super" => at.rsplit_once("::")?.0.to_owned(),
            name => format!("{at}::{name}"),
        };
    }
    krate.files.contains_key(&at).then_some(at)
}

#[cfg(test)]
mod tests {
    use crate::source::SourceFile;

    use super::*;

    /// Returns the edges of a crate with these files, as `from uses name of to`.
    fn edges(files: &[(&str, &str)]) -> Vec<String> {
        let files = files.iter().map(|&(module, text)| (module.to_owned(), SourceFile::parse(text).0));
        let edges = file_edges(&Crate { files: files.collect() });
        let each = edges.into_iter().flat_map(|((from, to), names)| {
            names.into_iter().map(move |name| format!("{from} uses {name} of {to}"))
        });
        each.collect()
    }

    #[test]
    fn a_name_counts_where_it_is_defined_and_a_re_export_ties_nothing() {
        let files = [
            ("crate", "mod a; mod b; pub use a::Data;"),
            ("crate::a", "pub struct Data;"),
            ("crate::b", "use super::Data; fn f() -> Data { crate::a::Data }"),
        ];
        assert_eq!(edges(&files), ["crate::b uses Data of crate::a"]);
    }

    #[test]
    fn paths_in_macros_count_and_tests_do_not() {
        let files = [
            ("crate", "mod a; mod b;"),
            ("crate::a", "pub fn x() {} #[cfg(test)] mod tests { use crate::b::y; }"),
            ("crate::b", "pub fn y() { println!(\"{:?}\", crate::a::x()); }"),
        ];
        assert_eq!(edges(&files), ["crate::b uses x of crate::a"]);
    }
}
