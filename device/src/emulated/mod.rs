//! An emulated GPU, which needs no hardware.
//!
//! The GPU's memory is a memfd that the worker owns. An extent of physical memory is an extent of
//! this file, `map` is `mmap` with MAP_FIXED, and an access to bytes that are not loaded faults.
//!
//! A stream runs its work synchronously on the caller's thread. Work is therefore ordered by
//! construction, and an event has already happened when it is recorded.
//!
//! An engine runs models on the CPU. The engine reads a region in place through the region's
//! [pins](PinnedBytes), so a byte that changes in device memory changes the result.

mod extent;
mod faults;
mod region;

use std::borrow::Cow;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use millrace_types::{Bytes, Timestamp};
use rustix::fs::SealFlags;

use crate::api::{Capabilities, CopySource, Device, Event, InjectedFault, MemoryExtent, Stream};
use crate::clock::monotonic_now;
use crate::error::Error;
use crate::map::page;
use crate::memfd;
use crate::memory::{HostAccess, HostRegion};

pub use extent::Chunk;
pub use region::{EmulatedRegion, PinnedBytes, RegionPin};

use extent::check_extent;
use faults::Faults;

/// Value of [`Capabilities::copy_max`].
const COPY_MAX: Bytes = Bytes::mib(2);

/// An emulated GPU: memory in a memfd, and copies on the caller's thread.
#[derive(Debug)]
pub struct EmulatedGpu {
    memory: Arc<OwnedFd>,
    bytes: Bytes,
    faults: Arc<Faults>,
}

impl EmulatedGpu {
    /// Opens a GPU on memory that a worker lent (see [`crate::DeviceMemory`]).
    ///
    /// # Errors
    /// [`Error::Unsealed`] if the memory does not have `bytes` bytes, or could shrink.
    pub fn new(memory: OwnedFd, bytes: Bytes) -> Result<Self, Error> {
        memfd::check_sealed(&memory, bytes.get(), SealFlags::empty())?;
        Ok(Self { memory: Arc::new(memory), bytes, faults: Arc::default() })
    }

    /// Fails if the GPU is lost. An engine calls this before it works without a stream.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn alive(&self) -> Result<(), Error> {
        self.faults.alive()
    }
}

impl Device for EmulatedGpu {
    type Region = EmulatedRegion;
    type Chunk = Chunk;
    type Bytes<'a> = Cow<'a, [u8]>;
    type Stream = EmulatedStream;

    fn capabilities(&self) -> Capabilities {
        Capabilities { memory: self.bytes, granularity: Bytes(page()), copy_max: COPY_MAX }
    }

    fn reserve(&self, bytes: Bytes) -> Result<EmulatedRegion, Error> {
        self.faults.alive()?;
        EmulatedRegion::new(bytes.get())
    }

    fn create(&self, extent: MemoryExtent) -> Result<Chunk, Error> {
        self.faults.alive()?;
        check_extent(extent, self.bytes.get())?;
        Ok(Chunk { file: Arc::clone(&self.memory), extent })
    }

    fn export(&self, chunk: &Chunk) -> Result<(OwnedFd, MemoryExtent), Error> {
        let file = chunk.file.try_clone().map_err(|source| Error::Os { what: "export a chunk", source })?;
        Ok((file, chunk.extent))
    }

    fn import(&self, file: OwnedFd, extent: MemoryExtent) -> Result<Chunk, Error> {
        self.faults.alive()?;
        let bytes = memfd::size(&file)?;
        memfd::check_sealed(&file, bytes, SealFlags::empty())?;
        check_extent(extent, bytes)?;
        Ok(Chunk { file: Arc::new(file), extent })
    }

    fn map(&self, region: &EmulatedRegion, chunks: Vec<(u64, Chunk)>) -> Result<(), Error> {
        self.faults.alive()?;
        if self.faults.fail_map.swap(false, Ordering::Relaxed) {
            return Err(Error::OutOfMemory("this fault was injected".to_owned()));
        }
        region.map(chunks)
    }

    fn unmap(&self, region: &EmulatedRegion) -> Result<(), Error> {
        region.unmap()
    }

    fn missing(&self, region: &EmulatedRegion, bytes: Range<u64>) -> Option<Range<u64>> {
        region.missing(bytes)
    }

    fn import_host(&self, file: OwnedFd, bytes: Bytes, access: HostAccess) -> Result<HostRegion, Error> {
        HostRegion::receive(file, bytes, access)
    }

    fn stream(&self) -> Result<EmulatedStream, Error> {
        self.faults.alive()?;
        Ok(EmulatedStream { faults: Arc::clone(&self.faults), staging: Vec::new() })
    }

    fn inject(&self, fault: InjectedFault<'_, EmulatedRegion>) -> Result<(), Error> {
        match fault {
            InjectedFault::FailNextCopy => self.faults.fail_copy.store(true, Ordering::Relaxed),
            InjectedFault::FailNextMap => self.faults.fail_map.store(true, Ordering::Relaxed),
            InjectedFault::ExhaustNextLaunch => self.faults.exhaust_launch.store(true, Ordering::Relaxed),
            InjectedFault::Lose => self.faults.lost.store(true, Ordering::Relaxed),
            InjectedFault::LosePeers => self.faults.peers_lost.store(true, Ordering::Relaxed),
            InjectedFault::Corrupt(region) => return region.corrupt(),
        }
        Ok(())
    }
}

