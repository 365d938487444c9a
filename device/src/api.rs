//! The GPU interface that an executor uses.
//!
//! ```text
//! Region (addresses) <─ map ─ Chunk (physical memory)      Host (pinned)
//!    ▲                                                        │
//!    └───────────────────── Stream <───────── copy ───────────┘
//! ```
//! A region keeps its addresses for its whole life, whatever physical memory is mapped there. So a
//! model that an engine loaded against these addresses need not be loaded again after a swap. A device
//! knows no models: what loads and launches them is an engine, in a crate above this one.

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use millrace_types::slices::SmShare;
use millrace_types::{Bytes, Timestamp};

use crate::error::Error;
use crate::memory::{HostAccess, HostRegion};

/// The limits of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Size of the device's memory.
    pub memory: Bytes,
    /// Alignment of the offsets and lengths of extents.
    pub granularity: Bytes,
    /// Most bytes that a single copy moves: 2 MiB on an emulated GPU (the elbow of the curve in T09, and
    /// FaaSTube's chunk size), 4 MiB on CUDA.
    pub copy_max: Bytes,
}

/// A contiguous piece of a device's physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryExtent {
    /// Offset in bytes from the start of the device's memory.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// Source of a copy from the device to a file.
#[derive(Debug)]
pub enum CopySource<'a, D: Device + ?Sized> {
    /// Bytes of a region.
    Region(&'a D::Region, Range<u64>),
    /// Bytes that an engine lends. The copy reads all of them.
    Bytes(D::Bytes<'a>),
}

/// A fault that tests and chaos runs inject into a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedFault<'a, R> {
    /// The next copy fails.
    FailNextCopy,
    /// The next `map` fails because no memory is left.
    FailNextMap,
    /// Memory runs out in the next launch.
    ExhaustNextLaunch,
    /// The device is lost, as after an Xid when the GPU has fallen off the bus.
    Lose,
    /// The process's context is broken, as after an illegal access. The next use detects this.
    LoseContext,
    /// Copies from other devices fail from now on, as when the links to these devices are down.
    LosePeers,
    /// Loaded bytes of this region change.
    Corrupt(&'a R),
}

/// Bytes of a region that are not loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MissingBytes<E> {
    /// No copy of the first of these bytes was issued.
    NotIssued(Range<u64>),
    /// Copies of all missing bytes were issued. The bytes are loaded after these events.
    Issued(Vec<E>),
}

/// A single GPU.
///
/// The virtual memory calls follow CUDA's:
/// - `reserve` is cuMemAddressReserve, and `create` is cuMemCreate.
/// - `export` and `import` are cuMemExportToShareableHandle and cuMemImportFromShareableHandle, with
///   POSIX descriptors.
/// - `map` is cuMemMap with cuMemSetAccess.
/// - `import_host` is mmap, with cuMemHostRegister if access is direct.
/// - `stream` is cuStreamCreate.
pub trait Device: Debug + Send + Sync + 'static {
    /// A range of reserved addresses. Clones refer to the same range, and dropping the last clone
    /// releases it.
    type Region: Clone + Debug + Send + Sync;
    /// Physical memory of the device, owned until the value is dropped.
    type Chunk: Debug + Send + Sync;
    /// Bytes of device memory that an engine lends for a copy, such as the bytes of a tensor.
    type Bytes<'a>: Debug + Send;
    /// A point in the queue of a stream. All threads and streams may wait for the event, and clones
    /// are the same event.
    type Event: Event + Clone + Debug + Send + Sync;
    /// An ordered queue of work on the device.
    type Stream: Stream<Self> + Send;

    /// Returns the limits of the device.
    fn capabilities(&self) -> Capabilities;

    /// Reserves addresses, without memory behind them.
    ///
    /// # Errors
    /// [`Error::Os`], [`Error::Lost`].
    fn reserve(&self, bytes: Bytes) -> Result<Self::Region, Error>;

    /// Reserves an extent of physical memory. The caller must keep track of the free extents.
    ///
    /// # Errors
    /// [`Error::BadExtent`], [`Error::OutOfMemory`], [`Error::Lost`].
    fn create(&self, extent: MemoryExtent) -> Result<Self::Chunk, Error>;

    /// Exports a chunk, so that another process can map the chunk. Returns a descriptor and the
    /// chunk's extent within the descriptor's memory.
    ///
    /// # Errors
    /// [`Error::Os`], [`Error::Unsupported`].
    fn export(&self, chunk: &Self::Chunk) -> Result<(OwnedFd, MemoryExtent), Error>;

    /// Imports a chunk that another device of this machine exported. The two arguments are the
    /// results of [`Self::export`].
    ///
    /// # Errors
    /// [`Error::BadExtent`], [`Error::Unsealed`], [`Error::Unsupported`].
    fn import(&self, file: OwnedFd, extent: MemoryExtent) -> Result<Self::Chunk, Error>;

    /// Maps chunks into an unmapped region, each at its offset. The new memory does not count as loaded.
    ///
    /// # Errors
    /// [`Error::BadExtent`], [`Error::Busy`], [`Error::OutOfMemory`], [`Error::Lost`]. After an error
    /// the region is unmapped.
    fn map(&self, region: &Self::Region, chunks: Vec<(u64, Self::Chunk)>) -> Result<(), Error>;

    /// Unmaps all memory of a region. An unmapped region is no error.
    ///
    /// # Errors
    /// [`Error::Busy`] until every launch and copy that uses the region has finished.
    fn unmap(&self, region: &Self::Region) -> Result<(), Error>;

    /// Returns which bytes of this range are not loaded, or `None` if all bytes are loaded.
    fn missing(&self, region: &Self::Region, bytes: Range<u64>) -> Option<MissingBytes<Self::Event>>;

    /// Imports host memory, so that copies may read it.
    ///
    /// # Errors
    /// [`Error::Unsealed`], [`Error::Os`].
    fn import_host(&self, file: OwnedFd, bytes: Bytes, access: HostAccess) -> Result<HostRegion, Error>;

    /// Creates a stream.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Os`].
    fn stream(&self) -> Result<Self::Stream, Error>;

    /// Injects a fault, for tests and chaos runs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device cannot produce this fault.
    fn inject(&self, fault: InjectedFault<'_, Self::Region>) -> Result<(), Error>;
}

