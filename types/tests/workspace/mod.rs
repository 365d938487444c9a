//! Access to the files of the workspace, for the tests that search them.

use std::path::{Path, PathBuf};

/// Returns the root folder of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns the files whose names have this ending, as paths from the root. Build output and hidden
/// folders are skipped.
pub(crate) fn files(ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect(root(), ending, &mut found);
    found
}

/// Returns the text of a file, by its path from the root.
pub(crate) fn text(file: &Path) -> String {
    std::fs::read_to_string(root().join(file)).expect("the workspace is readable")
}

fn collect(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the workspace is readable") {
        let path = entry.expect("the workspace is readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, ending, found);
            }
        } else if name.ends_with(ending) {
            found.push(path.strip_prefix(root()).expect("the path is below the root").to_owned());
        }
    }
}
