//! One run of a workflow: carries out the actions of the core and reports the results. Dropping a run
//! cancels the calls and releases the objects at workers.

mod losses;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::{AbortHandle, Abortable, BoxFuture, FutureExt as _};
use futures::stream::FuturesUnordered;
use millrace_core::Core as _;
use millrace_gateway::backend::AnswerTimes;
use millrace_proto::worker as wire;
use millrace_types::workflow::{StepTarget, TensorSource};
use millrace_types::{Failure, FunctionKey, Reason, Timestamp};
use millrace_workflow::{
    Action, CallId, Event, ObjectiveShares, PrewarmHint, RunFailureCause, StepIndex, TensorFacts,
    TensorIndex, TensorLoss, WorkflowEngine, WorkflowGraph,
};
use tokio::time::Instant;
use tracing::Instrument as _;

use super::ask::{CallOutputs, RequestedOutput, StepCall};
use super::catalog::WorkflowPlan;
use super::failure::WorkflowRunFailure;
use super::paces::StepDurations;
use super::ran::ExecutionRecord;
use super::release::let_go_of;
use super::request::{Depth, WorkflowRequest};
use super::values::{ReadyPoint, RunTensor, StepCallInput};
use crate::serving::backend::ServingBackend;

/// The tolerance for a request's timeout by this controller's clock: the gateway counts the timeout
/// from the request's arrival, so the end may be seen this much earlier.
const OVER_EARLY: Duration = Duration::from_millis(5);

/// The expectations of a run's caller.
pub(super) struct RunExpectations {
    /// Whether the controller needs the bytes of each output, in the workflow's order.
    pub(super) answered: Vec<bool>,
    /// The time by which the answer is due, by the workflow's objective.
    pub(super) target: Option<Instant>,
    /// The functions that probably read the run's outputs.
    pub(super) after: Vec<PrewarmHint>,
}

/// The outputs of a run.
#[derive(Debug)]
pub(super) struct WorkflowResponse {
    /// The outputs in the workflow's order.
    pub(super) outputs: Vec<RunTensor>,
    /// The latency breakdown of the longest path.
    pub(super) split: AnswerTimes,
    /// The largest number of attempts of a single call.
    pub(super) attempts: u32,
}

/// The result of a call.
struct CallResult {
    call: CallId,
    result: Result<CallOutputs, WorkflowRunFailure>,
}

/// A call in progress.
struct Out {
    step: StepIndex,
    row: Option<u64>,
    outputs: Vec<TensorIndex>,
    /// The time at which the call could begin.
    began: Instant,
    /// The objects that the call reads, with the tensor that each is part of.
    takes: Vec<(TensorLoss, wire::DataId)>,
    abort: AbortHandle,
}

/// A run in progress.
pub(super) struct WorkflowRunner<'a> {
    serving: &'a ServingBackend,
    workflow: &'a FunctionKey,
    request: &'a WorkflowRequest,
    ran: &'a ExecutionRecord<'a>,
    depth: Depth,
    /// The time by which the answer is due, by the workflow's objective.
    target: Option<Instant>,
    /// The functions that probably read the run's outputs.
    after: Vec<PrewarmHint>,
    paces: Arc<StepDurations>,
    shares: ObjectiveShares,
    /// Whether the controller needs the bytes of each output.
    answered: Vec<bool>,
    engine: WorkflowEngine,
    values: Vec<Option<RunTensor>>,
    /// The time at which each tensor was last ready. Conditions are evaluated by this after the release
    /// of the tensors.
    made: Vec<Option<ReadyPoint>>,
    /// The calls made so far: a repeated call follows a loss.
    called: BTreeSet<(StepIndex, Option<u64>)>,
    /// The time of the last loss.
    lost_at: Option<Instant>,
    calls: FuturesUnordered<Abortable<BoxFuture<'a, CallResult>>>,
    out: BTreeMap<CallId, Out>,
    attempts: u32,
    /// The time of the last answer, with the latency breakdown until then.
    reached: ReadyPoint,
    /// The failure of the last failed call.
    failure: Option<Failure>,
    /// Lost objects among the run's inputs.
    lost: Vec<wire::DataId>,
}

