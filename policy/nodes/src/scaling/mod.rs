//! Number of nodes that the cluster needs: the signal for an autoscaler (node allocation and
//! scaling of Torpor's cluster manager, T02; a lost node is replaced, T16 and Torpor
//! §4.5).
//!
//! ```text
//! ClusterSnapshot, PlacementPlan, scores ──► need ──► nodes needed now, with reasons
//!                                                      │ more: at once    fewer: after the lower need has lasted
//!                                                      ▼
//!                                                   Signal
//! ```
//!
//! New nodes are assumed to be like the present ones. Several requirements ask for nodes, and the
//! largest counts ([`need`]). They are host memory for every desired copy, GPU time, replicas that
//! must not share a node, functions that found no node, and objectives that are missed while GPUs
//! are busy.
//!
//! Deliberately absent: starting and stopping nodes. The autoscaler reads the signal and applies
//! its own bounds.

mod need;
mod protocol;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use millrace_types::{FunctionKey, SloCounts, Timestamp};

pub use self::protocol::{NodeNeedReason, ObjectiveScore, ScalingInputs, ScalingLimits, ScalingSignal};

/// Judgement of a function's objective, by periods.
#[derive(Debug, Clone, Copy)]
struct ObjectiveWindow {
    since: Timestamp,
    base: SloCounts,
    missed: bool,
}

/// A lower need that may rise again.
#[derive(Debug, Clone, Copy)]
struct LowerNeed {
    since: Timestamp,
    /// Largest need since then.
    nodes: u32,
}

/// Signal over time. A new instance does not ask for fewer nodes than exist until a lower need has
/// lasted: a leader that was just elected knows no loads yet.
#[derive(Debug)]
pub struct ScalingMonitor {
    limits: ScalingLimits,
    held: Option<u32>,
    lower: Option<LowerNeed>,
    windows: BTreeMap<FunctionKey, ObjectiveWindow>,
}

impl ScalingMonitor {
    /// Creates a signal without observations.
    #[must_use]
    pub const fn new(limits: ScalingLimits) -> Self {
        Self { limits, held: None, lower: None, windows: BTreeMap::new() }
    }

    /// Updates the signal with the present observations. `now` must not go back.
    pub fn observe(&mut self, now: Timestamp, observed: ScalingInputs<'_>) -> ScalingSignal {
        let missed = self.judge(now, observed.scores);
        let need = need::of(&observed, missed, &self.limits);
        let held = self.hold(now, need.nodes, need.nodes_now);
        let reasons =
            if held > need.nodes { vec![NodeNeedReason::Stable { nodes: need.nodes }] } else { need.reasons };
        ScalingSignal { nodes_needed: held, nodes_now: need.nodes_now, reasons }
    }

    /// Returns the signal: raised at once, lowered only after the need was lower for long enough.
    fn hold(&mut self, now: Timestamp, nodes: u32, nodes_now: u32) -> u32 {
        let held = *self.held.get_or_insert(nodes.max(nodes_now));
        if nodes >= held {
            self.lower = None;
            self.held = Some(nodes);
            return nodes;
        }
        let lower = self.lower.get_or_insert(LowerNeed { since: now, nodes });
        lower.nodes = lower.nodes.max(nodes);
        if now.since(lower.since) < self.limits.stable {
            return held;
        }
        let enough = lower.nodes;
        self.held = Some(enough);
        self.lower = (nodes < enough).then_some(LowerNeed { since: now, nodes });
        enough
    }

    /// Returns the number of functions that missed their objective in their last full period.
    fn judge(&mut self, now: Timestamp, scores: &[ObjectiveScore]) -> u32 {
        // Windows of functions without a score are dropped.
        let mut before = std::mem::take(&mut self.windows);
        let mut missed = 0;
        for score in scores {
            let new = ObjectiveWindow { since: now, base: score.counts, missed: false };
            let last = before.remove(&score.function).unwrap_or(new);
            let window = self.windows.entry(score.function.clone()).or_insert(last);
            if now.since(window.since) >= self.limits.slo_window {
                let SloCounts { m, n } = score.counts.since(window.base);
                let late = (m as f64) < score.percentile * n as f64;
                *window = ObjectiveWindow { missed: n >= self.limits.slo_requests && late, ..new };
            }
            missed += u32::from(window.missed);
        }
        missed
    }
}
