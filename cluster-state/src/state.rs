//! The replicated state and its read methods. [`State::apply`] is the single way to change the state.

use std::ops::Bound;
use std::sync::Arc;

use imbl::OrdMap;
pub use millrace_types::limits::{
    ARTIFACTS_MAX, FUNCTIONS_MAX, NODES_MAX, POLICIES_KEPT, RETIRED_MAX, REVISIONS_KEPT, TENANTS_MAX,
    WORKFLOWS_MAX, WORKFLOWS_PER_TENANT_MAX,
};
use millrace_types::{Bytes, Digest, FunctionKey, NodeName, Quota, Revision, SliceId, TenantName};
use serde::{Deserialize, Serialize};

use crate::accounts::{BillTotals, FunctionScore};
use crate::checkpoint::NodeCheckpoint;
use crate::index::HolderIndex;
use crate::operation_record::OperationRecord;
use crate::placements::{Placements, first_key};
use crate::record::{
    Artifact, ClusterRecord, FunctionRecord, NodeRecord, NodeStatus, PolicyRecord, SliceRecord, TenantRecord,
    WorkflowRecord,
};
use crate::rules::RulesVersion;
use crate::sessions::Sessions;
use crate::table::CountedTable;
use crate::time::UnixMillis;

/// The newest rules of this build. Controllers report this version in each message to each other.
pub const CLUSTER_VERSION: u64 = RulesVersion::NEWEST.0;

/// The state on which the controllers agree.
///
/// Cloning is cheap because the maps are persistent. Equal logs give equal states and equal
/// [bytes](State::encode).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub(crate) cluster: Option<ClusterRecord>,
    /// The latest stamp: the present time, as far as the state knows.
    pub(crate) clock: UnixMillis,
    /// The log index of the last command applied.
    pub(crate) applied_index: u64,
    /// Number of changes. The log index would not do: one entry carries many commands, and two
    /// changes in one entry must not share a resource version. A writer that had seen the first
    /// change could otherwise overwrite the second without a conflict.
    pub(crate) version: u64,
    pub(crate) functions: CountedTable<FunctionKey, FunctionRecord>,
    pub(crate) artifacts: CountedTable<Digest, Artifact>,
    pub(crate) nodes: CountedTable<NodeName, NodeRecord>,
    pub(crate) epochs_given: u64,
    /// The highest number of a slice so far.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) slices_given: u64,
    /// The last numbers of deleted functions and workflows. If a deleted name returns, its numbers
    /// continue from there, so that a number never means two models to a worker or a client. An
    /// existing function is never in this map. An existing workflow may be: nodes may still have to
    /// report the usage of a deleted function of that name.
    #[serde(deserialize_with = "crate::packed::map")]
    pub(crate) retired: OrdMap<FunctionKey, RetiredName>,
    pub(crate) sessions: Sessions,
    /// Workflows. No workflow has the name of a function.
    #[serde(default)]
    pub(crate) workflows: CountedTable<FunctionKey, WorkflowRecord>,
    /// Tenants that have caps.
    #[serde(default)]
    pub(crate) tenants: CountedTable<TenantName, TenantRecord>,
    /// The last scheduling policies of the nodes, oldest first; the newest is in force.
    #[serde(default)]
    pub(crate) policies: Vec<Arc<PolicyRecord>>,
    /// Long-running operations, by the version at which each began.
    #[serde(default)]
    pub(crate) operations: CountedTable<u64, OperationRecord>,
    #[serde(default)]
    pub(crate) placements: Placements,
    /// Checkpoints of live nodes. A node has no checkpoint until its first report or its first score
    /// base.
    #[serde(default)]
    pub(crate) checkpoints: CountedTable<NodeName, NodeCheckpoint>,
    #[serde(default)]
    pub(crate) index: HolderIndex,
    #[serde(default, deserialize_with = "crate::packed::map")]
    pub(crate) scores: OrdMap<FunctionKey, FunctionScore>,
    #[serde(default)]
    pub(crate) bills: BillTotals,
    /// Number of merged checkpoints. A checkpoint changes nothing that people wrote, and does not
    /// change the version.
    #[serde(default)]
    pub(crate) synced: u64,
    /// The rules in force for the next command. The header of the encoded state names them.
    #[serde(skip)]
    pub(crate) rules: RulesVersion,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The record of a deleted function or workflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RetiredName {
    pub(crate) last: Revision,
    /// The state's version at the deletion.
    pub(crate) version: u64,
}

impl State {
    /// Increments the state's version, and returns the new version as the next resource version.
    pub(crate) fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    /// Returns the cluster; `None` before the cluster is initialized.
    #[must_use]
    pub fn cluster(&self) -> Option<&ClusterRecord> {
        self.cluster.as_ref()
    }

