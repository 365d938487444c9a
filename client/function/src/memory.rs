//! The memory of a function's data. Small data lies in the process's own memory. Large data lies in
//! a memfd that the worker and other processes map too. Data to read is mapped when it is first
//! read. Written data is sealed before any other process learns of it, so the bytes that other
//! processes read never change.
#![allow(unsafe_code, reason = "mapping memory; each block says why it is sound")]

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use bytes::Bytes;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::INLINE_BYTES_MAX;
use crate::error::Error;

/// A mapping of the first bytes of a memfd.
#[derive(Debug)]
struct MemoryMapping {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that this value alone owns.
unsafe impl Send for MemoryMapping {}
// SAFETY: a shared reference only reads the mapping.
unsafe impl Sync for MemoryMapping {}

impl MemoryMapping {
    fn new(fd: &OwnedFd, len: usize, protection: ProtFlags) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { at: NonNull::dangling(), len });
        }
        // A private mapping of memory that is never written shows the file's pages. Before Linux
        // 6.7, memory that is sealed against writing can be mapped only privately.
        let writes = protection.contains(ProtFlags::WRITE);
        let sharing = if writes { MapFlags::SHARED } else { MapFlags::PRIVATE };
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of this
        // process.
        let at = unsafe { mmap(ptr::null_mut(), len, protection, sharing, fd, 0)? };
        // The kernel never maps at address zero.
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, len })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped here while this value lives. The file is at least as long
        // (checked before the mapping), and no process writes to it (see `Buffer` and `Room`).
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: this value owns the mapping, and nothing borrows from it any longer. `munmap`
            // fails only for a wrong address, and this address came from `mmap`.
            unsafe { munmap(self.at.as_ptr().cast(), self.len) }.unwrap_or_default();
        }
    }
}

/// The alignment of all data in bytes, so that SIMD code can read the data as numbers.
const ALIGNMENT: usize = 64;

/// Small data, aligned, in an allocation of its own.
#[derive(Debug)]
struct Aligned {
    // The vector is never grown, so its bytes stay at their address.
    allocation: Vec<u8>,
    first: usize,
}

impl Aligned {
    fn zeros(len: usize) -> Self {
        let mut allocation = vec![0; len + ALIGNMENT - 1];
        let at = allocation.as_ptr().addr();
        let first = at.next_multiple_of(ALIGNMENT) - at;
        allocation.truncate(first + len);
        Self { allocation, first }
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &self.allocation[self.first..]
    }
}

/// The memory in which data lies.
#[derive(Debug)]
pub(crate) enum DataMemory {
    Inline(Bytes),
    /// A memfd. A worker shares only memfds that are sealed against writing.
    Memory {
        fd: OwnedFd,
        len: usize,
    },
}

impl DataMemory {
    /// Copies small data from a message, where it may be unaligned.
    pub(crate) fn arrived(data: &[u8]) -> Self {
        let mut aligned = Aligned::zeros(data.len());
        aligned.allocation[aligned.first..].copy_from_slice(data);
        Self::Inline(Bytes::from_owner(aligned))
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Inline(data) => data.len(),
            Self::Memory { len, .. } => *len,
        }
    }

    /// Returns the same data. A memfd gets a second descriptor.
    pub(crate) fn share(&self) -> Result<Self, Error> {
        Ok(match self {
            Self::Inline(data) => Self::Inline(data.clone()),
            Self::Memory { fd, len } => {
                let fd = fd.try_clone().map_err(|cause| Error::Memory { bytes: *len, cause })?;
                Self::Memory { fd, len: *len }
            }
        })
    }
}

/// Data to read. Nothing is mapped or copied before [`Self::bytes`] is called.
#[derive(Debug)]
pub struct Buffer {
    data: DataMemory,
    map: OnceLock<MemoryMapping>,
}

impl Buffer {
    pub(crate) fn new(data: DataMemory) -> Self {
        Self { data, map: OnceLock::new() }
    }

    /// Returns the number of bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "no tensor is empty")]
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Returns the bytes, aligned to 64. Maps large data read-only, without a copy.
    ///
    /// # Errors
    /// [`Error::Memory`] when the data cannot be mapped.
    pub fn bytes(&self) -> Result<&[u8], Error> {
        let (fd, len) = match &self.data {
            DataMemory::Inline(data) => return Ok(data),
            DataMemory::Memory { fd, len } => (fd, *len),
        };
        if let Some(map) = self.map.get() {
            return Ok(map.bytes());
        }
        let map = map_whole(fd, len).map_err(|cause| Error::Memory { bytes: len, cause })?;
        Ok(self.map.get_or_init(|| map).bytes())
    }
}

fn map_whole(fd: &OwnedFd, len: usize) -> io::Result<MemoryMapping> {
    // Reading a mapping beyond the end of its file raises SIGBUS.
    if u64::try_from(fstat(fd)?.st_size).unwrap_or(0) < len as u64 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    MemoryMapping::new(fd, len, ProtFlags::READ)
}

