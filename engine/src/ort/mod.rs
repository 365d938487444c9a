//! Runs ONNX models with ONNX Runtime on the memory of a device.
//!
//! | module | content |
//! |---|---|
//! | [`library`] | opens the library, which is no part of this program |
//! | [`memory`] | [`OrtDevice`]: what ONNX Runtime needs of a device, and the emulated GPU |
//! | `cuda` | the CUDA GPU |
//! | `module` | a loaded model and its launches, each a session of its own |
//! | `value` | tensors |
//!
//! ONNX Runtime reads the weights at their addresses in a region, and loads a model without reading a
//! weight. All sessions share the threads and the host memory of the process's only environment.
//!
//! # Order on a device with streams
//! All launches run in a single compute stream of the engine, because a session is bound to a stream when it
//! is made. A launch waits for the earlier work of its queue's stream, and the later work of that stream
//! waits for the launch. **No GPU has run this code so far.**

mod cuda;
pub mod library;
pub mod memory;
mod module;
mod value;

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use millrace_device::Stream as _;
use millrace_types::DataType;
use ort::environment::Environment;
use ort::ep::CUDA;
use ort::logging::LogLevel;
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};

use crate::api::{Engine, HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue, TensorPart};
use crate::error::Error;

pub use memory::{DeviceAddress, OrtDevice, Provider};
pub use module::{OrtKernel, OrtModule};
pub use value::OrtValue;

/// ONNX Runtime on a device.
#[derive(Debug)]
pub struct OrtEngine<D: OrtDevice> {
    shared: Arc<Shared<D>>,
}

/// The parts of an engine that its queues and kernels use. The fields are dropped in this order: a session
/// must be dropped before the stream in which it runs.
struct Shared<D: OrtDevice> {
    /// Allocates values in the device's memory. Locked, because allocators of some providers are not safe on
    /// several threads.
    allocator: Mutex<Allocator>,
    /// Keeps the provider of the allocator alive.
    _anchor: Option<Session>,
    /// The stream in which all sessions run; `None` if launches run on the caller's thread.
    compute: Option<Mutex<D::Stream>>,
    environment: Environment,
    provider: Provider,
    device: D,
}

impl<D: OrtDevice> fmt::Debug for Shared<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("device", &self.device)
            .field("provider", &self.provider)
            .finish_non_exhaustive()
    }
}

impl<D: OrtDevice> OrtEngine<D> {
    /// Opens the library, and creates an engine with `threads` host threads for its launches. The number of
    /// threads of a process's first engine holds for all of its engines.
    ///
    /// # Errors
    /// [`Error::Library`] if the library cannot be opened or lacks the device's provider; of the device lost.
    pub fn new(device: D, threads: NonZeroUsize) -> Result<Self, Error> {
        let environment = library::environment(threads)?;
        let provider = device.provider();
        let compute = match provider {
            Provider::Cpu => None,
            Provider::Cuda { .. } => Some(Mutex::new(device.stream()?)),
        };
        let cpu = Mutex::new(Allocator::default());
        let mut shared = Shared { allocator: cpu, _anchor: None, compute, environment, provider, device };
        if let Provider::Cuda { device_id } = provider {
            // An allocator of CUDA belongs to a session.
            let anchor = shared.session(GraphOptimizationLevel::Disable)?.commit_from_memory(&IDENTITY)?;
            shared.allocator = Mutex::new(Allocator::new(&anchor, cuda_memory(device_id)?)?);
            shared._anchor = Some(anchor);
        }
        Ok(Self { shared: Arc::new(shared) })
    }
}

/// An ONNX model with a single node, `y = Identity(x)` of type FLOAT, in IR version 8 and opset 17.
const IDENTITY: [u8; 45] = [
    0x08, 8, // IR version
    0x3a, 37, // graph
    0x0a, 16, 0x0a, 1, b'x', 0x12, 1, b'y', 0x22, 8, b'I', b'd', b'e', b'n', b't', b'i', b't',
    b'y', // node
    0x12, 1, b'g', // name
    0x5a, 9, 0x0a, 1, b'x', 0x12, 4, 0x0a, 2, 0x08, 1, // input
    0x62, 3, 0x0a, 1, b'y', // output
    0x42, 2, 0x10, 17, // opset
];

fn cuda_memory(device_id: i32) -> Result<MemoryInfo<'static>, ort::Error> {
    MemoryInfo::new(AllocationDevice::CUDA, device_id, AllocatorType::Device, MemoryType::Default)
}

