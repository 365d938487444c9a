//! What the sequences of a function are told, and what they want done.

use millrace_types::InSequence;

use crate::ids::{RequestKey, StateId};

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A request came.
    Arrive {
        /// Its key, which no other has.
        key: RequestKey,
        /// The sequence that it is of.
        place: InSequence,
    },
    /// It ran, and the state that it wrote is held, unless it ends its sequence.
    Succeeded {
        /// Which.
        key: RequestKey,
    },
    /// It will not be answered, or nobody waits for it any more: whether it ran or waited. What it may
    /// have written is not held.
    Failed {
        /// Which.
        key: RequestKey,
    },
    /// It could not run, for the state that it reads is nowhere any more.
    Lost {
        /// Which.
        key: RequestKey,
    },
    /// State that is held is nowhere any more.
    StateLost {
        /// Which.
        state: StateId,
    },
    /// Time has passed.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// A request's turn.
    Run {
        /// Which.
        key: RequestKey,
        /// The state that it reads; `None`: zeros.
        reads: Option<StateId>,
        /// What the state that it writes is called.
        writes: StateId,
    },
    /// A request is not run.
    Refuse {
        /// Which.
        key: RequestKey,
        /// Why.
        why: Refusal,
    },
    /// Nobody reads this state again.
    Release {
        /// Which.
        state: StateId,
    },
}

/// Why a request is not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// No such sequence, and it does not begin one.
    Unknown,
    /// The sequence's state was lost, and it does not begin it anew.
    Lost,
    /// As many sequences as there may be.
    TableFull,
    /// As many requests of the sequence as may wait.
    QueueFull,
}

/// What became of sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Ended since nobody asked for them.
    pub idle: u64,
    /// Ended since their state was lost.
    pub lost: u64,
}
