//! A call of a workflow run: a function on a worker, or a nested workflow.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use millrace_gateway::backend::{Backend as _, ModelAvailability, ModelRevision};
use millrace_proto::convert::duration_wire;
use millrace_proto::worker as wire;
use millrace_types::workflow::NESTING_MAX;
use millrace_types::{Failure, FunctionKey, FunctionName, Reason, RequestId};
use millrace_workflow::PrewarmHint;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::in_order;
use super::ran::ExecutionRecord;
use super::run::{Depth, RunExpectations, WorkflowRunFailure, WorkflowRunner, let_go_of};
use super::values::{ReadyPoint, RunTensor, StepCallInput};
use crate::passed::RunTraffic;
use crate::serving::dispatch::DispatchedCall;
use crate::serving::{ServingBackend, tensors};

/// The time beyond the request's timeout for which a worker keeps the run's objects, because the
/// controller may be gone before the release.
const HOLD_GRACE: Duration = Duration::from_secs(5);
/// Concurrent function calls of a request, including nested workflows.
const OUT_MAX: usize = 64;
/// Function calls of a request in total.
const CALLS_MAX: u32 = 65_536;

/// The request that a run and its nested runs serve.
#[derive(Debug)]
pub(super) struct WorkflowRequest {
    pub(super) id: RequestId,
    pub(super) deadline: Instant,
    pub(super) priority: u64,
    /// The traffic between the called functions.
    pub(super) passing: RunTraffic,
    out: Semaphore,
    calls: AtomicU32,
}

impl WorkflowRequest {
    pub(super) fn new(id: RequestId, timeout: Duration, priority: u64) -> Self {
        let out = Semaphore::new(OUT_MAX);
        let calls = AtomicU32::new(0);
        let passing = RunTraffic::default();
        Self { id, deadline: Instant::now() + timeout, priority, passing, out, calls }
    }

    /// Counts a call; refuses calls beyond [`CALLS_MAX`].
    fn call(&self) -> Result<(), Failure> {
        if self.calls.fetch_add(1, Ordering::Relaxed) < CALLS_MAX {
            return Ok(());
        }
        let message = format!("the request needs more than {CALLS_MAX} function calls: send fewer rows");
        Err(Failure::new(Reason::InvalidInput, message))
    }
}

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
    fn key(&self, name: FunctionName) -> FunctionKey {
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
        let call = DispatchedCall {
            request_id: self.request.id.clone(),
            inputs: tensors,
            outputs: self.wanted.iter().map(|it| it.name.clone()).collect(),
            timeout,
            priority: self.request.priority,
            // A function that keeps state cannot be a step.
            sequence: None,
            hold: Some(wire::Hold {
                time: Some(duration_wire(timeout + HOLD_GRACE)),
                answered: answered.collect(),
            }),
            held,
            target: self.target,
            next: self.serving.likely(&self.workflow.tenant, &self.next),
        };
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

    /// Runs a nested workflow.
    pub(super) async fn workflow(
        self,
        name: FunctionName,
        inputs: Vec<(String, RunTensor)>,
    ) -> Result<CallOutputs, WorkflowRunFailure> {
        let key = self.key(name);
        if self.depth >= Depth(NESTING_MAX) {
            let message = format!("workflow {key} is nested more than {NESTING_MAX} levels deep");
            return Err(Failure::new(Reason::Internal, message).into());
        }
        let (way, model) = self.serving.workflow(&key)?;
        let missing = || Failure::new(Reason::Internal, format!("an input of workflow {key} is missing"));
        let mut inputs = in_order(&way.plan, inputs).ok_or_else(missing)?;
        // Some inputs may have been ready for longer, but no step inside could begin before the call.
        inputs.iter_mut().for_each(|input| input.made = self.began);
        let names = || model.outputs.iter().map(|output| output.name.clone());
        let answered =
            names().map(|name| self.wanted.contains(&RequestedOutput { name, answered: true })).collect();
        let depth = Depth(self.depth.0 + 1);
        let ran = ExecutionRecord::within(self.ran);
        // Apply the earlier of the workflow's own objective and that of the outer workflow.
        let own = model.objective.map(|slo| self.began.at + slo.deadline);
        let target = own.into_iter().chain(self.target).min();
        let wish = RunExpectations { answered, target, after: self.next };
        let runner = WorkflowRunner::new(self.serving, &key, way, self.request, &ran, depth, wish);
        let answer = runner.run(inputs).await?;
        let outputs = names().zip(answer.outputs).collect();
        Ok(CallOutputs { outputs, attempts: answer.attempts })
    }
}
