//! The inputs with which targets begin.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Target;

/// Files of the repository that are inputs of a target too.
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

/// Attacks of 2 MiB, each as its target, its beginning and its repeated part. Shorter attacks would stay
/// within [`crate::HEAP_MARGIN_BYTES`], whatever the reader takes for each byte.
const LARGE: [(&str, &[u8], &[u8]); 6] = [
    // Tensors without fields.
    ("grpc_request", b"", b"\x2a\x00"),
    // Unknown fields.
    ("grpc_request", b"", b"\x9a\x06\x00"),
    // Tensors without fields of an invocation, and functions of a desired state.
    ("messages", b"\x05", b"\x4a\x00"),
    ("messages", b"\x04", b"\x0a\x02\x0a\x00"),
    // A complete framed message of tensors without fields.
    ("grpc_framing", b"\x00\xff\x00\x00\x20\x00\x00", b"\x2a\x00"),
    // An array of numbers in a parameter.
    ("rest_request", b"-\n{\"parameters\":{\"p\":[0", b",0"),
];
const LARGE_BYTES: usize = 2 << 20;

/// Returns the corpus of a target in the order of the files' names, followed by the target's [`LARGE`]
/// attacks.
///
/// # Panics
/// Panics if a file cannot be read.
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
    let large = LARGE.iter().filter(|(name, ..)| *name == target.name);
    let large = large.map(|(_, beginning, pattern)| {
        [beginning.to_vec(), pattern.repeat(LARGE_BYTES / pattern.len())].concat()
    });
    paths.into_iter().map(read).chain(large).collect()
}

/// Runs a target over an input, and returns the peak of the heap in bytes. Meanwhile the input is in a file
/// in `fuzz/artifacts`, and stays there if the target ends the process.
///
/// # Panics
/// Panics if [`Target::run`] does, or if the file cannot be written.
pub fn run_kept(target: Target, input: &[u8]) -> usize {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("artifacts").join(target.name);
    let path = folder.join(format!("input-{}", std::process::id()));
    fs::create_dir_all(&folder).and_then(|()| fs::write(&path, input)).expect("fuzz/artifacts is writable");
    let peak = target.run(input);
    fs::remove_file(&path).expect("fuzz/artifacts is writable");
    peak
}
