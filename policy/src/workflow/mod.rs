//! Which step of a workflow runs when: the run of one request (D01), as a pure core. It knows facts
//! about the tensors, such as how many rows they have; the driver holds the tensors themselves. A
//! workflow in a workflow is one call like any other: the driver makes it with an engine of its own.
//!
//! ```text
//!  Begin(facts of inputs) ─▶ ┌────────┐ ─▶ Call(step, row)…       Done or Failed comes back
//!  Done(facts of outputs) ─▶ │ Engine │ ─▶ Release(slot)          its last taker has it (D28)
//!  Failed, Lost ───────────▶ │        │ ─▶ Empty(slot)            an output that no call makes
//!                            └────────┘ ─▶ Answer or Fail, once   and Abandon, Release of the rest
//! ```
//!
//! After every event four passes bring the run up to date:
//!
//! 1. `decide`, forwards: which steps run and how often, which are skipped.
//! 2. `weigh`, backwards: which tensors are *wanted*, that is, taken by a call still to be started or
//!    answered; and so which calls are to be started. Wanted, or taken by a call that is out, it is
//!    *held*; a call that makes nothing of the kind is abandoned.
//! 3. `release`: what is not held is freed.
//! 4. `start`, forwards: calls that have all their inputs, up to [`CALLS_MAX`].
//!
//! **Lost data** (DESIGN section 7: objects re-made by running their producer again) needs no pass of
//! its own. What is wanted and not there is made, whether it never was or is gone; its inputs are
//! wanted then, and so on up to the workflow's inputs, which the driver keeps. Of a step that runs
//! `each`, only the lost rows run again. A call that is out may have its inputs already, so what it
//! takes is made again only once it has [failed](Event::Failed) for that. What was decided stays
//! decided, and an answer that was used is never asked for again; a tensor made again with other
//! rows than before ends the run.
//!
//! Not here: retries at other workers, time, and which step is worth more. Nor is a run cancelled: the
//! driver drops it, with all that it holds.

mod ahead;
mod objective;
mod passes;
mod plan;
mod protocol;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::Timestamp;

pub use self::ahead::{AHEAD_MAX, Ahead, Nearness};
pub use self::objective::Shares;
pub use self::plan::{Plan, PlanError, PlannedSlot, PlannedStep};
pub use self::protocol::{Action, CallId, Cause, Event, Facts, Loss, Slot, StepIndex};
use self::state::{Call, SlotState, StepState};
use crate::core::Core;

/// The most calls of a run that are out at a time.
pub const CALLS_MAX: usize = 16;
/// How often one step, or one row of it, is called in a run, the first time included and calls that
/// were abandoned not.
pub const RUNS_MAX: u32 = 3;

/// The run of one request.
#[derive(Debug, Clone)]
pub struct Engine {
    plan: Arc<Plan>,
    steps: Vec<StepState>,
    slots: Vec<SlotState>,
    calls: BTreeMap<CallId, Call>,
    last_call: CallId,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The inputs are not there.
    New,
    Running,
    Over,
}

/// What ends a run without an answer.
#[derive(Debug, Clone, Copy)]
struct Failure {
    step: usize,
    row: Option<usize>,
    cause: Cause,
}

impl Engine {
    /// A run that waits for [`Event::Begin`].
    #[must_use]
    pub fn new(plan: Arc<Plan>) -> Self {
        let steps = vec![StepState::default(); plan.steps().len()];
        let slots = vec![SlotState::default(); plan.slots().len()];
        Self { plan, steps, slots, calls: BTreeMap::new(), last_call: CallId(0), phase: Phase::New }
    }

    /// What is run.
    #[must_use]
    pub fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    /// A row as the driver knows it: a step that runs once has none.
    fn row_of(&self, step: usize, row: Option<usize>) -> Option<u64> {
        self.plan.steps()[step].each.and(row).map(|row| row as u64)
    }

