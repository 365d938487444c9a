//! The gRPC `Worker` service. A gateway's request becomes an [`Attempt`] for the actors, and
//! their answer becomes a response ([`running`]). Every request is checked here, once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millrace_proto::activity::Activity;
use millrace_proto::log::{Page, Query};
use millrace_proto::status::to_status;
use millrace_proto::trace::wire::Spans;
use millrace_proto::trace::{self, FinishedSpan, SpanRing};
use millrace_proto::{convert, logs, worker as wire};
use millrace_transport::PortLimits;
use millrace_types::{Bytes, Failure, Reason, Revision, RevisionKey};
use tokio::sync::{Semaphore, watch};
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::activity::WorkerIdentity;
use crate::handle::NodeHandle;
use crate::host_tier::gate::HostMemoryGate;
use crate::objects::{ChunkStream, GatherError, ObjectStore};
use crate::prewarming::HintFollower;
use crate::request::Attempt;
use crate::sequences::{SequenceManager, SequenceTurn};
use crate::signature::{FunctionSignature, Signatures};
pub use crate::tensors;

pub use crate::faults::InjectedFaults;

use self::budget::ServiceByteBudget;

mod budget;
mod faults;
mod rerun;
mod response;
mod running;
mod sequence;
mod trial;

pub use self::trial::run_trial;

/// The limits of a worker's service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceLimits {
    /// Maximum size of one request or response.
    pub message: Bytes,
    /// Maximum bytes of the inputs of all requests in flight.
    pub in_flight: Bytes,
    /// Limits of the connections to the worker's port.
    pub port: PortLimits,
}

impl Default for ServiceLimits {
    fn default() -> Self {
        Self { message: Bytes::mib(256), in_flight: Bytes::gib(1), port: PortLimits::new(1_024) }
    }
}

/// The service. Clones share the state.
#[derive(Debug, Clone)]
pub struct WorkerService {
    node: NodeHandle,
    signatures: watch::Receiver<Arc<Signatures>>,
    gate: HostMemoryGate,
    budget: Arc<ServiceByteBudget>,
    /// Maximum bytes of the tensors of one answer.
    message_max: Bytes,
    faults: InjectedFaults,
    draining: Arc<AtomicBool>,
    place: WorkerIdentity,
    kept: Option<SpanRing>,
    objects: ObjectStore,
    hints: Option<HintFollower>,
    sequences: SequenceManager,
    /// A trial of a profile holds the only permit.
    trials: Arc<Semaphore>,
}

impl WorkerService {
    /// Returns the service of the functions that `signatures` names. Requests wait at `gate` until
    /// their models are in host memory.
    #[must_use]
    pub(crate) fn new(
        node: NodeHandle,
        place: WorkerIdentity,
        signatures: watch::Receiver<Arc<Signatures>>,
        gate: HostMemoryGate,
        objects: ObjectStore,
        limits: ServiceLimits,
        faults: InjectedFaults,
    ) -> Self {
        let budget = Arc::new(ServiceByteBudget::new(limits.in_flight));
        let sequences = SequenceManager::new(signatures.clone(), objects.clone());
        Self {
            node,
            signatures,
            gate,
            budget,
            message_max: limits.message,
            faults,
            draining: Arc::default(),
            place,
            kept: None,
            objects,
            hints: None,
            sequences,
            trials: Arc::new(Semaphore::new(1)),
        }
    }

    /// Returns this service with the process's span store, which answers `GetSpans`.
    #[must_use]
    pub fn showing(self, kept: Option<SpanRing>) -> Self {
        Self { kept, ..self }
    }

    /// Returns this service with prewarming: the service follows the hints of requests.
    pub(crate) fn following(self, hints: HintFollower) -> Self {
        Self { hints: Some(hints), ..self }
    }

    /// Returns the sequences of the served functions.
    pub(crate) fn sequences(&self) -> &SequenceManager {
        &self.sequences
    }

    /// Waits until this worker holds no objects.
    pub(crate) async fn emptied(&self) {
        self.objects.wait_until_empty().await;
    }

    /// Refuses every request from now on.
    pub fn refuse(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.gate.close();
    }

    async fn run(&self, request: wire::InvokeRequest) -> Result<wire::InvokeResponse, Failure> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Failure::new(
                Reason::ShuttingDown,
                "the worker is shutting down: ask another worker",
            ));
        }
        let _held = self.budget.take(self.objects.copied(&request.inputs))?;
        let revision = revision_key(&request)?;
        let signature = self.signature(&revision)?;
        tensors::check(&request.inputs, &request.outputs, &signature)?;
        match &signature.state {
            None => self.run_on(request, revision, &signature, None).await,
            Some(state) => self.run_in_sequence(request, revision, &signature, state).await,
        }
    }

    /// Runs a checked request. A request of a sequence runs on the sequence's state, through its
    /// `turn`.
    async fn run_on(
        &self,
        mut request: wire::InvokeRequest,
        revision: RevisionKey,
        signature: &FunctionSignature,
        turn: Option<&mut SequenceTurn>,
    ) -> Result<wire::InvokeResponse, Failure> {
        let hold = request.hold.take();
        let hints = std::mem::take(&mut request.next);
        let behind = turn.as_deref().map_or(Duration::ZERO, SequenceTurn::waited);
        let came = turn.as_deref().map(SequenceTurn::came);
        let (keep, state) = match (&turn, &hold) {
            (Some(turn), _) => (turn.outputs(), turn.inputs()),
            (None, Some(hold)) => (kept_outputs(hold, &request.outputs, signature), Vec::new()),
            (None, None) => (Vec::new(), Vec::new()),
        };
        let ready = self.invocation(request, came, revision, signature.reader, state).await;
        let (mut invocation, gathered) = match ready {
            Ok(ready) => ready,
            Err(GatherError::Failed(failure)) => return Err(failure),
            Err(GatherError::Lost(ids)) => return Ok(response::lost(&ids)),
        };
        invocation.on_gpus.keep = keep;
        let held = self.gate.enter(signature.digest, invocation.timeout).await?;
        // Follow the hints only now. A prewarmed model must not evict this request's model or be
        // loaded earlier, and a refused request must not prewarm anything.
        if let Some(follows) = &self.hints {
            invocation.next = follows.follow(&invocation.revision.function.tenant, &hints);
        }
        if !held.waited().is_zero() {
            let past = FinishedSpan { ago: Duration::ZERO, took: held.waited() };
            trace::record_finished(&tracing::Span::current(), "cold start", past, Vec::new);
        }
        // The timeout counts from the request's arrival, so the wait in the sequence is added.
        let timeout = invocation.timeout + behind;
        let invocation = Attempt { timeout, cold: held.waited(), behind, ..invocation };
        self.answered(invocation, gathered, hold, turn).await
    }

    fn signature(&self, revision: &RevisionKey) -> Result<Arc<FunctionSignature>, Failure> {
        self.signatures.borrow().get(revision).cloned().ok_or_else(|| {
            let message = format!("{revision} is not ready on this worker: try again soon");
            Failure::new(Reason::FunctionNotReady, message)
        })
    }
}

