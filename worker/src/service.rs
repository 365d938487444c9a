//! The gRPC `Worker` service: a gateway's request becomes an [`Invocation`] for the actors, and
//! their answer a response. Checks what comes over the wire once, here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millrace_proto::activity::Activity;
use millrace_proto::executor::Fault;
use millrace_proto::log::{Page, Query};
use millrace_proto::status::to_status;
use millrace_proto::trace::wire::Spans;
use millrace_proto::trace::{self, Kept, Past};
use millrace_proto::{convert, logs, worker as wire};
use millrace_types::function::DEFAULT_TIMEOUT;
use millrace_types::{Bytes, DataId, Failure, GpuIndex, Reason, RequestId, Revision, RevisionKey};
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::activity::Place;
use crate::actors::fetch_attributes;
use crate::handle::{FaultError, NodeHandle};
use crate::hints::Hints;
use crate::host_tier::gate::Gate;
use crate::host_tier::{Reader, Signature, Signatures};
use crate::objects::{self, Chunks, GatherError, Gathered, Objects};
use crate::request::{Brought, Completion, Invocation, OnGpus, Split};

use self::again::Again;

mod again;
pub mod tensors;

/// What a worker takes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// One request or response.
    pub message: Bytes,
    /// The inputs of all requests in flight.
    pub in_flight: Bytes,
}

impl Default for Limits {
    fn default() -> Self {
        Self { message: Bytes::mib(256), in_flight: Bytes::gib(1) }
    }
}

/// Whether faults may be injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Faults {
    /// Refused.
    Refuse,
    /// For tests of what faults cost.
    Obey,
}

/// The service. Clones share everything.
#[derive(Debug, Clone)]
pub struct WorkerService {
    node: NodeHandle,
    signatures: watch::Receiver<Arc<Signatures>>,
    gate: Gate,
    budget: Arc<Budget>,
    faults: Faults,
    draining: Arc<AtomicBool>,
    place: Place,
    kept: Option<Kept>,
    objects: Objects,
    hints: Option<Hints>,
}

impl WorkerService {
    /// Serves the functions that `signatures` names, whose models are behind the gate.
    #[must_use]
    pub(crate) fn new(
        node: NodeHandle,
        place: Place,
        (signatures, gate): (watch::Receiver<Arc<Signatures>>, Gate),
        objects: Objects,
        limits: Limits,
        faults: Faults,
    ) -> Self {
        let budget = Arc::new(Budget::new(limits.in_flight));
        let (draining, kept, hints) = (Arc::default(), None, None);
        Self { node, signatures, gate, budget, faults, draining, place, kept, objects, hints }
    }

    /// The same, showing the spans that are kept here.
    #[must_use]
    pub fn showing(self, kept: Option<Kept>) -> Self {
        Self { kept, ..self }
    }

    /// The same, following hints of what comes next.
    pub(crate) fn following(self, hints: Hints) -> Self {
        Self { hints: Some(hints), ..self }
    }

    /// Returns once no object is held here any more.
    pub(crate) async fn emptied(&self) {
        self.objects.emptied().await;
    }

    /// Refuses every request from now on.
    pub fn refuse(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.gate.close();
    }

