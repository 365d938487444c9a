//! What one run knows of each tensor and each step.

use super::protocol::{CallId, Cause, Facts, Slot};

/// Stands for the call that made what the driver made by itself: it is older than every call.
const NO_CALL: CallId = CallId(0);

/// A tensor of a run: one part, or one for each row that its step runs for.
#[derive(Debug, Clone, Default)]
pub(super) struct SlotState {
    /// Known from the first time that all parts were made, and never forgotten.
    pub(super) facts: Option<Facts>,
    parts: Vec<Part>,
    /// Parts that are there.
    here: usize,
    /// Parts of which the facts are known.
    known: usize,
    /// Whether somebody is still to be called with it, or is to be answered it: if it is not there,
    /// it is to be made.
    pub(super) is_wanted: bool,
    /// Whether it is wanted, or a call that takes it is out: if it is there, it stays.
    pub(super) is_held: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Part {
    facts: Option<Facts>,
    /// The call that made it, while it is there.
    made: Option<CallId>,
}

impl SlotState {
    /// Expects parts to be made.
    pub(super) fn lay(&mut self, parts: usize) {
        self.parts = vec![Part::default(); parts];
    }

    /// Takes what came with the request.
    pub(super) fn give(&mut self, facts: Facts) {
        self.parts = vec![Part { facts: Some(facts), made: Some(NO_CALL) }];
        (self.facts, self.here, self.known) = (Some(facts), 1, 1);
    }

    /// Makes it nothing. There is something to hold only where it is answered.
    pub(super) fn skip(&mut self, is_output: bool) {
        self.facts = Some(Facts::EMPTY);
        if is_output {
            self.parts = vec![Part { facts: self.facts, made: None }];
            self.known = 1;
        }
    }

    /// Notes that the driver made what was [skipped](Self::skip).
    pub(super) fn fill_empty(&mut self) {
        if let Some(part) = self.parts.first_mut() {
            part.made = Some(NO_CALL);
            self.here = 1;
        }
    }

    /// Notes that a part was made.
    ///
    /// # Errors
    /// [`Cause::Changed`] when it is not as large as it was. It is there all the same.
    pub(super) fn put(&mut self, row: usize, call: CallId, facts: Facts) -> Result<(), Cause> {
        let part = &mut self.parts[row];
        debug_assert!(part.made.is_none(), "a part that is there is made again");
        part.made = Some(call);
        self.here += 1;
        if let Some(before) = part.facts {
            let is_same = before.rows == facts.rows && before.is_empty == facts.is_empty;
            let changed = Cause::Changed { before: before.rows, now: facts.rows };
            return if is_same { Ok(()) } else { Err(changed) };
        }
        part.facts = Some(facts);
        self.known += 1;
        if self.known == self.parts.len() {
            self.facts = self.parts.iter().filter_map(|part| part.facts).reduce(Facts::join);
        }
        Ok(())
    }

    /// Notes a loss, of one part or all. What was made by a later call than `seen_by` is not meant.
    pub(super) fn lose(&mut self, row: Option<u64>, seen_by: Option<CallId>) {
        let is_meant = |at: usize| row.is_none_or(|row| row == at as u64);
        for (_, part) in self.parts.iter_mut().enumerate().filter(|(at, _)| is_meant(*at)) {
            if part.made.is_some_and(|made| seen_by.is_none_or(|call| made < call)) {
                part.made = None;
                self.here -= 1;
            }
        }
    }

    /// Drops all parts that are there, if any is.
    pub(super) fn release(&mut self) -> bool {
        let had_some = self.here > 0;
        if had_some {
            self.here = 0;
            self.parts.iter_mut().for_each(|part| part.made = None);
        }
        had_some
    }

    /// Whether all of it is there.
    pub(super) fn is_whole(&self) -> bool {
        self.facts.is_some() && self.here == self.parts.len()
    }

    /// Whether it is to be made, or a part of it.
    pub(super) fn is_missed(&self) -> bool {
        self.is_wanted && self.here < self.parts.len()
    }

    /// Whether a part is to be made.
    pub(super) fn misses(&self, row: usize) -> bool {
        self.is_wanted && self.parts.get(row).is_some_and(|part| part.made.is_none())
    }
}

/// A step of a run.
#[derive(Debug, Clone, Default)]
pub(super) struct StepState {
    pub(super) stage: Stage,
    /// One for each call that it takes; none before it is known how many.
    pub(super) rows: Vec<Row>,
    /// Rows that were done, once at least.
    pub(super) done: usize,
    pub(super) calls_out: usize,
    /// Whether a call of it is still to be started.
    pub(super) is_pending: bool,
}

/// Whether a step runs. Decided once: what is known of a tensor is never forgotten.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not everything that decides it is known.
    #[default]
    Waiting,
    /// It does not run, and what it gives is empty.
    Skipped,
    /// It runs, if somebody wants what it gives.
    Runs,
}

/// One call of a step, which may have to be made more than once.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Row {
    /// How often it was called.
    pub(super) runs: u32,
    pub(super) is_done: bool,
    pub(super) out: Option<CallId>,
}

/// A call that is out.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) step: usize,
    pub(super) row: usize,
    pub(super) outputs: Vec<Slot>,
}
