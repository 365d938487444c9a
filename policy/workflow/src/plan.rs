//! A workflow in the form that its runs use: steps and tensors by index, with the consumers of each
//! tensor. Built once per revision of the workflow and shared by all its runs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::ids::FunctionName;
use millrace_types::tensor::TensorSpec;
use millrace_types::workflow::{Signature, Step, StepTarget, TensorSource, WorkflowSpec};

use super::protocol::{StepIndex, TensorIndex};

/// Reason why a workflow cannot run with the present functions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GraphError {
    /// A step runs a function or workflow that does not exist.
    #[error("step \"{step}\" runs {run}, which does not exist: apply it first, or change the step")]
    UnknownRun {
        step: FunctionName,
        /// Missing function or workflow.
        run: StepTarget,
    },
    /// A step or output takes a tensor that no step makes.
    #[error("{of} takes {from}, which does not exist: name an input of the workflow or an output of a step")]
    UnknownSource {
        /// Step or output that takes the tensor.
        of: String,
        /// Missing tensor.
        from: TensorSource,
    },
    /// `each` of a step names a tensor that is no input of the step.
    #[error(
        "step \"{step}\" runs for each {each:?}, which is not an input of the step: name one of its inputs"
    )]
    UnknownEach {
        step: FunctionName,
        /// Name given in `each`.
        each: String,
    },
    /// A step that is part of a cycle, or waits for a step that does not exist.
    #[error("step \"{0}\" waits for a step that never runs: remove the cycle, or name a step that exists")]
    NeverRuns(FunctionName),
}

/// A workflow by indexes.
#[derive(Debug, Clone)]
pub struct WorkflowGraph {
    steps: Vec<PlannedStep>,
    slots: Vec<GraphTensor>,
    /// Number of inputs of the workflow, which are the first slots.
    inputs: usize,
    outputs: Vec<TensorIndex>,
}

/// A step by indexes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedStep {
    /// Name within the workflow.
    pub name: FunctionName,
    /// Function or workflow that the step runs.
    pub run: StepTarget,
    /// Name and slot of each input.
    pub inputs: Vec<(String, TensorIndex)>,
    /// Index of the input that is read row by row.
    pub each: Option<usize>,
    /// Condition: the step runs only if an element of this tensor is not zero.
    pub when: Option<TensorIndex>,
    /// Slots of the outputs that have a consumer.
    pub outputs: Vec<TensorIndex>,
    /// Whether the step may run again if its outputs are lost.
    pub is_idempotent: bool,
    /// Time within which a call of the step should be answered.
    pub deadline: Option<Duration>,
}

impl PlannedStep {
    /// Returns the input that is read row by row, with a call for each row.
    #[must_use]
    pub fn each_slot(&self) -> Option<TensorIndex> {
        self.each.and_then(|each| self.inputs.get(each)).map(|(_, slot)| *slot)
    }
}

/// A tensor and its consumers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GraphTensor {
    /// Workflow input or step output that the tensor is.
    pub source: TensorSource,
    /// Declaration by the producing function; `None` for an input of the workflow.
    pub tensor: Option<TensorSpec>,
    /// Steps that take the tensor as an input.
    pub takers: Vec<StepIndex>,
    /// Steps that take the tensor as a condition.
    pub conditions: Vec<StepIndex>,
    /// Whether the tensor is an output of the workflow.
    pub is_output: bool,
}

