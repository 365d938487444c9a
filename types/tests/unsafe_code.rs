//! Which files may hold unsafe code. The workspace's lint denies it, unless a file allows it: this finds
//! the files that do, and those that hold some without saying so themselves, for a file's word holds for
//! the modules in it too.

mod workspace;

use std::path::{Path, PathBuf};

/// Besides device/: what a user's function links, memory that it shares with its worker
/// and the C interface.
const ALLOWED: [&str; 5] = [
    "client/function/src/ffi.rs",
    "client/function/src/ffi/getters.rs",
    "client/function/src/ffi/handles.rs",
    "client/function/src/ffi/tests.rs",
    "client/function/src/memory.rs",
];

/// How a file allows it for itself. In two parts, as those below, so that this file is not found.
const ALLOWANCE: &str = concat!("allow(unsafe", "_code");

/// What unsafe code looks like.
const CODE: [&str; 6] = [
    concat!("unsafe", " {"),
    concat!("unsafe", " fn "),
    concat!("unsafe", " impl"),
    concat!("unsafe", " trait"),
    concat!("unsafe", " extern"),
    concat!("[unsafe", "("),
];

/// A source with unsafe code, or that allows it.
#[derive(Debug)]
struct Source {
    file: PathBuf,
    says_so: bool,
    has_some: bool,
}

#[test]
fn unsafe_code_is_where_it_may_be() {
    let found: Vec<_> = workspace::files(".rs").into_iter().filter_map(source).collect();
    let elsewhere: Vec<_> = found.iter().filter(|source| !is_allowed(&source.file)).collect();
    assert!(elsewhere.is_empty(), "unsafe code in {elsewhere:?}: only {ALLOWED:?} and all of device/ may");
    let silent: Vec<_> = found.iter().filter(|source| source.has_some && !source.says_so).collect();
    assert!(silent.is_empty(), "unsafe code in {silent:?}: allow it in the file, and say why");
    for file in ALLOWED {
        let has_some = found.iter().any(|source| source.file == Path::new(file) && source.has_some);
        assert!(has_some, "{file} has none: take it off the list");
    }
}

fn is_allowed(file: &Path) -> bool {
    ALLOWED.iter().any(|allowed| file == Path::new(allowed)) || file.starts_with("device")
}

fn source(file: PathBuf) -> Option<Source> {
    let text = workspace::text(&file);
    let lines = text.lines().filter(|line| line.contains("unsafe"));
    let mut code = lines.filter(|line| !line.trim_start().starts_with("//"));
    let has_some = code.any(|line| CODE.iter().any(|code| line.contains(code)));
    let says_so = text.contains(ALLOWANCE);
    (has_some || says_so).then_some(Source { file, says_so, has_some })
}