    async fn run(&self, mut request: wire::InvokeRequest) -> Result<wire::InvokeResponse, Failure> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Failure::new(Reason::ShuttingDown, "the worker is shutting down: ask another"));
        }
        let _held = self.budget.take(self.objects.copied(&request.inputs))?;
        let revision = revision_key(&request)?;
        let signature = self.signature(&revision)?;
        tensors::check(&request.inputs, &request.outputs, &signature)?;
        let hold = request.hold.take();
        let hints = std::mem::take(&mut request.next);
        let keep = hold.as_ref().map(|hold| kept_outputs(hold, &request.outputs, &signature));
        let (mut invocation, gathered) = match self.invocation(request, revision, signature.reader).await {
            Ok(ready) => ready,
            Err(GatherError::Failed(failure)) => return Err(failure),
            Err(GatherError::Lost(ids)) => return Ok(lost(&ids)),
        };
        invocation.on_gpus.keep = keep.unwrap_or_default();
        let held = self.gate.enter(signature.digest, invocation.timeout).await?;
        // Not before: what comes for the next request must neither push this one's model out nor come
        // ahead of it, nor come at all for one that is refused.
        if let Some(follows) = &self.hints {
            invocation.next = follows.follow(&invocation.revision.function.tenant, &hints);
        }
        if !held.waited().is_zero() {
            let past = Past { ago: Duration::ZERO, took: held.waited() };
            trace::tell(&tracing::Span::current(), "cold start", past, Vec::new);
        }
        let invocation = Invocation { cold: held.waited(), ..invocation };
        self.answered(invocation, gathered, hold).await
    }

    /// Has a request run, and its answer put together; both again where what it gave was lost in
    /// between ([`again`]).
    pub(crate) async fn answered(
        &self,
        mut invocation: Invocation,
        gathered: Gathered,
        hold: Option<wire::Hold>,
    ) -> Result<wire::InvokeResponse, Failure> {
        let mut before = 0;
        loop {
            let again = Again::of(&invocation, &self.node);
            let completion = match self.node.invoke(invocation).await {
                Err(failure) if failure.reason == Reason::DataLost => {
                    let ids = |gone: &dyn Fn(&Arc<objects::Kept>) -> bool| {
                        let gone = gathered.kept.iter().filter(|(_, object)| gone(object));
                        gone.map(|(id, _)| id.clone()).collect::<Vec<_>>()
                    };
                    let gone = ids(&|object| object.is_lost());
                    // One could not be copied, though it is there: it is not to be had all the same.
                    return Ok(lost(&if gone.is_empty() { ids(&|_| true) } else { gone }));
                }
                Err(failure) if before > 0 => return Err(failure.after_execution()),
                completion => completion?,
            };
            let mut fetched = gathered.fetched.clone();
            for Brought { input, method, bytes, took } in &completion.brought {
                self.objects.count(*method, *bytes);
                fetched.push(objects::fetched(input.clone(), *method, *bytes, *took));
            }
            let (attempts, took) = (completion.attempts, completion.split.total);
            let error = match self.response(completion, hold.clone()).await {
                Ok(response) => {
                    let attempts = before + response.attempts;
                    return Ok(wire::InvokeResponse { fetched, attempts, ..response });
                }
                Err(error) => error,
            };
            let again = again.filter(|_| matches!(error, tensors::UnpackError::Lost(_)));
            invocation =
                again.and_then(|again| again.after(attempts, took)).ok_or_else(|| unreadable(&error))?;
            tracing::warn!(request = %invocation.request_id, function = %invocation.revision, %error, "a request is run again");
            before += attempts;
        }
    }

    /// The request as the actors take it, with everything it takes at hand.
    async fn invocation(
        &self,
        request: wire::InvokeRequest,
        revision: RevisionKey,
        reader: Reader,
    ) -> Result<(Invocation, Gathered), GatherError> {
        let malformed = |message: &str| Failure::new(Reason::MalformedRequest, message);
        let request_id = RequestId::new(&request.request_id)
            .ok_or_else(|| malformed("request_id must be 1 to 128 visible ASCII characters"))?;
        let timeout = match &request.timeout {
            None => DEFAULT_TIMEOUT,
            Some(wire) => convert::duration(wire).ok_or_else(|| malformed("timeout is negative"))?,
        };
        let objective = request.objective_micros.map(Duration::from_micros);
        let gathered = tokio::time::timeout(timeout, self.objects.gather(request.inputs, reader)).await;
        let mut gathered = gathered.map_err(|_late| {
            Failure::new(Reason::TimedOut, "the timeout passed while inputs came from other workers")
        })??;
        tell_fetches(&gathered.fetched);
        let packed = tensors::pack(std::mem::take(&mut gathered.inputs))?;
        let invocation = Invocation {
            request_id,
            attempt: request.attempt,
            attempts_left: request.attempts_left,
            revision,
            timeout: timeout.saturating_sub(gathered.took),
            objective: objective.map(|objective| objective.saturating_sub(gathered.took)),
            priority: request.priority,
            inputs: packed.tensors,
            descriptors: packed.descriptors,
            on_gpus: OnGpus { objects: packed.objects, keep: Vec::new() },
            outputs: request.outputs,
            next: Vec::new(),
            cold: Duration::ZERO,
            counted: false,
        };
        Ok((invocation, gathered))
    }

    /// The answer: outputs that are to be held are, as far as there is room, and the others told.
    async fn response(
        &self,
        completion: Completion,
        hold: Option<wire::Hold>,
    ) -> Result<wire::InvokeResponse, tensors::UnpackError> {
        let Completion { outputs, descriptors, kept, share, split, mut marks, gpu, attempts, .. } =
            completion;
        let taken = tensors::take(outputs, (&descriptors, &kept), share)?;
        let mut outputs: Vec<wire::InferTensor> = Vec::with_capacity(taken.len());
        let mut answered = Vec::new();
        for output in taken {
            let mark = marks.remove(&output.name).unwrap_or_default();
            let held = match &hold {
                Some(hold) if !mark.response => self.hold(output, hold, mark.object.as_ref()).await,
                _ => Err(output),
            };
            outputs.push(match held {
                Ok(held) => held,
                Err(output) => {
                    answered.extend(mark.object);
                    match tensors::answer(output).await {
                        Ok(answer) => answer,
                        Err(error) => {
                            // Nobody will ever hear of those that were kept.
                            answered.extend(outputs.iter().filter_map(object_of));
                            self.objects.release(&answered).await;
                            return Err(error);
                        }
                    }
                }
            });
        }
        // Whoever asked has their bytes.
        self.objects.release(&answered).await;
        let (split, gpu) = (Some(split_wire(split)), gpu.map_or(0, |gpu| gpu.0));
        Ok(wire::InvokeResponse { outputs, split, gpu, attempts, ..wire::InvokeResponse::default() })
    }

    /// Keeps an output as an object, or gives it back: one that is to be answered, is small enough to
    /// travel, or finds no room.
    async fn hold(
        &self,
        output: tensors::Input,
        hold: &wire::Hold,
        object: Option<&DataId>,
    ) -> Result<wire::InferTensor, tensors::Input> {
        let bytes = output.contents.len();
        if bytes <= tensors::INLINE_BYTES_MAX as u64 || hold.answered.contains(&output.name) {
            return Err(output);
        }
        let time = hold.time.as_ref().and_then(convert::duration).unwrap_or(DEFAULT_TIMEOUT);
        let tensors::Input { name, datatype, shape, contents } = output;
        let kept = match object {
            // A process stored it: its name stays.
            Some(id) if self.objects.keep_on(id, time) => Ok(id.clone()),
            _ => self.objects.keep(contents, time).await,
        };
        match kept {
            Ok(id) => {
                let id = Some(convert::data_id_wire(&id));
                let object = wire::Object { id, address: String::new(), bytes };
                let part = wire::HeldPart { object: Some(object), offset: 0, bytes };
                let parts = vec![wire::TensorPart { part: Some(wire::tensor_part::Part::Held(part)) }];
                Ok(wire::InferTensor { name, datatype, shape, parts, ..wire::InferTensor::default() })
            }
            Err(contents) => Err(tensors::Input { name, datatype, shape, contents }),
        }
    }

    fn signature(&self, revision: &RevisionKey) -> Result<Arc<Signature>, Failure> {
        self.signatures.borrow().get(revision).cloned().ok_or_else(|| {
            let message = format!("{revision} is not ready on this worker: try again soon");
            Failure::new(Reason::FunctionNotReady, message)
        })
    }

    async fn inject(&self, request: wire::InjectFaultRequest) -> Result<(), Failure> {
        if self.faults == Faults::Refuse {
            let message = "faults are not allowed here: start the worker with --allow-faults";
            return Err(Failure::new(Reason::PermissionDenied, message));
        }
        let malformed = |message: String| Failure::new(Reason::MalformedRequest, message);
        let fault = i32::try_from(request.fault).ok().and_then(|number| Fault::try_from(number).ok());
        let fault = fault.filter(|fault| *fault != Fault::Unspecified);
        let fault = fault.ok_or_else(|| malformed(format!("fault {} is not known", request.fault)))?;
        let function =
            match request.function.as_str() {
                "" => None,
                text => Some(parse_revision(text).ok_or_else(|| {
                    malformed(format!("{text:?} is no function: write tenant/name@revision"))
                })?),
            };
        tracing::warn!(gpu = request.gpu, ?fault, ?function, "a fault is injected");
        self.node.inject_fault(GpuIndex(request.gpu), fault, function).await.map_err(|error| match &error {
            FaultError::NodeGone => Failure::new(Reason::ShuttingDown, error.to_string()),
            FaultError::NoSuchGpu(_) => malformed(error.to_string()),
            FaultError::NoSuchFunction(_) => Failure::new(Reason::FunctionNotFound, error.to_string()),
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
        Ok(Response::new(logs::here(request.get_ref())))
    }

    async fn release_objects(
        &self,
        request: Request<wire::ReleaseObjectsRequest>,
    ) -> Result<Response<wire::ReleaseObjectsResponse>, Status> {
        let ids = request.into_inner().ids;
        let ids = ids.iter().map(convert::data_id).collect::<Result<Vec<_>, _>>();
        let ids = ids.map_err(|failure| to_status(&failure))?;
        let objects = self.objects.clone();
        // To the end, whether or not the caller waits for it.
        let released = tokio::spawn(async move { objects.release(&ids).await }).await;
        released.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(wire::ReleaseObjectsResponse {}))
    }

    async fn get_activity(
        &self,
        _request: Request<wire::GetActivityRequest>,
    ) -> Result<Response<Activity>, Status> {
        Ok(Response::new(self.place.activity(&self.node.snapshot().await)))
    }
}

