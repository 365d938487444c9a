//! Workflows: how they are read, whether one fits what it runs, and what a change of that makes of it.
//!
//! A workflow is kept with what it takes and gives, so that one that runs it is checked without
//! looking inside. When something changes that workflows run, those are checked again, the least
//! nested first, and in turn those that run one whose signature became another.
//!
//! Who runs what is not indexed: it is found by a scan of the tenant's workflows, at most
//! [`WORKFLOWS_PER_TENANT_MAX`](crate::WORKFLOWS_PER_TENANT_MAX) of
//! [`STEPS_MAX`](millrace_types::workflow::STEPS_MAX) steps. What they run is looked at where it lies. Only what people write needs it, and of functions only a deletion or a model with another
//! signature.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use millrace_types::workflow::{CheckError, NESTING_MAX, Ports, Run, Signature};
use millrace_types::{FunctionKey, FunctionName, TenantName, WorkflowSpec};

use crate::outcome::Refusal;
use crate::placements::first_key;
use crate::record::Workflow;
use crate::state::State;

/// The most workflows that a refusal names when something is in use.
pub const USERS_NAMED_MAX: usize = 8;

/// Why a workflow cannot run what it runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// One of its edges.
    #[error(transparent)]
    Check(#[from] Box<CheckError>),
    /// Workflows too deep in workflows.
    #[error(
        "{run} has workflows {nesting} deep in it: in another they would lie deeper than {NESTING_MAX}; run what is in it instead"
    )]
    TooDeep {
        /// What it runs that is deep.
        run: Run,
        /// How deep workflows lie in that.
        nesting: u32,
    },
}

/// What a function or workflow is to a workflow that runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fit {
    pub(crate) signature: Signature,
    /// How deep workflows lie in it.
    pub(crate) nesting: u32,
}

/// The same, wherever it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FitRef<'a> {
    ports: Ports<'a>,
    nesting: u32,
}

/// What functions and workflows of one tenant are to become.
pub(crate) type Fits = BTreeMap<Run, Fit>;

impl Fit {
    pub(crate) fn of(workflow: &Workflow) -> Self {
        Self { signature: workflow.signature.clone(), nesting: workflow.nesting }
    }

    fn by_ref(&self) -> FitRef<'_> {
        FitRef { ports: (&self.signature).into(), nesting: self.nesting }
    }

    pub(crate) fn of_function(signature: Signature) -> Self {
        Self { signature, nesting: 0 }
    }
}

impl<'a> FitRef<'a> {
    fn of(workflow: &'a Workflow) -> Self {
        Self { ports: (&workflow.signature).into(), nesting: workflow.nesting }
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

    /// How many workflows there are.
    #[must_use]
    pub fn workflows_len(&self) -> usize {
        self.workflows.len()
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
                let artifact = self.artifacts.get(&function.latest().digest)?;
                Some(FitRef { ports: artifact.model.ports(), nesting: 0 })
            }
            Run::Workflow(name) => self.workflows.get(&key(name)).map(|workflow| FitRef::of(workflow)),
        }
    }

    /// Checks a workflow against what it runs, as that is or is to become. Trusts the spec to be
    /// valid by itself.
    pub(crate) fn fit(&self, spec: &WorkflowSpec, becoming: &Fits) -> Result<Fit, FitError> {
        let mut known: BTreeMap<&Run, Ports<'_>> = BTreeMap::new();
        let mut nesting = 0;
        for run in spec.runs() {
            let fit = becoming.get(run).map(Fit::by_ref).or_else(|| self.fit_of(&spec.key.tenant, run));
            // What is not there is for the check to name, with its step.
            let Some(fit) = fit else { continue };
            if matches!(run, Run::Workflow(_)) {
                if u64::from(fit.nesting) >= NESTING_MAX as u64 {
                    return Err(FitError::TooDeep { run: run.clone(), nesting: fit.nesting });
                }
                nesting = nesting.max(fit.nesting + 1);
            }
            known.insert(run, fit.ports);
        }
        let signature = spec.check(|run| known.get(run).copied()).map_err(Box::new)?;
        Ok(Fit { signature, nesting })
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
            if fit.by_ref() != FitRef::of(workflow) {
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
            if let Some(workflow) = self.workflows.get_mut(&key) {
                let workflow = Arc::make_mut(workflow);
                (workflow.signature, workflow.nesting) = (fit.signature, fit.nesting);
            }
        }
    }
}
