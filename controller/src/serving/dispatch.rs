//! Sends one request to a worker. The worker handles the loss of an executor; this module handles the
//! loss of a worker. A request of an idempotent function then goes to another worker, within the
//! client's timeout and [`ATTEMPTS_MAX`]. A request that a full worker refuses is sent to a few others
//! only (`nodes::retries`). Dropping a dispatch cancels the call.

use std::convert::Infallible;
use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use millrace_gateway::backend::ModelRevision;
use millrace_nodes::retries::OTHER_WORKERS_MAX;
use millrace_proto::convert::duration_wire;
use millrace_proto::status::from_status;
use millrace_proto::{trace, worker as wire};
use millrace_types::{Bytes, Failure, Reason, RevisionKey};
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Status};
use tracing::Instrument as _;

use super::backend::ServingBackend;
use super::route;
use super::runs::RevisionEstimates;
use super::tensors;
use crate::fleet::AttachedWorker;

/// Attempts of one request over all workers.
const ATTEMPTS_MAX: u32 = 3;

/// The outcome of an attempt without an answer.
#[derive(Debug)]
enum AttemptFailure {
    /// The worker answered with a failure, which is final.
    Failed(Failure),
    /// The worker did not begin the request, so another worker may.
    Declined(Failure),
    /// The worker was lost.
    Lost(Failure),
}

/// A call of a function, for a request or for a step of a workflow.
#[derive(Debug)]
pub(super) struct DispatchedCall {
    /// The request for a worker. Each attempt adds the function's name, its own number and the times
    /// that are left.
    pub(super) request: wire::InvokeRequest,
    pub(super) timeout: Duration,
    /// The workers that hold inputs of the call, with the bytes of each.
    pub(super) held: Vec<(Arc<AttachedWorker>, Bytes)>,
    /// The time by which the answer is due; `None` applies the function's own objective.
    pub(super) target: Option<Instant>,
}

/// The answer to a call.
#[derive(Debug)]
pub(super) struct CallResponse {
    pub(super) response: wire::InvokeResponse,
    pub(super) worker: Arc<AttachedWorker>,
    /// Attempts, including the answered attempt.
    pub(super) attempts: u32,
}

impl ServingBackend {
    /// Runs a function on a worker.
    pub(super) async fn call(
        &self,
        model: &ModelRevision,
        call: DispatchedCall,
    ) -> Result<CallResponse, Failure> {
        let key = RevisionKey { function: model.key.clone(), revision: model.revision };
        let run = self.runs.of(&key);
        CallDispatcher::new(self, model, key, &run, call).run().await
    }
}

/// A request in progress.
struct CallDispatcher<'a> {
    serving: &'a ServingBackend,
    model: &'a ModelRevision,
    /// The requested revision.
    key: RevisionKey,
    run: &'a RevisionEstimates,
    call: DispatchedCall,
    deadline: Instant,
    /// Attempts made so far.
    attempts: u32,
    /// Refusals by workers without capacity.
    refusals: u32,
    /// The tried workers, compared by process: a worker that only lost the stream counts as tried.
    tried: Vec<Arc<AttachedWorker>>,
    /// Whether a lost attempt may have run.
    may_have_executed: bool,
}

impl<'a> CallDispatcher<'a> {
    pub(super) fn new(
        serving: &'a ServingBackend,
        model: &'a ModelRevision,
        key: RevisionKey,
        run: &'a RevisionEstimates,
        call: DispatchedCall,
    ) -> Self {
        let deadline = Instant::now() + call.timeout;
        run.count_request();
        Self {
            serving,
            model,
            key,
            run,
            call,
            deadline,
            attempts: 0,
            refusals: 0,
            tried: Vec::new(),
            may_have_executed: false,
        }
    }

    /// Runs the request to the end.
    pub(super) async fn run(mut self) -> Result<CallResponse, Failure> {
        let result = self.attempt_all().await;
        // An earlier attempt may have run, regardless of the last attempt's outcome.
        result.map_err(|failure| Failure {
            may_have_executed: failure.may_have_executed || self.may_have_executed,
            ..failure
        })
    }

