//! The GPU interface that an executor uses.
//!
//! ```text
//! Region (addresses) <─ map ─ Chunk (physical memory)      Host (pinned)
//!    │ load                                                  │
//!    ▼                                                       │
//! Module ─ kernel ─> Kernel ─ launch ─┐                      │
//!                                   Stream <───── copy ──────┘
//! ```
//! A region keeps its addresses for its whole life, whatever physical memory is mapped there. Data
//! that was loaded against these addresses (a module's weights) need not be loaded again after a
//! swap. A device refuses a launch that would read bytes that are not loaded.

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use bytes::Bytes as Buffer;
use millrace_types::{Bytes, DataType, Timestamp};

use crate::error::Error;
use crate::memory::{HostAccess, HostRegion};

/// The limits of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Size of the device's memory.
    pub memory: Bytes,
    /// Alignment of the offsets and lengths of extents.
    pub granularity: Bytes,
    /// Most bytes that a single copy moves: 2 MiB, the elbow of the curve in T09 and FaaSTube's chunk size.
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

/// A model to load: a graph with its weights in a separate file.
#[derive(Debug)]
pub struct ModelCode<'a> {
    /// Serialized ONNX graph.
    pub graph: Vec<u8>,
    /// Name by which the graph refers to its weights' file.
    pub weights_name: &'a str,
    /// Host copy of the weights. At load time, a device reads the constants that it stores in another
    /// form from here. At run time, it reads the other weights from the region.
    pub weights: &'a HostRegion,
}

/// A single launch of a module: part of the model's graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSpec {
    /// Names of the input values, in order.
    pub args: Vec<String>,
    /// Names of the output values, in order.
    pub writes: Vec<String>,
    /// Byte ranges of the region that the launch reads.
    pub reads: Vec<Range<u64>>,
}

/// An input value of a launch.
#[derive(Debug)]
pub enum LaunchArg<'a, V> {
    /// Lends the value, because the caller uses it after the launch.
    Lend(&'a V),
    /// Gives the value up, so the launch may reuse its memory.
    Give(V),
}

/// A tensor in host memory.
#[derive(Debug)]
pub struct HostTensor {
    /// Element type of the tensor.
    pub datatype: DataType,
    /// Dimensions of the tensor.
    pub shape: Vec<usize>,
    /// Elements in row-major order, little-endian.
    pub contents: TensorBytes,
}

