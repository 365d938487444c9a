//! Conditions that hold after every command. The same checks serve debug builds, tests, simulations
//! and the decoding of a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use millrace_types::workflow::CompositionError;
use millrace_types::{ClusterId, Digest, FunctionKey, NodeName, SliceId};

use crate::operation_record::OperationKind;
use crate::operations::OPERATIONS_MAX;
use crate::placements::PLACEMENTS_MAX;
use crate::record::{FunctionRecord, PolicyRecord};
use crate::state::{
    ARTIFACTS_MAX, FUNCTIONS_MAX, NODES_MAX, POLICIES_KEPT, RETIRED_MAX, REVISIONS_KEPT, State, TENANTS_MAX,
    WORKFLOWS_MAX,
};

/// A broken invariant: a bug of this crate, or bytes that no build wrote.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvariantViolation {
    /// The state has contents, but the cluster has no name.
    #[error("the cluster has no name but has contents")]
    Unnamed,
    /// The cluster's name is empty.
    #[error("cluster id {0:?} is empty")]
    EmptyClusterId(ClusterId),
    /// A record is stored under another key than its own.
    #[error("{0} is stored under another key")]
    Misfiled(String),
    /// The revisions of a function are missing, out of order, or too many.
    #[error("the revisions of {0} are not 1 to {REVISIONS_KEPT} in rising order")]
    Revisions(FunctionKey),
    /// A stored spec fails validation.
    #[error("{0} has a spec that is out of range")]
    Spec(FunctionKey),
    /// A revision refers to an artifact that does not exist.
    #[error("{0} refers to artifact {1}, which is not known")]
    Dangling(FunctionKey, Digest),
    /// The reference count of an artifact is wrong.
    #[error("artifact {0} counts {1} uses and has {2}")]
    Uses(Digest, u64, u64),
    /// An artifact has no holder.
    #[error("artifact {0} has no holder")]
    NoHolder(Digest),
    /// A resource version is greater than the state's, or two resources share a version.
    #[error("{0} has resource version {1}, which is not its own")]
    Version(String, u64),
    /// An epoch was never assigned, or was assigned twice.
    #[error("node {0} has an epoch that is not its own")]
    Epoch(NodeName),
    /// A date is after the state's clock.
    #[error("{0} is dated after the clock")]
    Future(String),
    /// An existing function is also recorded as deleted.
    #[error("{0} is both an existing function and retired")]
    RetiredAndHere(FunctionKey),
    /// A function and a workflow have the same name.
    #[error("{0} is both a function and a workflow")]
    NamedTwice(FunctionKey),
    /// A workflow does not fit the functions or workflows that it runs, or a step's model does not exist.
    #[error("workflow {0} does not fit the functions and workflows that it runs: {1}")]
    Unfit(FunctionKey, CompositionError),
    /// The stored inputs, outputs or nesting of a workflow differ from those that its functions and
    /// workflows imply.
    #[error("the stored signature or nesting of workflow {0} differs from the one that its steps imply")]
    Signature(FunctionKey),
    /// The number of a workflow is not above the last number of a deleted model of its name.
    #[error("workflow {0} has a number that a deleted model of its name had")]
    Generation(FunctionKey),
    /// The state holds more records of a kind than its bound.
    #[error("the number of {0} is over its bound")]
    Unbounded(&'static str),
    /// The two orders of the placements differ.
    #[error("the placements by node differ from the placements by function")]
    Placements,
    /// A record belongs to a function or registration that does not exist.
    #[error("{0} belongs to a function, registration or placement that does not exist")]
    Stray(String),
    /// A slice has a number that was never given, or that another slice has.
    #[error("slice {0} has a number that is not its own")]
    Slice(SliceId),
    /// The data index differs from the nodes' checkpoints.
    #[error("the data index differs from the nodes' checkpoints")]
    Index,
    /// Requests were forgotten, or counted twice.
    #[error("the replicas of {0} do not add up to its score")]
    Score(FunctionKey),
    /// The two orders of the sessions differ.
    #[error("the sessions by time of use differ from the sessions by client")]
    Sessions,
}

impl State {
    /// Checks every invariant.
    ///
    /// # Errors
    /// The first [`InvariantViolation`] found.
    pub fn check_invariants(&self) -> Result<(), InvariantViolation> {
        self.check_records()?;
        self.check_soft_state()
    }

