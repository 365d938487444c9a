//! The run of one workflow request (D01), as a pure core that decides which step runs when. The
//! core knows facts about the tensors, such as their number of rows; the driver holds the tensors
//! themselves. A workflow inside a workflow is an ordinary call: the driver runs the inner workflow
//! with an engine of its own.
//!
//! ```text
//!  Begin(facts of inputs) ─▶ ┌──────────┐ ─▶ Call(step, row)…       answered by Done or Failed
//!  Done(facts of outputs) ─▶ │ Workflow │ ─▶ Release(slot)          after its last consumer (D28)
//!  Failed, Lost ───────────▶ │ Engine   │ ─▶ Empty(slot)            an output that no call makes
//!                            └──────────┘ ─▶ Answer or Fail, once   and Abandon, Release of the rest
//! ```
//!
//! After every event four passes bring the run up to date:
//!
//! 1. `decide`, forwards, determines which steps run and how often, and which steps are skipped.
//! 2. `weigh`, backwards, determines the *wanted* tensors: inputs of calls still to be started, and
//!    outputs of the workflow. A step with a missing wanted output has calls to start. A tensor is
//!    *held* if wanted or if a running call takes the tensor. A running call without a held output
//!    is abandoned.
//! 3. `release` frees tensors that are not held.
//! 4. `start`, forwards, starts calls that have all their inputs, up to [`CALLS_MAX`].
//!
//! **Lost data** (objects are made again by their producer) needs no pass of its
//! own. A wanted tensor that is absent is made, lost or not. Its inputs are then wanted too, and so
//! on up to the workflow's inputs, which the driver keeps. A step that runs `each` repeats only the
//! lost rows. A running call may already have read its inputs, so lost inputs are made again only
//! after the call has [failed](Event::Failed) because of the loss. Decided conditions stay decided,
//! and a used output is never requested again. If a tensor made again has another number of rows,
//! the run ends.
//!
//! Out of scope: retries at other workers, time, and priorities of steps. The core has no
//! cancellation either: the driver drops the engine and every tensor it holds.

pub mod hints;
mod objective;
mod passes;
mod plan;
mod prewarm;
mod protocol;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::Timestamp;

pub use self::objective::ObjectiveShares;
pub use self::plan::{GraphError, GraphTensor, PlannedStep, WorkflowGraph};
pub use self::prewarm::{AHEAD_MAX, PrewarmHint, PrewarmTarget};
pub use self::protocol::{
    Action, CallId, Event, RunFailureCause, StepIndex, TensorFacts, TensorIndex, TensorLoss,
};
use self::state::{RunningCall, SlotState, StepState};
use millrace_core::Core;

/// Maximum number of running calls of a run.
pub const CALLS_MAX: usize = 16;
/// Maximum number of calls of a step, or of a row of a step, in a run. The first call counts;
/// abandoned calls do not.
pub const RUNS_MAX: u32 = 3;

/// The run of one request.
#[derive(Debug, Clone)]
pub struct WorkflowEngine {
    plan: Arc<WorkflowGraph>,
    steps: Vec<StepState>,
    slots: Vec<SlotState>,
    calls: BTreeMap<CallId, RunningCall>,
    last_call: CallId,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The inputs have not arrived.
    New,
    Running,
    Over,
}

/// Reason for which a run ends without an answer.
#[derive(Debug, Clone, Copy)]
struct Failure {
    step: usize,
    row: Option<usize>,
    cause: RunFailureCause,
}

impl WorkflowEngine {
    /// Returns a run that waits for [`Event::Begin`].
    #[must_use]
    pub fn new(plan: Arc<WorkflowGraph>) -> Self {
        let steps = vec![StepState::default(); plan.steps().len()];
        let slots = vec![SlotState::default(); plan.slots().len()];
        Self { plan, steps, slots, calls: BTreeMap::new(), last_call: CallId(0), phase: Phase::New }
    }

    /// Returns the plan of the run.
    #[must_use]
    pub fn plan(&self) -> &Arc<WorkflowGraph> {
        &self.plan
    }

    /// Returns the row number for the driver: `None` for a step that runs once.
    fn row_of(&self, step: usize, row: Option<usize>) -> Option<u64> {
        self.plan.steps()[step].each.and(row).map(|row| row as u64)
    }

