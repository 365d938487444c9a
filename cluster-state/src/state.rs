//! The replicated state, its read methods, and [`State::apply`], the single way to change the state.

use std::ops::Bound;
use std::sync::Arc;

use imbl::OrdMap;
pub use millrace_types::limits::{
    ARTIFACTS_MAX, FUNCTIONS_MAX, NODES_MAX, POLICIES_KEPT, RETIRED_MAX, REVISIONS_KEPT, TENANTS_MAX,
    WORKFLOWS_MAX, WORKFLOWS_PER_TENANT_MAX,
};
use millrace_types::{Bytes, Digest, FunctionKey, NodeName, Quota, Revision, TenantName};
use serde::{Deserialize, Serialize};

use crate::accounts::{BillTotals, FunctionScore};
use crate::checkpoint::NodeCheckpoint;
use crate::command::{CallerName, Proposal, StateCommand, UnixMillis};
use crate::commands;
use crate::index::HolderIndex;
use crate::operations::OperationRecord;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::placements::{Placements, first_key};
use crate::record::{
    Artifact, ClusterRecord, FunctionRecord, NodeRecord, NodeStatus, PolicyRecord, TenantRecord,
    WorkflowRecord,
};
use crate::rules::RulesVersion;
use crate::sessions::Sessions;
use crate::table::CountedTable;

/// The newest rules of this build. Controllers report this version in each message to each other.
pub const CLUSTER_VERSION: u64 = RulesVersion::NEWEST.0;
/// Number of a function's newest revisions that workers prepare: see [`FunctionRecord::served`].
pub const REVISIONS_SERVED: usize = 2;

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

/// The record of a deleted function or workflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RetiredName {
    pub(crate) last: Revision,
    /// The state's version at the deletion.
    pub(crate) version: u64,
}

/// The inputs of a command besides the state and the command's own fields.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CommandContext<'a> {
    pub(crate) now: UnixMillis,
    pub(crate) caller: &'a CallerName,
}

impl State {
    /// Applies the next command of the log. Several commands may share one `index`, because a log
    /// entry is a batch. The caller has [checked](Self::check_rules) that this build knows the
    /// rules.
    ///
    /// The clock advances and sessions expire even if the command is refused; a refused command
    /// changes nothing else. Debug builds check the [invariants](Self::check_invariants) after the
    /// command.
    ///
    /// # Errors
    /// The command's [`CommandRefusal`]. A refusal is an answer, and is replicated as any other answer.
    ///
    /// # Panics
    /// In debug builds, if an invariant is broken, which is a bug of this crate.
    pub fn apply(&mut self, index: u64, proposal: &Proposal) -> CommandOutcome {
        debug_assert!(index >= self.applied_index, "the log runs forward");
        self.applied_index = index;
        self.clock = self.clock.max(proposal.stamp);
        self.sessions.expire(self.clock);
        self.expire_operations();
        let outcome = self.apply_once(proposal);
        if cfg!(debug_assertions)
            && let Err(violation) = self.check_after(&proposal.command)
        {
            panic!("after {:?}: {violation}", proposal.command);
        }
        outcome
    }

    fn apply_once(&mut self, proposal: &Proposal) -> CommandOutcome {
        let Some(key) = &proposal.idempotency else { return self.carry_out(proposal) };
        let digest = proposal.command.digest();
        if let Some(answer) = self.sessions.find_answer(&proposal.caller, key, digest) {
            return answer;
        }
        let outcome = self.carry_out(proposal);
        self.sessions.store_answer(&proposal.caller, key, digest, outcome.clone(), self.clock);
        outcome
    }

    fn carry_out(&mut self, proposal: &Proposal) -> CommandOutcome {
        let outcome = match self.rules.has_quota() {
            true => self.within_quota(proposal, |state| state.carry_out_command(proposal)),
            false => self.carry_out_command(proposal),
        };
        if outcome.as_ref().is_ok_and(|applied| applied.changed()) {
            self.settle_operations();
        }
        outcome
    }

