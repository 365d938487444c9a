//! Workflows as served by the gateway (D01): models, inputs of runs, and runs.
//!
//! The controller that receives the request drives the run. It knows the graph and the location of each
//! tensor. A step's output stays with the worker that produced it, and the next step's worker fetches
//! the output there. The controller receives only small tensors, tensors that a condition reads,
//! requested outputs, and tensors for which the worker has no capacity.
//!
//! | module | task |
//! |---|---|
//! | [`values`] | the tensors of a run, in the controller or at a worker |
//! | [`run`] | a run: carries out the core's actions |
//! | [`ask`] | one call of a run |
//! | [`next`] | prewarming hints about the following calls |
//! | [`paces`] | durations of steps, and the SLO counts of steps with a deadline |
//! | [`scores`] | metrics of these SLO counts |
//! | [`ran`] | whether any call of a run may have run |

mod ask;
mod next;
mod paces;
mod ran;
mod run;
mod scores;
#[cfg(test)]
mod tests;
mod values;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use millrace_cluster_state::{FunctionRecord, State, WORKFLOWS_MAX, WorkflowRecord};
use millrace_gateway::backend::{Kind, ModelAvailability, ModelRequest, ModelResponse, ModelRevision};
use millrace_proto::worker as wire;
use millrace_types::workflow::{StepTarget, TensorSource};
use millrace_types::{Bytes, Failure, FunctionKey, Reason, TenantName};
use millrace_workflow::{GraphTensor, WorkflowGraph};
use tokio::time::Instant;

use super::catalog::{CatalogInputs, availability};
use super::{ServingBackend, tensors};
use crate::fleet::{AttachedWorker, readiness};
use crate::passed::TrafficMatrix;
pub(crate) use scores::register as show_steps;

use ask::WorkflowRequest;
use paces::StepDurations;
use ran::ExecutionRecord;
use run::{Depth, RunExpectations, WorkflowRunFailure, WorkflowRunner};
use scores::StepSloMetrics;
use values::{RunByteBudget, RunTensor};

/// Bytes of tensors of all runs in the controller, except tensors that arrived with the requests.
const ANSWERED_BYTES_MAX: Bytes = Bytes::gib(1);

/// A workflow as of the last look-up.
#[derive(Debug)]
struct Entry {
    /// The versions of the state and of the fleet at that time.
    seen: (u64, u64),
    model: Arc<ModelRevision>,
    /// The plan for runs, or the reason why the workflow cannot run.
    way: Result<WorkflowPlan, Failure>,
}

/// The plan of a workflow, with the durations of the steps.
#[derive(Debug, Clone)]
struct WorkflowPlan {
    plan: Arc<WorkflowGraph>,
    paces: Arc<StepDurations>,
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
pub(super) struct Workflows {
    entries: RwLock<HashMap<FunctionKey, Arc<Entry>>>,
    /// The byte budget for the answers of steps.
    room: RunByteBudget,
    scores: StepSloMetrics,
    /// The traffic counts of finished runs.
    passed: TrafficMatrix,
}

impl Workflows {
    /// Returns an empty set, which adds the traffic of runs to `passed`.
    pub(super) fn new(passed: TrafficMatrix) -> Self {
        let room = RunByteBudget::new(ANSWERED_BYTES_MAX);
        Self { entries: RwLock::default(), room, scores: StepSloMetrics::default(), passed }
    }

    /// Returns a workflow as a model; `None` if no workflow has this name.
    pub(super) fn resolve(&self, sight: &CatalogInputs<'_>, key: &FunctionKey) -> Option<Arc<ModelRevision>> {
        Some(self.entry(sight, key)?.model.clone())
    }

    /// Returns every workflow of a tenant, ordered by name.
    pub(super) fn index(&self, sight: &CatalogInputs<'_>, tenant: &TenantName) -> Vec<Arc<ModelRevision>> {
        let keys = sight.state.workflows_of(tenant).map(|workflow| &workflow.key);
        keys.filter_map(|key| self.resolve(sight, key)).collect()
    }

