//! What an executor asks of a GPU.
//!
//! ```text
//! Region (addresses) <─ map ─ Chunk (physical memory)      Host (pinned)
//!    │ load                                                  │
//!    ▼                                                       │
//! Module ─ kernel ─> Kernel ─ launch ─┐                      │
//!                                   Stream <───── copy ──────┘
//! ```
//! A region's addresses stay the same for as long as it lives, whatever physical memory is under
//! them: what was loaded against them (a module's weights) need not be loaded again after a swap.
//! A device refuses a launch that would read bytes which are not loaded.

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use bytes::Bytes as Buffer;
use millrace_types::{Bytes, DataType, Timestamp};

use crate::error::Error;
use crate::memory::{Access, HostRegion};

/// What a device can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Its memory.
    pub memory: Bytes,
    /// What offsets and lengths of extents are multiples of.
    pub granularity: Bytes,
    /// The most that one copy moves: 2 MiB, the elbow of the curve in T09 and FaaSTube's chunk.
    pub copy_max: Bytes,
}

/// A piece of a device's physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// From the start of the device's memory.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

/// A model to load: a graph whose weights lie in a file of their own.
#[derive(Debug)]
pub struct Code<'a> {
    /// The graph, in ONNX.
    pub graph: Vec<u8>,
    /// How the graph names its weights' file.
    pub weights_name: &'a str,
    /// The weights' host copy. What a device keeps in another form (a converted constant) it takes
    /// from here, when it loads; the rest it reads from the region, when it runs.
    pub weights: &'a HostRegion,
}

/// One launch of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSpec {
    /// The values it is given.
    pub args: Vec<String>,
    /// The values it makes.
    pub writes: Vec<String>,
    /// The bytes of the region it reads.
    pub reads: Vec<Range<u64>>,
}

/// A value given to a launch.
#[derive(Debug)]
pub enum Arg<'a, V> {
    /// Someone needs it afterwards.
    Lend(&'a V),
    /// No one does: the launch may work in its memory.
    Give(V),
}

/// A tensor in host memory.
#[derive(Debug)]
pub struct HostTensor {
    /// Its element type.
    pub datatype: DataType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements, little-endian, rows last.
    pub contents: Contents,
}

