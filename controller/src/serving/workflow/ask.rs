//! A call of a workflow run, and the call of a function on a worker. [`super::nested`] has the call of
//! another workflow.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_gateway::backend::{Backend as _, ModelAvailability, ModelRevision};
use millrace_proto::convert::duration_wire;
use millrace_proto::worker as wire;
use millrace_types::{Failure, FunctionKey, FunctionName, Reason};
use millrace_workflow::PrewarmHint;
use tokio::time::Instant;

use super::failure::WorkflowRunFailure;
use super::ran::ExecutionRecord;
use super::release::let_go_of;
use super::request::{Depth, WorkflowRequest};
use super::values::{ReadyPoint, RunTensor, StepCallInput};
use crate::serving::backend::ServingBackend;
use crate::serving::dispatch::DispatchedCall;
use crate::serving::tensors;

/// The time beyond the request's timeout for which a worker keeps the run's objects, because the
/// controller may be gone before the release.
const HOLD_GRACE: Duration = Duration::from_secs(5);
/// The outputs of a call, by name.
#[derive(Debug)]
pub(super) struct CallOutputs {
    pub(super) outputs: BTreeMap<String, RunTensor>,
    pub(super) attempts: u32,
}

/// A requested output of a call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RequestedOutput {
    pub(super) name: String,
    /// Whether the controller needs the output's bytes.
    pub(super) answered: bool,
}

/// A call with the context in the run.
pub(super) struct StepCall<'a> {
    pub(super) serving: &'a ServingBackend,
    pub(super) request: &'a WorkflowRequest,
    /// The record of the calls of the run that this call belongs to.
    pub(super) ran: &'a ExecutionRecord<'a>,
    /// The workflow that the call is a step of.
    pub(super) workflow: &'a FunctionKey,
    pub(super) depth: Depth,
    pub(super) wanted: Vec<RequestedOutput>,
    /// The time at which the call could begin.
    pub(super) began: ReadyPoint,
    /// The time by which the answer is due, by the workflow's objective or the step's own.
    pub(super) target: Option<Instant>,
    /// The functions that the run probably calls next.
    pub(super) next: Vec<PrewarmHint>,
}

impl StepCall<'_> {
    /// Returns the key of a function or workflow of the same tenant.
    pub(super) fn key(&self, name: FunctionName) -> FunctionKey {
        FunctionKey { tenant: self.workflow.tenant.clone(), name }
    }

    fn left(&self) -> Result<Duration, Failure> {
        let left = self.request.deadline.saturating_duration_since(Instant::now());
        let late = || Failure::new(Reason::TimedOut, "the request's timeout expired before the call began");
        Some(left).filter(|left| !left.is_zero()).ok_or_else(late)
    }

    /// Runs a function on a worker.
    pub(super) async fn function(
        self,
        name: FunctionName,
        inputs: Vec<StepCallInput>,
    ) -> Result<CallOutputs, WorkflowRunFailure> {
        self.request.call()?;
        let late = |_| Failure::new(Reason::TimedOut, "the request's timeout expired before the step's turn");
        let turn = tokio::time::timeout_at(self.request.deadline, self.request.out.acquire()).await;
        // The semaphore is never closed, so only the timeout can fail.
        let _turn = turn.map_err(late)?;
        let model = self.ready(&self.key(name.clone())).await?;
        let mut tensors = Vec::with_capacity(inputs.len());
        let mut held = Vec::new();
        let mut taken = Vec::new();
        for StepCallInput { tensor, held: its, by, bytes } in inputs {
            tensors.push(tensor);
            held.extend(its);
            taken.extend(by.map(|by| (by, bytes)));
        }
        let timeout = self.left()?;
        let answered = self.wanted.iter().filter(|it| it.answered).map(|it| it.name.clone());
        let request = wire::InvokeRequest {
            request_id: self.request.id.to_string(),
            inputs: tensors,
            outputs: self.wanted.iter().map(|it| it.name.clone()).collect(),
            priority: self.request.priority,
            // A function that keeps state cannot be a step.
            sequence: None,
            hold: Some(wire::Hold {
                time: Some(duration_wire(timeout + HOLD_GRACE)),
                answered: answered.collect(),
            }),
            next: self.serving.likely(&self.workflow.tenant, &self.next),
            ..wire::InvokeRequest::default()
        };
        let call = DispatchedCall { request, timeout, held, target: self.target };
        let answer = self.ran.by(self.serving.call(&model, call)).await?;
        if !answer.response.lost.is_empty() {
            let failure = Failure::new(Reason::DataLost, "an input of the call was lost");
            return Err(WorkflowRunFailure { failure, lost: answer.response.lost, ran: false });
        }
        let made = self.began.then(&tensors::split(&answer.response.split.unwrap_or_default()));
        let mut outputs = BTreeMap::new();
        let mut failure = None;
        for output in answer.response.outputs {
            let output_name = output.name.clone();
            match RunTensor::answered(output, &answer.worker, made, &self.serving.workflows.room) {
                Ok(value) => {
                    outputs.insert(output_name, value.by(&name));
                }
                Err(unusable) => {
                    failure.get_or_insert(unusable);
                }
            }
        }
        if let Some(failure) = failure {
            // The worker may hold the other outputs, so release those outputs.
            let_go_of(outputs.values());
            return Err(failure.into());
        }
        taken.into_iter().for_each(|(from, bytes)| self.request.passing.took(from, &name, bytes));
        Ok(CallOutputs { outputs, attempts: answer.attempts })
    }

    /// Returns the function's revision that is ready, and waits for a revision that is being prepared.
    async fn ready(&self, key: &FunctionKey) -> Result<Arc<ModelRevision>, Failure> {
        let mut model = self.serving.resolve(key, None)?;
        if model.availability.may_become_ready() {
            let awaited =
                tokio::time::timeout_at(self.request.deadline, self.serving.wait_until_ready(&model)).await;
            let late = |_| {
                Failure::new(Reason::FunctionNotReady, format!("function {key} did not become ready in time"))
            };
            model = awaited.map_err(late)??;
        }
        if model.availability == ModelAvailability::Ready { Ok(model) } else { Err(model.refusal()) }
    }
}
