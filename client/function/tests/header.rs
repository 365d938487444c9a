//! `millrace.h` as C and C++ compilers read it.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

/// A program that names every function, so that a function that is declared but not defined does
/// not link.
const USES_ALL: &str = r#"
#include "millrace.h"
typedef void (*any)(void);
int main(void) {
    any all[] = {
        (any)millrace_error, (any)millrace_reason, (any)millrace_open, (any)millrace_close,
        (any)millrace_next, (any)millrace_serve, (any)millrace_input_count, (any)millrace_input_at,
        (any)millrace_input, (any)millrace_input_name, (any)millrace_input_id, (any)millrace_input_datatype,
        (any)millrace_input_rank, (any)millrace_input_shape, (any)millrace_request_id,
        (any)millrace_timeout_ms, (any)millrace_wanted_count, (any)millrace_wanted,
        (any)millrace_unique_id, (any)millrace_fetch, (any)millrace_create, (any)millrace_data,
        (any)millrace_bytes, (any)millrace_release, (any)millrace_store, (any)millrace_output,
        (any)millrace_finish, (any)millrace_fail,
    };
    millrace_tensor tensor = {0, 0, 0, 0, 0};
    char id[MILLRACE_ID_BYTES] = {0};
    return tensor.rank == 0 && id[0] == 0 && sizeof all > 0 ? 0 : 1;
}
"#;

/// Compiles the program with warnings as errors.
fn compiles(compiler: &str, standard: &str, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join(name);
    let object = dir.path().join("all.o");
    std::fs::write(&source, USES_ALL).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let out = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", standard, "-c"])
        .arg("-I")
        .arg(include)
        .arg(&source)
        .arg("-o")
        .arg(&object)
        .output()
        .unwrap();
    assert!(out.status.success(), "{compiler} {standard}: {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn the_header_compiles_as_c99() {
    compiles("cc", "-std=c99", "all.c");
}

#[test]
fn the_header_compiles_as_cpp() {
    compiles("c++", "-std=c++11", "all.cc");
}
