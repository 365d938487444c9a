//! Smoothed durations of a workflow's steps, and SLO counts of steps with a deadline. The durations
//! determine how the workflow's objective is divided over the steps. Both outlive an entry's renewal as
//! long as the workflow stays the same.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_types::{FunctionName, Reason};
use millrace_workflow::{ObjectiveShares, PlannedStep, StepIndex, WorkflowGraph};

use super::scores::StepSloCounter;

/// The duration and SLO counts of one step.
#[derive(Debug)]
struct StepDuration {
    /// The smoothed duration in nanoseconds; 0 before the first call.
    took: AtomicU64,
    /// The step's deadline with SLO counts; `None` without a deadline.
    score: Option<(Duration, StepSloCounter)>,
}

/// The steps' durations, in the plan's order.
#[derive(Debug)]
pub(super) struct StepDurations(Vec<StepDuration>);

impl StepDurations {
    /// Returns the initial durations of a plan. `score` returns the SLO counts of a step with a
    /// deadline.
    pub(super) fn new(plan: &WorkflowGraph, score: impl Fn(&FunctionName) -> StepSloCounter) -> Self {
        let pace = |step: &PlannedStep| {
            let score = step.deadline.map(|deadline| (deadline, score(&step.name)));
            StepDuration { took: AtomicU64::new(0), score }
        };
        Self(plan.steps().iter().map(pace).collect())
    }

    /// Records an answered call of a step.
    pub(super) fn answered(&self, step: StepIndex, took: Duration) {
        let pace = &self.0[step.0];
        let new = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        // The new value weighs one eighth. Concurrent updates may lose a value, which is fine for an
        // estimate.
        let old = pace.took.load(Ordering::Relaxed);
        let mean = if old == 0 { new } else { old - old / 8 + new / 8 };
        pace.took.store(mean, Ordering::Relaxed);
        if let Some((deadline, score)) = &pace.score {
            score.count(took <= *deadline);
        }
    }

    /// Records a failed call of a step. As for functions, only a timeout counts towards the SLO.
    pub(super) fn failed(&self, step: StepIndex, reason: Reason) {
        if let Some((_, score)) = self.0[step.0].score.as_ref().filter(|_| reason == Reason::TimedOut) {
            score.count(false);
        }
    }

    /// Returns the current division of the objective.
    pub(super) fn shares(&self, plan: &WorkflowGraph) -> ObjectiveShares {
        let took = |pace: &StepDuration| match pace.took.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        };
        ObjectiveShares::of(plan, &self.0.iter().map(took).collect::<Vec<_>>())
    }
}
