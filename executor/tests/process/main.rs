//! A real executor process: this test binary, started again as one, over a socketpair.
#![allow(missing_docs, clippy::unwrap_used)]

mod failures;
mod handshake;
mod limits;
mod loading;
mod opaque;
mod peers;
mod support;

use std::os::fd::AsFd as _;

/// What makes this binary an executor.
const EXECUTOR_ARGS: &[&str] = &["--exact", "executor_process", "--ignored", "--nocapture"];

/// The entry point of the processes that the tests start.
#[test]
#[ignore = "runs in the child processes of the other tests"]
fn executor_process() {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let ended = millrace_executor::run(socket);
    if let Err(error) = &ended {
        eprintln!("{error}");
    }
    std::process::exit(i32::from(ended.is_err()));
}
