//! The errors of a device.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use millrace_types::Bytes;

/// Reason why a device refused a call or failed. The variant shows whether the caller or the
/// device is at fault.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// An extent is outside the memory or the region, is not aligned, or overlaps another extent.
    #[error("extent of {bytes} bytes at {offset} is not valid: {problem}")]
    BadExtent {
        /// Offset of the extent in bytes.
        offset: u64,
        /// Length of the extent in bytes.
        bytes: u64,
        /// Rule that the extent breaks.
        problem: &'static str,
    },
    /// No physical memory is left.
    #[error("out of device memory: {0}")]
    OutOfMemory(String),
    /// The region is already mapped, or a launch or copy uses it.
    #[error("the region is in use: unmap it, and wait for its launches and copies")]
    Busy,
    /// Bytes of a region have no physical memory behind them.
    #[error("bytes {0:?} of the region are not mapped")]
    NotMapped(Range<u64>),
    /// Bytes that a launch or copy reads are not loaded.
    #[error("bytes {0:?} of the region are not loaded")]
    NotResident(Range<u64>),
    /// A copy failed; another copy may succeed.
    #[error("copy failed: {0}")]
    CopyFailed(String),
    /// The memory of another device cannot be read.
    #[error("the other GPU cannot be read: {0}")]
    PeerLost(String),
    /// The process's context on the device is broken, for example after an illegal access, and all
    /// further calls of this process will fail. Another process can use the device.
    #[error("the context is lost: {0}")]
    ContextLost(String),
    /// The device is gone (an Xid), and all further calls will fail.
    #[error("the device is lost: {0}")]
    Lost(String),
    /// Memory from another process has the wrong size, or could change or shrink under a mapping.
    #[error("received memory of {found}: expected {expected}, sealed against shrinking{writing}", writing = if *.written { " and writing" } else { "" })]
    Unsealed {
        /// Expected size of the memory.
        expected: Bytes,
        /// Actual size of the memory.
        found: Bytes,
        /// Whether the memory must also be sealed against writing.
        written: bool,
    },
    /// The CUDA driver refused a call, for a reason that none of the other variants names.
    #[error(transparent)]
    Driver(DriverError),
    /// The device does not support this operation.
    #[error("this device does not support {0}")]
    Unsupported(&'static str),
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// Operation that was tried.
        what: &'static str,
        /// Error of the operating system. Shared, because each waiter for an event gets the error.
        source: Arc<io::Error>,
    },
}

/// A call that the driver refused, or earlier work that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code}): {text}")]
pub struct DriverError {
    /// Function of the driver.
    pub call: &'static str,
    /// Number of the error.
    pub code: u32,
    /// Name of the error, such as CUDA_ERROR_OUT_OF_MEMORY.
    pub name: String,
    /// Description by the driver.
    pub text: String,
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        match error.code {
            2 => Self::OutOfMemory(error.to_string()),
            217 => Self::PeerLost(error.to_string()),
            // Errors after which every call in the context fails, such as an illegal address.
            214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 999 => Self::ContextLost(error.to_string()),
            _ => Self::Driver(error),
        }
    }
}

/// The part of a device that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceLoss {
    /// The context of this process.
    Context,
    /// The GPU.
    Gpu,
}

impl Error {
    /// Returns the part of the device that is lost, if the error says so.
    #[must_use]
    pub fn loss(&self) -> Option<DeviceLoss> {
        match self {
            Self::ContextLost(_) => Some(DeviceLoss::Context),
            Self::Lost(_) => Some(DeviceLoss::Gpu),
            _ => None,
        }
    }

    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Os { what, source: Arc::new(source) }
    }

    pub(crate) fn os(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| match errno {
            rustix::io::Errno::NOMEM | rustix::io::Errno::NOSPC => {
                Self::OutOfMemory(format!("{what}: {errno}"))
            }
            _ => Self::Os { what, source: Arc::new(errno.into()) },
        }
    }
}
