//! The worker's side: the memory it owns and lends to executors as descriptors. Host regions outlive
//! every executor. Device memory is made anew for each incarnation, so that what a dead executor
//! left is never seen again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use millrace_types::Bytes;
use rustix::fs::SealFlags;

use crate::error::Error;
use crate::map::ReadMapping;
use crate::memfd;

/// One emulated GPU's memory: a sparse memfd, so memory is taken as it is first written.
#[derive(Debug)]
pub struct DeviceMemory {
    file: OwnedFd,
    bytes: Bytes,
}

impl DeviceMemory {
    /// Makes a GPU's memory.
    ///
    /// # Errors
    /// [`Error::Os`] or [`Error::OutOfMemory`] from the kernel.
    pub fn create(name: &str, bytes: Bytes) -> Result<Self, Error> {
        let file = memfd::create(name, bytes.get())?;
        memfd::seal(&file, SealFlags::empty())?;
        Ok(Self { file, bytes })
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Reads what is in it now, for diagnosis and tests.
    ///
    /// # Errors
    /// [`Error::Os`], past the end too.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        memfd::read_at(&self.file, bytes, offset)
    }

    /// A descriptor to send to an executor.
    ///
    /// # Errors
    /// [`Error::Os`] when this process has too many open.
    pub fn share(&self) -> Result<OwnedFd, Error> {
        share(self.file.as_fd())
    }
}

/// Whether a host region's pages are locked in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pinned {
    /// They are: a GPU could read them without help (T07).
    Locked,
    /// They are not, and why. The emulated device does not mind.
    Pageable {
        /// What the kernel said, and what to change.
        reason: String,
    },
}

/// A host region that is being filled.
#[derive(Debug)]
pub struct HostRegionBuilder {
    file: OwnedFd,
    bytes: Bytes,
}

impl HostRegionBuilder {
    /// Begins a region of this size, all zero.
    ///
    /// # Errors
    /// [`Error::Os`] or [`Error::OutOfMemory`] from the kernel.
    pub fn new(name: &str, bytes: Bytes) -> Result<Self, Error> {
        Ok(Self { file: memfd::create(name, bytes.get())?, bytes })
    }

    /// Writes a part of it.
    ///
    /// # Errors
    /// [`Error::BadExtent`] past its end; [`Error::OutOfMemory`] when the machine is full.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let length = bytes.len() as u64;
        if offset.checked_add(length).is_none_or(|end| end > self.bytes.get()) {
            return Err(Error::BadExtent { offset, bytes: length, problem: "past the end of the region" });
        }
        memfd::write_at(&self.file, bytes, offset)
    }

    /// Seals it: from here on nobody, this process included, can change it. Its pages are locked if
    /// the limit allows.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn finish(self) -> Result<HostRegion, Error> {
        memfd::seal(&self.file, SealFlags::WRITE)?;
        let mapping = ReadMapping::of_sealed(&self.file, self.bytes.get())?;
        let pinned = match mapping.lock() {
            Ok(()) => Pinned::Locked,
            Err(errno) => Pinned::Pageable {
                reason: format!("{} could not be locked ({errno}): raise the limit (ulimit -l)", self.bytes),
            },
        };
        Ok(HostRegion { file: self.file, mapping, pinned, access: Access::Direct })
    }
}

/// How a device reaches host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// By itself: it is registered with the driver, which keeps it in place (T07).
    Direct,
    /// Through a buffer of the driver's, by one copy more: it is ordinary, pageable memory.
    Buffered,
}

/// A model's weights, or any bytes that executors read: a sealed memfd. The authoritative copy:
/// evicting a model from a GPU never copies back to it (T10).
#[derive(Debug)]
pub struct HostRegion {
    file: OwnedFd,
    mapping: ReadMapping,
    pinned: Pinned,
    access: Access,
}

impl HostRegion {
    /// Copies these bytes into a region.
    ///
    /// # Errors
    /// As [`HostRegionBuilder`].
    pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Self, Error> {
        let mut builder = HostRegionBuilder::new(name, Bytes(bytes.len() as u64))?;
        builder.write_at(0, bytes)?;
        builder.finish()
    }

