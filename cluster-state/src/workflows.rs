//! Workflows: read methods, the check of a workflow against its functions and inner workflows,
//! and the effect of a change of those.
//!
//! The state stores each workflow with its inputs and outputs, so a workflow that runs another is
//! checked without a look inside. A change of a function or workflow is followed by a check of the
//! workflows that run it, least nested first. If the signature of such a workflow changes, the
//! workflows that run it are checked in turn.
//!
//! The users of a function or workflow are not indexed. A scan of the tenant's workflows finds
//! them, at most [`WORKFLOWS_PER_TENANT_MAX`](crate::WORKFLOWS_PER_TENANT_MAX) workflows of
//! [`STEPS_MAX`](millrace_types::limits::STEPS_MAX) steps. The scan reads the stored records in
//! place. Only commands of people need the scan; of the commands for functions, only a deletion or
//! a model with another signature does.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use millrace_types::workflow::{
    CompositionError, RunnableSignature, RunnableSignatureRef, Signature, SignatureRef, StepTarget,
};
use millrace_types::{FunctionKey, FunctionName, TenantName, WorkflowSpec};

use crate::outcome::CommandRefusal;
use crate::placements::first_key;
use crate::record::WorkflowRecord;
use crate::state::State;

/// Maximum number of workflows that a refusal names as users.
pub const USERS_NAMED_MAX: usize = 8;

/// The new signatures of a tenant's functions and workflows under a change that is being checked.
pub(crate) type ChangedFits = BTreeMap<StepTarget, RunnableSignature>;

impl From<&WorkflowRecord> for RunnableSignature {
    fn from(workflow: &WorkflowRecord) -> Self {
        Self { signature: workflow.signature.clone(), nesting: workflow.nesting, keeps_state: false }
    }
}

impl<'a> From<&'a WorkflowRecord> for RunnableSignatureRef<'a> {
    fn from(workflow: &'a WorkflowRecord) -> Self {
        Self { ports: (&workflow.signature).into(), nesting: workflow.nesting, keeps_state: false }
    }
}

/// Returns the form in which a tenant's workflows name a workflow.
pub(crate) fn workflow_run(key: &FunctionKey) -> StepTarget {
    StepTarget::Workflow(key.name.clone())
}

/// Returns the form in which a tenant's workflows name a function.
pub(crate) fn function_run(key: &FunctionKey) -> StepTarget {
    StepTarget::Function(key.name.clone())
}

impl State {
    #[must_use]
    pub fn workflow(&self, key: &FunctionKey) -> Option<&Arc<WorkflowRecord>> {
        self.workflows.get(key)
    }

    /// Returns every workflow, by tenant and name.
    pub fn workflows(&self) -> impl Iterator<Item = &Arc<WorkflowRecord>> {
        self.workflows.values()
    }