    /// Checks the records that people and processes wrote: all but the nodes' checkpoints.
    pub(crate) fn check_records(&self) -> Result<(), InvariantViolation> {
        self.check_cluster()?;
        self.check_bounds()?;
        self.check_functions()?;
        self.check_workflows()?;
        self.check_artifacts()?;
        self.check_nodes()?;
        self.check_tenants()?;
        self.check_policies()?;
        self.check_operation_records()?;
        self.check_versions()?;
        if self.sessions.is_consistent() { Ok(()) } else { Err(InvariantViolation::Sessions) }
    }

    fn check_cluster(&self) -> Result<(), InvariantViolation> {
        match &self.cluster {
            Some(cluster) if cluster.id.0.is_empty() => {
                Err(InvariantViolation::EmptyClusterId(cluster.id.clone()))
            }
            Some(cluster) if cluster.created_at > self.clock => {
                Err(InvariantViolation::Future("the cluster".into()))
            }
            Some(_) => Ok(()),
            None if self.version == 0 => Ok(()),
            None => Err(InvariantViolation::Unnamed),
        }
    }

    fn check_bounds(&self) -> Result<(), InvariantViolation> {
        let bounds = [
            ("functions", self.functions.len(), FUNCTIONS_MAX),
            ("workflows", self.workflows.len(), WORKFLOWS_MAX),
            ("artifacts", self.artifacts.len(), ARTIFACTS_MAX),
            ("nodes", self.nodes.len(), NODES_MAX),
            ("retired names", self.retired.len(), RETIRED_MAX),
            ("placements", self.placements.len(), PLACEMENTS_MAX),
            ("tenants with caps", self.tenants.len(), TENANTS_MAX),
            ("policies", self.policies.len(), POLICIES_KEPT),
            // Ended operations, and running ones: changes of the group, profiles, and one drain for each
            // node.
            ("operations", self.operations.len(), 3 * OPERATIONS_MAX + NODES_MAX),
        ];
        match bounds.into_iter().find(|(_, len, max)| len > max) {
            Some((what, _, _)) => Err(InvariantViolation::Unbounded(what)),
            None => Ok(()),
        }
    }

    fn check_functions(&self) -> Result<(), InvariantViolation> {
        for (key, function) in &self.functions {
            if *key != function.key {
                return Err(InvariantViolation::Misfiled(function.key.to_string()));
            }
            if self.retired.contains_key(key) {
                return Err(InvariantViolation::RetiredAndHere(key.clone()));
            }
            self.check_revisions(function)?;
        }
        Ok(())
    }

    fn check_revisions(&self, function: &FunctionRecord) -> Result<(), InvariantViolation> {
        let key = &function.key;
        let rising = function.revisions.windows(2).all(|pair| pair[0].number < pair[1].number);
        if !rising || !(1..=REVISIONS_KEPT).contains(&function.revisions.len()) {
            return Err(InvariantViolation::Revisions(key.clone()));
        }
        for revision in &function.revisions {
            if revision.spec.key != *key {
                return Err(InvariantViolation::Misfiled(format!("{key}@{}", revision.number)));
            }
            if revision.spec.validate().is_err() {
                return Err(InvariantViolation::Spec(key.clone()));
            }
            if !self.artifacts.contains_key(&revision.digest) {
                return Err(InvariantViolation::Dangling(key.clone(), revision.digest));
            }
            if revision.created_at > function.updated_at {
                return Err(InvariantViolation::Future(format!("{key}@{}", revision.number)));
            }
        }
        if function.created_at > function.updated_at || function.updated_at > self.clock {
            return Err(InvariantViolation::Future(key.to_string()));
        }
        Ok(())
    }

    fn check_artifacts(&self) -> Result<(), InvariantViolation> {
        let mut uses: BTreeMap<Digest, u64> = BTreeMap::new();
        for revision in self.functions.values().flat_map(|function| &function.revisions) {
            *uses.entry(revision.digest).or_default() += 1;
        }
        for (digest, artifact) in &self.artifacts {
            if *digest != artifact.digest {
                return Err(InvariantViolation::Misfiled(artifact.digest.to_string()));
            }
            let counted = uses.get(digest).copied().unwrap_or(0);
            if artifact.uses != counted {
                return Err(InvariantViolation::Uses(*digest, artifact.uses, counted));
            }
            if artifact.holders.is_empty() {
                return Err(InvariantViolation::NoHolder(*digest));
            }
            if artifact.touched_at > self.clock {
                return Err(InvariantViolation::Future(digest.to_string()));
            }
        }
        Ok(())
    }

