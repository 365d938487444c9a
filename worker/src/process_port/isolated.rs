//! Executor processes in isolation: several processes with a program each share a GPU's memory.

use std::sync::Arc;

use millrace_types::GpuIndex;

use super::{ProcessPort, Settings};
use crate::port::isolating::Parts;
use crate::port::{ExecutorPort, Lent, PortSink};

/// The factory of a GPU's memory and of the ports of its processes.
#[derive(Debug)]
pub(super) struct Processes {
    settings: Arc<Settings>,
    gpu: GpuIndex,
}

impl Processes {
    pub(super) fn new(settings: Arc<Settings>, gpu: GpuIndex) -> Self {
        Self { settings, gpu }
    }
}

impl Parts for Processes {
    fn memory(&mut self) -> Result<Lent, String> {
        self.settings.device_memory(self.gpu).map_err(|error| error.to_string())
    }

    fn part(&mut self, memory: &Lent, program: &str, sink: PortSink) -> Box<dyn ExecutorPort> {
        tracing::debug!(gpu = %self.gpu, program, "starting an executor for one model");
        Box::new(ProcessPort {
            settings: Arc::clone(&self.settings),
            gpu: self.gpu,
            lent: Some(memory.clone()),
            sink,
            process: None,
            // A measurement would overwrite the models of other processes in the shared memory.
            probed: true,
        })
    }
}