    /// Returns the workflows from `bound` on, in order: the next page of a listing.
    pub fn workflows_from<'a>(
        &'a self,
        bound: Bound<&FunctionKey>,
    ) -> impl Iterator<Item = &'a Arc<WorkflowRecord>> + use<'a> {
        self.workflows.range::<_, FunctionKey>((bound, Bound::Unbounded)).map(|(_, workflow)| workflow)
    }

    /// Returns the workflows of a tenant, by name.
    pub fn workflows_of<'a>(
        &'a self,
        tenant: &'a TenantName,
    ) -> impl Iterator<Item = &'a Arc<WorkflowRecord>> + use<'a> {
        let workflows = self.workflows_from(Bound::Included(&first_key(tenant)));
        workflows.take_while(move |workflow| workflow.key.tenant == *tenant)
    }

    /// Returns the inputs and outputs of a function's newest revision, or of a workflow; `None` if
    /// the tenant has no such function or workflow.
    #[must_use]
    pub fn signature(&self, tenant: &TenantName, run: &StepTarget) -> Option<Signature> {
        let SignatureRef { inputs, outputs } = self.fit_of(tenant, run)?.ports;
        Some(Signature { inputs: inputs.to_vec(), outputs: outputs.to_vec() })
    }

    /// Returns the functions that these runs name, or run through workflows. Each function is
    /// listed once, however often and deep it occurs, the least deep first. A listed function need
    /// not exist.
    pub fn functions_in<'a>(
        &'a self,
        tenant: &TenantName,
        runs: impl IntoIterator<Item = &'a StepTarget>,
    ) -> Vec<FunctionKey> {
        let key = |name: &FunctionName| FunctionKey { tenant: tenant.clone(), name: name.clone() };
        let mut seen = BTreeSet::new();
        let mut rest = VecDeque::from_iter(runs);
        let mut found = Vec::new();
        while let Some(run) = rest.pop_front() {
            if !seen.insert(run) {
                continue;
            }
            match run {
                StepTarget::Function(name) => found.push(key(name)),
                StepTarget::Workflow(name) => {
                    rest.extend(self.workflow(&key(name)).into_iter().flat_map(|inner| inner.spec.runs()));
                }
            }
        }
        found
    }

    /// Returns the workflows that run a function or workflow in a step of their own.
    pub(crate) fn users_of<'a>(
        &'a self,
        tenant: &'a TenantName,
        run: &'a StepTarget,
    ) -> impl Iterator<Item = &'a FunctionName> {
        let uses =
            move |workflow: &&Arc<WorkflowRecord>| workflow.spec.steps.iter().any(|step| step.run == *run);
        self.workflows_of(tenant).filter(uses).map(|workflow| &workflow.key.name)
    }

    fn fit_of(&self, tenant: &TenantName, run: &StepTarget) -> Option<RunnableSignatureRef<'_>> {
        let key = |name: &FunctionName| FunctionKey { tenant: tenant.clone(), name: name.clone() };
        match run {
            StepTarget::Function(name) => {
                let function = self.functions.get(&key(name))?;
                let latest = function.latest();
                let artifact = self.artifacts.get(&latest.digest)?;
                let keeps_state = latest.spec.sequences.is_some();
                Some(RunnableSignatureRef { ports: artifact.model.ports(), nesting: 0, keeps_state })
            }
            StepTarget::Workflow(name) => {
                self.workflows.get(&key(name)).map(|workflow| RunnableSignatureRef::from(&**workflow))
            }
        }
    }

    /// Checks a workflow against its functions and inner workflows, with the changes in
    /// `becoming`. The caller has validated the spec by itself.
    pub(crate) fn fit(
        &self,
        spec: &WorkflowSpec,
        becoming: &ChangedFits,
    ) -> Result<RunnableSignature, CompositionError> {
        spec.fit(|run| {
            becoming.get(run).map(RunnableSignature::by_ref).or_else(|| self.fit_of(&spec.key.tenant, run))
        })
    }

    /// Returns the new signatures of a tenant's workflows after the change of an existing function
    /// or workflow. No workflow that the changed `key` runs may run `key`.
    ///
    /// # Errors
    /// [`CommandRefusal::BreaksWorkflow`] for the first workflow that would not fit.
    pub(crate) fn fits_after(
        &self,
        key: &FunctionKey,
        run: StepTarget,
        fit: RunnableSignature,
    ) -> Result<ChangedFits, CommandRefusal> {
        let mut becoming = ChangedFits::new();
        if self.fit_of(&key.tenant, &run).is_none_or(|known| known == fit.by_ref()) {
            return Ok(becoming);
        }
        becoming.insert(run.clone(), fit);
        // Less nested workflows first: each workflow is checked after its inner workflows.
        let mut workflows: Vec<_> = self.workflows_of(&key.tenant).collect();
        workflows.sort_by_key(|workflow| workflow.nesting);
        for workflow in workflows {
            if !workflow.spec.steps.iter().any(|step| becoming.contains_key(&step.run)) {
                continue;
            }
            let fit =
                self.fit(&workflow.spec, &becoming).map_err(|unfit| CommandRefusal::BreaksWorkflow {
                    key: key.clone(),
                    workflow: workflow.key.clone(),
                    problem: unfit.to_string(),
                })?;
            if fit.by_ref() != RunnableSignatureRef::from(&**workflow) {
                becoming.insert(workflow_run(&workflow.key), fit);
            }
        }
        becoming.remove(&run);
        Ok(becoming)
    }

    /// Stores the new signatures of [`Self::fits_after`].
    pub(crate) fn store_fits(&mut self, tenant: &TenantName, fits: ChangedFits) {
        for (run, fit) in fits {
            let key = FunctionKey { tenant: tenant.clone(), name: run.name().clone() };
            self.workflows.change(&key, |workflow| {
                workflow.signature = fit.signature;
                workflow.nesting = fit.nesting;
            });
        }
    }
}
