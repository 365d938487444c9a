//! The inputs that targets begin with.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Target;

/// Files of the repository that are inputs too.
const FILES: [(&str, &str); 9] = [
    ("manifest", "examples/digits/function.yaml"),
    ("manifest", "examples/workflows/auto-driving.yaml"),
    ("manifest", "examples/workflows/video-editing.yaml"),
    ("onnx", "examples/digits/digits.onnx"),
    ("snapshot", "raft-store/tests/data/rules-9.snapshot"),
    ("snapshot", "raft-store/tests/data/rules-10.snapshot"),
    ("snapshot", "cluster-state/tests/data/format-7.state"),
    ("log_records", "raft-store/tests/data/rules-9.log"),
    ("log_records", "raft-store/tests/data/rules-10.log"),
];

/// The corpus of a target, in the order of the files' names.
///
/// # Panics
/// Where files cannot be read.
#[must_use]
pub fn of(target: Target) -> Vec<Vec<u8>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = here.join("corpus").join(target.name);
    let found = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = found.map(|file| file.expect("a folder that is read").path()).collect();
    paths.sort();
    let others = FILES.iter().filter(|(name, _)| *name == target.name);
    paths.extend(others.map(|(_, path)| here.join("..").join(path)));
    let read = |path: PathBuf| fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    paths.into_iter().map(read).collect()
}

/// Runs a target over an input that is in `fuzz/artifacts` meanwhile, and stays there if it ends the
/// process; the heap's peak in bytes.
///
/// # Panics
/// As [`Target::run`], and where the file cannot be written.
pub fn run_kept(target: Target, input: &[u8]) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts").join(target.name);
    let path = folder.join(format!("input-{}", std::process::id()));
    fs::create_dir_all(&folder).and_then(|()| fs::write(&path, input)).expect("fuzz/artifacts is writable");
    let peak = target.run(input);
    fs::remove_file(&path).expect("fuzz/artifacts is writable");
    peak
}
