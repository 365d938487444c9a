//! Test of the files that may contain unsafe code. The workspace's lint denies unsafe code unless a
//! file allows it, and the permission of a file covers the modules below. The test therefore finds
//! the files that allow unsafe code, and those that contain unsafe code without allowing it
//! themselves.

mod workspace;

use std::path::{Path, PathBuf};

/// The allowed files besides `device/`: the library that a user's function links, the memory that
/// the function shares with its worker, and the C interface. In `engine`: views of a region's memory,
/// and calls of ONNX Runtime for which its crate has no safe function.
const ALLOWED: [&str; 12] = [
    "client/function/src/ffi.rs",
    "client/function/src/ffi/getters.rs",
    "client/function/src/ffi/handles.rs",
    "client/function/src/ffi/tests.rs",
    "client/function/src/memory.rs",
    "engine/src/ort/library.rs",
    "engine/src/ort/cuda.rs",
    "engine/src/ort/memory.rs",
    "engine/src/ort/module.rs",
    "engine/src/ort/value.rs",
    "engine/src/rten/module.rs",
    "engine/src/rten/value.rs",
];

/// The attribute by which a file allows unsafe code. Split in two, like the patterns below, so that
/// the test does not find this file.
const ALLOWANCE: &str = concat!("allow(unsafe", "_code");

/// The patterns of unsafe code.
const CODE: [&str; 6] = [
    concat!("unsafe", " {"),
    concat!("unsafe", " fn "),
    concat!("unsafe", " impl"),
    concat!("unsafe", " trait"),
    concat!("unsafe", " extern"),
    concat!("[unsafe", "("),
];

/// A source file that contains or allows unsafe code.
#[derive(Debug)]
struct UnsafeSource {
    file: PathBuf,
    says_so: bool,
    has_some: bool,
}

#[test]
fn unsafe_code_is_only_in_allowed_files() {
    let found: Vec<_> = workspace::files(".rs").into_iter().filter_map(source).collect();
    let elsewhere: Vec<_> = found.iter().filter(|source| !is_allowed(&source.file)).collect();
    assert!(
        elsewhere.is_empty(),
        "unsafe code in {elsewhere:?}: only {ALLOWED:?} and device/ may contain unsafe code"
    );
    let silent: Vec<_> = found.iter().filter(|source| source.has_some && !source.says_so).collect();
    assert!(silent.is_empty(), "unsafe code in {silent:?}: allow it in the file, and say why");
    for file in ALLOWED {
        let has_some = found.iter().any(|source| source.file == Path::new(file) && source.has_some);
        assert!(has_some, "{file} contains no unsafe code: remove the file from the list");
    }
}

fn is_allowed(file: &Path) -> bool {
    ALLOWED.iter().any(|allowed| file == Path::new(allowed)) || file.starts_with("device")
}

fn source(file: PathBuf) -> Option<UnsafeSource> {
    let text = workspace::text(&file);
    let lines = text.lines().filter(|line| line.contains("unsafe"));
    let mut code = lines.filter(|line| !line.trim_start().starts_with("//"));
    let has_some = code.any(|line| CODE.iter().any(|code| line.contains(code)));
    let says_so = text.contains(ALLOWANCE);
    (has_some || says_so).then_some(UnsafeSource { file, says_so, has_some })
}