#[tonic::async_trait]
impl wire::worker_objects_server::WorkerObjects for WorkerService {
    type FetchObjectStream = Chunks;

    async fn fetch_object(
        &self,
        request: Request<wire::FetchObjectRequest>,
    ) -> Result<Response<Chunks>, Status> {
        let chunks = self.objects.serve(request.into_inner());
        chunks.map(Response::new).map_err(|failure| to_status(&failure))
    }
}

/// What came of objects, on the request's trace. Inputs are fetched one after the other, the last until
/// now.
fn tell_fetches(fetched: &[wire::Fetched]) {
    let mut ago = Duration::ZERO;
    for fetch in fetched.iter().rev() {
        let took = Duration::from_nanos(fetch.took_ns);
        ago += took;
        let attributes = || fetch_attributes(fetch.method(), &fetch.input, fetch.bytes);
        trace::tell(&tracing::Span::current(), "fetch", Past { ago, took }, attributes);
    }
}

/// The outputs that are to be held.
fn kept_outputs(hold: &wire::Hold, asked: &[String], signature: &Signature) -> Vec<String> {
    let all = || signature.outputs.iter().map(|output| output.name.clone()).collect();
    let outputs: Vec<String> = if asked.is_empty() { all() } else { asked.to_vec() };
    outputs.into_iter().filter(|output| !hold.answered.contains(output)).collect()
}

