//! How many nodes the cluster needs: what an autoscaler is told (node allocation and scaling of
//! Torpor's cluster manager, T02; a node that is lost is replaced by a new one, T16 and Torpor §4.5).
//!
//! ```text
//! View, Plan, scores ──► need ──► at least so many now, and why
//!                                   │ more: at once    fewer: when it was so for a while
//!                                   ▼
//!                                Signal
//! ```
//!
//! Nodes are reckoned to be like those that are there. Each of these alone asks for nodes ([`need`]):
//! host memory for every wanted copy, GPU time, replicas that must not share a node, functions that
//! found no node, and objectives that are missed while GPUs are busy. The largest counts.
//!
//! Deliberately absent: starting and stopping nodes. Who does that reads the signal, and keeps to
//! its own bounds.

mod need;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::{Bytes, FunctionKey, SloCounts, Timestamp};

use crate::placement::{GpuLoad, Plan, View};

/// What the signal is held to. Shares are in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long fewer nodes must have been enough before that is said.
    pub stable: Duration,
    /// Share of a node's host memory that is planned with. The rest is what does not fit by chance.
    pub host_share: u64,
    /// Share of a node's GPU time that is planned with. Above it, requests wait for each other.
    pub gpu_share: u64,
    /// Over how long it is judged whether an objective is met.
    pub slo_window: Duration,
    /// Requests in a window that are enough to judge by.
    pub slo_requests: u64,
    /// Share of the GPUs' time below which a missed objective is no want of nodes: such a deadline
    /// is missed on idle GPUs too.
    pub slo_gpu_share: u64,
}

impl Default for Limits {
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

/// How a function does against its objective, over all nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Which.
    pub function: FunctionKey,
    /// The share of requests that must be served in time, of 1.
    pub percentile: f64,
    /// Served in time, and finished or expired, since it was created.
    pub counts: SloCounts,
}

/// Everything the signal depends on.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// What is wanted and what is.
    pub view: &'a View,
    /// What the planner made of it.
    pub plan: &'a Plan,
    /// Of functions with an objective.
    pub scores: &'a [Score],
}

/// Why so many nodes are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// All wanted copies have to be in host memory.
    #[error("the models of all wanted copies take {wanted} of host memory, and a node has {node}")]
    HostMemory {
        /// For all copies.
        wanted: Bytes,
        /// One node's.
        node: Bytes,
    },
    /// GPUs are busy.
    #[error("requests need {}.{:03} GPUs, and a node has {gpus}", .load.0 / 1000, .load.0 % 1000)]
    GpuTime {
        /// What is needed.
        load: GpuLoad,
        /// One node's, rounded.
        gpus: u32,
    },
    /// A node has one copy of a function.
    #[error("a function asks for {replicas} replicas, each on a node of its own")]
    Replicas {
        /// The most that one asks for.
        replicas: u32,
    },
    /// No node takes them as the nodes are, though their sum might.
    #[error("{functions} functions have fewer copies than they ask for, and no node takes one")]
    Unplaced {
        /// How many functions.
        functions: u32,
    },
    /// Objectives are missed and GPUs are busy.
    #[error("{functions} functions miss their objective, and GPUs are busy")]
    Slo {
        /// How many functions.
        functions: u32,
    },
    /// Fewer would do, and not for long enough yet.
    #[error("{nodes} would be enough, and that has to last first")]
    Stable {
        /// What would be enough.
        nodes: u32,
    },
}

impl Reason {
    /// In one CamelCase word, for programs.
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

/// What an autoscaler is told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signal {
    /// Nodes the cluster should have.
    pub nodes_needed: u32,
    /// Nodes that take functions.
    pub nodes_now: u32,
    /// What asks for that many. Empty when none is needed.
    pub reasons: Vec<Reason>,
}

/// A function's objective, judged by windows.
#[derive(Debug, Clone, Copy)]
struct Window {
    since: Timestamp,
    base: SloCounts,
    missed: bool,
}

/// A lower need that may pass again.
#[derive(Debug, Clone, Copy)]
struct Lower {
    since: Timestamp,
    /// The most that was needed since.
    nodes: u32,
}

/// The signal over time. A new one asks for no fewer nodes than there are, for as long as a lower
/// need has to last: a leader that was just elected knows no loads yet.
#[derive(Debug)]
pub struct Scaling {
    limits: Limits,
    held: Option<u32>,
    lower: Option<Lower>,
    windows: BTreeMap<FunctionKey, Window>,
}

impl Scaling {
    /// Nothing was seen yet.
    #[must_use]
    pub const fn new(limits: Limits) -> Self {
        Self { limits, held: None, lower: None, windows: BTreeMap::new() }
    }

    /// Takes in what is observed now. `now` must not go back.
    pub fn observe(&mut self, now: Timestamp, observed: Observed<'_>) -> Signal {
        let missed = self.judge(now, observed.scores);
        let need = need::of(&observed, missed, &self.limits);
        let held = self.hold(now, need.nodes, need.nodes_now);
        let reasons =
            if held > need.nodes { vec![Reason::Stable { nodes: need.nodes }] } else { need.reasons };
        Signal { nodes_needed: held, nodes_now: need.nodes_now, reasons }
    }

    /// More at once, fewer once nothing more was needed for long enough.
    fn hold(&mut self, now: Timestamp, nodes: u32, nodes_now: u32) -> u32 {
        let held = *self.held.get_or_insert(nodes.max(nodes_now));
        if nodes >= held {
            self.lower = None;
            self.held = Some(nodes);
            return nodes;
        }
        let lower = self.lower.get_or_insert(Lower { since: now, nodes });
        lower.nodes = lower.nodes.max(nodes);
        if now.since(lower.since) < self.limits.stable {
            return held;
        }
        let enough = lower.nodes;
        self.held = Some(enough);
        self.lower = (nodes < enough).then_some(Lower { since: now, nodes });
        enough
    }

    /// Functions that missed their objective in their last full window.
    fn judge(&mut self, now: Timestamp, scores: &[Score]) -> u32 {
        // What is scored no more is forgotten.
        let mut before = std::mem::take(&mut self.windows);
        let mut missed = 0;
        for score in scores {
            let new = Window { since: now, base: score.counts, missed: false };
            let last = before.remove(&score.function).unwrap_or(new);
            let window = self.windows.entry(score.function.clone()).or_insert(last);
            if now.since(window.since) >= self.limits.slo_window {
                let SloCounts { m, n } = score.counts.since(window.base);
                let late = (m as f64) < score.percentile * n as f64;
                *window = Window { missed: n >= self.limits.slo_requests && late, ..new };
            }
            missed += u32::from(window.missed);
        }
        missed
    }
}
