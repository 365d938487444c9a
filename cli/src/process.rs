//! What every server process has: signals, one line for programs when it is ready, and an end with
//! the process that started it.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use millrace_controller::{Inspection, InspectorCommand};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;
use crate::output::print;

/// The line of a controller that serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ControllerReady {
    pub(crate) ready: bool,
    pub(crate) role: String,
    pub(crate) id: u64,
    pub(crate) cluster: String,
    /// Where clients connect.
    pub(crate) client: String,
    /// Where workers and other controllers connect.
    pub(crate) internal: String,
    pub(crate) pid: u32,
    pub(crate) version: String,
}

/// The line of a worker that listens. Its GPUs may still be starting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WorkerReady {
    pub(crate) ready: bool,
    pub(crate) role: String,
    pub(crate) name: String,
    /// Where gateways connect.
    pub(crate) address: String,
    pub(crate) pid: u32,
    pub(crate) version: String,
}

/// Prints the one line that says that a server is ready.
pub(crate) fn announce(line: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(line)
        .map_err(|error| Failure::failed(format!("cannot write the ready line: {error}")))?;
    print(&text)
}

/// Ctrl-C and what service managers send.
pub(crate) struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    pub(crate) fn new() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::failed(format!("cannot listen for signals: {error}")))
        };
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Returns at the next signal.
    pub(crate) async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// What is said when a server is told to stop.
pub(crate) fn say_stopping(grace: Duration) {
    let grace = humantime::format_duration(grace);
    eprintln!("stopping: requests under way get {grace} (again to stop at once)");
}

/// What is said when it is told so once more.
pub(crate) fn stopped_at_once() -> Failure {
    Failure::failed("stopped at once: requests under way were cut short")
}

/// Asks for SIGKILL when the process that started this one ends. To be called on the main thread,
/// before anything else: the signal belongs to the thread that asks for it.
pub(crate) fn die_with(parent: u32) -> Result<(), Failure> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Failure::failed(format!("cannot tie this process to its parent: {error}")))?;
    // One that ended before we asked is not our parent any more.
    let now = rustix::process::getppid().map(Pid::as_raw_nonzero);
    if now.is_some_and(|now| now.get().unsigned_abs() == parent) {
        return Ok(());
    }
    Err(Failure::failed(format!("process {parent}, which started this one, has ended")))
}

/// How a controller of this program checks uploaded models.
pub(crate) fn inspection() -> Result<Inspection, Failure> {
    let command = InspectorCommand::this_program();
    let command = command.map_err(|error| Failure::failed(format!("cannot find this program: {error}")))?;
    Ok(Inspection::Child(command))
}

/// A folder that goes away with the process.
pub(crate) fn ephemeral_dir() -> Result<tempfile::TempDir, Failure> {
    tempfile::Builder::new()
        .prefix("millrace-")
        .tempdir()
        .map_err(|error| Failure::failed(format!("cannot make a temporary folder: {error}")))
}

pub(crate) fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// A seed from the system.
pub(crate) fn seed() -> Result<u64, Failure> {
    getrandom::u64().map_err(|error| Failure::failed(format!("no randomness from the system: {error}")))
}
