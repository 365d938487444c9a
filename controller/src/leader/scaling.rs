//! Computes the number of nodes that the cluster needs, from the placement plan and the SLO counts of
//! functions, by the scaling policy.

use millrace_cluster_state::State;
use millrace_nodes::placement::{ClusterSnapshot, PlacementPlan};
use millrace_nodes::scaling::{ObjectiveScore, ScalingInputs, ScalingLimits, ScalingMonitor, ScalingSignal};
use millrace_types::Timestamp;

use super::duties::Duties;

/// Publishes the scaling signal when it changes.
pub(super) struct Scaler {
    scaling: ScalingMonitor,
}

impl Scaler {
    pub(super) fn new() -> Self {
        Self { scaling: ScalingMonitor::new(ScalingLimits::default()) }
    }

    /// Evaluates a snapshot of the cluster and the plan made from it.
    pub(super) fn observe(
        &mut self,
        now: Timestamp,
        state: &State,
        view: &ClusterSnapshot,
        plan: &PlacementPlan,
        duties: &Duties,
    ) {
        let scores = scores(state);
        let signal = self.scaling.observe(now, ScalingInputs { view, plan, scores: &scores });
        duties.signal.send_if_modified(|last| {
            let news = last.as_ref() != Some(&signal);
            if news {
                tell(last.as_ref(), &signal);
                *last = Some(signal);
            }
            news
        });
    }
}

/// Returns the SLO counts of enabled functions that have an objective.
fn scores(state: &State) -> Vec<ObjectiveScore> {
    let functions = state.functions().filter(|function| function.enabled);
    let scores = functions.filter_map(|function| {
        let percentile = function.latest().spec.slo?.percentile;
        let counts = state.score(&function.key).total;
        Some(ObjectiveScore { function: function.key.clone(), percentile, counts })
    });
    scores.collect()
}

/// Logs a change of the number of needed nodes.
fn tell(last: Option<&ScalingSignal>, signal: &ScalingSignal) {
    if last.is_some_and(|last| last.nodes_needed != signal.nodes_needed) {
        let why: Vec<_> = signal.reasons.iter().map(ToString::to_string).collect();
        let needed = signal.nodes_needed;
        let now = signal.nodes_now;
        tracing::info!(needed, now, why = why.join("; "), "the number of needed nodes changed");
    }
}
