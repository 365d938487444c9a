//! The workflows as the gateway shows them, with the plans of their runs.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use millrace_cluster_state::{FunctionRecord, State, WORKFLOWS_MAX, WorkflowRecord};
use millrace_gateway::backend::{Kind, ModelAvailability, ModelRevision};
use millrace_types::workflow::StepTarget;
use millrace_types::{Bytes, Failure, FunctionKey, Reason, TenantName};
use millrace_workflow::WorkflowGraph;
use prometheus_client::registry::Registry;

use super::paces::StepDurations;
use super::scores::StepSloMetrics;
use super::values::RunByteBudget;
use crate::fleet::readiness;
use crate::passed::TrafficMatrix;
use crate::serving::catalog::{CatalogInputs, availability};

/// Bytes of tensors of all runs in the controller, except tensors that arrived with the requests.
const ANSWERED_BYTES_MAX: Bytes = Bytes::gib(1);

/// A workflow as of the last look-up.
#[derive(Debug)]
pub(super) struct Entry {
    /// The versions of the state and of the fleet at that time.
    seen: (u64, u64),
    pub(super) model: Arc<ModelRevision>,
    /// The plan for runs, or the reason why the workflow cannot run.
    pub(super) way: Result<WorkflowPlan, Failure>,
}

/// The plan of a workflow, with the durations of the steps.
#[derive(Debug, Clone)]
pub(super) struct WorkflowPlan {
    pub(super) plan: Arc<WorkflowGraph>,
    pub(super) paces: Arc<StepDurations>,
}

impl WorkflowPlan {
    /// Returns the durations if the steps of `plan` are the same. Comparing generations is not enough:
    /// the generations of a deleted workflow's name begin again at 1 after the state forgets the
    /// workflow.
    fn paces_of(&self, plan: &WorkflowGraph) -> Option<Arc<StepDurations>> {
        let own = self.plan.steps().iter().map(|step| (&step.name, step.deadline));
        own.eq(plan.steps().iter().map(|step| (&step.name, step.deadline))).then(|| self.paces.clone())
    }
}

/// The workflows looked up so far. Every request reads the map and only changes write, so a read-write
/// lock guards the map.
#[derive(Debug)]
pub(in crate::serving) struct Workflows {
    entries: RwLock<HashMap<FunctionKey, Arc<Entry>>>,
    /// The byte budget for the answers of steps.
    pub(super) room: RunByteBudget,
    scores: StepSloMetrics,
    /// The traffic counts of finished runs.
    pub(super) passed: TrafficMatrix,
}

impl Workflows {
    /// Returns an empty set, which adds the traffic of runs to `passed`.
    pub(in crate::serving) fn new(passed: TrafficMatrix) -> Self {
        let room = RunByteBudget::new(ANSWERED_BYTES_MAX);
        Self { entries: RwLock::default(), room, scores: StepSloMetrics::default(), passed }
    }

    /// Returns a workflow as a model; `None` if no workflow has this name.
    pub(in crate::serving) fn resolve(
        &self,
        sight: &CatalogInputs<'_>,
        key: &FunctionKey,
    ) -> Option<Arc<ModelRevision>> {
        Some(self.entry(sight, key)?.model.clone())
    }

    /// Returns every workflow of a tenant, ordered by name.
    pub(in crate::serving) fn index(
        &self,
        sight: &CatalogInputs<'_>,
        tenant: &TenantName,
    ) -> Vec<Arc<ModelRevision>> {
        let keys = sight.state.workflows_of(tenant).map(|workflow| &workflow.key);
        keys.filter_map(|key| self.resolve(sight, key)).collect()
    }

