//! Workflows as served by the gateway (D01): models, inputs of runs, and runs.
//!
//! The controller that receives the request drives the run. It knows the graph and the location of each
//! tensor. A step's output stays with the worker that produced it, and the next step's worker fetches
//! the output there. The controller receives only small tensors, tensors that a condition reads,
//! requested outputs, and tensors for which the worker has no capacity.
//!
//! | module | task |
//! |---|---|
//! | [`catalog`] | the workflows as models, with the plans of their runs |
//! | [`request`] | the request that a run and its nested runs serve |
//! | [`values`] | the tensors of a run, in the controller or at a worker; [`inputs`] orders the inputs |
//! | [`run`] | a run: carries out the core's actions; [`failure`] has the failure of a run |
//! | [`ask`] | one call of a run; [`nested`] calls another workflow |
//! | [`next`] | prewarming hints about the following calls |
//! | [`paces`] | durations of steps, and the SLO counts of steps with a deadline |
//! | [`scores`] | metrics of these SLO counts |
//! | [`ran`] | whether any call of a run may have run |
//! | [`release`] | releases objects at workers |

mod ask;
mod catalog;
mod failure;
mod inputs;
mod nested;
mod next;
mod paces;
mod ran;
mod release;
mod request;
mod run;
mod scores;
mod values;

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_gateway::backend::{ModelRequest, ModelResponse, ModelRevision, RequestContents};
use millrace_types::{Failure, FunctionKey, Reason};
use tokio::time::Instant;

use super::backend::ServingBackend;
use super::tensors;

pub(super) use catalog::Workflows;

use catalog::WorkflowPlan;
use failure::WorkflowRunFailure;
use inputs::in_order;
use ran::ExecutionRecord;
use request::{Depth, WorkflowRequest};
use run::{RunExpectations, WorkflowRunner};
use values::RunTensor;

impl ServingBackend {
    /// Runs a workflow once.
    pub(super) async fn invoke_workflow(
        &self,
        model: &ModelRevision,
        invocation: ModelRequest,
    ) -> Result<ModelResponse, Failure> {
        let RequestContents { inputs, outputs: requested, parameters } = invocation.contents;
        let request = WorkflowRequest::new(invocation.request_id, invocation.timeout, parameters.priority);
        let (way, model) = self.workflow(&model.key)?;
        let given = inputs.into_iter().map(|tensor| (tensor.name.clone(), RunTensor::given(tensor)));
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
        let names: Vec<&str> = match requested.as_slice() {
            [] => model.outputs.iter().map(|output| output.name.as_str()).collect(),
            asked => asked.iter().map(String::as_str).collect(),
        };
        let tensor = |name: &str| {
            let unknown = || Failure::new(Reason::InvalidOutput, format!("output {name:?} is unknown"));
            let value = outputs.remove(name).ok_or_else(unknown)?;
            tensors::received(value.whole(name)?)
        };
        let outputs = names.into_iter().map(tensor).collect::<Result<_, _>>()?;
        Ok(ModelResponse { outputs, split: answer.split, attempts: answer.attempts, served_by: None })
    }

    /// Returns the plan of a workflow, and the model with inputs and outputs.
    fn workflow(&self, key: &FunctionKey) -> Result<(WorkflowPlan, Arc<ModelRevision>), Failure> {
        let state = self.replica.state();
        let gone = || Failure::new(Reason::WorkflowNotFound, format!("workflow {key} was deleted"));
        let entry = self.workflows.entry(&self.sight(&state), key).ok_or_else(gone)?;
        Ok((entry.way.clone()?, entry.model.clone()))
    }
}
