//! How long each step of a workflow took lately, and whether it was in time: what its objective is
//! divided by, and the score of steps that have a deadline of their own. Kept from one version of the
//! entry to the next as long as the workflow is the same.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_policy::workflow::{Plan, PlannedStep, Shares, StepIndex};
use millrace_types::{FunctionName, Reason};

use super::scores::Score;

/// One step's.
#[derive(Debug)]
struct Pace {
    /// Nanoseconds, smoothed; 0 before the first.
    took: AtomicU64,
    /// Against its deadline, where it has one.
    score: Option<(Duration, Score)>,
}

/// Those of a workflow, in its plan's order.
#[derive(Debug)]
pub(super) struct Paces(Vec<Pace>);

impl Paces {
    /// Those of a plan of which nothing ran. `score`: of a step that has a deadline.
    pub(super) fn new(plan: &Plan, score: impl Fn(&FunctionName) -> Score) -> Self {
        let pace = |step: &PlannedStep| {
            let score = step.deadline.map(|deadline| (deadline, score(&step.name)));
            Pace { took: AtomicU64::new(0), score }
        };
        Self(plan.steps().iter().map(pace).collect())
    }

    /// Takes in that a call of a step was answered.
    pub(super) fn answered(&self, step: StepIndex, took: Duration) {
        let pace = &self.0[step.0];
        let new = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        // An eighth of the new, seven of the old. Of two at once one may be lost: it is an estimate.
        let old = pace.took.load(Ordering::Relaxed);
        let mean = if old == 0 { new } else { old - old / 8 + new / 8 };
        pace.took.store(mean, Ordering::Relaxed);
        if let Some((deadline, score)) = &pace.score {
            score.count(took <= *deadline);
        }
    }

    /// Takes in that one was not. As of a function, only one that ran out of time counts.
    pub(super) fn failed(&self, step: StepIndex, reason: Reason) {
        if let Some((_, score)) = self.0[step.0].score.as_ref().filter(|_| reason == Reason::TimedOut) {
            score.count(false);
        }
    }

    /// What the objective is divided by now.
    pub(super) fn shares(&self, plan: &Plan) -> Shares {
        let took = |pace: &Pace| match pace.took.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        };
        Shares::of(plan, &self.0.iter().map(took).collect::<Vec<_>>())
    }
}