    fn check_nodes(&self) -> Result<(), InvariantViolation> {
        let mut epochs = BTreeSet::new();
        for (name, node) in &self.nodes {
            if *name != node.name {
                return Err(InvariantViolation::Misfiled(node.name.to_string()));
            }
            let given = (1..=self.epochs_given).contains(&node.epoch.0);
            if !given || !epochs.insert(node.epoch) {
                return Err(InvariantViolation::Epoch(name.clone()));
            }
            if node.changed_at > self.clock {
                return Err(InvariantViolation::Future(name.to_string()));
            }
        }
        Ok(())
    }

    fn check_tenants(&self) -> Result<(), InvariantViolation> {
        for (name, tenant) in &self.tenants {
            // A tenant without caps has no record.
            if *name != tenant.name || tenant.quota.is_none() {
                return Err(InvariantViolation::Misfiled(format!("tenant {name}")));
            }
            if tenant.changed_at > self.clock {
                return Err(InvariantViolation::Future(format!("tenant {name}")));
            }
        }
        Ok(())
    }

    fn check_policies(&self) -> Result<(), InvariantViolation> {
        let follows = |pair: &[Arc<PolicyRecord>]| pair[0].generation + 1 == pair[1].generation;
        let first = self.policies.first().map_or(1, |it| it.generation);
        let read = self.policies.iter().all(|it| it.spec.check().is_ok());
        if first == 0 || !read || !self.policies.windows(2).all(follows) {
            return Err(InvariantViolation::Misfiled("the policy".into()));
        }
        match self.policies.last() {
            Some(last) if last.changed_at > self.clock => {
                Err(InvariantViolation::Future("the policy".into()))
            }
            _ => Ok(()),
        }
    }

    fn check_operation_records(&self) -> Result<(), InvariantViolation> {
        let mut drained = BTreeSet::new();
        for (&id, operation) in &self.operations {
            let named = || format!("operation {id}");
            if id != operation.id || id == 0 || id > self.version {
                return Err(InvariantViolation::Misfiled(named()));
            }
            let ended = operation.ended.as_ref().map_or(operation.started_at, |(at, _)| *at);
            if operation.started_at > ended || ended > self.clock {
                return Err(InvariantViolation::Future(named()));
            }
            if let OperationKind::ProfileFunction { function, .. } = &operation.kind
                && operation.is_running()
                && !self.functions.contains_key(function)
            {
                return Err(InvariantViolation::Stray(named()));
            }
            let OperationKind::DrainNode { node } = &operation.kind else { continue };
            if operation.is_running() && (self.placements.on(node).next().is_none() || !drained.insert(node))
            {
                return Err(InvariantViolation::Stray(named()));
            }
        }
        Ok(())
    }

    /// Each change has a version of its own, so no two resources can be at the same version.
    fn check_versions(&self) -> Result<(), InvariantViolation> {
        let functions = self.functions.values().map(|it| (it.key.to_string(), it.resource_version));
        let nodes = self.nodes.values().map(|it| (it.name.to_string(), it.resource_version));
        let retired = self.retired.iter().map(|(key, it)| (key.to_string(), it.version));
        let mut seen = BTreeSet::new();
        let placements = self.placements.all();
        let placements =
            placements.map(|it| (format!("{} on {}", it.function, it.node), it.resource_version));
        let tenants = self.tenants.values().map(|it| (format!("tenant {}", it.name), it.resource_version));
        let workflows =
            self.workflows.values().map(|it| (format!("workflow {}", it.key), it.resource_version));
        let policies =
            self.policies.iter().map(|it| (format!("policy {}", it.generation), it.resource_version));
        let all = functions.chain(workflows).chain(nodes).chain(retired).chain(placements).chain(tenants);
        let all = all.chain(policies);
        for (what, version) in all {
            if version == 0 || version > self.version || !seen.insert(version) {
                return Err(InvariantViolation::Version(what, version));
            }
        }
        Ok(())
    }
}
