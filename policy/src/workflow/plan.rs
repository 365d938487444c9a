//! A workflow as its runs use it: steps and tensors by index, and who takes what. Made once per
//! revision of the workflow, shared by all runs of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::ids::FunctionName;
use millrace_types::tensor::TensorSpec;
use millrace_types::workflow::{Run, Signature, Source, Step, WorkflowSpec};

use super::protocol::{Slot, StepIndex};

/// Why a workflow cannot be run with the functions there are.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A function or workflow that does not exist.
    #[error("step \"{step}\" runs {run}, which does not exist")]
    UnknownRun {
        /// Which step.
        step: FunctionName,
        /// What it runs.
        run: Run,
    },
    /// A tensor that nobody gives.
    #[error("{of} takes {from}, which does not exist")]
    UnknownSource {
        /// Who takes it.
        of: String,
        /// What it takes.
        from: Source,
    },
    /// `each` names what is no input of the step.
    #[error("step \"{step}\" runs for each {each:?}, which is none of its inputs")]
    UnknownEach {
        /// Which step.
        step: FunctionName,
        /// What it names.
        each: String,
    },
    /// Steps of a cycle, or behind a step that is not there.
    #[error("step \"{0}\" waits for a step that never runs")]
    NeverRuns(FunctionName),
}

/// A workflow by indexes.
#[derive(Debug, Clone)]
pub struct Plan {
    steps: Vec<PlannedStep>,
    slots: Vec<PlannedSlot>,
    /// The first slots are the workflow's inputs.
    inputs: usize,
    outputs: Vec<Slot>,
}

/// A step by indexes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedStep {
    /// Its name within the workflow.
    pub name: FunctionName,
    /// What runs.
    pub run: Run,
    /// The name of each input, and where it is.
    pub inputs: Vec<(String, Slot)>,
    /// Which of the inputs is taken row by row.
    pub each: Option<usize>,
    /// Runs only if an element of this is not zero.
    pub when: Option<Slot>,
    /// The outputs that somebody takes.
    pub outputs: Vec<Slot>,
    /// Whether it may run again when what it made is lost.
    pub is_idempotent: bool,
    /// Within how long a call of it should be answered.
    pub deadline: Option<Duration>,
}

impl PlannedStep {
    /// The tensor of which every row is a call.
    #[must_use]
    pub fn each_slot(&self) -> Option<Slot> {
        self.each.and_then(|each| self.inputs.get(each)).map(|(_, slot)| *slot)
    }
}

/// A tensor and who takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSlot {
    /// Where it comes from.
    pub source: Source,
    /// What its function says it is; `None` for an input of the workflow.
    pub tensor: Option<TensorSpec>,
    /// The steps that have it as an input.
    pub takers: Vec<StepIndex>,
    /// The steps that have it as a condition.
    pub conditions: Vec<StepIndex>,
    /// Whether the workflow gives it.
    pub is_output: bool,
}