/// A piece of a tensor's bytes.
#[derive(Debug)]
pub enum Part<'a, R> {
    /// In host memory.
    Host(&'a Contents),
    /// In a region.
    Region(&'a R, Range<u64>),
}

/// Bytes on the device.
#[derive(Debug)]
pub enum Source<'a, D: Device + ?Sized> {
    /// Of a region.
    Region(&'a D::Region),
    /// Of a value, as this type.
    Value(&'a D::Value, DataType),
}

/// Where a host tensor's bytes are.
#[derive(Debug)]
pub enum Contents {
    /// Here.
    Inline(Buffer),
    /// In a memfd that has exactly them.
    File(OwnedFd),
}

/// How many of the host's threads the launches of a stream may use, on a device that uses any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// The one that launches, which is the stream's own.
    One,
    /// All that the device was given.
    Whole,
}

/// What tests and chaos make a device do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault<'a, R> {
    /// The next copy fails.
    FailNextCopy,
    /// The next `map` finds no memory.
    FailNextMap,
    /// Memory runs out in the next launch.
    ExhaustNextLaunch,
    /// The device is lost, as after an Xid: it has fallen off the bus.
    Lose,
    /// No other device can be read any more, as when the links to them are down.
    LosePeers,
    /// Loaded bytes of a region change.
    Corrupt(&'a R),
}

/// One GPU.
///
/// The virtual memory calls are CUDA's: `reserve` is cuMemAddressReserve, `create` cuMemCreate,
/// `export` and `import` cuMemExportToShareableHandle and its counterpart (POSIX descriptors), `map`
/// cuMemMap with cuMemSetAccess, `import_host` mmap, with cuMemHostRegister where access is direct, `load` and `kernel`
/// cuModuleLoadData and cuModuleGetFunction, `stream` cuStreamCreate.
pub trait Device: Debug + Send + Sync + 'static {
    /// Reserved addresses. Clones are the same region; it is released with the last.
    type Region: Clone + Debug + Send + Sync;
    /// Physical memory.
    type Chunk: Debug + Send + Sync;
    /// A loaded model. It keeps its region.
    type Module: Debug + Send + Sync;
    /// One launch of a module, its names resolved.
    type Kernel: Debug + Send + Sync;
    /// A tensor on the device. Streams share it: one reads what another's launch made.
    type Value: Debug + Send + Sync;
    /// An ordered queue of work.
    type Stream: Stream<Self> + Send;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Reserves addresses. No memory is under them yet.
    ///
    /// # Errors
    /// [`Error::Os`], [`Error::Lost`].
    fn reserve(&self, bytes: Bytes) -> Result<Self::Region, Error>;

    /// Takes an extent of physical memory. The caller keeps the books of which extents are free.
    ///
    /// # Errors
    /// [`Error::BadExtent`], [`Error::OutOfMemory`], [`Error::Lost`].
    fn create(&self, extent: Extent) -> Result<Self::Chunk, Error>;

    /// Lets another process map a chunk: a descriptor, and where in it the chunk lies.
    ///
    /// # Errors
    /// [`Error::Os`], [`Error::Unsupported`].
    fn export(&self, chunk: &Self::Chunk) -> Result<(OwnedFd, Extent), Error>;

    /// Takes a chunk of another device of this machine.
    ///
    /// # Errors
    /// [`Error::BadExtent`], [`Error::Unsealed`], [`Error::Unsupported`].
    fn import(&self, exported: (OwnedFd, Extent)) -> Result<Self::Chunk, Error>;

    /// Puts chunks under a region that has none, each at its offset. Nothing counts as loaded.
    ///
    /// # Errors
    /// [`Error::BadExtent`], [`Error::Busy`], [`Error::OutOfMemory`], [`Error::Lost`]; the region
    /// is unmapped then.
    fn map(&self, region: &Self::Region, chunks: Vec<(u64, Self::Chunk)>) -> Result<(), Error>;

    /// Takes all memory from under a region; fine when it has none.
    ///
    /// # Errors
    /// [`Error::Busy`] while a launch or copy uses it.
    fn unmap(&self, region: &Self::Region) -> Result<(), Error>;

    /// Whether these bytes of a region are loaded: `None`, or the first that are not.
    fn missing(&self, region: &Self::Region, bytes: Range<u64>) -> Option<Range<u64>>;

    /// Takes host memory that copies may read.
    ///
    /// # Errors
    /// [`Error::Unsealed`], [`Error::Os`].
    fn import_host(&self, file: OwnedFd, bytes: Bytes, access: Access) -> Result<HostRegion, Error>;

    /// Loads a model against a region that is not mapped. Loading may be slow; it moves no weights.
    ///
    /// # Errors
    /// [`Error::Code`], [`Error::Busy`], [`Error::Lost`].
    fn load(&self, region: &Self::Region, code: Code<'_>) -> Result<Self::Module, Error>;

    /// Resolves a launch's names.
    ///
    /// # Errors
    /// [`Error::UnknownValue`], [`Error::BadExtent`] for reads outside the region.
    fn kernel(&self, module: &Self::Module, spec: &KernelSpec) -> Result<Self::Kernel, Error>;

    /// Makes a stream.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Os`].
    fn stream(&self, width: Width) -> Result<Self::Stream, Error>;

    /// Runs `body` where the launches of a stream are cheapest: with the device current, on a thread
    /// on which they begin.
    fn enter<R: Send>(&self, stream: Self::Stream, body: impl FnOnce(Self::Stream) -> R + Send) -> R;

    /// Breaks something on purpose.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the device cannot.
    fn inject(&self, fault: Fault<'_, Self::Region>) -> Result<(), Error>;
}

/// An ordered queue of work on one device. What is enqueued runs in order and may still be running
/// when a method returns; [`Stream::record`] gives something to wait for.
pub trait Stream<D: Device + ?Sized> {
    /// A point in the queue.
    type Event: Event;

    /// Copies bytes of a host region to the same place of a device region, at most
    /// [`Capabilities::copy_max`]. They count as loaded once an event behind it was waited for.
    ///
    /// # Errors
    /// [`Error::NotMapped`], [`Error::BadExtent`], [`Error::CopyFailed`], [`Error::OutOfMemory`],
    /// [`Error::Lost`].
    fn copy(&mut self, region: &D::Region, host: &HostRegion, bytes: Range<u64>) -> Result<(), Error>;

    /// Copies bytes of another device's memory to a device region, at most
    /// [`Capabilities::copy_max`]: those that `peer`, which was imported, has from `offset` on. They
    /// count as loaded as with [`Self::copy`].
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

    /// Copies bytes of a file of host memory to the same place of a device region, at most
    /// [`Capabilities::copy_max`]. The file need not be sealed: it is read, and never mapped. They
    /// count as loaded as with [`Self::copy`].
    ///
    /// # Errors
    /// As [`Self::copy`].
    fn copy_from_file(
        &mut self,
        region: &D::Region,
        file: BorrowedFd<'_>,
        bytes: Range<u64>,
    ) -> Result<(), Error>;

    /// Copies bytes of a value, as `datatype`, to the start of a device region, within the device
    /// (cuMemcpyDtoDAsync). They count as loaded as with [`Self::copy`].
    ///
    /// # Errors
    /// As [`Self::copy`]; [`Error::Tensor`] when the value is of another kind.
    fn fill(
        &mut self,
        region: &D::Region,
        value: &D::Value,
        datatype: DataType,
        bytes: Range<u64>,
    ) -> Result<(), Error>;

    /// Copies bytes from the device to a file of host memory, from `at` on (cuMemcpyDtoHAsync), at most
    /// [`Capabilities::copy_max`].
    ///
    /// # Errors
    /// [`Error::NotResident`] when bytes of a region are not loaded, [`Error::BadExtent`],
    /// [`Error::Tensor`] when a value is of another kind, [`Error::CopyFailed`],
    /// [`Error::OutOfMemory`], [`Error::Lost`].
    fn copy_out(
        &mut self,
        source: Source<'_, D>,
        bytes: Range<u64>,
        file: BorrowedFd<'_>,
        at: u64,
    ) -> Result<(), Error>;

    /// Runs a kernel on these values, which are in the order of its `args`; returns what it writes,
    /// in order.
    ///
    /// # Errors
    /// [`Error::NotResident`] when bytes it reads are not loaded, [`Error::Launch`] when the model
    /// fails on these values, [`Error::Lost`].
    fn launch(
        &mut self,
        module: &D::Module,
        kernel: &D::Kernel,
        args: Vec<Arg<'_, D::Value>>,
    ) -> Result<Vec<D::Value>, Error>;

    /// Moves a tensor to the device.
    ///
    /// # Errors
    /// [`Error::DataType`]; [`Error::Tensor`] when the bytes do not match the shape or an element
    /// does not fit the device's type for it.
    fn upload(&mut self, tensor: HostTensor) -> Result<D::Value, Error> {
        let HostTensor { datatype, shape, contents } = tensor;
        self.gather(datatype, shape, vec![Part::Host(&contents)])
    }

    /// Makes a tensor whose bytes are these parts, one after the other.
    ///
    /// # Errors
    /// As [`Self::upload`]; [`Error::NotResident`] when bytes of a region are not loaded.
    fn gather(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        parts: Vec<Part<'_, D::Region>>,
    ) -> Result<D::Value, Error>;

    /// Makes a tensor of bytes of a region, which it reads where they are: the region can be neither
    /// unmapped nor written to there while the value lives. Types that a device holds in another form,
    /// and bytes that do not lie as its elements must, are copied, as by [`Self::gather`].
    ///
    /// # Errors
    /// As [`Self::gather`].
    fn view(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        region: &D::Region,
        bytes: Range<u64>,
    ) -> Result<D::Value, Error>;

    /// Makes a value stand by itself: one that views a region is copied.
    fn detach(&mut self, value: D::Value) -> D::Value;

    /// The shape of a value, which is to be read as `datatype`.
    ///
    /// # Errors
    /// [`Error::Tensor`] when it is of another kind, [`Error::DataType`].
    fn shape(&self, value: &D::Value, datatype: DataType) -> Result<Vec<usize>, Error>;

    /// Moves a value from the device, as `datatype`; inline when it has at most `inline_max` bytes.
    ///
    /// # Errors
    /// [`Error::Tensor`] when the value is of another kind, [`Error::OutOfMemory`].
    fn download(
        &mut self,
        value: &D::Value,
        datatype: DataType,
        inline_max: usize,
    ) -> Result<HostTensor, Error>;

    /// Marks the end of what is enqueued so far.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn record(&mut self) -> Result<Self::Event, Error>;
}

/// A point in a stream's queue.
pub trait Event {
    /// Waits until everything before it is done; returns when that was.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::CopyFailed`]: what failed before it.
    fn wait(self) -> Result<Timestamp, Error>;
}