    /// Returns a workflow as of now; `None` if no workflow has this name.
    pub(super) fn entry(&self, sight: &CatalogInputs<'_>, key: &FunctionKey) -> Option<Arc<Entry>> {
        let workflow = sight.state.workflow(key)?;
        // Read the versions before the workers, so that a change in between causes a new entry.
        let seen = (sight.state.version(), sight.fleet.version());
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let ready = |entry: &&Arc<Entry>| entry.model.availability == ModelAvailability::Ready;
        // An unready entry is made again at each request, because the reason also depends on
        // placements.
        if let Some(entry) = entries.get(key).filter(|entry| entry.seen == seen).filter(ready) {
            return Some(entry.clone());
        }
        let before = entries.get(key).filter(|entry| entry.model.revision == workflow.generation).cloned();
        drop(entries);
        let way = plan(sight.state, workflow).map(|plan| {
            let paces = before.and_then(|entry| entry.way.as_ref().ok()?.paces_of(&plan));
            WorkflowPlan {
                paces: paces.unwrap_or_else(|| Arc::new(self.paces(sight.state, key, &plan))),
                plan,
            }
        });
        let entry = Arc::new(Entry { seen, model: Arc::new(model(sight, workflow)), way });
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= WORKFLOWS_MAX {
            entries.retain(|key, _| sight.state.workflow(key).is_some());
        }
        entries.insert(key.clone(), entry.clone());
        Some(entry)
    }

    /// Registers the metrics of all steps.
    pub(in crate::serving) fn show_steps(&self, registry: &mut Registry) {
        self.scores.register(registry);
    }

    /// Returns the initial durations of a workflow without finished runs.
    fn paces(&self, state: &State, key: &FunctionKey, plan: &WorkflowGraph) -> StepDurations {
        self.scores.make_room(|workflow, step| {
            let step = state.workflow(workflow).and_then(|workflow| workflow.spec.step(step));
            step.is_some_and(|step| step.deadline.is_some())
        });
        StepDurations::new(plan, |step| self.scores.of(key, step))
    }
}

fn model(sight: &CatalogInputs<'_>, workflow: &WorkflowRecord) -> ModelRevision {
    let workers = sight.fleet.workers();
    let shortages = sight.outlook.shortages();
    let availability = match readiness::of_workflow(sight.state, workflow, &workers, &shortages) {
        None => ModelAvailability::Ready,
        Some((name, readiness)) => {
            let of_it = availability(readiness);
            let why = || format!("function {name}: {}", of_it.obstacle().unwrap_or_default());
            match of_it {
                // A workflow cannot be unloaded itself, so a disabled function makes the workflow
                // unavailable.
                ModelAvailability::Disabled | ModelAvailability::Unavailable(_) => {
                    ModelAvailability::Unavailable(why())
                }
                ModelAvailability::Away(_) => ModelAvailability::Away(why()),
                ModelAvailability::Preparing | ModelAvailability::Ready => of_it,
            }
        }
    };
    ModelRevision {
        key: workflow.key.clone(),
        revision: workflow.generation,
        revisions: vec![workflow.generation],
        kind: Kind::Workflow,
        inputs: workflow.signature.inputs.clone(),
        outputs: workflow.signature.outputs.clone(),
        timeout: workflow.spec.timeout,
        objective: workflow.spec.slo,
        // The functions of the workflow decide for each call whether a repeat is safe.
        idempotent: true,
        sequences: None,
        weights: Bytes::ZERO,
        availability,
    }
}

fn plan(state: &State, workflow: &WorkflowRecord) -> Result<Arc<WorkflowGraph>, Failure> {
    let tenant = &workflow.key.tenant;
    let signatures: BTreeMap<&StepTarget, _> = workflow
        .spec
        .runs()
        .into_iter()
        .filter_map(|run| Some((run, state.signature(tenant, run)?)))
        .collect();
    let idempotent = |run: &StepTarget| is_idempotent(state, tenant, run);
    let plan = WorkflowGraph::new(&workflow.spec, |run| signatures.get(run), idempotent);
    // The state keeps the functions of a workflow usable, so this error is a bug.
    plan.map(Arc::new).map_err(|error| {
        Failure::new(Reason::Internal, format!("workflow {} cannot be run: {error}", workflow.key))
    })
}

/// Whether repeating the run is safe in every revision that may be called.
fn is_idempotent(state: &State, tenant: &TenantName, run: &StepTarget) -> bool {
    let twice = |function: &Arc<FunctionRecord>| function.served().iter().all(|it| it.spec.idempotent);
    state.functions_in(tenant, [run]).iter().all(|key| state.function(key).is_some_and(twice))
}
