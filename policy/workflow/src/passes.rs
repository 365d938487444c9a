//! The passes over all steps, forwards or backwards, that follow an event.

use millrace_types::workflow::EACH_ROWS_MAX;

use super::protocol::{Action, CallId, RunFailureCause, StepIndex, TensorFacts, TensorIndex};
use super::state::{RowState, RunningCall, StepStage};
use super::{CALLS_MAX, Failure, RUNS_MAX, WorkflowEngine};

/// Consequence of the known tensors for a step.
enum Verdict {
    Wait,
    Skip,
    /// The step runs with this number of calls.
    Run(usize),
}

impl WorkflowEngine {
    /// Runs all passes except for starting calls, which only happens if the run continues.
    pub(super) fn advance(&mut self, actions: &mut Vec<Action>) -> Result<(), Failure> {
        self.decide()?;
        self.weigh(actions)?;
        self.release(actions);
        Ok(())
    }

    /// Decides which steps run. One forward pass suffices, because a skip reaches every later step.
    fn decide(&mut self) -> Result<(), Failure> {
        let plan = self.plan.clone();
        for (at, step) in plan.steps().iter().enumerate() {
            if self.steps[at].stage != StepStage::Waiting {
                continue;
            }
            match self.verdict(at)? {
                Verdict::Wait => {}
                Verdict::Skip => {
                    self.steps[at].stage = StepStage::Skipped;
                    for slot in &step.outputs {
                        self.slots[slot.0].skip(plan.slot(*slot).is_output);
                    }
                }
                Verdict::Run(rows) => {
                    self.steps[at].stage = StepStage::Runs;
                    self.steps[at].rows = vec![RowState::default(); rows];
                    for slot in &step.outputs {
                        self.slots[slot.0].lay(rows);
                    }
                }
            }
        }
        Ok(())
    }

    fn verdict(&self, at: usize) -> Result<Verdict, Failure> {
        let step = &self.plan.steps()[at];
        let failure = |cause| Failure { step: at, row: None, cause };
        let facts = |slot: TensorIndex| self.slots[slot.0].facts;
        let mut is_known = true;
        if let Some(when) = step.when {
            match facts(when).map(TensorFacts::condition) {
                Some(Some(false)) => return Ok(Verdict::Skip),
                Some(Some(true)) => {}
                Some(None) => return Err(failure(RunFailureCause::Unread)),
                None => is_known = false,
            }
        }
        for (_, slot) in &step.inputs {
            match facts(*slot) {
                Some(facts) if facts.is_empty => return Ok(Verdict::Skip),
                Some(_) => {}
                None => is_known = false,
            }
        }
        if !is_known {
            return Ok(Verdict::Wait);
        }
        let Some(each) = step.each_slot().and_then(facts) else { return Ok(Verdict::Run(1)) };
        let rows = usize::try_from(each.rows).ok().filter(|_| each.rows <= EACH_ROWS_MAX);
        rows.map(Verdict::Run).ok_or_else(|| failure(RunFailureCause::TooManyRows { rows: each.rows }))
    }

    /// Determines wanted tensors and pending steps. Backwards, so that the consumers of a tensor
    /// are weighed before its producer.
    fn weigh(&mut self, actions: &mut Vec<Action>) -> Result<(), Failure> {
        let plan = self.plan.clone();
        for (at, step) in plan.steps().iter().enumerate().rev() {
            for slot in &step.outputs {
                self.weigh_slot(*slot);
            }
            let is_wanted = step.outputs.iter().any(|slot| self.slots[slot.0].is_wanted);
            self.steps[at].is_pending = match self.steps[at].stage {
                StepStage::Waiting => is_wanted,
                StepStage::Skipped => false,
                StepStage::Runs => {
                    self.abandon_idle(at, actions);
                    self.weigh_rows(at)?
                }
            };
        }
        Ok(())
    }

    fn weigh_slot(&mut self, slot: TensorIndex) {
        let planned = self.plan.slot(slot);
        let steps = &self.steps;
        let is_undecided = self.slots[slot.0].facts.is_none();
        let decides =
            |step: &StepIndex| steps[step.0].is_pending && steps[step.0].stage == StepStage::Waiting;
        let is_wanted = planned.is_output
            || planned.takers.iter().any(|step| steps[step.0].is_pending)
            || (is_undecided && planned.conditions.iter().any(decides));
        let is_held = is_wanted || planned.takers.iter().any(|step| steps[step.0].calls_out > 0);
        let state = &mut self.slots[slot.0];
        (state.is_wanted, state.is_held) = (is_wanted, is_held);
    }