impl Plan {
    /// Lays a valid workflow out. A step for which `idempotent` is false is never run twice.
    ///
    /// # Errors
    /// [`PlanError`] when the workflow and the functions there are no longer fit.
    pub fn new<'a>(
        spec: &WorkflowSpec,
        signature: impl Fn(&Run) -> Option<&'a Signature>,
        idempotent: impl Fn(&Run) -> bool,
    ) -> Result<Self, PlanError> {
        let order = spec.in_order();
        if let Some(step) = spec.steps.iter().find(|step| !order.iter().any(|it| it.name == step.name)) {
            return Err(PlanError::NeverRuns(step.name.clone()));
        }
        let mut layout = Layout::new(spec);
        let mut steps = Vec::with_capacity(order.len());
        for step in order {
            let unknown = || PlanError::UnknownRun { step: step.name.clone(), run: step.run.clone() };
            let made = signature(&step.run).ok_or_else(unknown)?;
            steps.push(layout.step(StepIndex(steps.len()), step, made, idempotent(&step.run))?);
        }
        let mut outputs = Vec::with_capacity(spec.outputs.len());
        for output in &spec.outputs {
            let slot = layout.slot(&output.from, || format!("output {:?}", output.name))?;
            layout.slots[slot.0].is_output = true;
            outputs.push(slot);
        }
        Ok(Self { steps, slots: layout.slots, inputs: spec.inputs.len(), outputs })
    }

    /// The steps, each after those it waits for; [`StepIndex`] counts them from 0.
    #[must_use]
    pub fn steps(&self) -> &[PlannedStep] {
        &self.steps
    }

    /// The tensors, the workflow's inputs first, in its order; [`Slot`] counts them from 0.
    #[must_use]
    pub fn slots(&self) -> &[PlannedSlot] {
        &self.slots
    }

    /// One step.
    ///
    /// # Panics
    /// When the index is another plan's.
    #[must_use]
    pub fn step(&self, step: StepIndex) -> &PlannedStep {
        &self.steps[step.0]
    }

    /// One tensor.
    ///
    /// # Panics
    /// When the slot is another plan's.
    #[must_use]
    pub fn slot(&self, slot: Slot) -> &PlannedSlot {
        &self.slots[slot.0]
    }

    /// The workflow's inputs, in its order: the first of the slots.
    #[must_use]
    pub fn inputs(&self) -> &[PlannedSlot] {
        &self.slots[..self.inputs]
    }

    /// Where each output of the workflow is.
    #[must_use]
    pub fn outputs(&self) -> &[Slot] {
        &self.outputs
    }

    /// Whether it is an input of the workflow: such are kept to the end of the run.
    #[must_use]
    pub fn is_input(&self, slot: Slot) -> bool {
        slot.0 < self.inputs
    }

    /// Whether [`Facts::holds`](super::Facts::holds) is to be given of it.
    ///
    /// # Panics
    /// When the slot is another plan's.
    #[must_use]
    pub fn is_condition(&self, slot: Slot) -> bool {
        !self.slot(slot).conditions.is_empty()
    }
}

/// A plan on the way.
struct Layout<'a> {
    taken: BTreeSet<&'a Source>,
    slots: Vec<PlannedSlot>,
    by_source: BTreeMap<Source, Slot>,
}

impl<'a> Layout<'a> {
    fn new(spec: &'a WorkflowSpec) -> Self {
        let by_steps = spec.steps.iter().flat_map(Step::sources);
        let taken = by_steps.chain(spec.outputs.iter().map(|output| &output.from)).collect();
        let mut layout = Self { taken, slots: Vec::new(), by_source: BTreeMap::new() };
        for input in &spec.inputs {
            layout.lay(Source::Input(input.clone()), None);
        }
        layout
    }

    fn lay(&mut self, source: Source, tensor: Option<TensorSpec>) -> Slot {
        let slot = Slot(self.slots.len());
        self.by_source.insert(source.clone(), slot);
        let (takers, conditions) = (Vec::new(), Vec::new());
        self.slots.push(PlannedSlot { source, tensor, takers, conditions, is_output: false });
        slot
    }

    fn slot(&self, source: &Source, of: impl Fn() -> String) -> Result<Slot, PlanError> {
        let unknown = || PlanError::UnknownSource { of: of(), from: source.clone() };
        self.by_source.get(source).copied().ok_or_else(unknown)
    }

    fn step(
        &mut self,
        index: StepIndex,
        step: &Step,
        made: &Signature,
        is_idempotent: bool,
    ) -> Result<PlannedStep, PlanError> {
        let of = || format!("step {:?}", step.name.as_str());
        let mut inputs = Vec::with_capacity(step.inputs.len());
        for (name, source) in &step.inputs {
            let slot = self.slot(source, of)?;
            let takers = &mut self.slots[slot.0].takers;
            if takers.last() != Some(&index) {
                takers.push(index);
            }
            inputs.push((name.clone(), slot));
        }
        let each = match &step.each {
            None => None,
            Some(each) => {
                let unknown = || PlanError::UnknownEach { step: step.name.clone(), each: each.clone() };
                Some(inputs.iter().position(|(name, _)| name == each).ok_or_else(unknown)?)
            }
        };
        let when = step.when.as_ref().map(|source| self.slot(source, of)).transpose()?;
        if let Some(when) = when {
            self.slots[when.0].conditions.push(index);
        }
        let mut outputs = Vec::new();
        for tensor in &made.outputs {
            let source = Source::Step { step: step.name.clone(), output: tensor.name.clone() };
            if self.taken.contains(&source) {
                outputs.push(self.lay(source, Some(tensor.clone())));
            }
        }
        let (name, run) = (step.name.clone(), step.run.clone());
        let deadline = step.deadline;
        Ok(PlannedStep { name, run, inputs, each, when, outputs, is_idempotent, deadline })
    }
}
