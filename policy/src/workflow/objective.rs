//! By when a step of a run should be answered, where its workflow has an objective: what the transfers
//! of its edges and its wait for a GPU are scheduled by (D14's `L_slo`, of a function in a workflow).
//!
//! What is left of the workflow's objective is divided among the steps still to run on the longest way
//! from a step to the end, in proportion to what they took so far. So each of them has the same slack
//! for its time, and what an early step saves or overdraws is shared by all after it. A step of which
//! nothing is known counts as the mean of the others.

use std::time::Duration;

use super::{Plan, StepIndex};

/// How much of what is left until the end each step may take.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares(Vec<f64>);

impl Shares {
    /// Shares by how long each step took, in the plan's order; `None` of those that have not run.
    ///
    /// # Panics
    /// When the times are of another plan.
    #[must_use]
    pub fn of(plan: &Plan, took: &[Option<Duration>]) -> Self {
        assert!(took.len() == plan.steps().len(), "times of another plan");
        let known = || took.iter().flatten().map(Duration::as_secs_f64);
        let count = known().count();
        let mean = if count == 0 { 1.0 } else { known().sum::<f64>() / count as f64 };
        // One that takes no time at all has no share, and its data none: a microsecond is the least.
        let time = |step: usize| took[step].map_or(mean, |took| took.as_secs_f64()).max(1e-6);
        // The longest way that begins with a step. Steps stand after all that they wait for.
        let mut ways = vec![0.0f64; took.len()];
        for step in (0..took.len()).rev() {
            let outputs = plan.steps()[step].outputs.iter().map(|slot| plan.slot(*slot));
            let after = outputs.flat_map(|slot| slot.takers.iter().chain(&slot.conditions));
            ways[step] = time(step) + after.map(|taker| ways[taker.0]).fold(0.0, f64::max);
        }
        Self(ways.iter().enumerate().map(|(step, way)| time(step) / way).collect())
    }

    /// Within how long a step that can begin now should be answered: its part of what is `left` until
    /// the workflow's answer is wanted, and no longer than its own deadline. `None` where neither says.
    ///
    /// # Panics
    /// When the step is another plan's.
    #[must_use]
    pub fn within(&self, plan: &Plan, step: StepIndex, left: Option<Duration>) -> Option<Duration> {
        let share = left.map(|left| left.mul_f64(self.0[step.0].clamp(0.0, 1.0)));
        share.into_iter().chain(plan.step(step).deadline).min()
    }
}