/// Memory for data to write in place, aligned to 64. All zeros at first.
#[derive(Debug)]
pub struct Room(WritableMemory);

#[derive(Debug)]
enum WritableMemory {
    Own(Aligned),
    Shared { fd: OwnedFd, map: MemoryMapping },
}

impl Room {
    pub(crate) fn new(len: usize) -> Result<Self, Error> {
        if len <= INLINE_BYTES_MAX {
            return Ok(Self(WritableMemory::Own(Aligned::zeros(len))));
        }
        let shared = || -> io::Result<WritableMemory> {
            let fd = memfd_create("millrace-data", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&fd, len as u64)?;
            let map = MemoryMapping::new(&fd, len, ProtFlags::READ | ProtFlags::WRITE)?;
            Ok(WritableMemory::Shared { fd, map })
        };
        Ok(Self(shared().map_err(|cause| Error::Memory { bytes: len, cause })?))
    }

    /// Seals the memory: no process can change the data from here on.
    pub(crate) fn seal(self) -> Result<DataMemory, Error> {
        match self.0 {
            WritableMemory::Own(data) => Ok(DataMemory::Inline(Bytes::from_owner(data))),
            WritableMemory::Shared { fd, map } => {
                let len = map.len;
                // The kernel refuses a seal against writes while a writable mapping exists.
                drop(map);
                fcntl_add_seals(fd.as_fd(), SEALS)
                    .map_err(|cause| Error::Memory { bytes: len, cause: cause.into() })?;
                Ok(DataMemory::Memory { fd, len })
            }
        }
    }
}

/// The seals that a worker requires of memory that it receives.
const SEALS: SealFlags =
    SealFlags::WRITE.union(SealFlags::GROW).union(SealFlags::SHRINK).union(SealFlags::SEAL);

impl Deref for Room {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.0 {
            WritableMemory::Own(data) => data.as_ref(),
            WritableMemory::Shared { map, .. } => map.bytes(),
        }
    }
}

impl DerefMut for Room {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            WritableMemory::Own(data) => &mut data.allocation[data.first..],
            // SAFETY: `len` bytes are mapped for writing while this value lives, no other process
            // knows the memory before it is sealed, and the borrow is exclusive.
            WritableMemory::Shared { map, .. } => unsafe {
                std::slice::from_raw_parts_mut(map.at.as_ptr(), map.len)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_data_is_read_in_place() {
        for len in [1, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, 3 << 20] {
            let mut room = Room::new(len).unwrap();
            assert!(room.iter().all(|&byte| byte == 0));
            room[len - 1] = 7;
            let data = room.seal().unwrap();
            assert_eq!(matches!(data, DataMemory::Inline(_)), len <= INLINE_BYTES_MAX);
            let buffer = Buffer::new(data);
            assert_eq!((buffer.len(), buffer.bytes().unwrap()[len - 1]), (len, 7));
            assert!(
                std::ptr::eq(buffer.bytes().unwrap(), buffer.bytes().unwrap()),
                "the data is mapped once"
            );
        }
    }

    /// Every kernel can map memory that is sealed against writing in this way.
    #[test]
    fn data_to_read_is_mapped_privately() {
        let mut room = Room::new(1 << 20).unwrap();
        room[0] = 7;
        let buffer = Buffer::new(room.seal().unwrap());
        let first = format!("{:x}-", buffer.bytes().unwrap().as_ptr().addr());
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let map = maps.lines().find(|line| line.starts_with(&first)).unwrap();
        assert!(map.contains(" r--p "), "{map}");
        assert_eq!(buffer.bytes().unwrap()[0], 7);
    }

    #[test]
    fn data_of_every_size_is_aligned() {
        for len in (1..200).chain([INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1]) {
            let room = Room::new(len).unwrap();
            assert!(room.as_ptr().addr().is_multiple_of(ALIGNMENT), "{len}");
            let buffers = [room.seal().unwrap(), DataMemory::arrived(&vec![7; len])].map(Buffer::new);
            for buffer in &buffers {
                let bytes = buffer.bytes().unwrap();
                assert!(bytes.len() == len && bytes.as_ptr().addr().is_multiple_of(ALIGNMENT), "{len}");
            }
            assert_eq!(buffers[1].bytes().unwrap(), vec![7; len]);
        }
    }

    #[test]
    fn sealed_memory_can_neither_be_written_nor_cut() {
        let DataMemory::Memory { fd, len } = Room::new(1 << 20).unwrap().seal().unwrap() else { panic!() };
        assert!(rustix::io::pwrite(&fd, b"x", 0).is_err());
        assert!(ftruncate(&fd, 1).is_err());
        assert!(MemoryMapping::new(&fd, len, ProtFlags::READ | ProtFlags::WRITE).is_err());
    }

    #[test]
    fn memory_that_is_shorter_than_announced_is_not_mapped() {
        let fd = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 10).unwrap();
        assert!(Buffer::new(DataMemory::Memory { fd, len: 11 }).bytes().is_err());
    }
}
