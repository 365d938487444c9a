//! What a child of the worker does before it is the program: it ties itself to the worker, so that
//! whatever the program is, it does not outlive it; and it has the kernel end the program before the worker
//! when memory runs out.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use millrace_proto::OOM_SCORE_ADJ;
use rustix::process::Signal;

/// Where a child finds which program it is to be.
pub(super) const PROGRAM_VARIABLE: &str = "MILLRACE_FUNCTION_PROGRAM";
/// How often a file that is still being written somewhere is tried again.
const BUSY_TRIES: u32 = 100;
/// How long apart.
const BUSY_WAIT: Duration = Duration::from_millis(20);

/// Becomes the program that the worker named. Returns only where that cannot be.
#[must_use]
pub fn launch() -> ExitCode {
    let Some(path) = std::env::var_os(PROGRAM_VARIABLE) else {
        eprintln!("millrace program: a worker starts this, not a person");
        return ExitCode::FAILURE;
    };
    // The worker goes on without it: then the kernel may end either.
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ.to_string()) {
        eprintln!("the kernel may end the worker before this program when memory runs out: {error}");
    }
    let error = match tie_to_worker() {
        Ok(()) => become_program(&path),
        Err(error) => error,
    };
    eprintln!("cannot be started: {error}");
    ExitCode::FAILURE
}

/// Asks for SIGKILL when the worker's thread that started it ends; an exec keeps that. A worker that
/// ended before we asked is not our parent any more, which the socket tells: its other end was made by
/// the worker.
fn tie_to_worker() -> io::Result<()> {
    let worker = rustix::net::sockopt::socket_peercred(io::stdin().as_fd())?.pid;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() != Some(worker) {
        return Err(io::Error::other("the worker is gone"));
    }
    Ok(())
}

#[allow(clippy::disallowed_methods, reason = "nobody tells when that other child is itself")]
fn become_program(path: &OsStr) -> io::Error {
    for _ in 1..BUSY_TRIES {
        let error = Command::new(path).env_remove(PROGRAM_VARIABLE).exec();
        // Another child, forked while the file was written, has it open until it is itself.
        if error.kind() != io::ErrorKind::ExecutableFileBusy {
            return error;
        }
        thread::sleep(BUSY_WAIT);
    }
    io::ErrorKind::ExecutableFileBusy.into()
}
