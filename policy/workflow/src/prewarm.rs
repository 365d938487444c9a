//! Prewarming hints of a run (D29): the functions that follow a step, and where their models should
//! be. The next steps that consume the step's outputs and surely run belong on a GPU. Later steps,
//! and steps that run only under a condition, belong in host memory.
//!
//! Nested workflows make no difference. The first consumers inside the next workflow count as next
//! steps. So do the outer workflow's next steps, after a step that makes an output of the inner
//! workflow.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_types::FunctionName;
use millrace_types::workflow::StepTarget;

use super::plan::{PlannedStep, WorkflowGraph};
use super::protocol::{StepIndex, TensorIndex};

/// Maximum number of hints for a step.
pub const AHEAD_MAX: usize = 8;
/// Maximum number of nested workflows examined for a step: their number multiplies with every
/// level, and each call repeats this.
pub(super) const LOOKED_INTO_MAX: usize = 8;

/// Memory in which a model should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PrewarmTarget {
    /// The model should be on a GPU.
    Gpu,
    /// The model should be in host memory.
    Host,
}

/// A prewarming hint: a function that is likely to be called after a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrewarmHint {
    pub function: FunctionName,
    /// Memory in which its model should be when the function is called.
    pub nearness: PrewarmTarget,
}

/// A step that is likely to run after another step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FollowingStep {
    pub(super) step: StepIndex,
    pub(super) nearness: PrewarmTarget,
}

impl WorkflowGraph {
    /// Returns the functions that follow a step, each once, the nearest first, at most
    /// [`AHEAD_MAX`]. The step's own function is left out. `inner` returns the plan of a nested
    /// workflow, if known; `after` lists the functions that follow this workflow, if nested itself.
    #[must_use]
    pub fn prewarm_hints(
        &self,
        step: StepIndex,
        after: &[PrewarmHint],
        inner: impl Fn(&FunctionName) -> Option<Arc<WorkflowGraph>>,
    ) -> Vec<PrewarmHint> {
        let mut look = HintSearch { inner: &inner, looked_into: 0, ahead: Vec::new() };
        look.through(self, self.next(step), PrewarmTarget::Gpu);
        let gives = self.step(step).outputs.iter().any(|&slot| self.slot(slot).is_output);
        let nearness = |it: &PrewarmHint| if gives { it.nearness } else { PrewarmTarget::Host };
        look.ahead.extend(after.iter().map(|it| PrewarmHint { nearness: nearness(it), ..it.clone() }));
        let mut ahead = look.ahead;
        let mut known = BTreeSet::new();
        // Of a function that is listed several times, the nearest entry counts.
        ahead.sort_by_key(|it| it.nearness);
        // The step's own model is present already.
        ahead.retain(|it| self.step(step).run != StepTarget::Function(it.function.clone()));
        ahead.retain(|it| known.insert(it.function.clone()));
        ahead.truncate(AHEAD_MAX);
        ahead
    }

    /// Returns the steps that follow a step, the nearest first, at most [`AHEAD_MAX`].
    pub(super) fn next(&self, step: StepIndex) -> Vec<FollowingStep> {
        self.behind(self.step(step).outputs.iter().copied().collect(), step.0 + 1)
    }

    /// Returns the first steps of the workflow and their followers, the nearest first, at most
    /// [`AHEAD_MAX`].
    fn first(&self) -> Vec<FollowingStep> {
        self.behind((0..self.inputs().len()).map(TensorIndex).collect(), 0)
    }

    /// Returns the steps from `first` on that depend on these tensors.
    fn behind(&self, own: BTreeSet<TensorIndex>, first: usize) -> Vec<FollowingStep> {
        // Tensors made by the followers found so far.
        let mut made = BTreeSet::new();
        let mut next = Vec::new();
        // Steps are ordered after the steps they wait for, so a single pass finds indirect
        // followers too.
        for (at, planned) in self.steps().iter().enumerate().skip(first) {
            let behind = sources(planned).any(|slot| made.contains(&slot));
            if !behind && !sources(planned).any(|slot| own.contains(&slot)) {
                continue;
            }
            made.extend(planned.outputs.iter().copied());
            let surely_next = !behind && planned.when.is_none();
            let nearness = if surely_next { PrewarmTarget::Gpu } else { PrewarmTarget::Host };
            next.push(FollowingStep { step: StepIndex(at), nearness });
        }
        next.sort_by_key(|it| (it.nearness, it.step));
        next.truncate(AHEAD_MAX);
        next
    }
}

/// A search through nested workflows.
struct HintSearch<'a> {
    inner: &'a dyn Fn(&FunctionName) -> Option<Arc<WorkflowGraph>>,
    looked_into: usize,
    ahead: Vec<PrewarmHint>,
}

impl HintSearch<'_> {
    /// Adds the functions of these steps of a workflow, none of them nearer than `of_all`.
    fn through(&mut self, plan: &WorkflowGraph, steps: Vec<FollowingStep>, of_all: PrewarmTarget) {
        for FollowingStep { step, nearness } in steps {
            let nearness = nearness.max(of_all);
            match &plan.step(step).run {
                StepTarget::Function(name) => {
                    self.ahead.push(PrewarmHint { function: name.clone(), nearness })
                }
                StepTarget::Workflow(_) if self.looked_into == LOOKED_INTO_MAX => {}
                StepTarget::Workflow(name) => {
                    self.looked_into += 1;
                    if let Some(inner) = (self.inner)(name) {
                        self.through(&inner, inner.first(), nearness);
                    }
                }
            }
        }
    }
}

fn sources(step: &PlannedStep) -> impl Iterator<Item = TensorIndex> {
    step.inputs.iter().map(|(_, slot)| *slot).chain(step.when)
}
