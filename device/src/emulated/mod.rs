//! An emulated GPU, which needs no hardware.
//!
//! The GPU's memory is a memfd that the worker owns. An extent of physical memory is an extent of
//! this file, `map` is `mmap` with MAP_FIXED, and an access to bytes that are not loaded faults.
//!
//! A stream runs its work synchronously on the caller's thread, so that an event has already
//! happened when it is recorded. [`EmulatedGpu::with_late_work`] gives each stream a thread instead,
//! which finishes work late, as a GPU does.
//!
//! [`EmulatedGpu::with_sms`] counts which launch holds which SMs, so that a test can audit a
//! scheduler.
//!
//! An engine runs models on the CPU. The engine reads a region in place through the region's
//! [pins](PinnedBytes), so a byte that changes in device memory changes the result.

mod event;
mod extent;
mod late;
mod region;
mod sm;
mod sources;

use std::borrow::Cow;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_types::Bytes;
use millrace_types::slices::{SmShare, UnitSet};
use rustix::fs::SealFlags;

use crate::api::{
    Capabilities, CopySource, Device, Event as _, InjectedFault, MemoryExtent, MissingBytes, Stream,
};
use crate::error::Error;
use crate::map::page;
use crate::memfd;
use crate::memory::{HostAccess, HostRegion};

pub use event::EmulatedEvent;
pub use extent::Chunk;
pub use region::{EmulatedRegion, PinnedBytes, RegionPin};
pub use sm::{EmulatedLaunch, SmClaim, SmFigures, SmPage};

use crate::faults::Faults;
use extent::check_extent;
use late::LateQueue;
use sources::{FileSource, FillSource, carry_out};

/// Value of [`Capabilities::copy_max`].
const COPY_MAX: Bytes = Bytes::mib(2);

/// An emulated GPU. Its memory is a memfd.
#[derive(Debug)]
pub struct EmulatedGpu {
    memory: Arc<OwnedFd>,
    bytes: Bytes,
    faults: Arc<Faults>,
    /// Seed of the next stream's delays; `None` if work is carried out on the caller's thread.
    late: Option<AtomicU64>,
    /// Counters of the launches' SMs; `None` if no launch is counted.
    sms: Option<SmPage>,
}

impl EmulatedGpu {
    /// Opens a GPU on memory that a worker lent (see [`crate::DeviceMemory`]).
    ///
    /// # Errors
    /// [`Error::Unsealed`] if the memory does not have `bytes` bytes, or could shrink.
    pub fn new(memory: OwnedFd, bytes: Bytes) -> Result<Self, Error> {
        memfd::check_sealed(&memory, bytes.get(), SealFlags::empty())?;
        Ok(Self { memory: Arc::new(memory), bytes, faults: Arc::default(), late: None, sms: None })
    }

    /// Returns the GPU with streams that finish their work late. The seed decides the delays.
    #[must_use]
    pub fn with_late_work(self, seed: u64) -> Self {
        Self { late: Some(AtomicU64::new(seed)), ..self }
    }

    /// Returns the GPU with a page that counts the SMs of the launches of all later streams.
    #[must_use]
    pub fn with_sms(self, sms: SmPage) -> Self {
        Self { sms: Some(sms), ..self }
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
    type Event = EmulatedEvent;
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
        let file = chunk.file.try_clone().map_err(Error::io("export a chunk"))?;
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

    fn missing(&self, region: &EmulatedRegion, bytes: Range<u64>) -> Option<MissingBytes<EmulatedEvent>> {
        region.missing(bytes)
    }

    fn import_host(&self, file: OwnedFd, bytes: Bytes, access: HostAccess) -> Result<HostRegion, Error> {
        HostRegion::receive(file, bytes, access)
    }

    fn stream(&self) -> Result<EmulatedStream, Error> {
        self.faults.alive()?;
        let seed = self.late.as_ref().map(|next| next.fetch_add(1, Ordering::Relaxed));
        EmulatedStream::new(Arc::clone(&self.faults), seed, self.sms.clone())
    }

    fn inject(&self, fault: InjectedFault<'_, EmulatedRegion>) -> Result<(), Error> {
        self.faults.inject(fault, EmulatedRegion::corrupt)
    }
}

/// A stream of an emulated GPU.
#[derive(Debug)]
pub struct EmulatedStream {
    faults: Arc<Faults>,
    thread: StreamThread,
    sms: Option<SmPage>,
    /// SMs of the next launches.
    sm_share: SmShare,
}

/// The thread that carries out a stream's work.
#[derive(Debug)]
enum StreamThread {
    /// The caller's thread, with the buffer for copies from another GPU, from pageable memory or
    /// from a file.
    Caller(Vec<u8>),
    /// A thread that finishes work late.
    Late(LateQueue),
}

impl EmulatedStream {
    /// Creates a stream. If there is a seed, the stream's work finishes late.
    fn new(faults: Arc<Faults>, late: Option<u64>, sms: Option<SmPage>) -> Result<Self, Error> {
        let thread = match late {
            None => StreamThread::Caller(Vec::new()),
            Some(seed) => StreamThread::Late(LateQueue::start(seed)?),
        };
        Ok(Self { faults, thread, sms, sm_share: SmShare::Block(UnitSet::ALL) })
    }

    /// Waits for the stream's earlier work, and fails if a launch may not begin: the GPU is lost, or a
    /// fault was injected. An engine that computes on the caller's thread calls this before a launch,
    /// and keeps the returned value while the launch computes.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::OutOfMemory`]; the errors of the earlier work.
    pub fn begin_launch(&mut self) -> Result<EmulatedLaunch, Error> {
        if let StreamThread::Late(_) = self.thread {
            self.record()?.wait()?;
        }
        self.faults.may_launch()?;
        Ok(EmulatedLaunch::begin(self.sms.as_ref(), self.sm_share))
    }