/// A stream of an emulated GPU. Work runs synchronously on the caller's thread.
#[derive(Debug)]
pub struct EmulatedStream {
    faults: Arc<Faults>,
    /// Intermediate buffer for copies from another GPU, from pageable memory or from a file.
    staging: Vec<u8>,
}

impl EmulatedStream {
    /// Fails if a launch may not begin: the GPU is lost, or a fault was injected. Also called after a
    /// launch, because a launch on a GPU that was lost in the meantime returns no results.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfMemory`].
    pub fn check_launch(&self) -> Result<(), Error> {
        self.faults.alive()?;
        if self.faults.exhaust_launch.swap(false, Ordering::Relaxed) {
            return Err(Error::OutOfMemory("this fault was injected".to_owned()));
        }
        Ok(())
    }

    /// Fails if the GPU is lost.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn alive(&self) -> Result<(), Error> {
        self.faults.alive()
    }

    /// Checks that a copy of these bytes may begin, and returns their number.
    fn begin_copy(&self, bytes: &Range<u64>) -> Result<u64, Error> {
        let length = bytes.end.saturating_sub(bytes.start);
        if length > COPY_MAX.get() {
            let problem = "more than one copy may move";
            return Err(Error::BadExtent { offset: bytes.start, bytes: length, problem });
        }
        self.may_copy()?;
        Ok(length)
    }

    fn may_copy(&self) -> Result<(), Error> {
        self.faults.alive()?;
        if self.faults.fail_copy.swap(false, Ordering::Relaxed) {
            return Err(Error::CopyFailed("this fault was injected".to_owned()));
        }
        Ok(())
    }
}

impl Stream<EmulatedGpu> for EmulatedStream {
    type Event = PastEvent;

    fn copy(&mut self, region: &EmulatedRegion, host: &HostRegion, bytes: Range<u64>) -> Result<(), Error> {
        let length = self.begin_copy(&bytes)?;
        let source = region::part(host.as_slice(), &bytes)?;
        match host.access() {
            HostAccess::Direct => region.fill_from(source, bytes),
            HostAccess::Buffered => {
                // The length is at most COPY_MAX, so the cast is lossless.
                self.staging.resize(length as usize, 0);
                self.staging.copy_from_slice(source);
                region.fill_from(&self.staging, bytes)
            }
        }
    }

    fn copy_from_peer(
        &mut self,
        region: &EmulatedRegion,
        peer: &Chunk,
        offset: u64,
        bytes: Range<u64>,
    ) -> Result<(), Error> {
        let length = self.begin_copy(&bytes)?;
        if self.faults.peers_lost.load(Ordering::Relaxed) {
            return Err(Error::PeerLost("this fault was injected".to_owned()));
        }
        if offset.checked_add(length).is_none_or(|end| end > peer.extent.bytes) {
            let problem = "past the end of the other device's memory";
            return Err(Error::BadExtent { offset, bytes: length, problem });
        }
        // The length is at most COPY_MAX, so the cast is lossless. The peer's memory is read and not
        // mapped, because its owner may write to it at any time.
        self.staging.resize(length as usize, 0);
        memfd::read_at(&peer.file, &mut self.staging, peer.extent.offset + offset)?;
        region.fill_from(&self.staging, bytes)
    }

    fn copy_from_file(
        &mut self,
        region: &EmulatedRegion,
        file: BorrowedFd<'_>,
        bytes: Range<u64>,
    ) -> Result<(), Error> {
        let length = self.begin_copy(&bytes)?;
        // The length is at most COPY_MAX, so the cast is lossless. The file is read and not mapped,
        // because other processes may write to it at any time.
        self.staging.resize(length as usize, 0);
        memfd::read_at(file, &mut self.staging, bytes.start)?;
        region.fill_from(&self.staging, bytes)
    }

    fn fill(&mut self, region: &EmulatedRegion, source: Cow<'_, [u8]>) -> Result<(), Error> {
        self.may_copy()?;
        region.fill_from(&source, 0..source.len() as u64)
    }

    fn copy_out(
        &mut self,
        source: CopySource<'_, EmulatedGpu>,
        file: BorrowedFd<'_>,
        at: u64,
    ) -> Result<(), Error> {
        match source {
            CopySource::Region(region, bytes) => {
                self.begin_copy(&bytes)?;
                memfd::write_at(file, region.hold(bytes)?.as_slice(), at)
            }
            CopySource::Bytes(source) => {
                self.begin_copy(&(0..source.len() as u64))?;
                memfd::write_at(file, &source, at)
            }
        }
    }

    fn record(&mut self) -> Result<PastEvent, Error> {
        self.faults.alive()?;
        Ok(PastEvent(monotonic_now()))
    }
}

/// A recorded point of an emulated stream, which has already been reached.
#[derive(Debug)]
pub struct PastEvent(Timestamp);

impl Event for PastEvent {
    fn wait(self) -> Result<Timestamp, Error> {
        Ok(self.0)
    }
}
