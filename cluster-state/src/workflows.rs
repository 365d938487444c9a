//! Workflows: how they are read, whether one fits what it runs, and what a change of that makes of it.
//!
//! A workflow is kept with what it takes and gives, so that one that runs it is checked without
//! looking inside. When something changes that workflows run, those are checked again, the least
//! nested first, and in turn those that run one whose signature became another.
//!
//! Who runs what is not indexed: it is found by a scan of the tenant's workflows, at most
//! [`WORKFLOWS_PER_TENANT_MAX`](crate::WORKFLOWS_PER_TENANT_MAX) of
//! [`STEPS_MAX`](millrace_types::limits::STEPS_MAX) steps. What they run is looked at where it lies. Only what people write needs it, and of functions only a deletion or a model with another
//! signature.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use millrace_types::workflow::{Fit, FitError, FitRef, Ports, Run, Signature};
use millrace_types::{FunctionKey, FunctionName, TenantName, WorkflowSpec};

use crate::outcome::Refusal;
use crate::placements::first_key;
use crate::record::Workflow;
use crate::state::State;

/// The most workflows that a refusal names when something is in use.
pub const USERS_NAMED_MAX: usize = 8;

/// What functions and workflows of one tenant are to become.
pub(crate) type Fits = BTreeMap<Run, Fit>;

impl From<&Workflow> for Fit {
    fn from(workflow: &Workflow) -> Self {
        Self { signature: workflow.signature.clone(), nesting: workflow.nesting, keeps_state: false }
    }
}

impl<'a> From<&'a Workflow> for FitRef<'a> {
    fn from(workflow: &'a Workflow) -> Self {
        Self { ports: (&workflow.signature).into(), nesting: workflow.nesting, keeps_state: false }
    }
}

/// How a tenant's workflows name another.
pub(crate) fn workflow_run(key: &FunctionKey) -> Run {
    Run::Workflow(key.name.clone())
}

/// How a tenant's workflows name a function.
pub(crate) fn function_run(key: &FunctionKey) -> Run {
    Run::Function(key.name.clone())
}

impl State {
    /// One workflow.
    #[must_use]
    pub fn workflow(&self, key: &FunctionKey) -> Option<&Arc<Workflow>> {
        self.workflows.get(key)
    }

    /// Every workflow, by tenant and name.
    pub fn workflows(&self) -> impl Iterator<Item = &Arc<Workflow>> {
        self.workflows.values()
    }

