//! Events: points in a stream that the host and other streams can wait for.

use std::sync::{Arc, OnceLock};

use millrace_types::Timestamp;

use super::driver::RawEvent;
use crate::api::Event;
use crate::clock::monotonic_now;
use crate::error::Error;

/// A point in a stream of a CUDA GPU.
#[derive(Debug, Clone)]
pub struct CudaEvent {
    raw: RawEvent,
    finished: Arc<OnceLock<Timestamp>>,
}

impl CudaEvent {
    pub(super) fn new(raw: RawEvent) -> Self {
        Self { raw, finished: Arc::default() }
    }

    pub(super) fn raw(&self) -> &RawEvent {
        &self.raw
    }
}

impl Event for CudaEvent {
    fn wait(&self) -> Result<Timestamp, Error> {
        self.raw.wait()?;
        Ok(*self.finished.get_or_init(monotonic_now))
    }
}
