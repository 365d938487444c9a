//! What a run is likely to ask for after a step (D29): every step behind it, and how near its model
//! should be. Right after it, those that take something of it and surely run come to a GPU; those that
//! wait for others behind it, and those that run only under a condition, to host memory.

use std::collections::BTreeSet;

use super::plan::{Plan, PlannedStep};
use super::protocol::{Slot, StepIndex};

/// Steps that are named behind one.
pub const AHEAD_MAX: usize = 8;

/// How near a model should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Nearness {
    /// On a GPU.
    Gpu,
    /// In host memory.
    Host,
}

/// A step that is likely to run after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    /// Which.
    pub step: StepIndex,
    /// How near its model should be when it does.
    pub nearness: Nearness,
}

impl Plan {
    /// The steps behind one, at most [`AHEAD_MAX`], those that come next first.
    #[must_use]
    pub fn ahead(&self, step: StepIndex) -> Vec<Ahead> {
        // What is made behind the step, and what it makes itself.
        let (mut made, mut ahead) = (BTreeSet::new(), Vec::new());
        let own: BTreeSet<Slot> = self.step(step).outputs.iter().copied().collect();
        // Each is after those that it waits for.
        for (at, planned) in self.steps().iter().enumerate().skip(step.0 + 1) {
            let behind = sources(planned).any(|slot| made.contains(&slot));
            if !behind && !sources(planned).any(|slot| own.contains(&slot)) {
                continue;
            }
            made.extend(planned.outputs.iter().copied());
            let surely_next = !behind && planned.when.is_none();
            let nearness = if surely_next { Nearness::Gpu } else { Nearness::Host };
            ahead.push(Ahead { step: StepIndex(at), nearness });
        }
        ahead.sort_by_key(|it| (it.nearness, it.step));
        ahead.truncate(AHEAD_MAX);
        ahead
    }
}

fn sources(step: &PlannedStep) -> impl Iterator<Item = Slot> {
    step.inputs.iter().map(|(_, slot)| *slot).chain(step.when)
}
