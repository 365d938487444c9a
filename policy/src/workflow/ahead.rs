//! What a run is likely to ask for after a step (D29): the functions behind it, and how near their models
//! should be. Right after it, those that take something of it and surely run come to a GPU; those that
//! wait for others behind it, and those that run only under a condition, to host memory.
//!
//! Workflows in workflows make no difference. What takes a step's output first inside the next workflow is
//! right after it, and so is what the outer workflow runs next after a step that gives an output of the
//! inner one.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_types::FunctionName;
use millrace_types::workflow::Run;

use super::plan::{Plan, PlannedStep};
use super::protocol::{Slot, StepIndex};

/// Functions that are named behind a step.
pub const AHEAD_MAX: usize = 8;
/// Workflows inside that are looked into for one step: they multiply with every level, and this is done
/// for every call.
pub(super) const LOOKED_INTO_MAX: usize = 8;

/// How near a model should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Nearness {
    /// On a GPU.
    Gpu,
    /// In host memory.
    Host,
}

/// A function that is likely to be called after a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ahead {
    /// Which.
    pub function: FunctionName,
    /// How near its model should be when it is.
    pub nearness: Nearness,
}

/// A step that is likely to run after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Next {
    pub(super) step: StepIndex,
    pub(super) nearness: Nearness,
}

impl Plan {
    /// The functions behind a step but its own, each once, at most [`AHEAD_MAX`], those that come next
    /// first. `inner` is a workflow inside, where that is known; `after` is what comes after all of this one,
    /// where it lies in another.
    #[must_use]
    pub fn ahead(
        &self,
        step: StepIndex,
        after: &[Ahead],
        inner: impl Fn(&FunctionName) -> Option<Arc<Plan>>,
    ) -> Vec<Ahead> {
        let mut look = Look { inner: &inner, looked_into: 0, ahead: Vec::new() };
        look.through(self, self.next(step), Nearness::Gpu);
        let gives = self.step(step).outputs.iter().any(|&slot| self.slot(slot).is_output);
        let nearness = |it: &Ahead| if gives { it.nearness } else { Nearness::Host };
        look.ahead.extend(after.iter().map(|it| Ahead { nearness: nearness(it), ..it.clone() }));
        let (mut ahead, mut known) = (look.ahead, BTreeSet::new());
        // Of what comes more than once the nearest counts.
        ahead.sort_by_key(|it| it.nearness);
        // The step's own model is there.
        ahead.retain(|it| self.step(step).run != Run::Function(it.function.clone()));
        ahead.retain(|it| known.insert(it.function.clone()));
        ahead.truncate(AHEAD_MAX);
        ahead
    }

    /// The steps behind one, at most [`AHEAD_MAX`], those that come next first.
    pub(super) fn next(&self, step: StepIndex) -> Vec<Next> {
        self.behind(self.step(step).outputs.iter().copied().collect(), step.0 + 1)
    }

    /// The steps, at most [`AHEAD_MAX`], those that come first first.
    fn first(&self) -> Vec<Next> {
        self.behind((0..self.inputs().len()).map(Slot).collect(), 0)
    }

    /// The steps that wait for these tensors, of those from `first` on.
    fn behind(&self, own: BTreeSet<Slot>, first: usize) -> Vec<Next> {
        // What is made behind them.
        let (mut made, mut next) = (BTreeSet::new(), Vec::new());
        // Each is after those that it waits for.
        for (at, planned) in self.steps().iter().enumerate().skip(first) {
            let behind = sources(planned).any(|slot| made.contains(&slot));
            if !behind && !sources(planned).any(|slot| own.contains(&slot)) {
                continue;
            }
            made.extend(planned.outputs.iter().copied());
            let surely_next = !behind && planned.when.is_none();
            let nearness = if surely_next { Nearness::Gpu } else { Nearness::Host };
            next.push(Next { step: StepIndex(at), nearness });
        }
        next.sort_by_key(|it| (it.nearness, it.step));
        next.truncate(AHEAD_MAX);
        next
    }
}

/// A look through workflows.
struct Look<'a> {
    inner: &'a dyn Fn(&FunctionName) -> Option<Arc<Plan>>,
    looked_into: usize,
    ahead: Vec<Ahead>,
}

impl Look<'_> {
    /// Adds the functions of these steps of a workflow, none of them nearer than all of it.
    fn through(&mut self, plan: &Plan, steps: Vec<Next>, of_all: Nearness) {
        for Next { step, nearness } in steps {
            let nearness = nearness.max(of_all);
            match &plan.step(step).run {
                Run::Function(name) => self.ahead.push(Ahead { function: name.clone(), nearness }),
                Run::Workflow(_) if self.looked_into == LOOKED_INTO_MAX => {}
                Run::Workflow(name) => {
                    self.looked_into += 1;
                    if let Some(inner) = (self.inner)(name) {
                        self.through(&inner, inner.first(), nearness);
                    }
                }
            }
        }
    }
}

fn sources(step: &PlannedStep) -> impl Iterator<Item = Slot> {
    step.inputs.iter().map(|(_, slot)| *slot).chain(step.when)
}
