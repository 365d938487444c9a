//! Deadlines of a run's steps if its workflow has an objective. The transfers of a step's edges and
//! its wait for a GPU are scheduled by this deadline (D14's `L_slo`, for a function in a workflow).
//!
//! The time left of the workflow's objective is divided among the steps on the longest path from a
//! step to the end, in proportion to their recent durations. So each of these steps has the same
//! slack relative to its duration, and the time that an early step saves or overdraws is shared by
//! all later steps. A step without a known duration counts as the mean of the others.

use std::time::Duration;

use super::{StepIndex, WorkflowGraph};

/// Share of the time left until the end that each step may take.
#[derive(Debug, Clone, PartialEq)]
pub struct ObjectiveShares(Vec<f64>);

impl ObjectiveShares {
    /// Returns shares by the recent duration of each step, in the plan's order; `None` for a step
    /// that has not run.
    ///
    /// # Panics
    /// If the number of durations differs from the number of steps.
    #[must_use]
    pub fn of(plan: &WorkflowGraph, took: &[Option<Duration>]) -> Self {
        assert!(took.len() == plan.steps().len(), "times of another plan");
        let known = || took.iter().flatten().map(Duration::as_secs_f64);
        let count = known().count();
        let mean = if count == 0 { 1.0 } else { known().sum::<f64>() / count as f64 };
        // A step without any duration would get no time for its data, so the minimum is a
        // microsecond.
        let time = |step: usize| took[step].map_or(mean, |took| took.as_secs_f64()).max(1e-6);
        // Duration of the longest path that begins with each step. Steps are ordered after the
        // steps they wait for, so a backward pass suffices.
        let mut ways = vec![0.0f64; took.len()];
        for step in (0..took.len()).rev() {
            let outputs = plan.steps()[step].outputs.iter().map(|slot| plan.slot(*slot));
            let after = outputs.flat_map(|slot| slot.takers.iter().chain(&slot.conditions));
            ways[step] = time(step) + after.map(|taker| ways[taker.0]).fold(0.0, f64::max);
        }
        Self(ways.iter().enumerate().map(|(step, way)| time(step) / way).collect())
    }

    /// Returns the time within which a step that can begin now should be answered. The time is the
    /// step's share of `left`, the time until the workflow's deadline, but at most the step's own
    /// deadline. Returns `None` if neither is set.
    ///
    /// # Panics
    /// If the step's index is not in the plan.
    #[must_use]
    pub fn within(&self, plan: &WorkflowGraph, step: StepIndex, left: Option<Duration>) -> Option<Duration> {
        let share = left.map(|left| left.mul_f64(self.0[step.0].clamp(0.0, 1.0)));
        share.into_iter().chain(plan.step(step).deadline).min()
    }
}
