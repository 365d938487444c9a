//! Why an executor ends by itself.

use std::io;

use millrace_proto::{BUILD, PROTOCOL_VERSION, frames};

/// Why an executor ends by itself. What concerns one program, copy or run is an event instead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket failed, or what came over it is no frame.
    #[error(
        "the worker's socket: {0} (an executor is started by a worker, with its socket as standard input)"
    )]
    Socket(#[source] io::Error),
    /// A message that is no command.
    #[error("a frame from the worker is not a command: {0}")]
    Command(#[from] frames::Error),
    /// Another command came where `Hello` was due, or a second `Hello`.
    #[error("the worker broke the protocol: {0}")]
    Protocol(&'static str),
    /// The worker speaks another version.
    #[error(
        "the worker speaks protocol {theirs} (build {build:?}), this executor {PROTOCOL_VERSION} (build {BUILD:?}): start both from one build"
    )]
    Version {
        /// Its version.
        theirs: u32,
        /// Its build.
        build: String,
    },
    /// The worker ended before this process was tied to it.
    #[error("the worker (process {worker}) is not this process's parent any more")]
    Orphaned {
        /// Its process id.
        worker: i32,
    },
    /// The device cannot be used.
    #[error("the device: {0}")]
    Device(#[from] millrace_device::Error),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Its answer.
        source: io::Error,
    },
}
