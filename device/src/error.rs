//! Why a device refused or failed.

use std::io;
use std::ops::Range;

use millrace_types::{Bytes, DataType};

/// Why a device refused or failed. Which variant it is says whose fault it is: the caller's, the
/// model's, or the device's.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An extent that is not within the memory or the region, not aligned, or overlaps another.
    #[error("extent of {bytes} bytes at {offset} is not valid: {problem}")]
    BadExtent {
        /// Where it starts.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// No physical memory left.
    #[error("out of device memory: {0}")]
    OutOfMemory(String),
    /// The region shows memory already, or a launch or copy uses it.
    #[error("the region is in use: unmap it, and wait for what runs")]
    Busy,
    /// Bytes without physical memory under them.
    #[error("bytes {0:?} of the region are not mapped")]
    NotMapped(Range<u64>),
    /// Bytes that a launch reads are not loaded.
    #[error("bytes {0:?} of the region are not loaded")]
    NotResident(Range<u64>),
    /// A copy failed.
    #[error("copy failed: {0}")]
    CopyFailed(String),
    /// Another device cannot be read.
    #[error("the other GPU cannot be read: {0}")]
    PeerLost(String),
    /// The device is gone (an Xid): nothing more will work.
    #[error("the device is lost: {0}")]
    Lost(String),
    /// A model's graph does not load.
    #[error("the model does not load: {0}")]
    Code(String),
    /// A kernel names a value that the model does not have.
    #[error("the model has no value named {0:?}")]
    UnknownValue(String),
    /// An input is not what its datatype and shape say, or a value cannot be represented.
    #[error("{0}")]
    Tensor(String),
    /// The device has no such element type.
    #[error("datatype {0} is not supported by this device: use FP32, INT32, INT64, INT8, UINT8 or BOOL")]
    DataType(DataType),
    /// The model failed on these inputs.
    #[error("{0}")]
    Launch(String),
    /// Memory received from another process that could change or shrink under a mapping.
    #[error("memory of {found} received where {expected} sealed against shrinking{writing} was due", writing = if *.written { " and writing" } else { "" })]
    Unsealed {
        /// What its size should be.
        expected: Bytes,
        /// What it is.
        found: Bytes,
        /// Whether it must be sealed against writing too.
        written: bool,
    },
    /// The device does not do this.
    #[error("this device does not support {0}")]
    Unsupported(&'static str),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// Its answer.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn os(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| match errno {
            rustix::io::Errno::NOMEM | rustix::io::Errno::NOSPC => {
                Self::OutOfMemory(format!("{what}: {errno}"))
            }
            _ => Self::Os { what, source: errno.into() },
        }
    }
}