    /// Returns the latest stamp applied.
    #[must_use]
    pub fn clock(&self) -> UnixMillis {
        self.clock
    }

    /// Returns the log index of the last command applied.
    #[must_use]
    pub fn applied_index(&self) -> u64 {
        self.applied_index
    }

    /// Returns the version, which grows by one with each change. Two states of one cluster with
    /// equal versions differ at most in their clocks, sessions and [checkpoints](Self::synced).
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    #[must_use]
    pub fn function(&self, key: &FunctionKey) -> Option<&Arc<FunctionRecord>> {
        self.functions.get(key)
    }

    /// Returns every function, by tenant and name.
    pub fn functions(&self) -> impl Iterator<Item = &Arc<FunctionRecord>> {
        self.functions.values()
    }

    #[must_use]
    pub fn functions_len(&self) -> usize {
        self.functions.len()
    }

    #[must_use]
    pub fn artifacts_len(&self) -> usize {
        self.artifacts.len()
    }

    /// Returns the functions from `bound` on, in order: the next page of a listing.
    pub fn functions_from<'a>(
        &'a self,
        bound: Bound<&FunctionKey>,
    ) -> impl Iterator<Item = &'a Arc<FunctionRecord>> + use<'a> {
        self.functions.range::<_, FunctionKey>((bound, Bound::Unbounded)).map(|(_, function)| function)
    }

    /// Returns the functions of a tenant, by name.
    pub fn functions_of<'a>(
        &'a self,
        tenant: &'a TenantName,
    ) -> impl Iterator<Item = &'a Arc<FunctionRecord>> + use<'a> {
        let functions = self.functions_from(Bound::Included(&first_key(tenant)));
        functions.take_while(move |function| function.key.tenant == *tenant)
    }

    #[must_use]
    pub fn artifact(&self, digest: &Digest) -> Option<&Arc<Artifact>> {
        self.artifacts.get(digest)
    }

    /// Returns every artifact, by digest.
    pub fn artifacts(&self) -> impl Iterator<Item = &Arc<Artifact>> {
        self.artifacts.values()
    }

    /// Returns a node, live or lost.
    #[must_use]
    pub fn node(&self, name: &NodeName) -> Option<&Arc<NodeRecord>> {
        self.nodes.get(name)
    }

    /// Returns every node, by name.
    pub fn nodes(&self) -> impl Iterator<Item = &Arc<NodeRecord>> {
        self.nodes.values()
    }

    /// Returns the slices of a node's GPUs with their functions, by function.
    pub fn slices_on<'a>(
        &'a self,
        node: &'a NodeName,
    ) -> impl Iterator<Item = (&'a FunctionKey, SliceRecord)> + use<'a> {
        let placements = self.placements.on(node).filter_map(|function| self.placements.get(function, node));
        placements.flat_map(|placement| placement.slices.iter().map(|&slice| (&placement.function, slice)))
    }

    /// Returns the highest number of a slice so far. A new slice has a higher number.
    #[must_use]
    pub fn slices_given(&self) -> SliceId {
        SliceId(self.slices_given)
    }

    /// Returns the caps on a tenant's functions.
    #[must_use]
    pub fn quota(&self, tenant: &TenantName) -> Quota {
        self.tenants.get(tenant).map_or(Quota::NONE, |tenant| tenant.quota)
    }

    /// Returns a tenant that has caps.
    #[must_use]
    pub fn tenant(&self, name: &TenantName) -> Option<&Arc<TenantRecord>> {
        self.tenants.get(name)
    }

    /// Returns every tenant that has caps, by name.
    pub fn tenants(&self) -> impl Iterator<Item = &Arc<TenantRecord>> {
        self.tenants.values()
    }

    /// Returns the scheduling policy in force; `None` if no policy was ever set.
    #[must_use]
    pub fn policy(&self) -> Option<&Arc<PolicyRecord>> {
        self.policies.last()
    }

    /// Returns the last policies, oldest first.
    pub fn policies(&self) -> impl DoubleEndedIterator<Item = &Arc<PolicyRecord>> {
        self.policies.iter()
    }

    /// Returns the memory of the largest GPU of any live node; `None` if no live node has a GPU.
    #[must_use]
    pub fn largest_gpu(&self) -> Option<Bytes> {
        let live = self.nodes.values().filter(|node| node.status == NodeStatus::Live);
        live.flat_map(|node| &node.gpus).map(|gpu| gpu.memory).max()
    }

    /// Returns the rules in force for the next command.
    #[must_use]
    pub fn rules(&self) -> RulesVersion {
        self.rules
    }
}