/// An ordered queue of work on a device. Work runs in the order of the calls, and may still be
/// running when a call returns; [`Stream::record`] returns an event to wait for. Work that fails
/// after its call has returned fails the next event.
pub trait Stream<D: Device + ?Sized> {
    /// Lets all later work of this stream wait for an event of another stream (cuStreamWaitEvent).
    ///
    /// # Errors
    /// [`Error::Lost`]; the error of the other stream's work, if it has failed.
    fn after(&mut self, event: &D::Event) -> Result<(), Error>;

    /// Lets all later launches of this stream use only these SMs. The launches of a new stream use the
    /// whole GPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device cannot restrict its launches to these SMs.
    fn restrict(&mut self, on: SmShare) -> Result<(), Error>;

    /// Copies bytes of a host region to the same offset of a device region, at most
    /// [`Capabilities::copy_max`]. The bytes are loaded once the copy has finished.
    ///
    /// # Errors
    /// [`Error::NotMapped`], [`Error::BadExtent`], [`Error::CopyFailed`], [`Error::OutOfMemory`],
    /// [`Error::Lost`].
    fn copy(&mut self, region: &D::Region, host: &HostRegion, bytes: Range<u64>) -> Result<(), Error>;

    /// Copies bytes of another device's memory to a device region, at most
    /// [`Capabilities::copy_max`]. The source starts at `offset` of `peer`, an imported chunk.
    ///
    /// # Errors
    /// As [`Self::copy`]; [`Error::PeerLost`].
    fn copy_from_peer(
        &mut self,
        region: &D::Region,
        peer: &D::Chunk,
        offset: u64,
        bytes: Range<u64>,
    ) -> Result<(), Error>;

    /// Copies bytes of a file in host memory to the same offset of a device region, at most
    /// [`Capabilities::copy_max`]. The file need not be sealed, because it is read and never mapped.
    ///
    /// # Errors
    /// As [`Self::copy`].
    fn copy_from_file(
        &mut self,
        region: &D::Region,
        file: BorrowedFd<'_>,
        bytes: Range<u64>,
    ) -> Result<(), Error>;

    /// Copies bytes that an engine lends to the start of a device region, within the device
    /// (cuMemcpyDtoDAsync).
    ///
    /// # Errors
    /// As [`Self::copy`].
    fn fill(&mut self, region: &D::Region, source: D::Bytes<'_>) -> Result<(), Error>;

    /// Copies bytes from the device to a file in host memory, starting at `at` (cuMemcpyDtoHAsync),
    /// at most [`Capabilities::copy_max`]. The bytes are in the file once the copy has finished.
    ///
    /// # Errors
    /// [`Error::NotResident`] if bytes of a region are not loaded, [`Error::BadExtent`],
    /// [`Error::CopyFailed`], [`Error::OutOfMemory`], [`Error::Lost`].
    fn copy_out(&mut self, source: CopySource<'_, D>, file: BorrowedFd<'_>, at: u64) -> Result<(), Error>;

    /// Records an event after all work that is enqueued so far.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn record(&mut self) -> Result<D::Event, Error>;
}

/// A point in a stream's queue that the caller can wait for.
pub trait Event {
    /// Waits until all earlier work has finished, and returns the time at which it finished.
    ///
    /// # Errors
    /// The error of the work before this event and after the previous event, if some has failed.
    fn wait(&self) -> Result<Timestamp, Error>;
}
