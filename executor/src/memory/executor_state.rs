//! The state that all threads share: the device, its kept outputs, and the sender of events.

use std::sync::atomic::AtomicBool;

use millrace_device::Device;

use crate::memory::kept_outputs::KeptOutputs;
use crate::socket::events::EventSender;

/// State that all threads share.
#[derive(Debug)]
pub(crate) struct ExecutorState<D: Device> {
    pub(crate) device: D,
    pub(crate) events: EventSender,
    /// Outputs that stay on the GPU after the run.
    pub(crate) kept: KeptOutputs<D::Value>,
    /// Whether the next run aborts the process: an injected fault.
    pub(crate) abort_on_run: AtomicBool,
}
