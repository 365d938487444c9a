//! Which files may hold unsafe code. Everywhere else the workspace's lint denies it, unless a file
//! allows it for itself: this finds the files that do.

use std::path::{Path, PathBuf};

/// Besides device/: what a user's function links, memory that it shares with its worker
/// and the C interface.
const ALLOWED: [&str; 2] = ["client/function/src/ffi.rs", "client/function/src/memory.rs"];

#[test]
fn unsafe_code_is_where_it_may_be() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut found = Vec::new();
    collect(root, root, &mut found);
    let elsewhere: Vec<_> = found.iter().filter(|file| !is_allowed(file)).collect();
    assert!(elsewhere.is_empty(), "unsafe code in {elsewhere:?}: only {ALLOWED:?} and all of device/ may");
    for file in ALLOWED {
        assert!(found.iter().any(|it| it == Path::new(file)), "{file} has none: take it off the list");
    }
}

fn is_allowed(file: &Path) -> bool {
    ALLOWED.iter().any(|allowed| file == Path::new(allowed)) || file.starts_with("device")
}

/// The sources that allow it for themselves.
fn collect(root: &Path, folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the workspace is readable") {
        let path = entry.expect("the workspace is readable").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(root, &path, found);
            }
        } else if name.ends_with(".rs") {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            // In two parts, so that this file is not found.
            if text.contains(concat!("allow(unsafe", "_code")) {
                found.push(path.strip_prefix(root).expect("it is below").to_owned());
            }
        }
    }
}
