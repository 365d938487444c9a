//! Errors that end the executor process.

use std::io;

use millrace_proto::{BUILD, PROTOCOL_VERSION, frames};

/// Reason why an executor exits. Failures of a single program, copy or run are reported as events instead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket failed, or its bytes are not a frame.
    #[error(
        "the worker's socket: {0} (an executor is started by a worker, with its socket as standard input)"
    )]
    Socket(#[source] io::Error),
    /// A message is not a command.
    #[error("a frame from the worker is not a command: {0}")]
    Command(#[from] frames::FrameError),
    /// The first command was not `Hello`, or a second `Hello` arrived.
    #[error("the worker broke the protocol: {0}")]
    Protocol(&'static str),
    /// The worker speaks another protocol version.
    #[error(
        "the worker speaks protocol {theirs} (build {build:?}), this executor {PROTOCOL_VERSION} (build {BUILD:?}): start both from one build"
    )]
    Version {
        /// Protocol version of the worker.
        theirs: u32,
        /// Build of the worker.
        build: String,
    },
    /// The worker ended before this process was tied to it.
    #[error("the worker (process {worker}) is no longer this process's parent")]
    Orphaned {
        /// Process id of the worker.
        worker: i32,
    },
    /// A run is for a seat that no executor has.
    #[error("seat {0} is past the last seat, which is {last}", last = crate::SEATS_MAX - 1)]
    Seat(usize),
    /// The device failed or cannot be used.
    #[error("the device: {0}")]
    Device(#[from] millrace_device::Error),
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] millrace_engine::Error),
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// Operation that was tried.
        what: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
}
