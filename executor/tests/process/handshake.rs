//! Tests how an executor begins and ends, and that it never outlives its worker.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};

use millrace_device::DeviceMemory;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::*;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::support::{EXECUTOR_VARIABLE, Executor, MEMORY, executor_command, hello, send, spawn};

fn stderr(mut child: Child) -> (i32, String) {
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (child.wait().unwrap().code().unwrap(), said)
}

#[test]
fn a_shutdown_or_a_closed_socket_ends_the_executor_cleanly() {
    let mut executor = Executor::start();
    executor.send(Command::Shutdown(Shutdown {}));
    assert!(executor.child.wait().unwrap().success());

    let mut executor = Executor::start();
    executor.socket.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(executor.child.wait().unwrap().success());
}

#[test]
fn a_broken_handshake_ends_the_executor_with_a_message() {
    let memory = || DeviceMemory::create("gpu", MEMORY).unwrap().share().unwrap();
    let other = Hello { protocol_version: 99, build: "other".to_owned(), ..hello(MEMORY) };
    let larger = Hello { device_memory_bytes: MEMORY.get() + 1, ..hello(MEMORY) };
    for (command, descriptors, says) in [
        (Command::Hello(other), vec![memory()], "protocol 99"),
        (Command::Hello(hello(MEMORY)), vec![], "without the GPU's memory"),
        (Command::Hello(larger), vec![memory()], "sealed"),
        (Command::Shutdown(Shutdown {}), vec![], "before Hello"),
    ] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&ours, command, descriptors);
        let (code, said) = stderr(spawn(theirs.into(), Stdio::piped()));
        assert_eq!(code, 1);
        assert!(said.contains(says), "{says}: {said}");
    }
}

#[test]
fn bytes_that_are_no_command_end_the_executor_with_a_message() {
    for (bytes, says) in [
        (&[0xff; 8][..], "exceeds the"),
        (&[1, 0, 0, 0, 0xff], "does not decode"),
        (&[0, 0, 0, 0], "without content"),
        (&[9, 0, 0, 0, 1], "before the end of a frame"),
    ] {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(bytes).unwrap();
        drop(ours);
        let (code, said) = stderr(spawn(theirs.into(), Stdio::piped()));
        assert_eq!(code, 1);
        assert!(said.contains(says), "{bytes:?}: {said}");
    }
}

#[test]
fn an_executor_not_started_by_a_worker_ends_with_a_message() {
    // A user who starts the executor from a terminal has no socket to pass.
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let (code, said) = stderr(spawn(null, Stdio::piped()));
    assert!(code == 1 && said.contains("started by a worker"), "{said}");

    // The executor's parent is a shell and not the worker, as after a worker that died too early.
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let executor = executor_command();
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "\"$@\"; exit $?", "sh"]).arg(executor.get_program()).args(executor.get_args());
    shell.env(EXECUTOR_VARIABLE, "1");
    shell.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
    let (code, said) = stderr(shell.spawn().unwrap());
    assert!(code == 1 && said.contains("no longer this process's parent"), "{said}");
}

/// Environment variable that is set in the child process that acts as the worker.
const WORKER_VARIABLE: &str = "MILLRACE_TEST_WORKER";

/// Starts an executor, prints its process id, and waits to be killed.
fn be_a_worker() {
    let executor = Executor::start();
    println!("executor {}", executor.child.id());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn killing_the_worker_ends_its_executor() {
    if std::env::var_os(WORKER_VARIABLE).is_some() {
        return be_a_worker();
    }
    let mut worker = std::process::Command::new(std::env::current_exe().unwrap());
    worker.args(["--exact", "handshake::killing_the_worker_ends_its_executor", "--nocapture"]);
    worker.env(WORKER_VARIABLE, "1");
    let mut worker = worker.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let mut output = worker.stdout.take().unwrap();
    let executor = loop {
        let mut byte = [0];
        output.read_exact(&mut byte).unwrap();
        said.push(byte[0].into());
        let line = said.lines().find_map(|line| line.split_once("executor "));
        if let Some((_, pid)) = line.filter(|_| byte == *b"\n") {
            break Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        }
    };
    let executor = pidfd_open(executor, PidfdFlags::empty()).unwrap();
    worker.kill().unwrap();
    worker.wait().unwrap();
    let mut ends = [PollFd::new(&executor, PollFlags::IN)];
    assert_eq!(poll(&mut ends, None).unwrap(), 1, "the executor's end");
}
