//! The files of the workspace.

use std::path::{Path, PathBuf};

/// Where the workspace is.
pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The files whose names end so, by their paths from the root on; what is built, and what is hidden, aside.
pub(crate) fn files(ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect(root(), ending, &mut found);
    found
}

/// The text of one of them.
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
            found.push(path.strip_prefix(root()).expect("it is below").to_owned());
        }
    }
}
