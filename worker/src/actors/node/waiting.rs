//! A request between its admission and its end, as far as the node has to know: whether it waits or is
//! on a GPU, and the span of its wait.

use std::sync::Arc;

use millrace_policy::batching::Batcher;
use millrace_types::{GpuIndex, RequestId};
use tracing::Span;
use tracing::field::Empty;

use crate::actors::work::SharedWork;
use crate::handle::Directory;

/// A request in the queue or on a GPU.
pub(super) struct Entry {
    pub(super) work: SharedWork,
    /// Its wait, while it waits.
    queue: Option<Span>,
    on: Option<GpuIndex>,
}

impl Entry {
    /// One that waits from now on, at a node that is found there.
    pub(super) fn new(work: SharedWork, queue: &Batcher, node: &Arc<Directory>) -> Self {
        work.invocation.on_gpus.objects.iter().for_each(|object| object.read_by(work.key, node));
        let mut entry = Self { work, queue: None, on: None };
        entry.waits(queue);
        entry
    }

    /// It waits, again or for the first time.
    pub(super) fn waits(&mut self, queue: &Batcher) {
        self.on = None;
        self.tell_objects(true);
        self.queue = Some(tracing::info_span!(
            parent: &self.work.span,
            "queue",
            millrace.queued = queue.queued(),
            millrace.gpu = Empty,
        ));
    }

    /// It waits no more.
    pub(super) fn goes_to(&mut self, gpu: GpuIndex) {
        self.on = Some(gpu);
        self.tell_objects(false);
        if let Some(queue) = self.queue.take() {
            queue.record("millrace.gpu", gpu.0);
        }
    }

    /// Tells where its inputs are how near it is: whoever came earlier goes earlier, as far as can be known.
    fn tell_objects(&self, waits: bool) {
        for object in &self.work.invocation.on_gpus.objects {
            object.queued(self.work.key.0, waits);
        }
    }

    pub(super) fn is_on(&self, gpu: GpuIndex) -> bool {
        self.on == Some(gpu)
    }
}

/// Names requests that a GPU was lost with, by which their traces are found: the first of them, where they
/// are many.
pub(super) fn log_lost<'a>(gpu: GpuIndex, requests: impl ExactSizeIterator<Item = &'a RequestId>) {
    const NAMED_MAX: usize = 8;
    let count = requests.len();
    if count > 0 {
        let named: Vec<_> = requests.take(NAMED_MAX).map(RequestId::as_str).collect();
        tracing::warn!(
            gpu = gpu.0,
            count,
            requests = named.join(" "),
            "requests were on a GPU that lost all: they run again if they may"
        );
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.on.is_none() {
            self.tell_objects(false);
        }
        let objects = &self.work.invocation.on_gpus.objects;
        objects.iter().for_each(|object| object.read_no_more(self.work.key));
    }
}