impl<'a> WorkflowRunner<'a> {
    pub(super) fn new(
        serving: &'a ServingBackend,
        workflow: &'a FunctionKey,
        WorkflowPlan { plan, paces }: WorkflowPlan,
        request: &'a WorkflowRequest,
        ran: &'a ExecutionRecord<'a>,
        depth: Depth,
        RunExpectations { answered, target, after }: RunExpectations,
    ) -> Self {
        let values = vec![None; plan.slots().len()];
        let made = vec![None; plan.slots().len()];
        let shares = paces.shares(&plan);
        Self {
            serving,
            workflow,
            request,
            ran,
            depth,
            target,
            after,
            paces,
            shares,
            answered,
            engine: WorkflowEngine::new(plan),
            values,
            made,
            called: BTreeSet::new(),
            lost_at: None,
            calls: FuturesUnordered::new(),
            out: BTreeMap::new(),
            attempts: 1,
            reached: ReadyPoint { at: Instant::now(), split: AnswerTimes::default() },
            failure: None,
            lost: Vec::new(),
        }
    }

    /// Runs the workflow on these inputs, given in the workflow's order.
    pub(super) async fn run(self, inputs: Vec<RunTensor>) -> Result<WorkflowResponse, WorkflowRunFailure> {
        let ran = self.ran;
        let result = self.drive(inputs).await;
        // `drive` has dropped the remaining calls by now, so `ran` includes them.
        result.map_err(|ended| WorkflowRunFailure { ran: ended.ran || ran.get(), ..ended })
    }

    async fn drive(mut self, inputs: Vec<RunTensor>) -> Result<WorkflowResponse, WorkflowRunFailure> {
        let plan = self.engine.plan().clone();
        let facts =
            inputs.iter().enumerate().map(|(at, value)| value.facts(plan.is_condition(TensorIndex(at))));
        let mut events = vec![Event::Begin { inputs: facts.collect() }];
        for (at, value) in inputs.into_iter().enumerate() {
            self.made[at] = Some(value.made);
            self.values[at] = Some(value);
        }
        loop {
            for event in events {
                if let Some(over) = self.tell(event) {
                    return over;
                }
            }
            events = match self.calls.next().await {
                Some(Ok(called)) => self.back(called),
                // An abandoned call has no result.
                Some(Err(_aborted)) => Vec::new(),
                None => return Err(self.stuck().into()),
            };
        }
    }

    /// Returns the failure of a run whose core neither waits nor has ended, which is a bug.
    fn stuck(&self) -> Failure {
        Failure::new(Reason::Internal, format!("workflow {} stopped making progress", self.workflow))
            .after_execution()
    }

    /// Passes an event to the core and carries out the resulting actions. Returns the outcome once the
    /// run has ended.
    fn tell(&mut self, event: Event) -> Option<Result<WorkflowResponse, WorkflowRunFailure>> {
        let mut actions = Vec::new();
        // The core uses no timers, so the time does not matter.
        self.engine.on_event(Timestamp::ZERO, event, &mut actions);
        let mut over = None;
        for action in actions {
            match action {
                Action::Call { call, step, row, inputs, outputs } => {
                    if let Err(failure) = self.call(call, (step, row), &inputs, outputs) {
                        return Some(Err(self.failed(step, row, failure)));
                    }
                }
                Action::Empty { slot } => {
                    let made = self.reached;
                    self.made[slot.0] = Some(made);
                    let tensor = self.engine.plan().slot(slot).tensor.clone();
                    self.values[slot.0] = tensor.map(|tensor| RunTensor::empty(&tensor, made));
                }
                Action::Release { slot } => {
                    if let Some(value) = self.values[slot.0].take() {
                        let_go_of([&value]);
                    }
                }
                Action::Abandon { call } => {
                    if let Some(out) = self.out.remove(&call) {
                        self.give_up(&out);
                        out.abort.abort();
                    }
                }
                Action::Answer { outputs } => over = Some(self.answer(&outputs)),
                Action::Fail { step, row, cause } => {
                    let failure = self.failure.take().unwrap_or_else(|| refusal(cause));
                    over = Some(Err(self.failed(step, row, failure)));
                }
            }
        }
        over
    }

    fn answer(&mut self, slots: &[TensorIndex]) -> Result<WorkflowResponse, WorkflowRunFailure> {
        let values = slots.iter().map(|slot| self.values[slot.0].clone());
        let outputs = values.collect::<Option<Vec<_>>>().ok_or_else(|| self.stuck())?;
        // The caller owns these values now, so the run must not release their objects.
        for slot in slots {
            self.values[slot.0] = None;
        }
        let last = outputs.iter().map(|value| value.made).reduce(ReadyPoint::later);
        let split = last.map(|made| made.split).unwrap_or_default();
        Ok(WorkflowResponse { outputs, split, attempts: self.attempts })
    }

