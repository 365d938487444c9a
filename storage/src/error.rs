//! The errors of files and folders.

use std::io;
use std::path::{Path, PathBuf};

use millrace_types::{Bytes, Digest, Failure, Reason};

use crate::space::Space;

/// Error of a file operation, or of bytes that do not match the announced size or digest.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused an operation, most often because the disk is full.
    #[error("{doing} {}: {source}", path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    /// The received bytes have another digest than announced.
    #[error(
        "the received bytes have digest {actual}, not {claimed}: the file changed or was damaged in transit; send the file again"
    )]
    Digest { claimed: Digest, actual: Digest },
    /// The file has fewer bytes than announced.
    #[error("received {received} of {claimed} bytes: the transfer ended early; send the file again")]
    Short { received: u64, claimed: u64 },
    /// The file has more bytes than announced.
    #[error("received more than the {claimed} announced bytes: announce the file's size")]
    Long { claimed: u64 },
    /// Too little space would stay free.
    #[error(
        "{} has {} free of {}, and a model file of {bytes} must leave {}: free space on that disk, or delete functions; unused files are removed after an hour",
        dir.display(),
        space.available,
        space.total,
        space.floor()
    )]
    Full { dir: PathBuf, space: Space, bytes: Bytes },
    /// The file on the disk has other bytes than were written.
    #[error("model file {digest} on this disk is damaged: upload the model again")]
    Damaged { digest: Digest },
    /// The file is not on the disk.
    #[error("model file {digest} is not on this disk")]
    Missing { digest: Digest },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let reason = match &error {
            Error::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => Reason::StorageFull,
            Error::Full { .. } => Reason::StorageFull,
            Error::Io { .. } => Reason::Internal,
            Error::Digest { .. } | Error::Damaged { .. } => Reason::DigestMismatch,
            Error::Short { .. } | Error::Long { .. } => Reason::MalformedRequest,
            Error::Missing { .. } => Reason::ArtifactNotFound,
        };
        Failure::new(reason, error.to_string())
    }
}

/// Returns the conversion of an error of the operating system.
pub(crate) fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { doing, path, source }
}
