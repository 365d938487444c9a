//! The Node's view of a request between its admission and its end: whether the request waits or is on a
//! GPU, and the span of its wait.

use std::sync::Arc;

use millrace_scheduling::batching::Batcher;
use millrace_types::{GpuIndex, RequestId};
use tracing::Span;
use tracing::field::Empty;

use crate::messages::work::SharedWork;
use crate::object_handle::QueueAddress;

/// A request in the queue or on a GPU.
pub(super) struct WaitingEntry {
    pub(super) work: SharedWork,
    /// The span of the wait, while the request waits.
    queue: Option<Span>,
    on: Option<GpuIndex>,
}

impl WaitingEntry {
    /// Returns a request that waits from now on. `address` is registered with the request's objects as the
    /// address of the request's queue.
    pub(super) fn new(work: SharedWork, queue: &Batcher, address: &Arc<QueueAddress>) -> Self {
        work.invocation.on_gpus.objects.iter().for_each(|object| object.read_by(work.key, address));
        let mut entry = Self { work, queue: None, on: None };
        entry.set_waiting(queue);
        entry
    }

    /// Records that the request waits, for the first time or again, and starts the span of the wait.
    pub(super) fn set_waiting(&mut self, queue: &Batcher) {
        self.on = None;
        self.tell_objects(true);
        self.queue = Some(tracing::info_span!(
            parent: &self.work.span,
            "queue",
            millrace.queued = queue.queued(),
            millrace.gpu = Empty,
        ));
    }

    /// Records that the request is assigned to a GPU, and ends the span of the wait.
    pub(super) fn set_assigned(&mut self, gpu: GpuIndex) {
        self.on = Some(gpu);
        self.tell_objects(false);
        if let Some(queue) = self.queue.take() {
            queue.record("millrace.gpu", gpu.0);
        }
    }

    /// Tells the request's objects whether the request waits, and its rank. The rank is the request's
    /// key: the order of arrival is the best guess of the order in which requests will run.
    fn tell_objects(&self, waits: bool) {
        for object in &self.work.invocation.on_gpus.objects {
            object.queued(self.work.key.0, waits);
        }
    }

    pub(super) fn is_on(&self, gpu: GpuIndex) -> bool {
        self.on == Some(gpu)
    }
}

/// Logs the requests that were on a GPU that was lost. The log names up to 8 requests, whose traces can
/// then be found by their ids.
pub(super) fn log_lost<'a>(gpu: GpuIndex, requests: impl ExactSizeIterator<Item = &'a RequestId>) {
    const NAMED_MAX: usize = 8;
    let count = requests.len();
    if count > 0 {
        let named: Vec<_> = requests.take(NAMED_MAX).map(RequestId::as_str).collect();
        tracing::warn!(
            gpu = gpu.0,
            count,
            requests = named.join(" "),
            "a GPU was lost with requests on it: requests that may be repeated run again"
        );
    }
}

impl Drop for WaitingEntry {
    fn drop(&mut self) {
        if self.on.is_none() {
            self.tell_objects(false);
        }
        let objects = &self.work.invocation.on_gpus.objects;
        objects.iter().for_each(|object| object.read_no_more(self.work.key));
    }
}