    /// Returns the error of a run, with the failed step and the reason.
    fn failed(&mut self, step: StepIndex, row: Option<u64>, failure: Failure) -> WorkflowRunFailure {
        let name = &self.engine.plan().step(step).name;
        let row = row.map(|row| format!(" for row {row}")).unwrap_or_default();
        let at = format!("step {:?} of workflow {}{row}", name.as_str(), self.workflow);
        let failure = Failure { message: format!("{at}: {}", failure.message), ..failure };
        WorkflowRunFailure { lost: std::mem::take(&mut self.lost), ..failure.into() }
    }

    /// Starts a call.
    fn call(
        &mut self,
        call: CallId,
        (step, row): (StepIndex, Option<u64>),
        inputs: &[TensorIndex],
        outputs: Vec<TensorIndex>,
    ) -> Result<(), Failure> {
        let plan = self.engine.plan().clone();
        let planned = plan.step(step);
        let mut given = Vec::with_capacity(inputs.len());
        for (at, (slot, (name, _))) in inputs.iter().zip(&planned.inputs).enumerate() {
            let value = self.values[slot.0].as_ref().ok_or_else(|| self.stuck())?;
            given.push((name.clone(), value, row.filter(|_| planned.each == Some(at))));
        }
        let mut takes = Vec::new();
        for slot in inputs {
            let held = self.values[slot.0].iter().flat_map(RunTensor::held);
            takes.extend(
                held.map(|(row, held)| (TensorLoss { slot: *slot, row: Some(row) }, held.id.clone())),
            );
        }
        let again = self.called.contains(&(step, row));
        let began = self.began(inputs, planned.when, again);
        let wanted = outputs.iter().map(|slot| RequestedOutput {
            name: output_name(&plan, *slot),
            answered: self.is_answered(&plan, *slot),
        });
        let left = self.target.map(|target| target.saturating_duration_since(began.at));
        let within = self.shares.within(&plan, step, left);
        // With many rows, the hint of the first row is enough.
        let next = match row {
            None | Some(0) => self.serving.ahead(&self.workflow.tenant, &plan, step, &self.after),
            Some(_) => Vec::new(),
        };
        let ask = StepCall {
            serving: self.serving,
            request: self.request,
            ran: self.ran,
            workflow: self.workflow,
            depth: self.depth,
            wanted: wanted.collect(),
            began,
            target: within.map(|within| began.at + within),
            next,
        };
        let span = tracing::info_span!(
            "step",
            millrace.step = %planned.name,
            millrace.workflow = %self.workflow,
            millrace.row = row,
        );
        let made: BoxFuture<'a, Result<CallOutputs, WorkflowRunFailure>> = match &planned.run {
            StepTarget::Function(name) => ask.function(name.clone(), sent(given)?).boxed(),
            StepTarget::Workflow(name) => ask.workflow(name.clone(), rows(given)?).boxed(),
        };
        let called = async move { CallResult { call, result: made.await } };
        let (abort, registration) = AbortHandle::new_pair();
        self.calls.push(Abortable::new(called.instrument(span).boxed(), registration));
        self.called.insert((step, row));
        self.out.insert(call, Out { step, row, outputs, began: began.at, takes, abort });
        Ok(())
    }

    /// Returns the time at which a call could begin: when all inputs were ready and the condition was
    /// known. A repeated call could not begin before the loss that caused the repeat.
    fn began(&self, inputs: &[TensorIndex], when: Option<TensorIndex>, again: bool) -> ReadyPoint {
        let now = || ReadyPoint { at: Instant::now(), split: AnswerTimes::default() };
        let made = inputs.iter().chain(&when).filter_map(|slot| self.made[slot.0]);
        let began = made.reduce(ReadyPoint::later).unwrap_or_else(now);
        let at = self.lost_at.filter(|_| again).map_or(began.at, |lost_at| lost_at.max(began.at));
        ReadyPoint { at, ..began }
    }

    /// Whether the controller needs an output's bytes. Outputs of a nested workflow stay at the worker,
    /// except an output that is used twice, because an object has a single owner.
    fn is_answered(&self, plan: &WorkflowGraph, slot: TensorIndex) -> bool {
        let given = plan.outputs().iter().zip(&self.answered).filter(|(output, _)| **output == slot);
        let (times, asked) =
            given.fold((0, false), |(times, asked), (_, wanted)| (times + 1, asked | wanted));
        plan.is_condition(slot) || asked || times > 1
    }

    /// Handles a call's end, and returns the events for the core; none for an abandoned call.
    fn back(&mut self, CallResult { call, result }: CallResult) -> Vec<Event> {
        let Some(out) = self.out.remove(&call) else { return Vec::new() };
        let ended = match result.and_then(|made| self.take(&out, made)) {
            Ok(facts) => {
                self.paces.answered(out.step, out.began.elapsed());
                return vec![Event::Done { call, outputs: facts }];
            }
            Err(ended) => ended,
        };
        self.paces.failed(out.step, ended.failure.reason);
        // A partly executed workflow that is not idempotent is not run again.
        let again = self.engine.plan().step(out.step).is_idempotent || !ended.ran;
        let lost = if again { self.losses(out.takes, &ended.lost) } else { Vec::new() };
        self.failure = Some(ended.failure).filter(|_| lost.is_empty());
        let with_them = self.dead();
        if !lost.is_empty() || !with_them.is_empty() {
            self.lost_at = Some(Instant::now());
        }
        let mut events = vec![Event::Failed { call, lost }];
        if !with_them.is_empty() {
            events.push(Event::Lost { lost: with_them });
        }
        events
    }

    /// Counts an abandoned call: as timed out if the request's time is over, and otherwise not at all,
    /// as for functions.
    fn give_up(&self, out: &Out) {
        if Instant::now() + OVER_EARLY >= self.request.deadline {
            self.paces.failed(out.step, Reason::TimedOut);
        }
    }

    /// Stores the outputs of a call, and returns the facts that the core needs.
    fn take(&mut self, out: &Out, made: CallOutputs) -> Result<Vec<TensorFacts>, WorkflowRunFailure> {
        self.attempts = self.attempts.max(made.attempts);
        let plan = self.engine.plan().clone();
        let mut values = made.outputs;
        let mut facts = Vec::with_capacity(out.outputs.len());
        for slot in &out.outputs {
            let name = output_name(&plan, *slot);
            let Some(value) = values.remove(&name) else {
                let_go_of(values.values());
                let message = format!("output {name:?} is missing from the answer");
                return Err(Failure::new(Reason::Internal, message).after_execution().into());
            };
            self.reached = self.reached.later(value.made);
            self.made[slot.0] = Some(self.made[slot.0].map_or(value.made, |before| before.later(value.made)));
            facts.push(value.facts(plan.is_condition(*slot)));
            match (&mut self.values[slot.0], out.row) {
                (Some(joined), Some(row)) => joined.put(row, value),
                (empty, row) => *empty = Some(value.at(row.unwrap_or(0))),
            }
        }
        // A nested workflow may return more outputs than this run uses, so release the rest.
        let_go_of(values.values());
        Ok(facts)
    }
}

