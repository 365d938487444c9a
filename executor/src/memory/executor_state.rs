//! The state that all threads share: the engine, its kept outputs, and the sender of events.

use std::sync::atomic::AtomicBool;

use millrace_engine::Engine;

use crate::memory::kept_outputs::KeptOutputs;
use crate::socket::events::EventSender;

/// State that all threads share.
#[derive(Debug)]
pub(crate) struct ExecutorState<E: Engine> {
    pub(crate) engine: E,
    pub(crate) events: EventSender,
    /// Outputs that stay on the GPU after the run.
    pub(crate) kept: KeptOutputs<E::Value>,
    /// Whether the next run aborts the process: an injected fault.
    pub(crate) abort_on_run: AtomicBool,
}

impl<E: Engine> ExecutorState<E> {
    /// Returns the device whose memory holds the models and objects.
    pub(crate) fn device(&self) -> &E::Device {
        self.engine.device()
    }
}