    /// Abandons running calls without a held output. A call goes on if another running call may
    /// still need its output again.
    fn abandon_idle(&mut self, at: usize, actions: &mut Vec<Action>) {
        if self.steps[at].calls_out == 0 {
            return;
        }
        let is_held = |call: &RunningCall| call.outputs.iter().any(|slot| self.slots[slot.0].is_held);
        let idle = self.calls.iter().filter(|(_, call)| call.step == at && !is_held(call));
        let idle: Vec<CallId> = idle.map(|(id, _)| *id).collect();
        for call in idle {
            if let Some(RunningCall { row, .. }) = self.back(call) {
                // An abandoned call does not count. Otherwise losses elsewhere would use up the
                // runs that are reserved for losses of this row.
                self.steps[at].rows[row].runs -= 1;
            }
            actions.push(Action::Abandon { call });
        }
    }

    /// Returns whether rows of a step have to be called.
    ///
    /// # Errors
    /// If a row that has to be called must not run again.
    fn weigh_rows(&self, at: usize) -> Result<bool, Failure> {
        let step = &self.plan.steps()[at];
        let is_missed = step.outputs.iter().any(|slot| self.slots[slot.0].is_missed());
        if !is_missed {
            return Ok(false);
        }
        let mut is_pending = false;
        for (row, state) in self.steps[at].rows.iter().enumerate() {
            if !self.is_to_be_called(at, row) {
                continue;
            }
            is_pending = true;
            if state.runs >= RUNS_MAX || (state.is_done && !step.is_idempotent) {
                return Err(Failure { step: at, row: Some(row), cause: RunFailureCause::DataLost });
            }
        }
        Ok(is_pending)
    }

    fn is_to_be_called(&self, at: usize, row: usize) -> bool {
        let outputs = &self.plan.steps()[at].outputs;
        self.steps[at].rows[row].out.is_none() && outputs.iter().any(|slot| self.slots[slot.0].misses(row))
    }

    /// Frees tensors without further consumers, before any call is started that needs room (D28).
    /// Also requests the outputs that no call makes.
    fn release(&mut self, actions: &mut Vec<Action>) {
        let plan = self.plan.clone();
        for slot in (0..plan.slots().len()).map(TensorIndex) {
            if !self.slots[slot.0].is_held {
                self.free(slot, actions);
            }
        }
        for (at, step) in plan.steps().iter().enumerate() {
            let outputs =
                if self.steps[at].stage == StepStage::Skipped { step.outputs.as_slice() } else { &[] };
            for slot in outputs {
                if self.slots[slot.0].is_missed() {
                    self.slots[slot.0].fill_empty();
                    actions.push(Action::Empty { slot: *slot });
                }
            }
        }
    }

    /// Starts calls that have all their inputs, in the order of steps and rows.
    pub(super) fn start(&mut self, actions: &mut Vec<Action>) {
        let plan = self.plan.clone();
        for (at, step) in plan.steps().iter().enumerate() {
            let has_inputs = step.inputs.iter().all(|(_, slot)| self.slots[slot.0].is_whole());
            if !self.steps[at].is_pending || self.steps[at].stage != StepStage::Runs || !has_inputs {
                continue;
            }
            for row in 0..self.steps[at].rows.len() {
                if self.calls.len() >= CALLS_MAX {
                    return;
                }
                if self.is_to_be_called(at, row) {
                    self.call(at, row, actions);
                }
            }
        }
    }

    fn call(&mut self, at: usize, row: usize, actions: &mut Vec<Action>) {
        self.last_call.0 += 1;
        let call = self.last_call;
        let step = &self.plan.steps()[at];
        let outputs: Vec<_> =
            step.outputs.iter().copied().filter(|slot| self.slots[slot.0].misses(row)).collect();
        actions.push(Action::Call {
            call,
            step: StepIndex(at),
            row: self.row_of(at, Some(row)),
            inputs: step.inputs.iter().map(|(_, slot)| *slot).collect(),
            outputs: outputs.clone(),
        });
        let state = &mut self.steps[at];
        state.calls_out += 1;
        state.rows[row].runs += 1;
        state.rows[row].out = Some(call);
        self.calls.insert(call, RunningCall { step: at, row, outputs });
    }
}
