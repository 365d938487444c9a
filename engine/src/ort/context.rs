//! The parts of an engine that its sessions share: environment, allocator and compute stream.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ort::environment::Environment;
use ort::ep::cuda::ConvAlgorithmSearch;
use ort::ep::{ArenaExtendStrategy, CUDA};
use ort::logging::LogLevel;
use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};

use super::library;
use super::memory::{self, OrtDevice, Provider};
use crate::error::Error;

/// The parts of an engine that its queues and kernels share. The fields are dropped in this order: a session
/// must be dropped before the stream in which it runs.
pub(super) struct SessionContext<D: OrtDevice> {
    /// Allocates values in the device's memory. Locked, because allocators of some providers are not safe on
    /// several threads.
    allocator: Mutex<Allocator>,
    /// Keeps the provider of the allocator alive.
    _anchor: Option<Session>,
    /// Stream of all sessions; `None` if launches run on the caller's thread.
    compute: Option<Mutex<D::Stream>>,
    environment: Environment,
    pub(super) provider: Provider,
    pub(super) device: D,
}

impl<D: OrtDevice> fmt::Debug for SessionContext<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionContext")
            .field("device", &self.device)
            .field("provider", &self.provider)
            .finish_non_exhaustive()
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

impl<D: OrtDevice> SessionContext<D> {
    /// Opens the library, and prepares the device for sessions.
    pub(super) fn new(device: D, threads: NonZeroUsize) -> Result<Self, Error> {
        let environment = library::environment(threads)?;
        let provider = device.provider();
        let compute = match provider {
            Provider::Cpu => None,
            Provider::Cuda { .. } => Some(Mutex::new(device.stream()?)),
        };
        let cpu = Mutex::new(Allocator::default());
        let mut context = Self { allocator: cpu, _anchor: None, compute, environment, provider, device };
        if let Provider::Cuda { device_id } = provider {
            // An allocator of CUDA belongs to a session.
            let anchor = context.session(GraphOptimizationLevel::Disable)?.commit_from_memory(&IDENTITY)?;
            context.allocator = Mutex::new(Allocator::new(&anchor, cuda_memory(device_id)?)?);
            context._anchor = Some(anchor);
        }
        Ok(context)
    }

    /// Locks the allocator of values.
    pub(super) fn allocator(&self) -> MutexGuard<'_, Allocator> {
        self.allocator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the memory in which sessions allocate outputs.
    pub(super) fn output_memory(&self) -> Result<MemoryInfo<'static>, ort::Error> {
        match self.provider {
            Provider::Cpu => {
                MemoryInfo::new(AllocationDevice::CPU, 0, AllocatorType::Device, MemoryType::Default)
            }
            Provider::Cuda { device_id } => cuda_memory(device_id),
        }
    }

    /// Begins a session that runs on the CPU.
    pub(super) fn cpu_session(
        &self,
        optimizations: GraphOptimizationLevel,
    ) -> Result<SessionBuilder, ort::Error> {
        let builder = Session::builder(&self.environment)?
            .with_optimization_level(optimizations)?
            // Prepacking would copy the constants.
            .with_prepacking(false)?
            .with_env_allocators()?
            // Every error is also returned, and a request's error is no matter for the log.
            .with_log_level(LogLevel::Fatal)?;
        Ok(builder)
    }

    /// Begins a session that runs on the device.
    pub(super) fn session(
        &self,
        optimizations: GraphOptimizationLevel,
    ) -> Result<SessionBuilder, ort::Error> {
        let builder = self.cpu_session(optimizations)?;
        let Provider::Cuda { device_id } = self.provider else { return Ok(builder) };
        let compute = self.compute();
        let Some(stream) = compute.as_deref().and_then(D::raw_stream) else {
            return Err(ort::Error::new("the device has no CUDA stream"));
        };
        let cuda = CUDA::default()
            .with_device_id(device_id)
            // The exhaustive search runs every algorithm in the first run of a model, which a request waits for.
            .with_conv_algorithm_search(ConvAlgorithmSearch::Heuristic)
            // Each session has an arena of its own, so none may grow beyond what it uses.
            .with_arena_extend_strategy(ArenaExtendStrategy::SameAsRequested);
        let cuda = memory::cuda_provider(cuda, stream);
        // Without `error_on_failure`, a provider that cannot be loaded is silently replaced by the CPU.
        Ok(builder.with_execution_providers([cuda.build().error_on_failure()])?)
    }

    /// Locks the stream of all sessions.
    pub(super) fn compute(&self) -> Option<MutexGuard<'_, D::Stream>> {
        self.compute.as_ref().map(|stream| stream.lock().unwrap_or_else(PoisonError::into_inner))
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
