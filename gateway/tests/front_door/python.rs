//! Tests unmodified clients of other projects: tritonclient over gRPC and HTTP, and KServe's SDK.
//!
//! The tests run if an interpreter can import these clients: `OIP_CLIENTS_PYTHON`, or `python3`.
//! Otherwise the tests report on standard error that they were skipped.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;

use crate::harness::Server;

fn interpreter() -> String {
    std::env::var("OIP_CLIENTS_PYTHON").unwrap_or_else(|_| "python3".to_owned())
}

/// Reports a skipped test. Bypasses the test harness, which captures the output of a passing test.
fn say_skipped(script: &str, module: &str) {
    let message =
        format!("SKIPPED {script}: {} cannot import {module}; see OIP_CLIENTS_PYTHON\n", interpreter());
    std::io::stderr().write_all(message.as_bytes()).unwrap();
}

async fn passes(script: &str, module: &str, more: &[&str]) {
    let mut import = Command::new(interpreter());
    import.args(["-c", &format!("import numpy, {module}")]).stdout(Stdio::null()).stderr(Stdio::null());
    if !import.status().await.is_ok_and(|status| status.success()) {
        return say_skipped(script, module);
    }
    let server = Server::start().await;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(script);
    let mut checks = Command::new(interpreter());
    checks.arg("-B").arg(path).arg(server.addr.to_string()).args(["--model", "pair"]).args(more);
    let done = checks.output().await.unwrap();
    let out = String::from_utf8_lossy(&done.stdout);
    let err = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{out}\n{err}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tritonclient_works_over_grpc() {
    passes("tritonclient_grpc.py", "tritonclient.grpc", &["--large", "mlp"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tritonclient_works_over_http() {
    passes("tritonclient_http.py", "tritonclient.http", &["--large", "mlp"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kserve_sdk_works_over_rest_and_grpc() {
    passes("kserve_sdk.py", "kserve", &[]).await;
}
