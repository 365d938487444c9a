//! State of the tensors and steps of one run.

use super::protocol::{CallId, RunFailureCause, TensorFacts, TensorIndex};

/// Stands for the maker of tensors that the driver provided: older than every call.
const NO_CALL: CallId = CallId(0);

/// A tensor of a run: one part, or a part for each row that its step runs for.
#[derive(Debug, Clone, Default)]
pub(super) struct SlotState {
    /// Facts of the whole tensor, known once all parts were made and never forgotten.
    pub(super) facts: Option<TensorFacts>,
    parts: Vec<Part>,
    /// Number of parts that exist.
    here: usize,
    /// Number of parts with known facts.
    known: usize,
    /// Whether a future call takes the tensor, or the run answers it. A wanted tensor that is
    /// missing is made.
    pub(super) is_wanted: bool,
    /// Whether the tensor is wanted, or a running call takes it. A held tensor is not freed.
    pub(super) is_held: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Part {
    facts: Option<TensorFacts>,
    /// The call that made the part, while the part exists.
    made: Option<CallId>,
}

impl SlotState {
    /// Prepares the parts that calls will make.
    pub(super) fn lay(&mut self, parts: usize) {
        self.parts = vec![Part::default(); parts];
    }

    /// Records a tensor that arrived with the request.
    pub(super) fn give(&mut self, facts: TensorFacts) {
        self.parts = vec![Part { facts: Some(facts), made: Some(NO_CALL) }];
        (self.facts, self.here, self.known) = (Some(facts), 1, 1);
    }

    /// Makes the tensor empty. Only an output of the workflow has a part, which the driver has to
    /// make.
    pub(super) fn skip(&mut self, is_output: bool) {
        self.facts = Some(TensorFacts::EMPTY);
        if is_output {
            self.parts = vec![Part { facts: self.facts, made: None }];
            self.known = 1;
        }
    }

    /// Records that the driver made the tensor that was [skipped](Self::skip).
    pub(super) fn fill_empty(&mut self) {
        if let Some(part) = self.parts.first_mut() {
            part.made = Some(NO_CALL);
            self.here = 1;
        }
    }

    /// Records that a call made a part.
    ///
    /// # Errors
    /// [`RunFailureCause::Changed`] if the part's size has changed. The part counts as existing all the same.
    pub(super) fn put(
        &mut self,
        row: usize,
        call: CallId,
        facts: TensorFacts,
    ) -> Result<(), RunFailureCause> {
        let part = &mut self.parts[row];
        debug_assert!(part.made.is_none(), "a call made a part that exists");
        part.made = Some(call);
        self.here += 1;
        if let Some(before) = part.facts {
            let is_same = before.rows == facts.rows && before.is_empty == facts.is_empty;
            let changed = RunFailureCause::Changed { before: before.rows, now: facts.rows };
            return if is_same { Ok(()) } else { Err(changed) };
        }
        part.facts = Some(facts);
        self.known += 1;
        if self.known == self.parts.len() {
            self.facts = self.parts.iter().filter_map(|part| part.facts).reduce(TensorFacts::join);
        }
        Ok(())
    }

    /// Records the loss of a part, or of all parts. Parts made by a call later than `seen_by` are
    /// not affected.
    pub(super) fn lose(&mut self, row: Option<u64>, seen_by: Option<CallId>) {
        let is_meant = |at: usize| row.is_none_or(|row| row == at as u64);
        for (_, part) in self.parts.iter_mut().enumerate().filter(|(at, _)| is_meant(*at)) {
            if part.made.is_some_and(|made| seen_by.is_none_or(|call| made < call)) {
                part.made = None;
                self.here -= 1;
            }
        }
    }

    /// Drops all existing parts, and returns whether there were any.
    pub(super) fn release(&mut self) -> bool {
        let had_some = self.here > 0;
        if had_some {
            self.here = 0;
            self.parts.iter_mut().for_each(|part| part.made = None);
        }
        had_some
    }

    /// Returns whether all parts exist.
    pub(super) fn is_whole(&self) -> bool {
        self.facts.is_some() && self.here == self.parts.len()
    }

    /// Returns whether a wanted part is missing.
    pub(super) fn is_missed(&self) -> bool {
        self.is_wanted && self.here < self.parts.len()
    }

    /// Returns whether this part is wanted and missing.
    pub(super) fn misses(&self, row: usize) -> bool {
        self.is_wanted && self.parts.get(row).is_some_and(|part| part.made.is_none())
    }
}

/// A step of a run.
#[derive(Debug, Clone, Default)]
pub(super) struct StepState {
    pub(super) stage: StepStage,
    /// An entry for each call of the step; empty until the number of calls is known.
    pub(super) rows: Vec<RowState>,
    /// Number of rows that were done at least once.
    pub(super) done: usize,
    pub(super) calls_out: usize,
    /// Whether a call of the step is still to be started.
    pub(super) is_pending: bool,
}

/// Whether a step runs. Decided once, because facts of a tensor are never forgotten.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum StepStage {
    /// Facts that decide about the step are still missing.
    #[default]
    Waiting,
    /// The step does not run, and its outputs are empty.
    Skipped,
    /// The step runs, if its outputs are wanted.
    Runs,
}

/// A call of a step, which may have to be repeated.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RowState {
    /// Number of calls that were started for this row.
    pub(super) runs: u32,
    pub(super) is_done: bool,
    pub(super) out: Option<CallId>,
}

/// A running call.
#[derive(Debug, Clone)]
pub(super) struct RunningCall {
    pub(super) step: usize,
    pub(super) row: usize,
    pub(super) outputs: Vec<TensorIndex>,
}
