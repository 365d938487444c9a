//! Events of the batcher, in addition to those of the gate and the dispatcher.

use std::hash::{Hash, Hasher};
use std::time::Duration;

use millrace_types::BatchingOptions;

use crate::dispatch::QueuedRequest;
use crate::{dispatch, tenancy};
use millrace_core::ids::{FunctionIndex, RequestKey};

/// Properties of a request that decide which requests may run together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BatchItem {
    /// Size of the first dimension of the inputs.
    pub rows: u32,
    /// Class of batchable requests: inputs that differ only in rows, and the same outputs.
    pub class: u64,
    /// Bytes of inputs that travel inside a message.
    pub inline: u32,
    /// Number of inputs that travel as descriptors.
    pub descriptors: u32,
}

impl BatchItem {
    /// Returns the sum of both requests.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            rows: self.rows + other.rows,
            inline: self.inline + other.inline,
            descriptors: self.descriptors + other.descriptors,
            ..self
        }
    }
}

/// Input of the batcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// An event for the queue or its gate.
    Queue(tenancy::Event),
    /// A batchable request is ready to run.
    Enqueue { request: QueuedRequest, item: BatchItem },
    /// A function has new batching limits.
    Limits {
        function: FunctionIndex,
        /// Batching limits; `None` runs each request alone.
        batching: Option<BatchingOptions>,
        /// Time from a request's arrival within which the response is due.
        deadline: Option<Duration>,
    },
    /// The run of a batch failed, perhaps because of a single member. After the end on its GPU,
    /// each member runs again alone.
    Split { key: RequestKey },
}

impl From<tenancy::Event> for Event {
    fn from(event: tenancy::Event) -> Self {
        Self::Queue(event)
    }
}

impl From<dispatch::Event> for Event {
    fn from(event: dispatch::Event) -> Self {
        Self::Queue(event.into())
    }
}

/// Events for the queue hash without any wrapper, so that a node without batches has the same event
/// trace as a node without a batcher (`core::trace`).
impl Hash for Event {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Self::Queue(event) => event.hash(state),
            Self::Enqueue { request, item } => {
                dispatch::Event::Enqueue(*request).hash(state);
                item.hash(state);
            }
            Self::Limits { function, batching, deadline } => {
                ("limits", function, batching, deadline).hash(state);
            }
            Self::Split { key } => ("split", key).hash(state),
        }
    }
}