    /// Takes a region received from another process.
    ///
    /// # Errors
    /// [`Error::Unsealed`] when its size is not `bytes` or it could still change.
    pub fn receive(file: OwnedFd, bytes: Bytes, access: Access) -> Result<Self, Error> {
        let mapping = ReadMapping::of_sealed(&file, bytes.get())?;
        // The process that made it pins it; locking the same pages twice gains nothing.
        let pinned = Pinned::Pageable { reason: "pinned by its owner, if at all".to_owned() };
        Ok(Self { file, mapping, pinned, access })
    }

    /// Its bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.mapping.as_slice()
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.as_slice().len() as u64)
    }

    /// Whether its pages are locked.
    #[must_use]
    pub fn pinned(&self) -> &Pinned {
        &self.pinned
    }

    /// How a device reaches it.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// A descriptor to send to an executor.
    ///
    /// # Errors
    /// [`Error::Os`] when this process has too many open.
    pub fn share(&self) -> Result<OwnedFd, Error> {
        share(self.file.as_fd())
    }
}

impl AsFd for HostRegion {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn share(file: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    file.try_clone_to_owned().map_err(|source| Error::Os { what: "share memory", source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_holds_what_was_written_and_no_one_can_change_it() {
        let mut builder = HostRegionBuilder::new("test", Bytes(6)).unwrap();
        builder.write_at(4, b"!?").unwrap();
        builder.write_at(0, b"word").unwrap();
        assert!(matches!(builder.write_at(5, b"ab"), Err(Error::BadExtent { .. })));
        assert!(matches!(builder.write_at(u64::MAX, b"a"), Err(Error::BadExtent { .. })));
        let region = builder.finish().unwrap();
        assert_eq!((region.as_slice(), region.bytes()), (&b"word!?"[..], Bytes(6)));
        let shared = region.share().unwrap();
        assert!(rustix::io::pwrite(&shared, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(&shared, 0).is_err());
        let received = HostRegion::receive(shared, Bytes(6), Access::Direct).unwrap();
        assert_eq!(received.as_slice(), b"word!?");
    }

    #[test]
    fn a_small_region_is_pinned_and_a_refusal_is_reported_not_fatal() {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        let region = HostRegion::from_bytes("test", &[7; 4096]).unwrap();
        if limit.is_none_or(|bytes| bytes >= 64 << 10) {
            assert_eq!(region.pinned(), &Pinned::Locked);
        }
        if let Some(limit) = limit.filter(|bytes| *bytes <= 64 << 20) {
            let builder = HostRegionBuilder::new("test", Bytes(limit + 4096)).unwrap();
            let region = builder.finish().unwrap();
            let root = rustix::process::geteuid().is_root();
            assert!(root || matches!(region.pinned(), Pinned::Pageable { .. }), "{:?}", region.pinned());
        }
    }

    /// The memory of this machine that a GPU's memory occupies.
    fn allocated(memory: &DeviceMemory) -> Bytes {
        let stat = rustix::fs::fstat(&memory.file).unwrap();
        // stat counts blocks of 512 bytes on every file system.
        Bytes(u64::try_from(stat.st_blocks).unwrap() * 512)
    }

    #[test]
    fn device_memory_takes_memory_only_as_it_is_written() {
        let memory = DeviceMemory::create("test", Bytes::gib(4)).unwrap();
        assert_eq!(allocated(&memory), Bytes::ZERO);
        let shared = memory.share().unwrap();
        rustix::io::pwrite(&shared, &[9; 100], 1 << 30).unwrap();
        let mut seen = [0; 2];
        memory.read_at((1 << 30) + 99, &mut seen).unwrap();
        assert_eq!(seen, [9, 0]);
        assert!(allocated(&memory) > Bytes::ZERO);
        assert!(rustix::fs::ftruncate(&shared, 0).is_err(), "its size is sealed");
    }
}