/// Converts the core's reason for ending a run.
fn refusal(cause: RunFailureCause) -> Failure {
    let reason = match cause {
        RunFailureCause::TooManyRows { .. } | RunFailureCause::Unread => Reason::InvalidInput,
        RunFailureCause::Changed { .. } => Reason::InvalidOutput,
        RunFailureCause::DataLost | RunFailureCause::Failed => Reason::DataLost,
    };
    Failure::new(reason, cause.to_string())
}

/// Releases the run's objects at workers after any outcome. A caller that drops the run while calls are
/// in progress may be the first to notice the request's timeout.
impl Drop for WorkflowRunner<'_> {
    fn drop(&mut self) {
        self.out.values().for_each(|out| self.give_up(out));
        let inputs = self.engine.plan().inputs().len();
        let_go_of(self.values.iter().skip(inputs).flatten());
    }
}

fn output_name(plan: &WorkflowGraph, slot: TensorIndex) -> String {
    match &plan.slot(slot).source {
        TensorSource::Step { output, .. } | TensorSource::Input(output) => output.clone(),
    }
}

type Given<'v> = Vec<(String, &'v RunTensor, Option<u64>)>;

fn sent(given: Given<'_>) -> Result<Vec<StepCallInput>, Failure> {
    given.into_iter().map(|(name, value, row)| value.sent(&name, row)).collect()
}

fn rows(given: Given<'_>) -> Result<Vec<(String, RunTensor)>, Failure> {
    let one = |(name, value, row): (String, &RunTensor, Option<u64>)| {
        let value = match row {
            None => value.clone(),
            Some(row) => value.row_value(&name, row)?,
        };
        Ok((name, value))
    };
    given.into_iter().map(one).collect()
}
