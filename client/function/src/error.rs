//! What can go wrong inside a function.

use std::io;

use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::DataId;

/// Why a call of this crate failed. What the function does with it is its own: most give up the
/// request ([`Call::fail`](crate::Call::fail)).
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no worker at standard input, or it is gone.
    #[error("no worker is at standard input ({0}): a program of a function is started by a worker")]
    Socket(io::Error),
    /// The worker is of another version.
    #[error(
        "the worker speaks protocol {theirs} (build {build}) and this program {PROTOCOL_VERSION} (build {BUILD}): build it against the worker's version"
    )]
    Version {
        /// The worker's protocol.
        theirs: u32,
        /// Its build.
        build: String,
    },
    /// It said what makes no sense here.
    #[error("the worker broke the protocol: {0}")]
    Protocol(&'static str),
    /// No memory, or no descriptors, are left.
    #[error("memory for {bytes} bytes: {cause}")]
    Memory {
        /// How many were wanted.
        bytes: usize,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// The function declares no such input.
    #[error("there is no input {0:?}: it is what the manifest's inputs name")]
    NoInput(String),
    /// Nothing has that name here.
    #[error("no data {0} is on this worker: it was let go of, or never stored")]
    NoData(DataId),
    /// The name is taken already.
    #[error("data {0} is stored already: take a new id for each")]
    Taken(DataId),
    /// The worker has no names to give.
    #[error("no id can be given: no controller has named this worker yet")]
    NoIds,
    /// Text that is no name of data.
    #[error("{0:?} is no id: pass one that unique_id or an input gave")]
    NotAnId(String),
    /// An output twice.
    #[error("output {0:?} is given twice")]
    Twice(String),
    /// Another call is not answered yet.
    #[error("the call before is not answered yet: finish or fail it, then wait for the next")]
    Open,
    /// The call was answered already.
    #[error("the call was answered already")]
    Answered,
    /// The function's own reason.
    #[error("{0}")]
    Function(String),
}