    fn carry_out_command(&mut self, proposal: &Proposal) -> CommandOutcome {
        let context = CommandContext { now: self.clock, caller: &proposal.caller };
        let begins = matches!(
            proposal.command,
            StateCommand::InitCluster { .. } | StateCommand::SetClusterVersion { .. }
        );
        if self.cluster.is_none() && !begins {
            return Err(CommandRefusal::NotInitialized);
        }
        match &proposal.command {
            StateCommand::InitCluster { cluster_id } => commands::init_cluster(self, context, cluster_id),
            StateCommand::ApplyFunction { spec, digest, expected, voters } => {
                commands::apply_function(self, context, spec, *digest, *expected, voters)
            }
            StateCommand::DeleteFunction { key, expected } => {
                commands::delete_function(self, context, key, *expected)
            }
            StateCommand::SetFunctionEnabled { key, enabled } => {
                commands::set_function_enabled(self, context, key, *enabled)
            }
            StateCommand::AddArtifact { digest, bytes, model, holder } => {
                commands::add_artifact(self, context, *digest, *bytes, model, *holder)
            }
            StateCommand::RemoveArtifact { digest, unused_since } => {
                commands::remove_artifact(self, *digest, *unused_since)
            }
            StateCommand::RegisterNode { name, instance, address, gpus, topology, host_memory, seen } => {
                let host_memory = *host_memory;
                let seen = *seen;
                let node =
                    commands::RegistrationRequest { instance, address, gpus, topology, host_memory, seen };
                commands::register_node(self, context, name, node)
            }
            StateCommand::NodeLost { name, epoch } => commands::node_lost(self, context, name, *epoch),
            StateCommand::SyncNode { node, batch } => commands::sync_node(self, node, batch),
            StateCommand::Place { function, node, reason } => {
                commands::place(self, context, function, node, *reason)
            }
            StateCommand::Unplace { function, node } => commands::unplace(self, function, node),
            StateCommand::SetNodeScheduling { name, scheduling } => {
                commands::set_node_scheduling(self, context, name, *scheduling)
            }
            StateCommand::RemoveNode { name } => commands::remove_node(self, name),
            StateCommand::RemoveArtifactHolder { digest, holder } => {
                commands::remove_artifact_holder(self, *digest, *holder)
            }
            StateCommand::SetQuota { tenant, quota } => commands::set_quota(self, context, tenant, *quota),
            StateCommand::ApplyWorkflow { spec, expected } => {
                commands::apply_workflow(self, context, spec, *expected)
            }
            StateCommand::DeleteWorkflow { key, expected } => commands::delete_workflow(self, key, *expected),
            StateCommand::SetPolicy { spec, settings, expected } => {
                commands::set_policy(self, context, *spec, settings, *expected)
            }
            StateCommand::BeginOperation { kind } => commands::begin_operation(self, context, kind),
            StateCommand::EndOperation { id, end } => commands::end_operation(self, context, *id, end),
            StateCommand::SetClusterVersion { version } => commands::set_cluster_version(self, *version),
        }
    }

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

    /// Returns the answer that [`Self::apply`] would give, and the state after the command.
    /// Changes nothing. Do not call this before a write to predict its answer: the state may have
    /// changed when the write is applied.
    pub fn dry_run(&self, proposal: &Proposal) -> (CommandOutcome, Self) {
        let mut after = self.clone();
        after.clock = after.clock.max(proposal.stamp);
        after.sessions.expire(after.clock);
        after.expire_operations();
        let outcome = after.carry_out(proposal);
        (outcome, after)
    }

    /// Admits and applies a proposal on a copy, as the leader would, and returns the copy after it.
    ///
    /// # Errors
    /// The [`CommandRefusal`] of the leader or of the command.
    pub fn admitted_dry_run(&self, proposal: &Proposal) -> Result<(CommandEffect, Self), CommandRefusal> {
        self.admit(proposal)?;
        let (outcome, after) = self.dry_run(proposal);
        Ok((outcome?, after))
    }
}

impl StateCommand {
    /// Returns the digest of the command's canonical encoding, without the parts that the leader
    /// stamps: a repeated command may arrive through another leader.
    fn digest(&self) -> Digest {
        let mut asked = self.clone();
        if let Self::ApplyFunction { voters, .. } = &mut asked {
            voters.clear();
        }
        let bytes = rmp_serde::to_vec(&asked).expect("plain data with string or integer keys encodes");
        Digest::of(&bytes)
    }
}

impl CommandEffect {
    /// Whether the command changed the state.
    #[must_use]
    pub fn changed(self) -> bool {
        !matches!(
            self,
            Self::Unchanged
                | Self::AlreadyRegistered { .. }
                | Self::SyncRepeated { .. }
                | Self::ResyncWanted { .. }
        )
    }
}