    /// Records an event.
    fn note(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Begin { inputs } => self.begin(&inputs),
            Event::Done { call, outputs } => return self.done(call, &outputs),
            Event::Failed { call, lost } => return self.failed(call, &lost),
            Event::Lost { lost } => self.lose(&lost, None),
        }
        Ok(())
    }

    fn begin(&mut self, inputs: &[TensorFacts]) {
        debug_assert!(self.phase == Phase::New, "Begin was sent twice");
        debug_assert!(
            self.plan.inputs().len() == inputs.len(),
            "the number of facts differs from the number of inputs"
        );
        self.phase = Phase::Running;
        for (slot, facts) in self.slots.iter_mut().zip(inputs) {
            slot.give(*facts);
        }
    }

    /// Removes a running call; `None` if the call was abandoned.
    fn back(&mut self, id: CallId) -> Option<RunningCall> {
        let call = self.calls.remove(&id)?;
        let step = &mut self.steps[call.step];
        step.calls_out -= 1;
        step.rows[call.row].out = None;
        Some(call)
    }

    fn done(&mut self, id: CallId, outputs: &[TensorFacts]) -> Result<(), Failure> {
        let Some(call) = self.back(id) else { return Ok(()) };
        debug_assert!(call.outputs.len() == outputs.len(), "{id} reported a different number of outputs");
        let step = &mut self.steps[call.step];
        if !std::mem::replace(&mut step.rows[call.row].is_done, true) {
            step.done += 1;
        }
        let mut result = Ok(());
        for (slot, facts) in call.outputs.iter().zip(outputs) {
            // The remaining outputs exist too, and are freed as usual, even if another output is
            // faulty.
            result = result.and(self.slots[slot.0].put(call.row, id, *facts));
        }
        result.map_err(|cause| Failure { step: call.step, row: Some(call.row), cause })
    }

    fn failed(&mut self, id: CallId, lost: &[TensorLoss]) -> Result<(), Failure> {
        let Some(call) = self.back(id) else { return Ok(()) };
        if lost.is_empty() {
            return Err(Failure { step: call.step, row: Some(call.row), cause: RunFailureCause::Failed });
        }
        self.lose(lost, Some(id));
        Ok(())
    }

    fn lose(&mut self, lost: &[TensorLoss], seen_by: Option<CallId>) {
        for loss in lost.iter().filter(|loss| !self.plan.is_input(loss.slot)) {
            if let Some(slot) = self.slots.get_mut(loss.slot.0) {
                slot.lose(loss.row, seen_by);
            }
        }
    }

    /// Returns whether all outputs of the workflow are complete.
    fn is_answerable(&self) -> bool {
        self.plan.outputs().iter().all(|slot| self.slots[slot.0].is_whole())
    }

    fn fail(&mut self, failure: Failure, actions: &mut Vec<Action>) {
        let Failure { step, row, cause } = failure;
        actions.push(Action::Fail { step: StepIndex(step), row: self.row_of(step, row), cause });
        self.end(actions);
    }

    /// Answers the request. No call and no tensor is left to clean up, because only the outputs are
    /// still wanted.
    fn answer(&mut self, actions: &mut Vec<Action>) {
        debug_assert!(self.calls.is_empty(), "a call is running although all outputs are complete");
        actions.push(Action::Answer { outputs: self.plan.outputs().to_vec() });
        self.phase = Phase::Over;
    }

    /// Ends the run and frees every tensor except the inputs, which the driver keeps.
    fn end(&mut self, actions: &mut Vec<Action>) {
        self.phase = Phase::Over;
        let calls = std::mem::take(&mut self.calls);
        actions.extend(calls.into_keys().map(|call| Action::Abandon { call }));
        for slot in (0..self.slots.len()).map(TensorIndex) {
            self.free(slot, actions);
        }
    }

    /// Frees a tensor if any part exists.
    fn free(&mut self, slot: TensorIndex, actions: &mut Vec<Action>) {
        if !self.plan.is_input(slot) && self.slots[slot.0].release() {
            actions.push(Action::Release { slot });
        }
    }
}

impl Core for WorkflowEngine {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, _now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        if self.phase == Phase::Over {
            return;
        }
        let noted = self.note(event);
        if self.phase == Phase::New {
            return;
        }
        match noted.and_then(|()| self.advance(actions)) {
            Err(failure) => self.fail(failure, actions),
            Ok(()) if self.is_answerable() => self.answer(actions),
            Ok(()) => self.start(actions),
        }
    }
}