    /// Takes what an event says.
    fn note(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Begin { inputs } => self.begin(&inputs),
            Event::Done { call, outputs } => return self.done(call, &outputs),
            Event::Failed { call, lost } => return self.failed(call, &lost),
            Event::Lost { lost } => self.lose(&lost, None),
        }
        Ok(())
    }

    fn begin(&mut self, inputs: &[Facts]) {
        debug_assert!(self.phase == Phase::New, "a run begins once");
        debug_assert!(self.plan.inputs().len() == inputs.len(), "facts of other inputs");
        self.phase = Phase::Running;
        for (slot, facts) in self.slots.iter_mut().zip(inputs) {
            slot.give(*facts);
        }
    }

    /// Takes a call back, unless it was abandoned.
    fn back(&mut self, id: CallId) -> Option<Call> {
        let call = self.calls.remove(&id)?;
        let step = &mut self.steps[call.step];
        step.calls_out -= 1;
        step.rows[call.row].out = None;
        Some(call)
    }

    fn done(&mut self, id: CallId, outputs: &[Facts]) -> Result<(), Failure> {
        let Some(call) = self.back(id) else { return Ok(()) };
        debug_assert!(call.outputs.len() == outputs.len(), "{id} was to make other outputs");
        let step = &mut self.steps[call.step];
        if !std::mem::replace(&mut step.rows[call.row].is_done, true) {
            step.done += 1;
        }
        let mut result = Ok(());
        for (slot, facts) in call.outputs.iter().zip(outputs) {
            // The others are there too, and are freed as any, whatever is wrong with one.
            result = result.and(self.slots[slot.0].put(call.row, id, *facts));
        }
        result.map_err(|cause| Failure { step: call.step, row: Some(call.row), cause })
    }

    fn failed(&mut self, id: CallId, lost: &[Loss]) -> Result<(), Failure> {
        let Some(call) = self.back(id) else { return Ok(()) };
        if lost.is_empty() {
            return Err(Failure { step: call.step, row: Some(call.row), cause: Cause::Failed });
        }
        self.lose(lost, Some(id));
        Ok(())
    }

    fn lose(&mut self, lost: &[Loss], seen_by: Option<CallId>) {
        for loss in lost.iter().filter(|loss| !self.plan.is_input(loss.slot)) {
            if let Some(slot) = self.slots.get_mut(loss.slot.0) {
                slot.lose(loss.row, seen_by);
            }
        }
    }

    /// Whether all that is to be answered is there.
    fn is_answerable(&self) -> bool {
        self.plan.outputs().iter().all(|slot| self.slots[slot.0].is_whole())
    }

    fn fail(&mut self, failure: Failure, actions: &mut Vec<Action>) {
        let Failure { step, row, cause } = failure;
        actions.push(Action::Fail { step: StepIndex(step), row: self.row_of(step, row), cause });
        self.end(actions);
    }

    /// Nothing is left to abandon or free then: nobody wants anything but the outputs.
    fn answer(&mut self, actions: &mut Vec<Action>) {
        debug_assert!(self.calls.is_empty(), "a call is out that nobody wants");
        actions.push(Action::Answer { outputs: self.plan.outputs().to_vec() });
        self.phase = Phase::Over;
    }

    /// Leaves nothing behind but the inputs, which the driver keeps by itself.
    fn end(&mut self, actions: &mut Vec<Action>) {
        self.phase = Phase::Over;
        let calls = std::mem::take(&mut self.calls);
        actions.extend(calls.into_keys().map(|call| Action::Abandon { call }));
        for slot in (0..self.slots.len()).map(Slot) {
            self.free(slot, actions);
        }
    }

    /// Frees a tensor if any of it is there.
    fn free(&mut self, slot: Slot, actions: &mut Vec<Action>) {
        if !self.plan.is_input(slot) && self.slots[slot.0].release() {
            actions.push(Action::Release { slot });
        }
    }
}

impl Core for Engine {
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
