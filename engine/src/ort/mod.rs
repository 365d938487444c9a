//! Runs ONNX models with ONNX Runtime on the memory of a device.
//!
//! | module | content |
//! |---|---|
//! | [`library`] | opens the library, which is no part of this program |
//! | [`memory`] | [`OrtDevice`]: what ONNX Runtime needs of a device, and the emulated GPU |
//! | `cuda` | the CUDA GPU |
//! | `context` | the environment, allocator and stream of an engine's sessions |
//! | `module` | a loaded model and its launches, each a session of its own |
//! | `value` | tensors |
//!
//! ONNX Runtime reads the weights at their addresses in a region, and loads a model without reading a
//! weight. All sessions share the threads and the host memory of the process's only environment.
//!
//! # Order on a device with streams
//! All launches run in a single compute stream of the engine, because a session is bound to a stream when it
//! is made. A launch waits for the earlier work of its queue's stream, and the later work of that stream
//! waits for the launch. `docs/gpu.md` has the results of an H100.

mod context;
mod cuda;
pub mod library;
pub mod memory;
mod module;
mod value;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use millrace_device::Stream as _;
use millrace_types::DataType;

use crate::api::{Engine, HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue, TensorPart};
use crate::error::Error;

use context::SessionContext;

pub use memory::{DeviceAddress, OrtDevice, Provider};
pub use module::{OrtKernel, OrtModule};
pub use value::OrtValue;

/// ONNX Runtime on a device.
#[derive(Debug)]
pub struct OrtEngine<D: OrtDevice> {
    context: Arc<SessionContext<D>>,
}

impl<D: OrtDevice> OrtEngine<D> {
    /// Opens the library, and creates an engine with `threads` host threads for its launches. The number of
    /// threads of a process's first engine holds for all of its engines.
    ///
    /// # Errors
    /// [`Error::Library`] if the library cannot be opened or lacks the device's provider; [`Error::Device`] if
    /// the device is lost.
    pub fn new(device: D, threads: NonZeroUsize) -> Result<Self, Error> {
        Ok(Self { context: Arc::new(SessionContext::new(device, threads)?) })
    }
}

impl<D: OrtDevice> Engine for OrtEngine<D> {
    type Device = D;
    type Module = OrtModule<D>;
    type Kernel = OrtKernel<D>;
    type Value = OrtValue<D>;
    type Queue = OrtQueue<D>;

    fn device(&self) -> &D {
        &self.context.device
    }

    fn load(&self, region: &D::Region, code: ModelCode<'_>) -> Result<OrtModule<D>, Error> {
        self.context.device.check_alive()?;
        OrtModule::load(region, code)
    }

    fn kernel(&self, module: &OrtModule<D>, spec: &KernelSpec) -> Result<OrtKernel<D>, Error> {
        self.context.device.check_alive()?;
        module.kernel(&self.context, spec)
    }

    /// Creates a queue. The number of threads is a hint that is not followed: all sessions share the threads of
    /// the environment.
    fn queue(&self, _threads: LaunchThreads) -> Result<OrtQueue<D>, Error> {
        Ok(OrtQueue { stream: self.context.device.stream()?, context: Arc::clone(&self.context) })
    }

    fn enter<R: Send>(&self, queue: OrtQueue<D>, body: impl FnOnce(OrtQueue<D>) -> R + Send) -> R {
        body(queue)
    }

    fn lend<'a>(
        &self,
        value: &'a OrtValue<D>,
        datatype: DataType,
        part: Range<u64>,
    ) -> Result<D::Bytes<'a>, Error> {
        value.lend(datatype, &part)
    }
}

/// A queue of launches.
pub struct OrtQueue<D: OrtDevice> {
    stream: D::Stream,
    context: Arc<SessionContext<D>>,
}

impl<D: OrtDevice> OrtQueue<D> {
    /// Lets later work of the queue's stream wait for all launches so far. Memory that a value gives back may
    /// still be used by a launch when the allocator hands it out again.
    fn join_compute(&mut self) -> Result<(), Error> {
        if let Some(mut compute) = self.context.compute() {
            let launched = compute.record()?;
            self.stream.after(&launched)?;
        }
        Ok(())
    }
}

impl<D: OrtDevice> Queue<OrtEngine<D>> for OrtQueue<D> {
    fn stream(&mut self) -> &mut D::Stream {
        &mut self.stream
    }

    fn launch(
        &mut self,
        _module: &OrtModule<D>,
        kernel: &OrtKernel<D>,
        args: Vec<LaunchArg<'_, OrtValue<D>>>,
    ) -> Result<Vec<OrtValue<D>>, Error> {
        let launch = D::begin_launch(&mut self.stream)?;
        let values = match self.context.compute() {
            None => kernel.launch(&mut self.stream, args),
            Some(mut compute) => {
                let earlier = self.stream.record()?;
                compute.after(&earlier)?;
                let values = kernel.launch(&mut compute, args);
                let launched = compute.record()?;
                self.stream.after(&launched)?;
                values
            }
        };
        drop(launch);
        // A launch on a device that was lost in the meantime returns no results, and its error is the loss.
        self.context.device.check_alive()?;
        values
    }

    fn gather(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        parts: Vec<TensorPart<'_, D::Region>>,
    ) -> Result<OrtValue<D>, Error> {
        self.context.device.check_alive()?;
        self.join_compute()?;
        OrtValue::gather(&self.context.allocator(), &mut self.stream, datatype, &shape, parts)
    }

    fn view_region(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        region: &D::Region,
        bytes: Range<u64>,
    ) -> Result<OrtValue<D>, Error> {
        self.context.device.check_alive()?;
        self.join_compute()?;
        let stream = &mut self.stream;
        OrtValue::in_place(&self.context.allocator(), stream, datatype, &shape, region, bytes)
    }

    fn detach(&mut self, value: OrtValue<D>) -> OrtValue<D> {
        match self.join_compute() {
            Ok(()) => value.detached(&self.context.allocator(), &mut self.stream),
            // The device is lost, so no value is read any more.
            Err(_) => value,
        }
    }

    fn shape(&self, value: &OrtValue<D>, datatype: DataType) -> Result<Vec<usize>, Error> {
        value.shape(datatype)
    }

    fn download(
        &mut self,
        value: &OrtValue<D>,
        datatype: DataType,
        inline_max: usize,
    ) -> Result<HostTensor, Error> {
        self.context.device.check_alive()?;
        value.download(&mut self.stream, datatype, inline_max)
    }
}
