//! The implementation of [`ExecutorPort`] with real executor processes.
//!
//! A process is started from the actor thread, which lives as long as the worker, because the executor's
//! parent-death signal follows the thread that forked it. The process's socket is its standard input. No
//! other descriptor can be passed to a child without a moment in which another child, forked at the same
//! time, would inherit the descriptor too, and the socket would stay open after the end of this worker.
//! All other descriptors of the worker are close-on-exec.
//!
//! There is a process per GPU, or in isolation per model and GPU (`isolated`).
//!
//! A task per process reads the process's events, waits for the end and reports it. The tasks run on the
//! actor thread, so an event costs no hop between threads.

use std::sync::Arc;

use millrace_gpu::ExecutorIsolation;
use millrace_types::GpuIndex;
use millrace_types::topology::Topology;

use self::isolated::IsolatedProcesses;
use self::port::{ProcessPort, SpawnSettings};
use crate::port::isolating::IsolatingPort;
use crate::port::{ExecutorPort, PortFactory, PortSink};

pub(crate) mod connection;
mod device;
mod engine;
mod isolated;
mod port;
pub(crate) mod stderr;
mod watch;

pub use self::device::ExecutorDevice;
pub use self::engine::{ENGINES, ExecutorEngine};
pub use self::port::ExecutorCommand;

/// The factory of the ports of a worker's executor processes.
#[derive(Debug)]
pub struct ProcessSpawner(Arc<SpawnSettings>);

impl ProcessSpawner {
    /// Returns a spawner that starts `command` for each GPU of the topology, with the GPU's memory.
    /// `threads` is the number of threads for the launches of an executor.
    #[must_use]
    pub fn new(command: ExecutorCommand, topology: &Topology, threads: u32, allow_faults: bool) -> Self {
        let memory = topology.gpus.iter().map(|gpu| gpu.memory).collect();
        let isolation = ExecutorIsolation::default();
        let engine = ExecutorEngine::default();
        let device = ExecutorDevice::default();
        Self(Arc::new(SpawnSettings { command, memory, threads, allow_faults, isolation, engine, device }))
    }

    /// Returns the spawner with this isolation: whether the models of a GPU share an executor process.
    #[must_use]
    pub fn with_isolation(self, isolation: ExecutorIsolation) -> Self {
        Self(Arc::new(SpawnSettings { isolation, ..SpawnSettings::clone(&self.0) }))
    }

    /// Returns the spawner with this engine for the executors.
    #[must_use]
    pub fn with_engine(self, engine: ExecutorEngine) -> Self {
        Self(Arc::new(SpawnSettings { engine, ..SpawnSettings::clone(&self.0) }))
    }

    /// Returns the spawner with these GPUs for the executors.
    #[must_use]
    pub fn with_device(self, device: ExecutorDevice) -> Self {
        Self(Arc::new(SpawnSettings { device, ..SpawnSettings::clone(&self.0) }))
    }
}

impl PortFactory for ProcessSpawner {
    fn port(&mut self, gpu: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort> {
        let settings = self.0.clone();
        if settings.isolation.per_model() {
            return Box::new(IsolatingPort::new(IsolatedProcesses::new(settings, gpu), sink));
        }
        Box::new(ProcessPort::new(settings, gpu, sink))
    }
}