impl<D: OrtDevice> Shared<D> {
    fn allocator(&self) -> MutexGuard<'_, Allocator> {
        self.allocator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the memory in which sessions allocate outputs.
    fn output_memory(&self) -> Result<MemoryInfo<'static>, ort::Error> {
        match self.provider {
            Provider::Cpu => {
                MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::Default)
            }
            Provider::Cuda { device_id } => cuda_memory(device_id),
        }
    }

    /// Begins a session that runs on the CPU.
    fn cpu_session(&self, optimizations: GraphOptimizationLevel) -> Result<SessionBuilder, ort::Error> {
        let builder = Session::builder(&self.environment)?
            .with_optimization_level(optimizations)?
            // Packed constants would be copies of them.
            .with_prepacking(false)?
            .with_env_allocators()?
            // Every error is also returned, and a request's error is no matter for the log.
            .with_log_level(LogLevel::Fatal)?;
        Ok(builder)
    }

    /// Begins a session that runs on the device.
    fn session(&self, optimizations: GraphOptimizationLevel) -> Result<SessionBuilder, ort::Error> {
        let builder = self.cpu_session(optimizations)?;
        let Provider::Cuda { device_id } = self.provider else { return Ok(builder) };
        let compute = self.compute();
        let Some(stream) = compute.as_deref().and_then(D::raw_stream) else {
            return Err(ort::Error::new("the device has no CUDA stream"));
        };
        let cuda = memory::cuda_provider(CUDA::default().with_device_id(device_id), stream);
        // Without `error_on_failure`, a provider that cannot be loaded is silently replaced by the CPU.
        Ok(builder.with_execution_providers([cuda.build().error_on_failure()])?)
    }

    fn compute(&self) -> Option<MutexGuard<'_, D::Stream>> {
        self.compute.as_ref().map(|stream| stream.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<D: OrtDevice> Engine for OrtEngine<D> {
    type Device = D;
    type Module = OrtModule<D>;
    type Kernel = OrtKernel<D>;
    type Value = OrtValue<D>;
    type Queue = OrtQueue<D>;

    fn device(&self) -> &D {
        &self.shared.device
    }

    fn load(&self, region: &D::Region, code: ModelCode<'_>) -> Result<OrtModule<D>, Error> {
        self.shared.device.check_alive()?;
        OrtModule::load(region, code)
    }

    fn kernel(&self, module: &OrtModule<D>, spec: &KernelSpec) -> Result<OrtKernel<D>, Error> {
        self.shared.device.check_alive()?;
        module.kernel(&self.shared, spec)
    }

    /// Creates a queue. The number of threads is a hint that is not followed: all sessions share the threads of
    /// the environment.
    fn queue(&self, _threads: LaunchThreads) -> Result<OrtQueue<D>, Error> {
        Ok(OrtQueue { stream: self.shared.device.stream()?, shared: Arc::clone(&self.shared) })
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
    shared: Arc<Shared<D>>,
}

impl<D: OrtDevice> OrtQueue<D> {
    /// Lets later work of the queue's stream wait for all launches so far. Memory that a value gives back may
    /// still be used by a launch when the allocator hands it out again.
    fn join_compute(&mut self) -> Result<(), Error> {
        if let Some(mut compute) = self.shared.compute() {
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
        D::begin_launch(&mut self.stream)?;
        let values = match self.shared.compute() {
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
        // A launch on a device that was lost in the meantime returns no results, and its error is the loss.
        self.shared.device.check_alive()?;
        values
    }

    fn gather(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        parts: Vec<TensorPart<'_, D::Region>>,
    ) -> Result<OrtValue<D>, Error> {
        self.shared.device.check_alive()?;
        self.join_compute()?;
        OrtValue::gather(&self.shared.allocator(), &mut self.stream, datatype, &shape, parts)
    }

    fn view_region(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        region: &D::Region,
        bytes: Range<u64>,
    ) -> Result<OrtValue<D>, Error> {
        self.shared.device.check_alive()?;
        self.join_compute()?;
        let stream = &mut self.stream;
        OrtValue::in_place(&self.shared.allocator(), stream, datatype, &shape, region, bytes)
    }

    fn detach(&mut self, value: OrtValue<D>) -> OrtValue<D> {
        match self.join_compute() {
            Ok(()) => value.detached(&self.shared.allocator(), &mut self.stream),
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
        self.shared.device.check_alive()?;
        value.download(&mut self.stream, datatype, inline_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_behind_the_allocator_loads() {
        if std::env::var_os(library::LIBRARY_VARIABLE).is_none() {
            eprintln!("skipped: {} is not set", library::LIBRARY_VARIABLE);
            return;
        }
        let environment = library::environment(NonZeroUsize::MIN).unwrap();
        let session = Session::builder(&environment).unwrap().commit_from_memory(&IDENTITY).unwrap();
        assert_eq!((session.inputs()[0].name(), session.outputs()[0].name()), ("x", "y"));
    }
}