#[tonic::async_trait]
impl wire::worker_server::Worker for WorkerService {
    async fn invoke(
        &self,
        request: Request<wire::InvokeRequest>,
    ) -> Result<Response<wire::InvokeResponse>, Status> {
        let parent = trace::extract(request.metadata());
        let request = request.into_inner();
        let span = tracing::info_span!(
            "worker.invoke",
            otel.kind = "server",
            millrace.request.id = request.request_id,
            millrace.function = %format_args!("{}/{}", request.tenant, request.function),
            millrace.revision = request.revision,
            millrace.attempt = request.attempt,
        );
        trace::adopt(&span, parent);
        let result = self.run(request).instrument(span.clone()).await;
        result.map(Response::new).map_err(|failure| {
            trace::fail(&span, &failure.message);
            to_status(&failure)
        })
    }

    async fn run_trial(
        &self,
        request: Request<wire::RunTrialRequest>,
    ) -> Result<Response<wire::RunTrialResponse>, Status> {
        let result = self.trial(request.into_inner()).await;
        result.map(Response::new).map_err(|failure| to_status(&failure))
    }

    async fn inject_fault(
        &self,
        request: Request<wire::InjectFaultRequest>,
    ) -> Result<Response<wire::InjectFaultResponse>, Status> {
        let done = self.inject(request.into_inner()).await;
        done.map(|()| Response::new(wire::InjectFaultResponse {})).map_err(|failure| to_status(&failure))
    }

    async fn get_spans(&self, request: Request<wire::GetSpansRequest>) -> Result<Response<Spans>, Status> {
        let spans = self.kept.as_ref().map(|kept| kept.find(&request.get_ref().id));
        Ok(Response::new(Spans { spans: spans.unwrap_or_default() }))
    }

    async fn get_logs(&self, request: Request<Query>) -> Result<Response<Page>, Status> {
        Ok(Response::new(logs::local_page(request.get_ref())))
    }

    async fn release_objects(
        &self,
        request: Request<wire::ReleaseObjectsRequest>,
    ) -> Result<Response<wire::ReleaseObjectsResponse>, Status> {
        let ids = request.into_inner().ids;
        let ids = ids.iter().map(convert::data_id).collect::<Result<Vec<_>, _>>();
        let ids = ids.map_err(|failure| to_status(&failure))?;
        let objects = self.objects.clone();
        // The release runs to its end even if the caller stops waiting.
        let released = tokio::spawn(async move { objects.release(&ids).await }).await;
        released.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(wire::ReleaseObjectsResponse {}))
    }

    async fn get_activity(
        &self,
        request: Request<wire::GetActivityRequest>,
    ) -> Result<Response<Activity>, Status> {
        Ok(Response::new(self.place.activity(&self.node.snapshot().await, &request.get_ref().tenant)))
    }
}

#[tonic::async_trait]
impl wire::worker_objects_server::WorkerObjects for WorkerService {
    type FetchObjectStream = ChunkStream;

    async fn fetch_object(
        &self,
        request: Request<wire::FetchObjectRequest>,
    ) -> Result<Response<ChunkStream>, Status> {
        let chunks = self.objects.serve(request.into_inner());
        chunks.map(Response::new).map_err(|failure| to_status(&failure))
    }
}

/// Returns the outputs that the request wants stored as objects.
fn kept_outputs(hold: &wire::Hold, asked: &[String], signature: &FunctionSignature) -> Vec<String> {
    let all = || signature.outputs.iter().map(|output| output.name.clone()).collect();
    let outputs: Vec<String> = if asked.is_empty() { all() } else { asked.to_vec() };
    outputs.into_iter().filter(|output| !hold.answered.contains(output)).collect()
}

fn revision_key(request: &wire::InvokeRequest) -> Result<RevisionKey, Failure> {
    revision_of(&request.tenant, &request.function, request.revision)
}

fn revision_of(tenant: &str, function: &str, revision: u64) -> Result<RevisionKey, Failure> {
    let function = convert::function_key(tenant, function)?;
    let revision =
        Revision::new(revision).ok_or_else(|| Failure::malformed("revision 0: revisions count from 1"))?;
    Ok(RevisionKey { function, revision })
}
