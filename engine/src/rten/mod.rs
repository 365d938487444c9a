//! Runs ONNX models with rten on the CPU, on the memory of an emulated GPU.
//!
//! The weights of rten's model are views into the region, so rten reads them from device memory only:
//! a byte that changes there changes the result.
//!
//! Host threads stand for SMs: a launch that is restricted to a part of the SMs uses that part of its
//! queue's threads.

mod module;
mod threads;
mod value;

use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::ops::Range;

use millrace_device::Device as _;
use millrace_device::emulated::{EmulatedGpu, EmulatedRegion, EmulatedStream};
use millrace_types::DataType;

use crate::api::{Engine, HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue, TensorPart};
use crate::error::Error;

use threads::QueueThreads;

pub use module::{Kernel, Module};
pub use value::RtenValue;

/// rten on an emulated GPU.
#[derive(Debug)]
pub struct RtenEngine {
    gpu: EmulatedGpu,
    threads: NonZeroUsize,
}

impl RtenEngine {
    /// Creates an engine. The launches of each queue with [`LaunchThreads::Whole`] use `threads` threads,
    /// which belong to the queue.
    #[must_use]
    pub fn new(gpu: EmulatedGpu, threads: NonZeroUsize) -> Self {
        Self { gpu, threads }
    }
}

impl Engine for RtenEngine {
    type Device = EmulatedGpu;
    type Module = Module;
    type Kernel = Kernel;
    type Value = RtenValue;
    type Queue = RtenQueue;

    fn device(&self) -> &EmulatedGpu {
        &self.gpu
    }

    fn load(&self, region: &EmulatedRegion, code: ModelCode<'_>) -> Result<Module, Error> {
        self.gpu.alive()?;
        Module::load(region, code)
    }

    fn kernel(&self, module: &Module, spec: &KernelSpec) -> Result<Kernel, Error> {
        module.kernel(spec)
    }

    fn queue(&self, threads: LaunchThreads) -> Result<RtenQueue, Error> {
        let threads = match threads {
            LaunchThreads::One => NonZeroUsize::MIN,
            LaunchThreads::Whole => self.threads,
        };
        // No queue shares the threads of another: `enter` occupies one thread for as long as its body
        // runs, so two bodies that share the only thread would run one after the other.
        Ok(RtenQueue { stream: self.gpu.stream()?, threads: QueueThreads::new(threads) })
    }

    /// Runs `body` on a thread of the queue's pool, so that a launch need not switch to one.
    fn enter<R: Send>(&self, queue: RtenQueue, body: impl FnOnce(RtenQueue) -> R + Send) -> R {
        let threads = queue.threads.own();
        threads.run(|| body(queue))
    }

    fn lend<'a>(
        &self,
        value: &'a RtenValue,
        datatype: DataType,
        part: Range<u64>,
    ) -> Result<Cow<'a, [u8]>, Error> {
        value.bytes(datatype, &part)
    }
}

/// A queue of launches, which run synchronously on the caller's thread and on the threads of a pool.
#[derive(Debug)]
pub struct RtenQueue {
    stream: EmulatedStream,
    threads: QueueThreads,
}

impl Queue<RtenEngine> for RtenQueue {
    fn stream(&mut self) -> &mut EmulatedStream {
        &mut self.stream
    }

    fn launch(
        &mut self,
        module: &Module,
        kernel: &Kernel,
        args: Vec<LaunchArg<'_, RtenValue>>,
    ) -> Result<Vec<RtenValue>, Error> {
        // Before the launch begins, so that a new pool's start does not count as busy time of the SMs.
        let threads = self.threads.for_share(self.stream.sm_share());
        let options = rten::RunOptions::default().with_thread_pool(Some(threads));
        let launch = self.stream.begin_launch()?;
        let values = module.launch(kernel, args, options)?;
        drop(launch);
        // A launch on a device that was lost in the meantime returns no results.
        self.stream.alive()?;
        Ok(values)
    }

    fn gather(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        parts: Vec<TensorPart<'_, EmulatedRegion>>,
    ) -> Result<RtenValue, Error> {
        self.stream.alive()?;
        RtenValue::gather(datatype, &shape, parts)
    }

    fn view_region(
        &mut self,
        datatype: DataType,
        shape: Vec<usize>,
        region: &EmulatedRegion,
        bytes: Range<u64>,
    ) -> Result<RtenValue, Error> {
        self.stream.alive()?;
        RtenValue::in_place(datatype, &shape, region, bytes)
    }

    fn detach(&mut self, value: RtenValue) -> RtenValue {
        value.detached()
    }

    fn shape(&self, value: &RtenValue, datatype: DataType) -> Result<Vec<usize>, Error> {
        value.shape(datatype)
    }

    fn download(
        &mut self,
        value: &RtenValue,
        datatype: DataType,
        inline_max: usize,
    ) -> Result<HostTensor, Error> {
        self.stream.alive()?;
        value.download(datatype, inline_max)
    }
}
