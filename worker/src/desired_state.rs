//! The desired state of the node: the functions to serve, the tenants' caps and the scheduling policy, as
//! the leader names them.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_proto::worker as wire;
use millrace_types::{
    Alphas, Bytes, Digest, Quota, RevisionKey, SchedulingOptions, SequenceSpec, SliceOnGpu, Slo, SloBase,
    TenantName, Terms,
};

use crate::policy::DesiredPolicy;

/// The position in the leader's log at which a desired state was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LogPosition {
    pub term: u64,
    /// Index of the last command that the state reflects.
    pub index: u64,
}

/// A function to serve.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacedFunction {
    pub key: RevisionKey,
    /// Digest of the function's model or program file.
    pub digest: Digest,
    /// Size of that file.
    pub artifact_bytes: Bytes,
    /// Whether a request may run twice.
    pub idempotent: bool,
    /// Latency objective.
    pub slo: Option<Slo>,
    /// GPU memory to reserve for a run; `None`: the model's size decides.
    pub gpu_memory: Option<Bytes>,
    /// SLO counts from other nodes and earlier placements.
    pub slo_base: SloBase,
    /// Priority, batching and residency settings.
    pub serving: SchedulingOptions,
    /// Creation time, in Unix milliseconds. A later function of the same name has another creation
    /// time.
    pub created_at_ms: u64,
    /// Number of processes of a program; 0 for a model.
    pub processes: u32,
    /// Outputs of the model that are state; `None`: the function keeps no state.
    pub sequences: Option<SequenceSpec>,
}

/// The slices of a function on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedSlices {
    /// The limits on the compute of each slice.
    pub terms: Terms,
    /// The slices and their GPUs. If empty, the function's requests wait.
    pub on: Vec<SliceOnGpu>,
}

/// The operator's setting for this node. The node itself does not act on the setting: the leader
/// moves functions away through the next desired states.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeScheduling {
    /// The node gets functions.
    #[default]
    Schedulable,
    /// The node keeps its functions and gets no new functions.
    Cordoned,
    /// The node's functions move to other nodes first, and then leave this node.
    Draining,
}

impl From<wire::NodeScheduling> for NodeScheduling {
    fn from(wire: wire::NodeScheduling) -> Self {
        match wire {
            wire::NodeScheduling::Unspecified | wire::NodeScheduling::Schedulable => Self::Schedulable,
            wire::NodeScheduling::Cordoned => Self::Cordoned,
            wire::NodeScheduling::Draining => Self::Draining,
        }
    }
}

impl From<NodeScheduling> for wire::NodeScheduling {
    fn from(scheduling: NodeScheduling) -> Self {
        match scheduling {
            NodeScheduling::Schedulable => Self::Schedulable,
            NodeScheduling::Cordoned => Self::Cordoned,
            NodeScheduling::Draining => Self::Draining,
        }
    }
}

/// The desired state of the node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DesiredState {
    /// Stamp of the state; `None` before the first state.
    pub stamp: Option<LogPosition>,
    pub functions: Vec<PlacedFunction>,
    pub scheduling: NodeScheduling,
    /// Tenants' caps on this node; tenants that are not named have no caps.
    pub quotas: Arc<TenantQuotas>,
    /// Scheduling policy.
    pub policy: DesiredPolicy,
    /// Alphas with which the node begins.
    pub alphas: Alphas,
    /// Slices of the functions that ask for slices.
    pub slices: Arc<NodeSlices>,
}

/// The slices of each function that asks for slices. Other functions compute on any SMs.
pub type NodeSlices = BTreeMap<RevisionKey, PlacedSlices>;

pub type TenantQuotas = BTreeMap<TenantName, Quota>;
