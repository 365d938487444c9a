//! A GPU's memory, and processes over it that have one program each.

use std::sync::Arc;

use millrace_types::GpuIndex;

use super::{ProcessPort, Settings};
use crate::port::isolating::Parts;
use crate::port::{ExecutorPort, Lent, PortSink};

/// What an isolated place of real processes is made of.
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
        let (settings, lent) = (Arc::clone(&self.settings), Some(memory.clone()));
        // Others have their models in that memory.
        let probed = true;
        Box::new(ProcessPort { settings, gpu: self.gpu, lent, sink, process: None, probed })
    }
}