    async fn attempt_all(&mut self) -> Result<CallResponse, Failure> {
        let mut worker = self.choose().ok_or_else(|| self.no_worker())?;
        loop {
            self.attempts += 1;
            self.tried.push(worker.clone());
            worker = match self.attempt(&worker).await {
                Ok(response) => return Ok(self.answer(response, worker)),
                Err(AttemptFailure::Failed(failure)) => return Err(failure),
                Err(AttemptFailure::Declined(failure)) => {
                    // The worker did not begin the request, so the attempt does not count.
                    self.attempts -= 1;
                    self.after_decline(failure).await?
                }
                Err(AttemptFailure::Lost(failure)) => {
                    self.may_have_executed |= failure.may_have_executed;
                    self.after_loss(&worker, failure).await?
                }
            };
        }
    }

    fn choose(&self) -> Option<Arc<AttachedWorker>> {
        let candidates = self.serving.candidates(&self.key)?;
        let tried = |worker: &AttachedWorker| self.tried.iter().any(|tried| tried.is_process_of(worker));
        let runs = self.run.estimates();
        route::choose(&candidates, &runs, |worker| self.missing(worker), tried)
    }

    /// Returns the input bytes that a worker would have to fetch from other workers.
    fn missing(&self, worker: &AttachedWorker) -> Bytes {
        let others = self.call.held.iter().filter(|(holder, _)| !holder.is_process_of(worker));
        // Workers send these numbers, so the sum may overflow.
        Bytes(others.map(|(_, bytes)| bytes.get()).fold(0, u64::saturating_add))
    }

    fn no_worker(&self) -> Failure {
        Failure::new(Reason::NoWorker, format!("no worker can serve {} now: try again soon", self.key))
    }

    /// Returns the next worker for a declined request. If the worker is shutting down, waits for
    /// another worker, because the function will be placed elsewhere.
    async fn after_decline(&mut self, failure: Failure) -> Result<Arc<AttachedWorker>, Failure> {
        if is_overload(failure.reason) {
            return self.after_overload(failure);
        }
        if failure.reason != Reason::ShuttingDown {
            return self.choose().ok_or(failure);
        }
        timeout_at(self.deadline, self.another()).await.map_err(|_| failure)
    }

    /// Returns the next worker for a request that a worker without capacity refused. Only a few other
    /// workers are asked: when all are full, each further attempt is wasted load.
    fn after_overload(&mut self, failure: Failure) -> Result<Arc<AttachedWorker>, Failure> {
        self.refusals += 1;
        if self.refusals > OTHER_WORKERS_MAX {
            return Err(failure);
        }
        let Some(other) = self.choose() else { return Err(failure) };
        // Take the retry credit last, so that a request without another worker does not consume it.
        if self.run.take_retry() { Ok(other) } else { Err(failure) }
    }

    /// Returns the next worker for a request that lost a worker. Waits for a worker: a supervisor may
    /// restart the process, or only the stream may be lost.
    async fn after_loss(
        &self,
        lost: &AttachedWorker,
        failure: Failure,
    ) -> Result<Arc<AttachedWorker>, Failure> {
        tracing::warn!(worker = %lost.name, request = %self.call.request.request_id, function = %self.key, error = failure.message, "worker lost under a request");
        if failure.may_have_executed && !self.model.idempotent {
            return Err(failure);
        }
        if self.attempts >= ATTEMPTS_MAX {
            let message = format!(
                "{} attempts on different workers were lost, the last with: {}",
                self.attempts, failure.message
            );
            return Err(Failure { reason: Reason::AttemptsExhausted, message, retryable: true, ..failure });
        }
        timeout_at(self.deadline, self.another()).await.map_err(|_| Failure {
            reason: Reason::TimedOut,
            message: format!("worker {} was lost, and no other worker became available in time", lost.name),
            retryable: true,
            ..failure
        })
    }

    /// Waits for a worker that was not tried yet.
    async fn another(&self) -> Arc<AttachedWorker> {
        let mut fleet = self.serving.fleet.changes();
        let mut state = self.serving.replica.changes();
        // Placements matter only to functions that keep state, so other functions do not wake at every
        // commit.
        let keeps_state = self.model.sequences.is_some();
        loop {
            if let Some(worker) = self.choose() {
                return worker;
            }
            let changed = tokio::select! {
                changed = fleet.changed() => changed,
                changed = state.changed(), if keeps_state => changed,
            };
            if changed.is_err() {
                std::future::pending::<Infallible>().await;
            }
        }
    }

