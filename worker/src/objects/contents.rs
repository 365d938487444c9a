//! A tensor's bytes: in the carrying message, in memory that other processes can map, or on a GPU.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use millrace_nodes::index::IndexedObject;
use rustix::buffer::spare_capacity;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::object_handle::{ObjectLost, ObjectRange, TransferReader};
use crate::port::Descriptor;

/// Largest tensor that travels inline, in bytes.
pub const INLINE_BYTES_MAX: usize = 64 << 10;

/// The bytes of a tensor on this worker.
#[derive(Debug, Clone)]
pub(crate) enum Contents {
    /// Bytes of a small tensor, or a slice of another tensor's bytes.
    Inline(Bytes),
    /// Bytes in memory that executors can map.
    Memory { fd: Descriptor, bytes: u64 },
    /// Bytes in a GPU's memory, or in host memory after a move.
    Kept(ObjectRange),
}

/// An input tensor, with its bytes in a message, in memory or in an object.
#[derive(Debug)]
pub(crate) struct InputTensor {
    pub(crate) name: String,
    pub(crate) datatype: String,
    pub(crate) shape: Vec<i64>,
    pub(crate) contents: Contents,
}

/// A worker may have a million tensors, and the index's bench counts on this size.
const _: () = assert!(std::mem::size_of::<Contents>() <= 40);

impl IndexedObject for Contents {
    fn bytes(&self) -> millrace_types::Bytes {
        millrace_types::Bytes(self.len())
    }

    fn files(&self) -> u64 {
        match self {
            Self::Inline(_) => 0,
            // Data on a GPU may be copied to the host, and needs a descriptor then.
            Self::Memory { .. } | Self::Kept(_) => 1,
        }
    }
}

impl Contents {
    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Inline(data) => data.len() as u64,
            Self::Memory { bytes, .. } => *bytes,
            Self::Kept(part) => part.bytes,
        }
    }

    /// Whether the bytes were lost with their GPU's executor.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Self::Kept(part) if part.object.is_lost())
    }

    /// Returns host memory with a range of the bytes, and the offset of the range there. Copies the
    /// range from a GPU if necessary.
    pub(crate) async fn on_host(
        &self,
        offset: u64,
        bytes: u64,
        reader: TransferReader,
    ) -> Result<(Self, u64), ObjectLost> {
        let Self::Kept(part) = self else { return Ok((self.clone(), offset)) };
        let part = ObjectRange { object: Arc::clone(&part.object), offset: part.offset + offset, bytes };
        let (fd, offset) = part.on_host(reader).await?;
        let bytes = size_of_memory(&fd).map_err(|_unreadable| ObjectLost)? as u64;
        Ok((Self::Memory { fd, bytes }, offset))
    }

    /// Reads a range of bytes that are on the host. Bytes in memory that is shared with an executor
    /// are copied.
    pub(crate) fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.len());
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        match self {
            // Both bounds are below the length of a slice.
            Self::Inline(data) => Ok(data.slice(offset as usize..end as usize)),
            Self::Memory { fd, .. } => {
                let mut data = Vec::new();
                // The size comes from another process: a wrong size must give an error, and no
                // abort.
                data.try_reserve_exact(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
                // The bytes are read into memory that is not zeroed first.
                while data.len() < len {
                    let at = offset + data.len() as u64;
                    if rustix::io::pread(fd, spare_capacity(&mut data), at)? == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                data.truncate(len);
                Ok(data.into())
            }
            Self::Kept(_) => {
                Err(io::Error::other("the bytes are in a GPU's memory: copy them to the host first"))
            }
        }
    }
}

/// Returns the size of shared memory, in bytes.
pub(crate) fn size_of_memory(fd: &OwnedFd) -> io::Result<usize> {
    Ok(usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0))
}

/// Creates empty shared memory that executors and programs can map. It can be sealed.
pub(crate) fn memory(name: &str) -> io::Result<File> {
    Ok(File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?))
}