impl WorkflowGraph {
    /// Builds the plan of a valid workflow. A step for which `idempotent` is false never runs
    /// twice.
    ///
    /// # Errors
    /// [`GraphError`] if the workflow no longer fits the present functions.
    pub fn new<'a>(
        spec: &WorkflowSpec,
        signature: impl Fn(&StepTarget) -> Option<&'a Signature>,
        idempotent: impl Fn(&StepTarget) -> bool,
    ) -> Result<Self, GraphError> {
        let order = spec.in_order();
        if let Some(step) = spec.steps.iter().find(|step| !order.iter().any(|it| it.name == step.name)) {
            return Err(GraphError::NeverRuns(step.name.clone()));
        }
        let mut layout = GraphBuilder::new(spec);
        let mut steps = Vec::with_capacity(order.len());
        for step in order {
            let unknown = || GraphError::UnknownRun { step: step.name.clone(), run: step.run.clone() };
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

    /// Returns the steps, each after the steps it waits for; [`StepIndex`] counts from 0.
    #[must_use]
    pub fn steps(&self) -> &[PlannedStep] {
        &self.steps
    }

    /// Returns the tensors, the workflow's inputs first, in the workflow's order; [`TensorIndex`] counts
    /// from 0.
    #[must_use]
    pub fn slots(&self) -> &[GraphTensor] {
        &self.slots
    }

    /// Returns a step.
    ///
    /// # Panics
    /// If the index is not in this plan.
    #[must_use]
    pub fn step(&self, step: StepIndex) -> &PlannedStep {
        &self.steps[step.0]
    }

    /// Returns a tensor.
    ///
    /// # Panics
    /// If the slot is not in this plan.
    #[must_use]
    pub fn slot(&self, slot: TensorIndex) -> &GraphTensor {
        &self.slots[slot.0]
    }

    /// Returns the workflow's inputs, in the workflow's order: the first slots.
    #[must_use]
    pub fn inputs(&self) -> &[GraphTensor] {
        &self.slots[..self.inputs]
    }

    /// Returns the slot of each output of the workflow.
    #[must_use]
    pub fn outputs(&self) -> &[TensorIndex] {
        &self.outputs
    }

    /// Returns whether the tensor is an input of the workflow, which is kept to the end of the run.
    #[must_use]
    pub fn is_input(&self, slot: TensorIndex) -> bool {
        slot.0 < self.inputs
    }

    /// Returns whether a step's condition needs [`TensorFacts::holds`](super::TensorFacts::holds) of the
    /// tensor.
    ///
    /// # Panics
    /// If the slot is not in this plan.
    #[must_use]
    pub fn is_condition(&self, slot: TensorIndex) -> bool {
        !self.slot(slot).conditions.is_empty()
    }
}

/// A plan under construction.
struct GraphBuilder<'a> {
    taken: BTreeSet<&'a TensorSource>,
    slots: Vec<GraphTensor>,
    by_source: BTreeMap<TensorSource, TensorIndex>,
}

impl<'a> GraphBuilder<'a> {
    fn new(spec: &'a WorkflowSpec) -> Self {
        let by_steps = spec.steps.iter().flat_map(Step::sources);
        let taken = by_steps.chain(spec.outputs.iter().map(|output| &output.from)).collect();
        let mut layout = Self { taken, slots: Vec::new(), by_source: BTreeMap::new() };
        for input in &spec.inputs {
            layout.lay(TensorSource::Input(input.clone()), None);
        }
        layout
    }

    fn lay(&mut self, source: TensorSource, tensor: Option<TensorSpec>) -> TensorIndex {
        let slot = TensorIndex(self.slots.len());
        self.by_source.insert(source.clone(), slot);
        self.slots.push(GraphTensor {
            source,
            tensor,
            takers: Vec::new(),
            conditions: Vec::new(),
            is_output: false,
        });
        slot
    }

    fn slot(&self, source: &TensorSource, of: impl Fn() -> String) -> Result<TensorIndex, GraphError> {
        let unknown = || GraphError::UnknownSource { of: of(), from: source.clone() };
        self.by_source.get(source).copied().ok_or_else(unknown)
    }

    fn step(
        &mut self,
        index: StepIndex,
        step: &Step,
        made: &Signature,
        is_idempotent: bool,
    ) -> Result<PlannedStep, GraphError> {
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
                let unknown = || GraphError::UnknownEach { step: step.name.clone(), each: each.clone() };
                Some(inputs.iter().position(|(name, _)| name == each).ok_or_else(unknown)?)
            }
        };
        let when = step.when.as_ref().map(|source| self.slot(source, of)).transpose()?;
        if let Some(when) = when {
            self.slots[when.0].conditions.push(index);
        }
        let mut outputs = Vec::new();
        for tensor in &made.outputs {
            let source = TensorSource::Step { step: step.name.clone(), output: tensor.name.clone() };
            if self.taken.contains(&source) {
                outputs.push(self.lay(source, Some(tensor.clone())));
            }
        }
        Ok(PlannedStep {
            name: step.name.clone(),
            run: step.run.clone(),
            inputs,
            each,
            when,
            outputs,
            is_idempotent,
            deadline: step.deadline,
        })
    }
}
