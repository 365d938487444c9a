//! The interface that an executor uses to load and launch models.
//!
//! ```text
//! Region ─ load ─> Module ─ kernel ─> Kernel ─┐
//!                                             ├─ launch ─> Value ─ bytes ─> copies of the device
//! HostTensor, Region ─ gather, view ─> Value ─┘
//! ```

use std::fmt::Debug;
use std::ops::Range;
use std::os::fd::OwnedFd;

use bytes::Bytes as Buffer;
use millrace_device::{Device, HostRegion};
use millrace_types::DataType;

use crate::error::Error;

/// A region of an engine's device.
pub type Region<E> = <<E as Engine>::Device as Device>::Region;
/// A stream of an engine's device.
pub type Stream<E> = <<E as Engine>::Device as Device>::Stream;
/// An event of an engine's device.
pub type DeviceEvent<E> = <<E as Engine>::Device as Device>::Event;
/// Bytes that an engine lends to its device.
pub type LentBytes<'a, E> = <<E as Engine>::Device as Device>::Bytes<'a>;

/// A model to load: a graph with its weights in a separate file.
#[derive(Debug)]
pub struct ModelCode<'a> {
    /// Serialized ONNX graph.
    pub graph: Vec<u8>,
    /// Name by which the graph refers to its weights' file.
    pub weights_name: &'a str,
    /// Host copy of the weights. At load time, an engine reads the constants that it stores in
    /// another form from here. At run time, it reads the other weights from the region.
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

/// The bytes of a host tensor.
#[derive(Debug)]
pub enum TensorBytes {
    /// The bytes are stored inline.
    Inline(Buffer),
    /// The bytes are the whole contents of a memfd.
    File(OwnedFd),
}

/// Number of host threads that the launches of a queue may use, on an engine that computes on host
/// threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchThreads {
    /// Launches use only the queue's own thread.
    One,
    /// Launches use as many threads as the engine was given.
    Whole,
}

/// Loads and launches models on one device.
pub trait Engine: Debug + Send + Sync + 'static {
    /// The device whose memory holds the models' weights.
    type Device: Device;
    /// A loaded model. A module keeps its region alive.
    type Module: Debug + Send + Sync;
    /// A launch of a module with all names resolved.
    type Kernel: Debug + Send + Sync;
    /// A tensor on the device. All queues may use the tensor, so a launch can read a value that
    /// another queue's launch produced.
    type Value: Debug + Send + Sync;
    /// An ordered queue of launches.
    type Queue: Queue<Self> + Send;

    /// Returns the device.
    fn device(&self) -> &Self::Device;

    /// Loads a model against an unmapped region. Loading may be slow, but moves no weights.
    ///
    /// # Errors
    /// [`Error::Code`]; [`Error::Device`] if the region is busy or the device is lost.
    fn load(&self, region: &Region<Self>, code: ModelCode<'_>) -> Result<Self::Module, Error>;

    /// Resolves the names of a launch.
    ///
    /// # Errors
    /// [`Error::UnknownValue`]; [`Error::Device`] if a read is outside the region.
    fn kernel(&self, module: &Self::Module, spec: &KernelSpec) -> Result<Self::Kernel, Error>;

    /// Creates a queue. Launches of the queue use these threads.
    ///
    /// # Errors
    /// As [`Device::stream`].
    fn queue(&self, threads: LaunchThreads) -> Result<Self::Queue, Error>;

    /// Runs `body` on the best thread for the launches of this queue: the device is current there,
    /// and launches start without a change of thread.
    fn enter<R: Send>(&self, queue: Self::Queue, body: impl FnOnce(Self::Queue) -> R + Send) -> R;

    /// Lends a part of a value's bytes to the device, converted to `datatype`. The part is in bytes of
    /// the converted elements.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the value has another element type, [`Error::DataType`]; [`Error::Device`] if the
    /// part is past the end of the value.
    fn lend<'a>(
        &self,
        value: &'a Self::Value,
        datatype: DataType,
        part: Range<u64>,
    ) -> Result<LentBytes<'a, Self>, Error>;
}

/// An ordered queue of launches on a device. Work runs in the order of the calls, and may still be
/// running when a call returns: record an event of the [stream](Self::stream) to wait for the work.
pub trait Queue<E: Engine + ?Sized> {
    /// Returns the device's stream that the launches run in.
    fn stream(&mut self) -> &mut Stream<E>;

    /// Runs a kernel on these values, given in the order of the kernel's `args`. Returns the values
    /// that the kernel writes, in order.
    ///
    /// # Errors
    /// [`Error::Launch`] if the model fails on these values; [`Error::Device`] if bytes that the kernel reads
    /// are not loaded, or the device is lost.
    fn launch(
        &mut self,
        module: &E::Module,
        kernel: &E::Kernel,
        args: Vec<LaunchArg<'_, E::Value>>,
    ) -> Result<Vec<E::Value>, Error>;

    /// Copies a tensor from host memory to the device.
    ///
    /// # Errors
    /// [`Error::DataType`]; [`Error::Tensor`] if the bytes do not match the shape, or an element does
    /// not fit the engine's type.
    fn upload(&mut self, tensor: HostTensor) -> Result<E::Value, Error> {
        let HostTensor { datatype, shape, contents } = tensor;
        self.gather(datatype, shape, vec![TensorPart::Host(&contents)])
    }

    /// Creates a tensor whose bytes are the concatenation of these parts.
    ///
    /// # Errors
    /// As [`Self::upload`]; [`Error::Device`] if bytes of a region are not loaded.
    fn gather(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        parts: Vec<TensorPart<'_, Region<E>>>,
    ) -> Result<E::Value, Error>;

    /// Creates a tensor that reads bytes of a region in place. While the value lives, the region
    /// cannot be unmapped, and these bytes cannot be written. The bytes are copied instead, as by
    /// [`Self::gather`], if the engine stores the type in another form or the bytes are not aligned
    /// for its elements.
    ///
    /// # Errors
    /// As [`Self::gather`].
    fn view_region(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        region: &Region<E>,
        bytes: Range<u64>,
    ) -> Result<E::Value, Error>;

    /// Detaches a value from its region: copies the value if it is a view of a region, and returns
    /// other values unchanged.
    fn detach(&mut self, value: E::Value) -> E::Value;

    /// Returns the shape of a value that is to be read as `datatype`.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the value has another element type, [`Error::DataType`].
    fn shape(&self, value: &E::Value, datatype: DataType) -> Result<Vec<usize>, Error>;

    /// Copies a value from the device to host memory, converted to `datatype`. The contents are
    /// inline up to `inline_max` bytes, and a file above that.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the value has another element type; [`Error::Device`] if the device is out of
    /// memory.
    fn download(
        &mut self,
        value: &E::Value,
        datatype: DataType,
        inline_max: usize,
    ) -> Result<HostTensor, Error>;
}
