//! The worker's side: memory that the worker owns and lends to executors as descriptors. A host
//! region outlives every executor. Device memory is created again for each incarnation, so that no
//! later executor sees the data of a dead one.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use millrace_types::Bytes;
use rustix::fs::SealFlags;

use crate::error::Error;
use crate::map::ReadMapping;
use crate::memfd;

/// The memory of an emulated GPU: a sparse memfd, which uses memory only for bytes that were written.
#[derive(Debug)]
pub struct DeviceMemory {
    file: OwnedFd,
    bytes: Bytes,
}

impl DeviceMemory {
    /// Creates the memory of a GPU.
    ///
    /// # Errors
    /// [`Error::Os`] or [`Error::OutOfMemory`] from the kernel.
    pub fn create(name: &str, bytes: Bytes) -> Result<Self, Error> {
        let file = memfd::create(name, bytes.get())?;
        memfd::seal(&file, SealFlags::empty())?;
        Ok(Self { file, bytes })
    }

    /// Returns the size of the memory.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Reads the current contents, for diagnosis and tests.
    ///
    /// # Errors
    /// [`Error::Os`], also for a read past the end.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        memfd::read_at(&self.file, bytes, offset)
    }

    /// Returns a new descriptor of the memory, to send to an executor.
    ///
    /// # Errors
    /// [`Error::Os`] if this process has too many open descriptors.
    pub fn share(&self) -> Result<OwnedFd, Error> {
        share(self.file.as_fd())
    }
}

/// Whether a host region's pages are locked in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PinState {
    /// The pages are locked, so a GPU could read them directly (T07).
    Locked,
    /// The pages are not locked. The emulated device works without locked pages.
    Pageable {
        /// Error of the kernel and a remedy.
        reason: String,
    },
}

/// A host region whose contents are being written.
#[derive(Debug)]
pub struct HostRegionBuilder {
    file: OwnedFd,
    bytes: Bytes,
}

impl HostRegionBuilder {
    /// Creates a region of this size, filled with zeros.
    ///
    /// # Errors
    /// [`Error::Os`] or [`Error::OutOfMemory`] from the kernel.
    pub fn new(name: &str, bytes: Bytes) -> Result<Self, Error> {
        Ok(Self { file: memfd::create(name, bytes.get())?, bytes })
    }

    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    /// [`Error::BadExtent`] past the end of the region; [`Error::OutOfMemory`] if the machine is out
    /// of memory.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let length = bytes.len() as u64;
        if offset.checked_add(length).is_none_or(|end| end > self.bytes.get()) {
            return Err(Error::BadExtent { offset, bytes: length, problem: "past the end of the region" });
        }
        memfd::write_at(&self.file, bytes, offset)
    }

    /// Seals the region, so that no process, including this one, can change it. Locks its pages if
    /// the limit allows.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn finish(self) -> Result<HostRegion, Error> {
        memfd::seal(&self.file, SealFlags::WRITE)?;
        let mapping = ReadMapping::of_sealed(&self.file, self.bytes.get())?;
        let pinned = match mapping.lock() {
            Ok(()) => PinState::Locked,
            Err(errno) => PinState::Pageable {
                reason: format!("{} could not be locked ({errno}): raise the limit (ulimit -l)", self.bytes),
            },
        };
        let file = SealedFile {
            file: self.file,
            attached: OnceLock::new(),
            mapping,
            pinned,
            access: HostAccess::Direct,
        };
        Ok(HostRegion(Arc::new(file)))
    }
}

/// The way in which a device reads host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostAccess {
    /// The device reads the memory directly: the memory is registered with the driver, which keeps it
    /// in place (T07).
    Direct,
    /// The memory is ordinary pageable memory, which the driver first copies to a buffer of its own.
    Buffered,
}

/// A model's weights, or other bytes that executors read, in a sealed memfd. This is the
/// authoritative copy: evicting a model from a GPU never copies data back (T10).
///
/// Clones are the same region: work that is queued on a device keeps the region alive.
#[derive(Debug, Clone)]
pub struct HostRegion(Arc<SealedFile>);