    /// The workflows from `bound` on, in order: a listing's next page.
    pub fn workflows_from<'a>(
        &'a self,
        bound: Bound<&FunctionKey>,
    ) -> impl Iterator<Item = &'a Arc<Workflow>> + use<'a> {
        self.workflows.range::<_, FunctionKey>((bound, Bound::Unbounded)).map(|(_, workflow)| workflow)
    }

    /// The workflows of one tenant, by name.
    pub fn workflows_of<'a>(
        &'a self,
        tenant: &'a TenantName,
    ) -> impl Iterator<Item = &'a Arc<Workflow>> + use<'a> {
        let workflows = self.workflows_from(Bound::Included(&first_key(tenant)));
        workflows.take_while(move |workflow| workflow.key.tenant == *tenant)
    }

    /// What a function, in its newest revision, or a workflow of a tenant takes and gives; `None` if
    /// there is no such thing.
    #[must_use]
    pub fn signature(&self, tenant: &TenantName, run: &Run) -> Option<Signature> {
        let Ports { inputs, outputs } = self.fit_of(tenant, run)?.ports;
        Some(Signature { inputs: inputs.to_vec(), outputs: outputs.to_vec() })
    }

    /// The functions that these are or come to run: each once, however often and how deep, the least
    /// deep first. They need not be there.
    pub fn functions_in<'a>(
        &'a self,
        tenant: &TenantName,
        runs: impl IntoIterator<Item = &'a Run>,
    ) -> Vec<FunctionKey> {
        let key = |name: &FunctionName| FunctionKey { tenant: tenant.clone(), name: name.clone() };
        let (mut seen, mut rest) = (BTreeSet::new(), VecDeque::from_iter(runs));
        let mut found = Vec::new();
        while let Some(run) = rest.pop_front() {
            if !seen.insert(run) {
                continue;
            }
            match run {
                Run::Function(name) => found.push(key(name)),
                Run::Workflow(name) => {
                    rest.extend(self.workflow(&key(name)).into_iter().flat_map(|inner| inner.spec.runs()));
                }
            }
        }
        found
    }

    /// The workflows that run it in a step of their own.
    pub(crate) fn users_of<'a>(
        &'a self,
        tenant: &'a TenantName,
        run: &'a Run,
    ) -> impl Iterator<Item = &'a FunctionName> {
        let uses = move |workflow: &&Arc<Workflow>| workflow.spec.steps.iter().any(|step| step.run == *run);
        self.workflows_of(tenant).filter(uses).map(|workflow| &workflow.key.name)
    }

    fn fit_of(&self, tenant: &TenantName, run: &Run) -> Option<FitRef<'_>> {
        let key = |name: &FunctionName| FunctionKey { tenant: tenant.clone(), name: name.clone() };
        match run {
            Run::Function(name) => {
                let function = self.functions.get(&key(name))?;
                let latest = function.latest();
                let artifact = self.artifacts.get(&latest.digest)?;
                let keeps_state = latest.spec.sequences.is_some();
                Some(FitRef { ports: artifact.model.ports(), nesting: 0, keeps_state })
            }
            Run::Workflow(name) => self.workflows.get(&key(name)).map(|workflow| FitRef::from(&**workflow)),
        }
    }

    /// Checks a workflow against what it runs, as that is or is to become. Trusts the spec to be
    /// valid by itself.
    pub(crate) fn fit(&self, spec: &WorkflowSpec, becoming: &Fits) -> Result<Fit, FitError> {
        spec.fit(|run| becoming.get(run).map(Fit::by_ref).or_else(|| self.fit_of(&spec.key.tenant, run)))
    }

    /// What becomes of a tenant's workflows when one function or workflow that exists becomes
    /// another. No workflow that `key` is to run may run `key`.
    ///
    /// # Errors
    /// [`Refusal::BreaksWorkflow`], of the first that would not fit.
    pub(crate) fn fits_after(&self, key: &FunctionKey, run: Run, fit: Fit) -> Result<Fits, Refusal> {
        let mut becoming = Fits::new();
        if self.fit_of(&key.tenant, &run).is_none_or(|known| known == fit.by_ref()) {
            return Ok(becoming);
        }
        becoming.insert(run.clone(), fit);
        // Each after those that it runs.
        let mut workflows: Vec<_> = self.workflows_of(&key.tenant).collect();
        workflows.sort_by_key(|workflow| workflow.nesting);
        for workflow in workflows {
            if !workflow.spec.steps.iter().any(|step| becoming.contains_key(&step.run)) {
                continue;
            }
            let fit = self.fit(&workflow.spec, &becoming).map_err(|unfit| Refusal::BreaksWorkflow {
                key: key.clone(),
                workflow: workflow.key.clone(),
                problem: unfit.to_string(),
            })?;
            if fit.by_ref() != FitRef::from(&**workflow) {
                becoming.insert(workflow_run(&workflow.key), fit);
            }
        }
        becoming.remove(&run);
        Ok(becoming)
    }

    /// Lets workflows become what [`Self::fits_after`] said.
    pub(crate) fn take_fits(&mut self, tenant: &TenantName, fits: Fits) {
        for (run, fit) in fits {
            let key = FunctionKey { tenant: tenant.clone(), name: run.name().clone() };
            self.workflows.change(&key, |workflow| {
                workflow.signature = fit.signature;
                workflow.nesting = fit.nesting;
            });
        }
    }
}