/// The object that a kept output is.
fn object_of(output: &wire::InferTensor) -> Option<DataId> {
    match &output.parts.first()?.part {
        Some(wire::tensor_part::Part::Held(held)) => {
            convert::data_id(held.object.as_ref()?.id.as_ref()?).ok()
        }
        _ => None,
    }
}

/// Why there is no answer though there was a run.
fn unreadable(error: &tensors::UnpackError) -> Failure {
    let reason = match error {
        tensors::UnpackError::Lost(_) => Reason::ExecutorLost,
        _ => Reason::Internal,
    };
    Failure::new(reason, format!("the executor's answer: {error}")).after_execution()
}

/// The answer of a request that was not run, for want of these.
fn lost(ids: &[DataId]) -> wire::InvokeResponse {
    let lost = ids.iter().map(convert::data_id_wire).collect();
    wire::InvokeResponse { lost, ..wire::InvokeResponse::default() }
}

fn revision_key(request: &wire::InvokeRequest) -> Result<RevisionKey, Failure> {
    let function = convert::function_key(&request.tenant, &request.function)?;
    let revision = Revision::new(request.revision)
        .ok_or_else(|| Failure::new(Reason::MalformedRequest, "revision 0: revisions count from 1"))?;
    Ok(RevisionKey { function, revision })
}

fn parse_revision(text: &str) -> Option<RevisionKey> {
    let (function, revision) = text.rsplit_once('@')?;
    let (tenant, name) = function.split_once('/')?;
    let function = convert::function_key(tenant, name).ok()?;
    Some(RevisionKey { function, revision: Revision::new(revision.parse().ok()?)? })
}

fn split_wire(split: Split) -> wire::Split {
    let nanos = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
    wire::Split {
        queue_ns: nanos(split.queue),
        swap_ns: nanos(split.swap),
        run_ns: nanos(split.run),
        total_ns: nanos(split.total),
        swapped_bytes: split.swapped.get(),
        cold_ns: nanos(split.cold),
    }
}

/// The bytes of requests in flight, in whole KiB.
#[derive(Debug)]
struct Budget {
    kib: Semaphore,
    size: Bytes,
}

impl Budget {
    fn new(size: Bytes) -> Self {
        let kib = usize::try_from(size.get() >> 10).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { kib: Semaphore::new(kib), size }
    }

    fn take(&self, bytes: usize) -> Result<SemaphorePermit<'_>, Failure> {
        let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        self.kib.try_acquire_many(kib).map_err(|_full| {
            let message =
                format!("the inputs of requests in flight fill the worker's {}: try again soon", self.size);
            Failure::new(Reason::ByteBudgetExceeded, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_reads_as_it_prints() {
        for text in ["default/digits@3", "team.a/resnet-50@1"] {
            assert_eq!(parse_revision(text).unwrap().to_string(), text);
        }
        for bad in
            ["", "digits", "default/digits", "default/digits@0", "default/digits@x", "default@1", "a/B@1"]
        {
            assert_eq!(parse_revision(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_byte_budget_is_given_back_with_the_request() {
        let budget = Budget::new(Bytes(4096));
        let first = budget.take(3000).unwrap();
        assert_eq!(budget.take(1500).unwrap_err().reason, Reason::ByteBudgetExceeded);
        drop(first);
        assert!(budget.take(4096).is_ok());
    }
}
