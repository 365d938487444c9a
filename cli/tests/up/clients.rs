//! Other people's clients, unmodified, against the whole server.

use std::process::Command;

use crate::running::{Up, repository};

/// The interpreter that `OIP_CLIENTS_PYTHON` names, or the machine's own.
fn python() -> String {
    std::env::var("OIP_CLIENTS_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

#[test]
fn tritonclient_and_kserve_work_unmodified() {
    let up = Up::ephemeral(&[]);
    up.apply_digits();
    for (script, module) in [
        ("tritonclient_grpc", "tritonclient.grpc"),
        ("tritonclient_http", "tritonclient.http"),
        ("kserve_sdk", "kserve"),
    ] {
        let has = Command::new(python()).args(["-c", &format!("import {module}")]).output();
        if !has.is_ok_and(|output| output.status.success()) {
            eprintln!("SKIPPED {script}: {} cannot import {module}; see tests/python/setup.sh", python());
            continue;
        }
        let file = repository(&format!("gateway/tests/python/{script}.py"));
        let output = Command::new(python()).args([&file, &up.client, "--model", "digits"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {said}");
    }
}
