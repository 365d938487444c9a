//! A request on a GPU, with the data that the run reads.

use millrace_core::ids::{ObjectKey, RequestKey};

use super::object_table::GpuObjects;
use crate::actors::spans::GpuSpans;
use crate::messages::work::SharedWork;
use crate::request::InputTransfer;

/// A request on this GPU, or a batch of requests that run as one.
pub(super) struct GpuRequest {
    pub(super) key: RequestKey,
    /// The requests of the batch, at least one.
    pub(super) works: Vec<SharedWork>,
    pub(super) attempt: u32,
    pub(super) spans: GpuSpans,
    /// Objects on this GPU that the run reads in place, reserved until the run has ended.
    pub(super) reserved: Vec<ObjectKey>,
    /// The run's own copies of objects on other GPUs.
    pub(super) copies: Vec<ObjectKey>,
    /// The fetches of inputs that are objects, each with its request.
    pub(super) fetches: Vec<(RequestKey, InputTransfer)>,
}

impl GpuRequest {
    /// Releases the objects that the run read, and discards the run's own copies.
    pub(super) fn release_inputs(&mut self, data: &mut GpuObjects) {
        self.reserved.drain(..).for_each(|object| data.release(object));
        self.copies.drain(..).for_each(|object| data.discard(object));
    }

    /// Returns the first request of the batch. Its trace shows the run of the whole batch.
    pub(super) fn work(&self) -> &SharedWork {
        &self.works[0]
    }
}
