//! Number of nodes that the cluster needs: the signal for an autoscaler (node allocation and
//! scaling of Torpor's cluster manager, T02; a lost node is replaced, T16 and Torpor
//! §4.5).
//!
//! ```text
//! View, Plan, scores ──► need ──► nodes needed now, with reasons
//!                                   │ more: at once    fewer: after the lower need has lasted
//!                                   ▼
//!                                Signal
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
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Bytes, FunctionKey, SloCounts, Timestamp};

use crate::placement::{ClusterSnapshot, GpuLoad, PlacementPlan};

/// Parameters of the signal. Shares are in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScalingLimits {
    /// Time for which a lower need must last before the signal falls.
    pub stable: Duration,
    /// Usable share of a node's host memory. The rest covers fragmentation between copies.
    pub host_share: u64,
    /// Usable share of a node's GPU time. Above this share, requests wait for each other.
    pub gpu_share: u64,
    /// Period over which an objective is judged.
    pub slo_window: Duration,
    /// Minimum number of requests in a period for a judgement.
    pub slo_requests: u64,
    /// Share of the GPUs' time below which a missed objective asks for no node: such a deadline is
    /// missed on idle GPUs too.
    pub slo_gpu_share: u64,
}

impl Default for ScalingLimits {
    fn default() -> Self {
        Self {
            stable: Duration::from_mins(5),
            host_share: 850,
            gpu_share: 700,
            slo_window: Duration::from_secs(30),
            slo_requests: 20,
            slo_gpu_share: 300,
        }
    }
}

/// Result of a function against its objective, over all nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct ObjectiveScore {
    pub function: FunctionKey,
    /// Share of requests to serve in time, from 0 to 1.
    pub percentile: f64,
    /// Requests in time, and requests that finished or expired, since the function was created.
    pub counts: SloCounts,
}

/// Inputs of the signal.
#[derive(Debug, Clone, Copy)]
pub struct ScalingInputs<'a> {
    /// Desired and actual state of the cluster.
    pub view: &'a ClusterSnapshot,
    /// Result of the planner for this view.
    pub plan: &'a PlacementPlan,
    /// Scores of the functions with an objective.
    pub scores: &'a [ObjectiveScore],
}

/// Reason for the number of nodes needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NodeNeedReason {
    /// The models of all desired copies must fit into host memory.
    #[error("the models of all wanted copies take {wanted} of host memory, and a node has {node}")]
    HostMemory {
        /// Memory of all copies.
        wanted: Bytes,
        /// Memory of a node.
        node: Bytes,
    },
    /// Requests keep the GPUs busy.
    #[error("requests need {}.{:03} GPUs, and a node has {gpus}", .load.0 / 1000, .load.0 % 1000)]
    GpuTime {
        /// GPUs' worth of time that requests need.
        load: GpuLoad,
        /// GPUs of a node, rounded.
        gpus: u32,
    },
    /// The replicas of a function need separate nodes.
    #[error("a function asks for {replicas} replicas, each on a node of its own")]
    Replicas {
        /// Largest number of replicas of any function.
        replicas: u32,
    },
    /// Some functions fit no node, although their sum might fit the cluster.
    #[error("{functions} functions have fewer copies than they ask for, and no node takes one")]
    Unplaced { functions: u32 },
    /// Functions miss their objective while GPUs are busy.
    #[error("{functions} functions miss their objective, and GPUs are busy")]
    Slo { functions: u32 },
    /// Fewer nodes would suffice, but not for long enough yet.
    #[error("{nodes} nodes would suffice once the lower need has lasted long enough")]
    Stable {
        /// Number of nodes that would suffice.
        nodes: u32,
    },
}

impl NodeNeedReason {
    /// Returns the name of the reason in CamelCase, for programs.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::HostMemory { .. } => "HostMemory",
            Self::GpuTime { .. } => "GpuTime",
            Self::Replicas { .. } => "Replicas",
            Self::Unplaced { .. } => "Unplaced",
            Self::Slo { .. } => "Slo",
            Self::Stable { .. } => "Stable",
        }
    }
}

/// Signal for an autoscaler.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScalingSignal {
    /// Number of nodes that the cluster should have.
    pub nodes_needed: u32,
    /// Number of nodes that accept functions.
    pub nodes_now: u32,
    /// Requirements that ask for this number. Empty if no node is needed.
    pub reasons: Vec<NodeNeedReason>,
}

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
