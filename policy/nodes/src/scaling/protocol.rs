//! Inputs and output of the autoscaling signal.

use std::time::Duration;

use millrace_types::{Bytes, FunctionKey, SloCounts};

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
    #[error("{nodes} nodes suffice now: fewer are asked for once the need has stayed lower for long enough")]
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
