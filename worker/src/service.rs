//! The gRPC `Worker` service: a gateway's request becomes an [`Invocation`] for the actors, and
//! their answer a response. Checks what comes over the wire once, here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millrace_proto::activity::Activity;
use millrace_proto::executor::Fault;
use millrace_proto::status::to_status;
use millrace_proto::trace::wire::Spans;
use millrace_proto::trace::{self, Kept, Past};
use millrace_proto::{convert, worker as wire};
use millrace_types::function::DEFAULT_TIMEOUT;
use millrace_types::{Bytes, Failure, GpuIndex, Reason, RequestId, Revision, RevisionKey};
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::activity::Place;
use crate::handle::{FaultError, NodeHandle};
use crate::host_tier::gate::Gate;
use crate::host_tier::{Signature, Signatures};
use crate::request::{Completion, Invocation, Split};

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
}

impl WorkerService {
    /// Serves the functions that `signatures` names, whose models are behind the gate.
    #[must_use]
    pub(crate) fn new(
        node: NodeHandle,
        place: Place,
        (signatures, gate): (watch::Receiver<Arc<Signatures>>, Gate),
        limits: Limits,
        faults: Faults,
    ) -> Self {
        let budget = Arc::new(Budget::new(limits.in_flight));
        Self { node, signatures, gate, budget, faults, draining: Arc::default(), place, kept: None }
    }

    /// The same, showing the spans that are kept here.
    #[must_use]
    pub fn showing(self, kept: Option<Kept>) -> Self {
        Self { kept, ..self }
    }

    /// Refuses every request from now on.
    pub fn refuse(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.gate.close();
    }

    async fn run(&self, request: wire::InvokeRequest) -> Result<wire::InvokeResponse, Failure> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Failure::new(Reason::ShuttingDown, "the worker is shutting down: ask another"));
        }
        let inputs: usize = request.inputs.iter().map(|input| input.data.len()).sum();
        let _held = self.budget.take(inputs)?;
        let revision = revision_key(&request)?;
        let signature = self.signature(&revision)?;
        let invocation = invocation(request, revision, &signature)?;
        let held = self.gate.enter(signature.digest, invocation.timeout).await?;
        if !held.waited().is_zero() {
            let past = Past { ago: Duration::ZERO, took: held.waited() };
            trace::tell(&tracing::Span::current(), "cold start", past, Vec::new);
        }
        let completion = self.node.invoke(Invocation { cold: held.waited(), ..invocation }).await?;
        response(completion)
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
            millrace.function = request.function,
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

    async fn get_activity(
        &self,
        _request: Request<wire::GetActivityRequest>,
    ) -> Result<Response<Activity>, Status> {
        Ok(Response::new(self.place.activity(&self.node.snapshot().await)))
    }
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

fn invocation(
    request: wire::InvokeRequest,
    revision: RevisionKey,
    signature: &Signature,
) -> Result<Invocation, Failure> {
    let malformed = |message: &str| Failure::new(Reason::MalformedRequest, message);
    let request_id = RequestId::new(&request.request_id)
        .ok_or_else(|| malformed("request_id must be 1 to 128 visible ASCII characters"))?;
    let timeout = match &request.timeout {
        None => DEFAULT_TIMEOUT,
        Some(wire) => convert::duration(wire).ok_or_else(|| malformed("timeout is negative"))?,
    };
    tensors::check(&request.inputs, &request.outputs, signature)?;
    let (inputs, descriptors) = tensors::pack(request.inputs)?;
    Ok(Invocation {
        request_id,
        attempt: request.attempt,
        attempts_left: request.attempts_left,
        revision,
        timeout,
        priority: request.priority,
        inputs,
        descriptors,
        outputs: request.outputs,
        cold: Duration::ZERO,
    })
}

fn response(completion: Completion) -> Result<wire::InvokeResponse, Failure> {
    let Completion { outputs, descriptors, share, split, gpu, attempts } = completion;
    let outputs = tensors::unpack(outputs, &descriptors, share).map_err(|error| {
        Failure::new(Reason::Internal, format!("the executor's answer: {error}")).after_execution()
    })?;
    Ok(wire::InvokeResponse { outputs, split: Some(split_wire(split)), gpu: gpu.0, attempts })
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
