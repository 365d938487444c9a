//! Executor processes in isolation: several processes with a program each share a GPU's memory.

use std::sync::Arc;

use millrace_types::GpuIndex;

use super::port::{ProcessPort, SpawnSettings};
use crate::port::isolating::IsolatedProcessFactory;
use crate::port::{ExecutorPort, PortSink, SharedDeviceMemory};

/// The factory of a GPU's memory and of the ports of its processes.
#[derive(Debug)]
pub(super) struct IsolatedProcesses {
    settings: Arc<SpawnSettings>,
    gpu: GpuIndex,
}

impl IsolatedProcesses {
    pub(super) fn new(settings: Arc<SpawnSettings>, gpu: GpuIndex) -> Self {
        Self { settings, gpu }
    }
}

impl IsolatedProcessFactory for IsolatedProcesses {
    fn memory(&mut self) -> Result<SharedDeviceMemory, String> {
        self.settings.device_memory(self.gpu).map_err(|error| error.to_string())
    }

    fn part(&mut self, memory: &SharedDeviceMemory, program: &str, sink: PortSink) -> Box<dyn ExecutorPort> {
        tracing::debug!(gpu = %self.gpu, program, "starting an executor for one model");
        Box::new(ProcessPort::sharing(Arc::clone(&self.settings), self.gpu, memory.clone(), sink))
    }
}
