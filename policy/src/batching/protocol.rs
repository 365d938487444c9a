//! What the batcher is told besides what the gate and the dispatcher are.

use std::hash::{Hash, Hasher};
use std::time::Duration;

use millrace_types::Batching;

use crate::dispatch::Request;
use crate::ids::{FunctionIndex, RequestKey};
use crate::{dispatch, tenancy};

/// What of a request decides with whom it may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Item {
    /// The size of its inputs' first dimension.
    pub rows: u32,
    /// Requests with the same may run as one: their inputs differ in rows alone, and they ask for the
    /// same outputs.
    pub class: u64,
    /// The bytes of its inputs that travel inside a message.
    pub inline: u32,
    /// Inputs that travel as descriptors.
    pub descriptors: u32,
}

impl Item {
    /// Both.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            rows: self.rows + other.rows,
            inline: self.inline + other.inline,
            descriptors: self.descriptors + other.descriptors,
            ..self
        }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// What concerns the queue, or the gate before it.
    Queue(tenancy::Event),
    /// A request wants to run that may run together with others.
    Enqueue {
        /// It.
        request: Request,
        /// With whom it may run.
        item: Item,
    },
    /// How a function's requests are batched from now on.
    Limits {
        /// Which.
        function: FunctionIndex,
        /// How; `None`: each alone.
        batching: Option<Batching>,
        /// Within how long of its arrival each should be answered.
        deadline: Option<Duration>,
    },
    /// The run of a batch failed, perhaps for one of its requests alone: when it has ended on its GPU
    /// each runs again by itself.
    Split {
        /// The batch.
        key: RequestKey,
    },
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

/// An event of the queue's hashes as it does alone: a node without batches is known to do the same as
/// one without a batcher (`policy::trace`).
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
