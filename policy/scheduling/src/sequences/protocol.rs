//! Events and actions of a function's sequences.

use millrace_types::InSequence;

use millrace_core::ids::{RequestKey, StateId};

/// Input of the sequence table.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A request arrived.
    Arrive {
        /// Key of the request, unique on this worker.
        key: RequestKey,
        /// Sequence of the request, and whether the request begins or ends the sequence.
        place: InSequence,
    },
    /// A request ran, and the written state is stored unless the request ends its sequence.
    Succeeded { key: RequestKey },
    /// A running or waiting request failed or was withdrawn. A possibly written state is not
    /// stored.
    Failed { key: RequestKey },
    /// A request could not run because its input state is lost.
    Lost { key: RequestKey },
    /// A stored state is lost.
    StateLost { state: StateId },
    /// Time has passed.
    Tick,
}

/// Output of the sequence table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Run a request now.
    Run {
        key: RequestKey,
        /// State that the request reads; `None` means zeros.
        reads: Option<StateId>,
        /// Name of the state that the request writes.
        writes: StateId,
    },
    /// Refuse a request.
    Refuse { key: RequestKey, why: SequenceRefusal },
    /// Release a state that no request will read again.
    Release { state: StateId },
}

/// Reason for which a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SequenceRefusal {
    /// The sequence does not exist, and the request does not begin a sequence.
    Unknown,
    /// The sequence's state was lost, and the request does not begin the sequence again.
    Lost,
    /// The function has its maximum number of sequences.
    TableFull,
    /// The sequence has its maximum number of waiting requests.
    QueueFull,
}

/// Counters of ended sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SequenceTotals {
    /// Sequences that expired without requests.
    pub idle: u64,
    /// Sequences that ended because their state was lost.
    pub lost: u64,
}