    /// Returns the SMs that the stream's next launch uses.
    #[must_use]
    pub fn sm_share(&self) -> SmShare {
        self.sm_share
    }

    /// Fails if the GPU is lost.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn alive(&self) -> Result<(), Error> {
        self.faults.alive()
    }

    /// Checks that a copy of these bytes may begin.
    fn check_copy(&self, bytes: &Range<u64>) -> Result<(), Error> {
        let length = bytes.end.saturating_sub(bytes.start);
        if length > COPY_MAX.get() {
            let problem = "more than one copy may move";
            return Err(Error::BadExtent { offset: bytes.start, bytes: length, problem });
        }
        self.alive()
    }

    /// Copies a source to these bytes of a region.
    fn fill_from(
        &mut self,
        region: &EmulatedRegion,
        bytes: Range<u64>,
        source: FillSource<'_>,
    ) -> Result<(), Error> {
        let mut fill = region.issue(bytes.clone())?;
        match &mut self.thread {
            StreamThread::Caller(buffer) => carry_out(&self.faults, fill, bytes, &source, buffer),
            StreamThread::Late(queue) => {
                let source = source.into_owned()?;
                // Announced last, because an announced event has to be reached.
                let event = EmulatedEvent::awaited();
                fill.announce(&event);
                let faults = Arc::clone(&self.faults);
                let work = move |buffer: &mut Vec<u8>| carry_out(&faults, fill, bytes, &source, buffer);
                queue.push(Box::new(work), event)
            }
        }
    }
}

impl Stream<EmulatedGpu> for EmulatedStream {
    fn after(&mut self, event: &EmulatedEvent) -> Result<(), Error> {
        match &self.thread {
            StreamThread::Caller(_) => event.wait().map(drop),
            StreamThread::Late(queue) => {
                let awaited = event.clone();
                queue.push(Box::new(move |_| awaited.wait().map(drop)), EmulatedEvent::awaited())
            }
        }
    }

    fn restrict(&mut self, on: SmShare) -> Result<(), Error> {
        self.sm_share = on;
        Ok(())
    }

    fn copy(&mut self, region: &EmulatedRegion, host: &HostRegion, bytes: Range<u64>) -> Result<(), Error> {
        self.check_copy(&bytes)?;
        region::part(host.as_slice(), &bytes)?;
        self.fill_from(region, bytes, FillSource::Host(Cow::Borrowed(host)))
    }

    fn copy_from_peer(
        &mut self,
        region: &EmulatedRegion,
        peer: &Chunk,
        offset: u64,
        bytes: Range<u64>,
    ) -> Result<(), Error> {
        self.check_copy(&bytes)?;
        if self.faults.peers_lost.load(Ordering::Relaxed) {
            return Err(Error::PeerLost("this fault was injected".to_owned()));
        }
        let length = bytes.end.saturating_sub(bytes.start);
        if offset.checked_add(length).is_none_or(|end| end > peer.extent.bytes) {
            let problem = "past the end of the other device's memory";
            return Err(Error::BadExtent { offset, bytes: length, problem });
        }
        self.fill_from(region, bytes, FillSource::Peer(Cow::Borrowed(peer), offset))
    }

    fn copy_from_file(
        &mut self,
        region: &EmulatedRegion,
        file: BorrowedFd<'_>,
        bytes: Range<u64>,
    ) -> Result<(), Error> {
        self.check_copy(&bytes)?;
        self.fill_from(region, bytes, FillSource::File(FileSource::Lent(file)))
    }

    fn fill(&mut self, region: &EmulatedRegion, source: Cow<'_, [u8]>) -> Result<(), Error> {
        self.alive()?;
        self.fill_from(region, 0..source.len() as u64, FillSource::Bytes(source))
    }

    fn copy_out(
        &mut self,
        source: CopySource<'_, EmulatedGpu>,
        file: BorrowedFd<'_>,
        at: u64,
    ) -> Result<(), Error> {
        let bytes = match &source {
            CopySource::Region(_, bytes) => bytes.clone(),
            CopySource::Bytes(source) => 0..source.len() as u64,
        };
        self.check_copy(&bytes)?;
        let StreamThread::Late(queue) = &self.thread else {
            self.faults.may_copy()?;
            return match source {
                CopySource::Region(region, bytes) => {
                    memfd::write_at(file, region.hold(bytes)?.as_slice(), at)
                }
                CopySource::Bytes(source) => memfd::write_at(file, &source, at),
            };
        };
        let faults = Arc::clone(&self.faults);
        let file = FileSource::Lent(file).into_owned()?;
        let event = EmulatedEvent::awaited();
        match source {
            CopySource::Region(region, bytes) => {
                let region = region.clone();
                let work = move |_: &mut Vec<u8>| {
                    faults.may_copy()?;
                    memfd::write_at(&file, region.hold(bytes)?.as_slice(), at)
                };
                queue.push(Box::new(work), event)
            }
            CopySource::Bytes(source) => {
                let source = source.into_owned();
                let work = move |_: &mut Vec<u8>| {
                    faults.may_copy()?;
                    memfd::write_at(&file, &source, at)
                };
                queue.push(Box::new(work), event)
            }
        }
    }

    fn record(&mut self) -> Result<EmulatedEvent, Error> {
        self.alive()?;
        match &self.thread {
            StreamThread::Caller(_) => Ok(EmulatedEvent::now()),
            StreamThread::Late(queue) => queue.record(),
        }
    }
}

#[cfg(test)]
mod tests;