    fn entry(&self, sight: &CatalogInputs<'_>, key: &FunctionKey) -> Option<Arc<Entry>> {
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

/// Returns the inputs of a run in the plan's order; `None` if an input is missing.
fn in_order(
    plan: &WorkflowGraph,
    given: impl IntoIterator<Item = (String, RunTensor)>,
) -> Option<Vec<RunTensor>> {
    let mut given: BTreeMap<String, RunTensor> = given.into_iter().collect();
    let input = |slot: &GraphTensor| match &slot.source {
        TensorSource::Input(name) => given.remove(name),
        TensorSource::Step { .. } => None,
    };
    plan.inputs().iter().map(input).collect()
}

impl ServingBackend {
    /// Runs a workflow once.
    pub(super) async fn invoke_workflow(
        &self,
        model: &ModelRevision,
        invocation: ModelRequest,
    ) -> Result<ModelResponse, Failure> {
        let request = WorkflowRequest::new(invocation.request_id, invocation.timeout, invocation.priority);
        let (way, model) = self.workflow(&model.key)?;
        let given =
            invocation.inputs.into_iter().map(|tensor| (tensor.name.clone(), RunTensor::given(tensor)));
        // The workflow may have changed since the gateway checked the inputs.
        let changed = || {
            let message = format!("workflow {} has just changed: send the request again", model.key);
            Failure::new(Reason::FunctionNotReady, message)
        };
        let inputs = in_order(&way.plan, given).ok_or_else(changed)?;
        let answered = vec![true; way.plan.outputs().len()];
        let ran = ExecutionRecord::default();
        let target = model.objective.map(|slo| Instant::now() + slo.deadline);
        let wish = RunExpectations { answered, target, after: Vec::new() };
        let runner = WorkflowRunner::new(self, &model.key, way, &request, &ran, Depth::TOP, wish);
        let told = |ended: WorkflowRunFailure| Failure { may_have_executed: ended.ran, ..ended.failure };
        let answer = runner.run(inputs).await.map_err(told)?;
        self.workflows.passed.ran(&model.key, model.revision, request.passing);
        let mut outputs: BTreeMap<&str, RunTensor> =
            model.outputs.iter().map(|output| output.name.as_str()).zip(answer.outputs).collect();
        let names: Vec<&str> = match invocation.outputs.as_slice() {
            [] => model.outputs.iter().map(|output| output.name.as_str()).collect(),
            asked => asked.iter().map(String::as_str).collect(),
        };
        let tensor = |name: &str| {
            let unknown = || Failure::new(Reason::InvalidOutput, format!("output {name:?} is unknown"));
            let value = outputs.remove(name).ok_or_else(unknown)?;
            tensors::received(value.whole(name)?)
        };
        let outputs = names.into_iter().map(tensor).collect::<Result<_, _>>()?;
        Ok(ModelResponse { outputs, split: answer.split, attempts: answer.attempts })
    }

    /// Returns the plan of a workflow, and the model with inputs and outputs.
    fn workflow(&self, key: &FunctionKey) -> Result<(WorkflowPlan, Arc<ModelRevision>), Failure> {
        let state = self.replica.state();
        let gone = || Failure::new(Reason::WorkflowNotFound, format!("workflow {key} was deleted"));
        let entry = self.workflows.entry(&self.sight(&state), key).ok_or_else(gone)?;
        Ok((entry.way.clone()?, entry.model.clone()))
    }

    /// Asks a worker to release objects, without waiting. If the request is lost, the objects expire.
    fn release(worker: Arc<AttachedWorker>, ids: Vec<wire::DataId>) {
        // Without a runtime the process is ending.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            let request = wire::ReleaseObjectsRequest { ids };
            let released = worker.calls.release_objects(tonic::Request::new(request));
            if let Ok(Err(status)) = tokio::time::timeout(RELEASE_PATIENCE, released).await {
                tracing::debug!(worker = %worker.name, %status, "cannot ask a worker to release objects");
            }
        });
    }
}

/// The timeout of a release request.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);
