//! The steps of a child process before it runs a function's program. The child ties itself to the worker,
//! so that no program outlives the worker. When memory runs out, the kernel kills the program before the
//! worker.

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

/// The environment variable with the path of the program to run.
pub(crate) const PROGRAM_VARIABLE: &str = "MILLRACE_FUNCTION_PROGRAM";
/// Maximum number of attempts to run a program's file while another process has the file open for writing.
const BUSY_TRIES: u32 = 100;
/// The wait between two such attempts.
const BUSY_WAIT: Duration = Duration::from_millis(20);

/// Replaces this process with the program that the worker named. Returns only if that fails.
#[must_use]
pub fn launch() -> ExitCode {
    let Some(path) = std::env::var_os(PROGRAM_VARIABLE) else {
        eprintln!("millrace program: {PROGRAM_VARIABLE} is not set: only a worker starts this command");
        return ExitCode::FAILURE;
    };
    // Not fatal: without this setting the kernel may kill either process.
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ.to_string()) {
        eprintln!("when memory runs out, the kernel may kill the worker before this program: {error}");
    }
    let error = match tie_to_worker() {
        Ok(()) => become_program(&path),
        Err(error) => error,
    };
    eprintln!("cannot start the program: {error}");
    ExitCode::FAILURE
}

/// Asks the kernel for SIGKILL when the worker's thread that started this process ends. The setting
/// survives an exec. A worker that ended before the setting took effect is no longer the parent. That is
/// checked against the socket's peer credentials, because the worker created the other end of the socket.
fn tie_to_worker() -> io::Result<()> {
    let worker = rustix::net::sockopt::socket_peercred(io::stdin().as_fd())?.pid;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() != Some(worker) {
        return Err(io::Error::other("the worker has ended"));
    }
    Ok(())
}

#[allow(clippy::disallowed_methods, reason = "no event says when the other child has called exec")]
fn become_program(path: &OsStr) -> io::Error {
    for _ in 1..BUSY_TRIES {
        let error = Command::new(path).env_remove(PROGRAM_VARIABLE).exec();
        // Another child of the worker that was forked while the file was written inherited its
        // descriptor. The file stays busy until that child has called exec.
        if error.kind() != io::ErrorKind::ExecutableFileBusy {
            return error;
        }
        thread::sleep(BUSY_WAIT);
    }
    io::ErrorKind::ExecutableFileBusy.into()
}