/// A part of a tensor's bytes.
#[derive(Debug)]
pub enum TensorPart<'a, R> {
    /// The part is in host memory.
    Host(&'a TensorBytes),
    /// The part is this byte range of a region.
    Region(&'a R, Range<u64>),
}

/// Source of a copy from the device to a file.
#[derive(Debug)]
pub enum CopySource<'a, D: Device + ?Sized> {
    /// Bytes of a region.
    Region(&'a D::Region),
    /// Bytes of a value, converted to this element type.
    Value(&'a D::Value, DataType),
}

/// The bytes of a host tensor.
#[derive(Debug)]
pub enum TensorBytes {
    /// The bytes are stored inline.
    Inline(Buffer),
    /// The bytes are the whole contents of a memfd.
    File(OwnedFd),
}

/// Number of host threads that the launches of a stream may use, on a device that runs launches on
/// host threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamThreads {
    /// Launches use only the stream's own thread.
    One,
    /// Launches use all threads that the device was given.
    Whole,
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
    /// Copies from other devices fail from now on, as when the links to these devices are down.
    LosePeers,
    /// Loaded bytes of this region change.
    Corrupt(&'a R),
}

/// A single GPU.
///
/// The virtual memory calls follow CUDA's:
/// - `reserve` is cuMemAddressReserve, and `create` is cuMemCreate.
/// - `export` and `import` are cuMemExportToShareableHandle and cuMemImportFromShareableHandle, with
///   POSIX descriptors.
/// - `map` is cuMemMap with cuMemSetAccess.
/// - `import_host` is mmap, with cuMemHostRegister if access is direct.
/// - `load` and `kernel` are cuModuleLoadData and cuModuleGetFunction; `stream` is cuStreamCreate.
pub trait Device: Debug + Send + Sync + 'static {
    /// A range of reserved addresses. Clones refer to the same range, and dropping the last clone
    /// releases it.
    type Region: Clone + Debug + Send + Sync;
    /// Physical memory of the device, owned until the value is dropped.
    type Chunk: Debug + Send + Sync;
    /// A loaded model. A module keeps its region alive.
    type Module: Debug + Send + Sync;
    /// A launch of a module with all names resolved.
    type Kernel: Debug + Send + Sync;
    /// A tensor on the device. All streams may use the tensor, so a launch can read a value that
    /// another stream's launch produced.
    type Value: Debug + Send + Sync;
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
    /// [`Error::Busy`] while a launch or copy uses the region.
    fn unmap(&self, region: &Self::Region) -> Result<(), Error>;

    /// Returns the first bytes of this range that are not loaded, or `None` if all bytes are loaded.
    fn missing(&self, region: &Self::Region, bytes: Range<u64>) -> Option<Range<u64>>;

    /// Imports host memory, so that copies may read it.
    ///
    /// # Errors
    /// [`Error::Unsealed`], [`Error::Os`].
    fn import_host(&self, file: OwnedFd, bytes: Bytes, access: HostAccess) -> Result<HostRegion, Error>;

    /// Loads a model against an unmapped region. Loading may be slow, but moves no weights.
    ///
    /// # Errors
    /// [`Error::Code`], [`Error::Busy`], [`Error::Lost`].
    fn load(&self, region: &Self::Region, code: ModelCode<'_>) -> Result<Self::Module, Error>;

    /// Resolves the names of a launch.
    ///
    /// # Errors
    /// [`Error::UnknownValue`]; [`Error::BadExtent`] if a read is outside the region.
    fn kernel(&self, module: &Self::Module, spec: &KernelSpec) -> Result<Self::Kernel, Error>;

    /// Creates a stream. `width` selects the threads of its launches.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::Os`].
    fn stream(&self, width: StreamThreads) -> Result<Self::Stream, Error>;

    /// Runs `body` on the best thread for the launches of this stream: the device is current there,
    /// and launches start without a change of thread.
    fn enter<R: Send>(&self, stream: Self::Stream, body: impl FnOnce(Self::Stream) -> R + Send) -> R;

    /// Injects a fault, for tests and chaos runs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device cannot produce this fault.
    fn inject(&self, fault: InjectedFault<'_, Self::Region>) -> Result<(), Error>;
}

/// An ordered queue of work on a device. Work runs in the order of the calls, and may still be
/// running when a call returns; [`Stream::record`] returns an event to wait for.
pub trait Stream<D: Device + ?Sized> {
    /// A point in the queue that the caller can wait for.
    type Event: Event;

    /// Copies bytes of a host region to the same offset of a device region, at most
    /// [`Capabilities::copy_max`]. The bytes count as loaded once the caller has waited for a later
    /// event.
    ///
    /// # Errors
    /// [`Error::NotMapped`], [`Error::BadExtent`], [`Error::CopyFailed`], [`Error::OutOfMemory`],
    /// [`Error::Lost`].
    fn copy(&mut self, region: &D::Region, host: &HostRegion, bytes: Range<u64>) -> Result<(), Error>;

    /// Copies bytes of another device's memory to a device region, at most
    /// [`Capabilities::copy_max`]. The source starts at `offset` of `peer`, an imported chunk. The
    /// bytes count as loaded under the same rule as with [`Self::copy`].
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
    /// The bytes count as loaded under the same rule as with [`Self::copy`].
    ///
    /// # Errors
    /// As [`Self::copy`].
    fn copy_from_file(
        &mut self,
        region: &D::Region,
        file: BorrowedFd<'_>,
        bytes: Range<u64>,
    ) -> Result<(), Error>;

    /// Copies bytes of a value, converted to `datatype`, to the start of a device region, within the
    /// device (cuMemcpyDtoDAsync). The bytes count as loaded under the same rule as with
    /// [`Self::copy`].
    ///
    /// # Errors
    /// As [`Self::copy`]; [`Error::Tensor`] if the value has another element type.
    fn fill(
        &mut self,
        region: &D::Region,
        value: &D::Value,
        datatype: DataType,
        bytes: Range<u64>,
    ) -> Result<(), Error>;

    /// Copies bytes from the device to a file in host memory, starting at `at` (cuMemcpyDtoHAsync),
    /// at most [`Capabilities::copy_max`].
    ///
    /// # Errors
    /// [`Error::NotResident`] if bytes of a region are not loaded, [`Error::BadExtent`],
    /// [`Error::Tensor`] if a value has another element type, [`Error::CopyFailed`],
    /// [`Error::OutOfMemory`], [`Error::Lost`].
    fn copy_out(
        &mut self,
        source: CopySource<'_, D>,
        bytes: Range<u64>,
        file: BorrowedFd<'_>,
        at: u64,
    ) -> Result<(), Error>;

    /// Runs a kernel on these values, given in the order of the kernel's `args`. Returns the values
    /// that the kernel writes, in order.
    ///
    /// # Errors
    /// [`Error::NotResident`] if bytes that the kernel reads are not loaded, [`Error::Launch`] if the
    /// model fails on these values, [`Error::Lost`].
    fn launch(
        &mut self,
        module: &D::Module,
        kernel: &D::Kernel,
        args: Vec<LaunchArg<'_, D::Value>>,
    ) -> Result<Vec<D::Value>, Error>;

    /// Copies a tensor from host memory to the device.
    ///
    /// # Errors
    /// [`Error::DataType`]; [`Error::Tensor`] if the bytes do not match the shape, or an element does
    /// not fit the device's type.
    fn upload(&mut self, tensor: HostTensor) -> Result<D::Value, Error> {
        let HostTensor { datatype, shape, contents } = tensor;
        self.gather(datatype, shape, vec![TensorPart::Host(&contents)])
    }

    /// Creates a tensor whose bytes are the concatenation of these parts.
    ///
    /// # Errors
    /// As [`Self::upload`]; [`Error::NotResident`] if bytes of a region are not loaded.
    fn gather(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        parts: Vec<TensorPart<'_, D::Region>>,
    ) -> Result<D::Value, Error>;

    /// Creates a tensor that reads bytes of a region in place. While the value lives, the region
    /// cannot be unmapped, and these bytes cannot be written. The bytes are copied instead, as by
    /// [`Self::gather`], if the device stores the type in another form or the bytes are not aligned
    /// for its elements.
    ///
    /// # Errors
    /// As [`Self::gather`].
    fn view_region(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        region: &D::Region,
        bytes: Range<u64>,
    ) -> Result<D::Value, Error>;

    /// Detaches a value from its region: copies the value if it is a view of a region, and returns
    /// other values unchanged.
    fn detach(&mut self, value: D::Value) -> D::Value;

    /// Returns the shape of a value that is to be read as `datatype`.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the value has another element type, [`Error::DataType`].
    fn shape(&self, value: &D::Value, datatype: DataType) -> Result<Vec<usize>, Error>;

    /// Copies a value from the device to host memory, converted to `datatype`. The contents are
    /// inline up to `inline_max` bytes, and a file above that.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the value has another element type, [`Error::OutOfMemory`].
    fn download(
        &mut self,
        value: &D::Value,
        datatype: DataType,
        inline_max: usize,
    ) -> Result<HostTensor, Error>;

    /// Records an event after all work that is enqueued so far.
    ///
    /// # Errors
    /// [`Error::Lost`].
    fn record(&mut self) -> Result<Self::Event, Error>;
}

/// A point in a stream's queue that the caller can wait for.
pub trait Event {
    /// Waits until all earlier work has finished, and returns the time at which it finished.
    ///
    /// # Errors
    /// [`Error::Lost`], [`Error::CopyFailed`], if earlier work failed.
    fn wait(self) -> Result<Timestamp, Error>;
}
