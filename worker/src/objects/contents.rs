//! A tensor's bytes, wherever they are: in the message that they came with, in memory that others can map,
//! or on a GPU.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use millrace_policy::index::Held;
use rustix::buffer::spare_capacity;
use rustix::fs::{MemfdFlags, memfd_create};

use super::{Lost, Part};
use crate::actors::node::Reader;
use crate::port::Descriptor;

/// A tensor's bytes, as the worker has them.
#[derive(Debug, Clone)]
pub(crate) enum Contents {
    /// Small ones, or a part of others'.
    Inline(Bytes),
    /// In memory that an executor maps.
    Memory {
        /// That memory.
        fd: Descriptor,
        /// Its size.
        bytes: u64,
    },
    /// In a GPU's memory, or in that of the host by now.
    Kept(Part),
}

/// There may be a million of them. The index's bench counts on it.
const _: () = assert!(std::mem::size_of::<Contents>() <= 40);

impl Held for Contents {
    fn bytes(&self) -> millrace_types::Bytes {
        millrace_types::Bytes(self.len())
    }

    fn files(&self) -> u64 {
        match self {
            Self::Inline(_) => 0,
            // What a GPU has may come to the host.
            Self::Memory { .. } | Self::Kept(_) => 1,
        }
    }
}

impl Contents {
    /// How many bytes there are.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Inline(data) => data.len() as u64,
            Self::Memory { bytes, .. } => *bytes,
            Self::Kept(part) => part.bytes,
        }
    }

    /// Whether it is nowhere any more.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Self::Kept(part) if part.object.is_lost())
    }

    /// Bytes of it in host memory, whatever it takes to have them there: where, and from which offset on.
    pub(crate) async fn on_host(&self, offset: u64, bytes: u64, reader: Reader) -> Result<(Self, u64), Lost> {
        let Self::Kept(part) = self else { return Ok((self.clone(), offset)) };
        let part = Part { object: Arc::clone(&part.object), offset: part.offset + offset, bytes };
        let (fd, offset) = part.on_host(reader).await?;
        let bytes = size_of_memory(&fd).map_err(|_unreadable| Lost)? as u64;
        Ok((Self::Memory { fd, bytes }, offset))
    }

    /// Bytes of it, which are on the host; copied, where they are in an executor's memory.
    pub(crate) fn read(&self, offset: u64, len: usize) -> io::Result<Bytes> {
        let end = offset.checked_add(len as u64).filter(|end| *end <= self.len());
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        match self {
            // Below the length of a slice.
            Self::Inline(data) => Ok(data.slice(offset as usize..end as usize)),
            Self::Memory { fd, .. } => {
                let mut data = Vec::new();
                // Its size is another process's word: too large a one is an error, and no abort.
                data.try_reserve_exact(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
                // Into memory that nobody has to clear first.
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
                Err(io::Error::other("it is in a GPU's memory: have it copied to the host first"))
            }
        }
    }
}

/// How many bytes memory has.
pub(crate) fn size_of_memory(fd: &OwnedFd) -> io::Result<usize> {
    Ok(usize::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0))
}

/// Memory that executors and programs can map, with nothing in it yet. It can be sealed.
pub(crate) fn memory(name: &str) -> io::Result<File> {
    Ok(File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?))
}
