//! What can go wrong inside a function.

use std::ffi::CStr;
use std::io;

use millrace_proto::{BUILD, FUNCTION_PROTOCOL_VERSION};
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
        "the worker speaks protocol {theirs} (build {build}) and this program {FUNCTION_PROTOCOL_VERSION} (build {BUILD}): build it against the worker's version"
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
    /// Nothing has that name any more: asking again will not help.
    #[error("{message}")]
    DataLost {
        /// The name.
        id: DataId,
        /// What the worker found.
        message: String,
    },
    /// It may be on a worker that cannot be reached now: asking again may help.
    #[error("{message}")]
    Unavailable {
        /// The name.
        id: DataId,
        /// Who could not be asked, and why.
        message: String,
    },
    /// Something was stored under the name before, whether or not it is there still.
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

impl Error {
    /// A stable name for what a function may decide by.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        // All of them are ASCII.
        self.c_reason().to_str().unwrap_or_default()
    }

    /// The same, as C has it.
    pub(crate) fn c_reason(&self) -> &'static CStr {
        match self {
            Self::DataLost { .. } => c"DATA_LOST",
            Self::Unavailable { .. } => c"UNAVAILABLE",
            Self::Taken(_) => c"TAKEN",
            Self::NoInput(_) => c"NO_INPUT",
            Self::NoIds => c"NO_IDS",
            Self::Memory { .. } => c"NO_MEMORY",
            Self::Answered => c"ANSWERED",
            Self::Socket(_) | Self::Protocol(_) => c"NO_WORKER",
            Self::Version { .. } => c"PEER_MISMATCH",
            Self::NotAnId(_) | Self::Twice(_) | Self::Open | Self::Function(_) => c"INVALID",
        }
    }
}