#[derive(Debug)]
struct SealedFile {
    file: OwnedFd,
    /// Before the mapping, because it goes first.
    attached: OnceLock<Box<dyn Attachment>>,
    mapping: ReadMapping,
    pinned: PinState,
    access: HostAccess,
}

/// What a device attaches to a host region, such as the registration with a driver. The value is
/// dropped before the region's memory.
pub(crate) trait Attachment: Debug + Send + Sync {}

impl<T: Debug + Send + Sync> Attachment for T {}

impl HostRegion {
    /// Creates a region with a copy of these bytes.
    ///
    /// # Errors
    /// As [`HostRegionBuilder`].
    pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Self, Error> {
        let mut builder = HostRegionBuilder::new(name, Bytes(bytes.len() as u64))?;
        builder.write_at(0, bytes)?;
        builder.finish()
    }

    /// Maps a region that another process sent.
    ///
    /// # Errors
    /// [`Error::Unsealed`] if its size is not `bytes`, or its contents could still change.
    pub fn receive(file: OwnedFd, bytes: Bytes, access: HostAccess) -> Result<Self, Error> {
        let mapping = ReadMapping::of_sealed(&file, bytes.get())?;
        // Not locked here: its owner already locks the pages, and locking the same pages twice has no
        // benefit.
        let pinned = PinState::Pageable { reason: "only the owner of the region locks its pages".to_owned() };
        Ok(Self(Arc::new(SealedFile { file, attached: OnceLock::new(), mapping, pinned, access })))
    }

    /// Returns the bytes of the region.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.0.mapping.as_slice()
    }

    /// Returns the size of the region.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.as_slice().len() as u64)
    }

    /// Returns whether the pages of the region are locked.
    #[must_use]
    pub fn pinned(&self) -> &PinState {
        &self.0.pinned
    }

    /// Returns the way in which a device reads the region.
    #[must_use]
    pub fn access(&self) -> HostAccess {
        self.0.access
    }

    /// Keeps a value until the region's memory goes. Only the first value is kept.
    pub(crate) fn attach(&self, value: Box<dyn Attachment>) {
        // A second device of the same process would find the first one's value.
        drop(self.0.attached.set(value));
    }

    /// Returns whether a device has attached a value.
    pub(crate) fn is_attached(&self) -> bool {
        self.0.attached.get().is_some()
    }

    /// Returns a new descriptor of the region, to send to an executor.
    ///
    /// # Errors
    /// [`Error::Os`] if this process has too many open descriptors.
    pub fn share(&self) -> Result<OwnedFd, Error> {
        share(self.0.file.as_fd())
    }
}

impl AsFd for HostRegion {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }
}

fn share(file: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    file.try_clone_to_owned().map_err(Error::io("share memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finished_region_has_the_written_bytes_and_cannot_be_changed() {
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
        let received = HostRegion::receive(shared, Bytes(6), HostAccess::Direct).unwrap();
        assert_eq!(received.as_slice(), b"word!?");
    }

    #[test]
    fn a_small_region_is_pinned_and_a_refused_lock_is_only_reported() {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        let region = HostRegion::from_bytes("test", &[7; 4096]).unwrap();
        if limit.is_none_or(|bytes| bytes >= 64 << 10) {
            assert_eq!(region.pinned(), &PinState::Locked);
        }
        if let Some(limit) = limit.filter(|bytes| *bytes <= 64 << 20) {
            let builder = HostRegionBuilder::new("test", Bytes(limit + 4096)).unwrap();
            let region = builder.finish().unwrap();
            let root = rustix::process::geteuid().is_root();
            assert!(root || matches!(region.pinned(), PinState::Pageable { .. }), "{:?}", region.pinned());
        }
    }

    /// Returns the memory of this machine that a GPU's memory uses.
    fn allocated(memory: &DeviceMemory) -> Bytes {
        let stat = rustix::fs::fstat(&memory.file).unwrap();
        // stat counts blocks of 512 bytes on every file system.
        Bytes(u64::try_from(stat.st_blocks).unwrap() * 512)
    }

    #[test]
    fn device_memory_uses_memory_only_for_written_bytes() {
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
