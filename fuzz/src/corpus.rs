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

/// Attacks of 2 MiB: their beginning and what is repeated. Shorter ones stay below the margin of the heap
/// that every target has, whatever their reader takes for each byte.
const LARGE: [(&str, &[u8], &[u8]); 6] = [
    // Tensors without fields.
    ("grpc_request", b"", b"\x2a\x00"),
    // Unknown fields.
    ("grpc_request", b"", b"\x9a\x06\x00"),
    // An invocation's tensors without fields, and a desired state's functions.
    ("messages", b"\x05", b"\x4a\x00"),
    ("messages", b"\x04", b"\x0a\x02\x0a\x00"),
    // A framed message of such tensors, whole.
    ("grpc_framing", b"\x00\xff\x00\x00\x20\x00\x00", b"\x2a\x00"),
    // Numbers in a parameter.
    ("rest_request", b"-\n{\"parameters\":{\"p\":[0", b",0"),
];
const LARGE_BYTES: usize = 2 << 20;

/// The corpus of a target, in the order of the files' names, and behind it its [`LARGE`] attacks.
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
    let large = LARGE.iter().filter(|(name, ..)| *name == target.name);
    let large = large.map(|(_, beginning, pattern)| {
        [beginning.to_vec(), pattern.repeat(LARGE_BYTES / pattern.len())].concat()
    });
    paths.into_iter().map(read).chain(large).collect()
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
