//! Tests a real executor process: this test binary, started again as an executor, over a socketpair.
#![allow(missing_docs, clippy::unwrap_used)]

mod copies_out;
mod engines;
mod failures;
mod handshake;
mod late_work;
mod limits;
mod loading;
mod object_failures;
mod object_support;
mod objects;
mod peers;
mod support;
mod tokens;

use std::os::fd::AsFd as _;

/// Arguments that make this binary an executor.
const EXECUTOR_ARGS: &[&str] = &["--exact", "executor_process", "--nocapture"];

/// Runs an executor if a test started this binary as one; otherwise does nothing.
#[test]
fn executor_process() {
    if std::env::var_os(support::EXECUTOR_VARIABLE).is_none() {
        return;
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let ended = millrace_executor::run(socket);
    if let Err(error) = &ended {
        eprintln!("{error}");
    }
    std::process::exit(i32::from(ended.is_err()));
}
