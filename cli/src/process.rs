//! The parts of every server process: signals, the ready line for programs, and death with the
//! parent process.

pub(crate) mod controller;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::CommandFailure;
use crate::output::print;

/// The ready line of a controller that serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ControllerReady {
    pub(crate) ready: bool,
    pub(crate) role: String,
    pub(crate) id: u64,
    pub(crate) cluster: String,
    /// The address of the port for clients.
    pub(crate) client: String,
    /// The address of the port for workers and other controllers.
    pub(crate) internal: String,
    pub(crate) pid: u32,
    pub(crate) version: String,
}

/// The ready line of a worker that listens. The worker's GPUs may still be starting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorkerReady {
    pub(crate) ready: bool,
    pub(crate) role: String,
    pub(crate) name: String,
    /// The address of the port for gateways.
    pub(crate) address: String,
    pub(crate) pid: u32,
    pub(crate) version: String,
}

/// Prints the line that reports a server as ready.
pub(crate) fn announce(line: &impl Serialize) -> Result<(), CommandFailure> {
    let text = serde_json::to_string(line)
        .map_err(|error| CommandFailure::failed(format!("cannot write the ready line: {error}")))?;
    print(&text)
}

/// The signals that ask the process to stop: Ctrl-C's and the service manager's.
pub(crate) struct StopSignals {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl StopSignals {
    pub(crate) fn new() -> Result<Self, CommandFailure> {
        let listen = |kind| {
            signal(kind)
                .map_err(|error| CommandFailure::failed(format!("cannot listen for signals: {error}")))
        };
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Waits for the next signal.
    pub(crate) async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// Prints that the server is stopping.
pub(crate) fn print_stopping(grace: Duration) {
    let grace = humantime::format_duration(grace);
    eprintln!("stopping: requests under way get {grace} (again to stop at once)");
}

/// Returns the failure for a second signal during the stop.
pub(crate) fn stopped_at_once() -> CommandFailure {
    CommandFailure::failed("stopped at once: requests under way were cut short")
}

/// Asks the kernel for SIGKILL when the process that started this one ends. Must be called first,
/// on the main thread, because the request belongs to the thread that makes it.
pub(crate) fn die_with(parent: u32) -> Result<(), CommandFailure> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| CommandFailure::failed(format!("cannot tie this process to its parent: {error}")))?;
    // If the parent ended before the request, this process has another parent now.
    let now = rustix::process::getppid().map(Pid::as_raw_nonzero);
    if now.is_some_and(|now| now.get().unsigned_abs() == parent) {
        return Ok(());
    }
    Err(CommandFailure::failed(format!("process {parent}, which started this one, has ended")))
}

/// Creates a temporary folder that is deleted when the value is dropped.
pub(crate) fn ephemeral_dir() -> Result<tempfile::TempDir, CommandFailure> {
    tempfile::Builder::new()
        .prefix("millrace-")
        .tempdir()
        .map_err(|error| CommandFailure::failed(format!("cannot create a temporary folder: {error}")))
}

pub(crate) fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// Returns a random seed from the system.
pub(crate) fn seed() -> Result<u64, CommandFailure> {
    getrandom::u64()
        .map_err(|error| CommandFailure::failed(format!("the system has no random numbers: {error}")))
}

/// Returns the number of threads for each executor's launches: the machine's cores divided among
/// the executors, and at least one.
pub(crate) fn executor_threads(executors: usize) -> Result<u32, CommandFailure> {
    let cores = std::thread::available_parallelism()
        .map_err(|error| CommandFailure::failed(format!("cannot count this machine's cores: {error}")))?;
    Ok(u32::try_from(cores.get() / executors.max(1)).unwrap_or(u32::MAX).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_executor_has_at_least_one_thread() {
        assert_eq!(executor_threads(10_000), Ok(1));
    }
}
