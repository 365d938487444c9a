//! Test that the REST API allocates no memory by a number that a client may have sent. Clippy's
//! list of disallowed methods covers the whole workspace, so it cannot forbid `with_capacity` in
//! this folder alone.

mod workspace;

use std::path::Path;

/// The folder of the code that parses clients' numbers.
const FOLDER: &str = "gateway/src/rest";

#[test]
fn rest_code_allocates_only_constant_capacities() {
    let files: Vec<_> = workspace::files(".rs").into_iter().filter(|file| file.starts_with(FOLDER)).collect();
    assert!(files.iter().any(|file| file == Path::new("gateway/src/rest/elements.rs")), "{files:?}");
    for file in files {
        let text = workspace::text(&file);
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let found = code.lines().enumerate().find(|(_, line)| allocates_by_a_variable(line));
        assert!(
            found.is_none(),
            "{}: {found:?}: let the collection grow, or use try_reserve after a check against what arrived",
            file.display()
        );
    }
}

fn allocates_by_a_variable(line: &str) -> bool {
    line.split("with_capacity(").skip(1).any(|argument| {
        let argument = argument.split(')').next().unwrap_or_default();
        argument.chars().any(|c| !(c.is_ascii_uppercase() || c == '_'))
    })
}

#[test]
fn a_variable_capacity_is_found() {
    assert!(allocates_by_a_variable("let raw = BytesMut::with_capacity(count * size);"));
    assert!(allocates_by_a_variable("Vec::with_capacity(inputs.len())"));
    assert!(!allocates_by_a_variable("Vec::with_capacity(JSON_FREE)"));
    assert!(!allocates_by_a_variable("Vec::new()"));
}
