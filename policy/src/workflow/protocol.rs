//! What a run's core is told and wants done, and the names in both.

use std::fmt;

/// One call of a run, numbered from 1 in the order of starting. Never given again within the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// One step of a [`Plan`](super::Plan). A step stands after all that it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepIndex(pub usize);

/// A place for one tensor of a run: a workflow input, or an output of a step that somebody takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub usize);

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "call{}", self.0)
    }
}

impl fmt::Display for StepIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step{}", self.0)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot{}", self.0)
    }
}

/// What the core has to know of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Facts {
    /// Its first dimension; 1 of a scalar.
    pub rows: u64,
    /// Whether it has no elements.
    pub is_empty: bool,
    /// Whether an element is not zero: to be given where [`Plan::is_condition`] says so.
    ///
    /// [`Plan::is_condition`]: super::Plan::is_condition
    pub holds: Option<bool>,
}

impl Facts {
    /// Those of a tensor without elements.
    pub const EMPTY: Self = Self { rows: 0, is_empty: true, holds: Some(false) };

    /// Those of two tensors joined by rows.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        let holds = match (self.condition(), other.condition()) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            (None, _) | (_, None) => None,
        };
        Self { rows: self.rows.saturating_add(other.rows), is_empty: self.is_empty && other.is_empty, holds }
    }

    /// Whether a condition on it holds; `None` when nobody looked. Nothing holds of an empty tensor.
    pub(super) fn condition(self) -> Option<bool> {
        if self.is_empty { Some(false) } else { self.holds }
    }
}

/// Something that is no longer there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Loss {
    /// Of which tensor.
    pub slot: Slot,
    /// What the call for this row made of it; `None` for all of it.
    pub row: Option<u64>,
}

/// What the core is told.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// The request is there. Said once, first.
    Begin {
        /// Of each input of the workflow, in its order.
        inputs: Vec<Facts>,
    },
    /// A call has its answer.
    Done {
        /// Which.
        call: CallId,
        /// Of each output that the call was to make, in the order of [`Action::Call`].
        outputs: Vec<Facts>,
    },
    /// A call has no answer, after all retries at other workers.
    Failed {
        /// Which.
        call: CallId,
        /// The inputs for whose loss it *could not run*: it is called again with new ones, even if
        /// it is not idempotent. Nothing if there was another reason, or if it may have run and may
        /// not run twice: that ends the run.
        lost: Vec<Loss>,
    },
    /// Values are gone, whether or not somebody needs them. What is not held is passed over.
    Lost {
        /// Which.
        lost: Vec<Loss>,
    },
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Run a step, once.
    Call {
        /// What the answer is reported as.
        call: CallId,
        /// What runs.
        step: StepIndex,
        /// Which row is taken of the input that it runs `each` of; `None` where it runs once.
        row: Option<u64>,
        /// Where its inputs are, in the order of [`PlannedStep::inputs`](super::PlannedStep).
        inputs: Vec<Slot>,
        /// Where its outputs go: those that somebody still needs and that are not there. With a row,
        /// what it makes is that part of the slot.
        outputs: Vec<Slot>,
    },
    /// Make the empty tensor of an output of the workflow.
    Empty {
        /// Which.
        slot: Slot,
    },
    /// Free a tensor, all parts that are there (D28).
    Release {
        /// Which.
        slot: Slot,
    },
    /// Stop a call, or let it run to no end: its values are not kept, and its report is passed over.
    Abandon {
        /// Which.
        call: CallId,
    },
    /// Answer the request. It is over.
    Answer {
        /// Where each output of the workflow is, in its order. They are the driver's to free.
        outputs: Vec<Slot>,
    },
    /// Refuse the request. It is over.
    Fail {
        /// Which step could not be run.
        step: StepIndex,
        /// For which row.
        row: Option<u64>,
        /// Why.
        cause: Cause,
    },
}

/// Why a run ended without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Cause {
    /// The step's call failed. The driver knows why.
    #[error("it failed")]
    Failed,
    /// What it needs, or made, is gone and cannot be made again.
    #[error("its data was lost and cannot be made again")]
    DataLost,
    /// It made something else than before, and some of what was made before has been used.
    #[error("its data was lost, and made again it is another: {now} rows, {before} before")]
    Changed {
        /// How many rows there were.
        before: u64,
        /// How many there are.
        now: u64,
    },
    /// More rows than a step runs `each` of.
    #[error("{rows} rows to run for: at most {} are taken", millrace_types::workflow::EACH_ROWS_MAX)]
    TooManyRows {
        /// How many.
        rows: u64,
    },
    /// Nobody could say whether its condition holds.
    #[error("its condition is on a tensor that has no zero to compare with")]
    Unread,
}
