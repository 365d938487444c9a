//! The errors of this crate.

use std::ffi::CStr;
use std::io;

use millrace_proto::{BUILD, FUNCTION_PROTOCOL_VERSION};
use millrace_types::DataId;

/// The reason why a call of this crate failed. Most functions report the error as the outcome of
/// the request ([`Call::fail`](crate::Call::fail)), but a function may also handle it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No worker is at standard input, or the worker is gone.
    #[error("no worker at standard input ({0}): let a worker start the function's program")]
    Socket(io::Error),
    /// The worker is of another version.
    #[error(
        "the worker speaks protocol {theirs} (build {build}) and this program {FUNCTION_PROTOCOL_VERSION} (build {BUILD}): build it against the worker's version"
    )]
    Version {
        /// The protocol version of the worker.
        theirs: u32,
        /// The build of the worker.
        build: String,
    },
    /// The worker sent a message that the protocol does not allow.
    #[error("the worker broke the protocol: {0}")]
    Protocol(&'static str),
    /// The process has no memory or no descriptors left.
    #[error("cannot allocate or map {bytes} bytes: {cause}")]
    Memory {
        /// The number of bytes requested.
        bytes: usize,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// The manifest declares no input with this name.
    #[error("there is no input {0:?}: use a name from the manifest's inputs")]
    NoInput(String),
    /// No data has the id any longer: asking again will not help.
    #[error("{message}")]
    DataLost {
        /// The id of the lost data.
        id: DataId,
        /// The worker's explanation.
        message: String,
    },
    /// The data may be on a worker that cannot be reached now: asking again may help.
    #[error("{message}")]
    Unavailable {
        /// The id of the data.
        id: DataId,
        /// The workers that could not be asked, and the reasons.
        message: String,
    },
    /// Data was stored under this id before. The data may no longer exist.
    #[error("data {0} is already stored: take a new id for each store")]
    IdAlreadyUsed(DataId),
    /// The worker has no ids to assign.
    #[error("no id is available: no controller has registered this worker yet")]
    NoIds,
    /// The text is not a data id.
    #[error("{0:?} is not a data id: pass an id from unique_id or from an input")]
    NotAnId(String),
    /// The output already has data.
    #[error("output {0:?} is set twice: set each output once")]
    OutputAlreadySet(String),
    /// The previous call is not answered yet.
    #[error("the previous call is not answered yet: finish or fail it, then wait for the next call")]
    CallUnanswered,
    /// The call has already been answered.
    #[error("the call has already been answered")]
    AlreadyAnswered,
    /// The function reports an error of its own.
    #[error("{0}")]
    Function(String),
}

impl Error {
    /// Returns the stable name of the error, by which a function may decide.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        // Every name is ASCII.
        self.c_reason().to_str().unwrap_or_default()
    }

    /// Returns the stable name of the error as a C string.
    pub(crate) fn c_reason(&self) -> &'static CStr {
        match self {
            Self::DataLost { .. } => c"DATA_LOST",
            Self::Unavailable { .. } => c"UNAVAILABLE",
            Self::IdAlreadyUsed(_) => c"TAKEN",
            Self::NoInput(_) => c"NO_INPUT",
            Self::NoIds => c"NO_IDS",
            Self::Memory { .. } => c"NO_MEMORY",
            Self::AlreadyAnswered => c"ANSWERED",
            Self::Socket(_) | Self::Protocol(_) => c"NO_WORKER",
            Self::Version { .. } => c"PEER_MISMATCH",
            Self::NotAnId(_) | Self::OutputAlreadySet(_) | Self::CallUnanswered | Self::Function(_) => {
                c"INVALID"
            }
        }
    }
}
