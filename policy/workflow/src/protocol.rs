//! Events, actions and identifiers of a run's core.

use std::fmt;

/// A call of a run, numbered from 1 in the order of starting. Never reused within the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// Index of a step in a [`WorkflowGraph`](super::WorkflowGraph). A step's index is greater than the index of every
/// step it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepIndex(pub usize);

/// Index of a tensor of a run: a workflow input, or an output of a step that has a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorIndex(pub usize);

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

impl fmt::Display for TensorIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot{}", self.0)
    }
}

/// Facts about a tensor that the core needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorFacts {
    /// First dimension; 1 for a scalar.
    pub rows: u64,
    /// Whether the tensor has no elements.
    pub is_empty: bool,
    /// Whether an element is not zero. Required if [`WorkflowGraph::is_condition`] holds for the tensor's
    /// slot.
    ///
    /// [`WorkflowGraph::is_condition`]: super::WorkflowGraph::is_condition
    pub holds: Option<bool>,
}

impl TensorFacts {
    /// Facts of a tensor without elements.
    pub const EMPTY: Self = Self { rows: 0, is_empty: true, holds: Some(false) };

    /// Returns the facts of two tensors joined by rows.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        let holds = match (self.condition(), other.condition()) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            (None, _) | (_, None) => None,
        };
        Self { rows: self.rows.saturating_add(other.rows), is_empty: self.is_empty && other.is_empty, holds }
    }

    /// Returns whether a condition on the tensor holds; `None` if its elements were not examined. A
    /// condition on an empty tensor never holds.
    pub(super) fn condition(self) -> Option<bool> {
        if self.is_empty { Some(false) } else { self.holds }
    }
}

/// A tensor, or a part of a tensor, that no longer exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorLoss {
    pub slot: TensorIndex,
    /// Row of the call that made the lost part; `None` for the whole tensor.
    pub row: Option<u64>,
}

/// Input of the core.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// The request arrived. This event is sent once, as the first.
    Begin {
        /// Facts of each input of the workflow, in the workflow's order.
        inputs: Vec<TensorFacts>,
    },
    /// A call was answered.
    Done {
        call: CallId,
        /// Facts of each output that the call was to make, in the order of [`Action::Call`].
        outputs: Vec<TensorFacts>,
    },
    /// A call failed, after all retries at other workers.
    Failed {
        call: CallId,
        /// Lost inputs because of which the call *could not run*: the call is repeated with new
        /// inputs, even if the step is not idempotent. Empty if the call failed for another reason,
        /// or if the step may have run and must not run twice; then the run ends.
        lost: Vec<TensorLoss>,
    },
    /// Tensors were lost, whether or not a step needs them. Losses of tensors that are not held are
    /// ignored.
    Lost { lost: Vec<TensorLoss> },
}

/// Output of the core.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Run a step once.
    Call {
        /// Number under which the result is reported.
        call: CallId,
        step: StepIndex,
        /// Row to read from the input that the step runs `each` of; `None` if the step runs once.
        row: Option<u64>,
        /// Slots of the inputs, in the order of [`PlannedStep::inputs`](super::PlannedStep).
        inputs: Vec<TensorIndex>,
        /// Slots of the outputs that are wanted and missing. With a row, the call makes only that
        /// row's part of each slot.
        outputs: Vec<TensorIndex>,
    },
    /// Make an empty tensor for an output of the workflow.
    Empty { slot: TensorIndex },
    /// Free all existing parts of a tensor (D28).
    Release { slot: TensorIndex },
    /// Stop a call, or ignore its end: drop the outputs without a report.
    Abandon { call: CallId },
    /// Answer the request and end the run.
    Answer {
        /// Slot of each output of the workflow, in the workflow's order. The driver frees these
        /// tensors.
        outputs: Vec<TensorIndex>,
    },
    /// Refuse the request and end the run.
    Fail {
        /// Step that could not run.
        step: StepIndex,
        /// Row for which the step could not run.
        row: Option<u64>,
        cause: RunFailureCause,
    },
}

/// Reason why a run ended without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RunFailureCause {
    /// The step's call failed; the driver has the reason.
    #[error("the step's call failed")]
    Failed,
    /// A tensor that the step needs, or made, is lost and cannot be made again.
    #[error("the step's data was lost and cannot be made again")]
    DataLost,
    /// The step's second run made other rows than its first, and some of the first were already
    /// used.
    #[error("the step's data was lost and its next run made {now} rows instead of {before}")]
    Changed {
        /// Number of rows of the first run.
        before: u64,
        /// Number of rows of the later run.
        now: u64,
    },
    /// The input has more rows than a step may run `each` of.
    #[error(
        "the step would run for {rows} rows: at most {} are allowed",
        millrace_types::workflow::EACH_ROWS_MAX
    )]
    TooManyRows { rows: u64 },
    /// The driver could not evaluate the step's condition.
    #[error(
        "the step's condition is on a tensor of a type without a zero: use a tensor of numbers or booleans"
    )]
    Unread,
}