    async fn attempt(&self, worker: &Arc<AttachedWorker>) -> Result<wire::InvokeResponse, AttemptFailure> {
        let span = tracing::info_span!(
            "attempt",
            otel.kind = "client",
            millrace.attempt = self.attempts,
            millrace.worker = %worker.name,
        );
        let result = self.ask(worker).instrument(span.clone()).await;
        if let Ok(answer) = &result {
            trace::add_attributes(&span, || {
                let served_by = worker.served_by(tensors::gpu_of(self.model, answer));
                vec![trace::KeyValue::new("millrace.served_by", served_by.to_string())]
            });
        }
        if let Err(
            AttemptFailure::Declined(failure)
            | AttemptFailure::Lost(failure)
            | AttemptFailure::Failed(failure),
        ) = &result
        {
            trace::fail(&span, &failure.message);
        }
        result
    }

    async fn ask(&self, worker: &Arc<AttachedWorker>) -> Result<wire::InvokeResponse, AttemptFailure> {
        let _in_flight = worker.begin();
        let mut request = Request::new(self.request());
        trace::inject(request.metadata_mut());
        tokio::select! {
            biased;
            answer = worker.calls.invoke(request) => answer.map(tonic::Response::into_inner).map_err(|status| missed(worker, &status)),
            () = self.abandoned(worker), if self.model.idempotent => {
                let message = format!("worker {} is lost, as far as this controller knows", worker.name);
                Err(AttemptFailure::Lost(Failure::new(Reason::NoWorker, message).after_execution()))
            }
        }
    }

    /// Waits until the worker's stream has ended or the worker is presumed lost, and another process
    /// can take the request. Until then the answer may still arrive: a lost stream does not always mean
    /// a lost worker.
    async fn abandoned(&self, worker: &AttachedWorker) {
        worker.gone().await;
        let mut changes = self.serving.fleet.changes();
        while self.choose().is_none_or(|other| other.is_process_of(worker)) {
            if changes.changed().await.is_err() {
                std::future::pending::<Infallible>().await;
            }
        }
    }

    fn request(&self) -> wire::InvokeRequest {
        let left = self.deadline.saturating_duration_since(Instant::now());
        wire::InvokeRequest {
            attempt: self.attempts,
            // The number of attempts left includes this one.
            attempts_left: ATTEMPTS_MAX + 1 - self.attempts,
            tenant: self.key.function.tenant.to_string(),
            function: self.key.function.name.to_string(),
            revision: self.key.revision.get(),
            timeout: Some(duration_wire(left)),
            objective_micros: self.call.target.map(|target| {
                let left = target.saturating_duration_since(Instant::now());
                u64::try_from(left.as_micros()).unwrap_or(u64::MAX)
            }),
            // Cloning shares the tensors' bytes.
            ..self.call.request.clone()
        }
    }

    fn answer(&self, response: wire::InvokeResponse, worker: Arc<AttachedWorker>) -> CallResponse {
        if let Some(split) = &response.split {
            self.run.took(&worker.machine, Duration::from_nanos(split.run_ns));
        }
        // Add the lost attempts and the attempts that the answering worker made itself.
        let attempts = self.attempts - 1 + response.attempts.max(1);
        CallResponse { response, worker, attempts }
    }
}

/// Classifies the failure of an attempt. A status with a source was made locally: the connection could
/// not be opened, or broke.
fn missed(worker: &AttachedWorker, status: &Status) -> AttemptFailure {
    if let Some(source) = status.source() {
        let failure = Failure::new(Reason::NoWorker, format!("worker {} is lost: {source}", worker.name));
        let sent = !caused_by_connecting(source);
        return AttemptFailure::Lost(if sent { failure.after_execution() } else { failure });
    }
    let failure = from_status(status);
    let declined = matches!(
        failure.reason,
        Reason::QueueFull
            | Reason::ByteBudgetExceeded
            | Reason::NoGpuMemory
            | Reason::ShuttingDown
            | Reason::FunctionNotReady
            | Reason::FunctionNotFound
            | Reason::RevisionNotFound
    );
    if declined && !failure.may_have_executed {
        AttemptFailure::Declined(failure)
    } else {
        AttemptFailure::Failed(failure)
    }
}

/// Whether a worker refused a request only because other requests use its capacity at the moment.
fn is_overload(reason: Reason) -> bool {
    matches!(reason, Reason::QueueFull | Reason::ByteBudgetExceeded)
}

fn caused_by_connecting(mut error: &(dyn std::error::Error + 'static)) -> bool {
    while !error.is::<tonic::ConnectError>() {
        let Some(source) = error.source() else { return false };
        error = source;
    }
    true
}
