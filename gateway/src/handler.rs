//! The path of an inference request, the same for both protocols: find the model, check the request
//! against the model's declaration, invoke the model within the timeout, and count the outcome.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_proto::trace;
use millrace_types::function::TIMEOUT_MAX;
use millrace_types::tensor::{RequestInput, check_inputs, element_count};
use millrace_types::{DataType, Failure, FunctionKey, FunctionName, Reason, RequestId, Revision, TensorSpec};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::backend::{
    Backend, Intent, ModelAvailability, ModelRequest, ModelResponse, ModelRevision, NamedTensor,
    RequestContents,
};
use crate::budget::ByteBudget;
use crate::bulk::{BulkThreads, unfinished};
use crate::call::{CallContext, ConnectionShares};
use crate::closing::ShutdownSignal;
use crate::config::{GatewayLimits, WallClock};
use crate::metrics::{RequestMetrics, RequestTimes, RevisionCounts};
use crate::parameters::RequestParameters;
use crate::request_id::RequestIds;

/// Most input tensors of a request, and most requested outputs.
pub(crate) const REQUEST_TENSORS_MAX: usize = 4_096;
/// Most dimensions of a tensor.
pub(crate) const SHAPE_RANK_MAX: usize = 64;
/// Most bytes of a tensor's name.
const NAME_BYTES_MAX: usize = 256;
/// Size in bytes from which [`BulkThreads`] convert a message: 256 KiB of JSON take about a millisecond.
pub(crate) const BULK_BYTES_MIN: usize = 256 << 10;

/// State that all handlers share.
pub(crate) struct InferenceHandler {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) meters: RequestMetrics,
    pub(crate) ids: RequestIds,
    pub(crate) budget: ByteBudget,
    /// Budget for requests to services that do no inference.
    pub(crate) admin_budget: ByteBudget,
    /// Permits for requests that wait until the model is ready.
    pub(crate) waiting: Semaphore,
    /// Threads for large messages.
    pub(crate) bulk: BulkThreads,
    pub(crate) limits: GatewayLimits,
    pub(crate) wall_clock: WallClock,
    pub(crate) closing: ShutdownSignal,
}

/// The response to a request.
pub(crate) struct InferenceResponse {
    pub(crate) model: Arc<ModelRevision>,
    pub(crate) completion: ModelResponse,
    received: Instant,
}

impl InferenceResponse {
    /// Returns the size of the outputs in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.completion.outputs.iter().map(|output| output.data.len() as u64).sum()
    }
}

impl InferenceHandler {
    /// Finds a model by the name and version of a client. An empty version selects the latest one.
    pub(crate) fn find(
        &self,
        call: &CallContext,
        name: &str,
        version: &str,
    ) -> Result<Arc<ModelRevision>, Failure> {
        self.backend.resolve(&key(call, name)?, revision(version)?)
    }

    /// Finds a model like [`Self::find`], and refuses an unloaded one, which must not be described.
    pub(crate) fn find_loaded(
        &self,
        call: &CallContext,
        name: &str,
        version: &str,
    ) -> Result<Arc<ModelRevision>, Failure> {
        let model = self.find(call, name, version)?;
        match model.availability {
            ModelAvailability::Disabled => Err(model.refusal()),
            _ => Ok(model),
        }
    }

    /// Whether inference is served: the backend is ready, the gateway is not closing, and the byte
    /// budget has capacity.
    pub(crate) fn ready(&self) -> bool {
        self.backend.ready() && !self.closing.is_closing() && !self.budget.is_locked_out()
    }

    /// Returns the budget shares of a new connection.
    pub(crate) fn shares(&self) -> ConnectionShares {
        ConnectionShares { inference: self.budget.share(), admin: self.admin_budget.share() }
    }

    /// Returns the number of requests that now wait for a model.
    pub(crate) fn waiting_now(&self) -> usize {
        self.limits.waiting_max.saturating_sub(self.waiting.available_permits())
    }

    /// Waits until the model of a request is ready. So a client need not retry while a model is being
    /// prepared, or while another worker takes over from a lost one.
    async fn wait_for(
        &self,
        model: &ModelRevision,
        deadline: Instant,
    ) -> Result<Arc<ModelRevision>, Failure> {
        let Ok(_place) = self.waiting.try_acquire() else {
            let message = "too many requests already wait for models: try again soon";
            return Err(Failure::new(Reason::FunctionNotReady, message));
        };
        loop {
            let until = deadline.min(Instant::now() + self.limits.away_max);
            // Either the state is settled, or the time is over and the current state tells the reason.
            let now = match timeout_at(until, self.backend.wait_until_ready(model)).await {
                Ok(awaited) => awaited?,
                Err(_) => self.backend.resolve(&model.key, Some(model.revision))?,
            };
            match now.availability {
                ModelAvailability::Ready => return Ok(now),
                // The model has workers that are preparing it, so the wait continues.
                ModelAvailability::Preparing if until < deadline => {}
                _ => return Err(now.refusal()),
            }
        }
    }

    /// Runs `convert` for a message of `len` bytes, on a bulk thread if the message is large.
    pub(crate) async fn convert<T: Send + 'static>(
        &self,
        len: usize,
        convert: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        match len {
            ..BULK_BYTES_MIN => Ok(convert()),
            _ => self.bulk.run(convert).await.map_err(|error| unfinished(&error)),
        }
    }

    /// Enables or disables a function. Only the backend decides whether the function exists, because
    /// the state for resolving may lag behind.
    pub(crate) async fn set_intent(
        &self,
        call: &CallContext,
        name: &str,
        intent: Intent,
    ) -> Result<(), Failure> {
        self.backend.set_intent(&key(call, name)?, intent, &call.caller).await
    }

    /// Starts an inference request, and counts the request as in flight.
    pub(crate) fn begin<'a>(&'a self, call: &'a CallContext) -> RequestInProgress<'a> {
        self.begin_part(call, call.request_id.clone(), call.arrived)
    }

    /// Starts one of several inference requests of a call, and counts the request as in flight.
    pub(crate) fn begin_part<'a>(
        &'a self,
        call: &'a CallContext,
        request_id: RequestId,
        arrived: Instant,
    ) -> RequestInProgress<'a> {
        self.meters.in_flight.inc();
        RequestInProgress { front: self, call, request_id, arrived, tally: None, counted: false }
    }
}

/// Truncates a client's text to the length that an error message shows.
fn shown(text: &str) -> &str {
    &text[..text.floor_char_boundary(NAME_BYTES_MAX)]
}

/// Returns the key of the function that a client names.
fn key(call: &CallContext, name: &str) -> Result<FunctionKey, Failure> {
    let Ok(function) = FunctionName::new(name) else {
        let message = format!("no function {:?} in tenant {}", shown(name), call.tenant);
        return Err(Failure::new(Reason::FunctionNotFound, message));
    };
    Ok(FunctionKey { tenant: call.tenant.clone(), name: function })
}

/// Parses a version as a revision.
fn revision(version: &str) -> Result<Option<Revision>, Failure> {
    if version.is_empty() {
        return Ok(None);
    }
    let digits = version.bytes().all(|c| c.is_ascii_digit());
    let number = version.parse().ok().filter(|_| digits).and_then(Revision::new);
    let message = || {
        format!("model version {:?} is not a whole number from 1: omit it to use the latest", shown(version))
    };
    number.map(Some).ok_or_else(|| Failure::malformed(message()))
}

/// An inference request in progress. The outcome is counted once. A request that is dropped before
/// counts as cancelled.
pub(crate) struct RequestInProgress<'a> {
    front: &'a InferenceHandler,
    call: &'a CallContext,
    request_id: RequestId,
    arrived: Instant,
    tally: Option<Arc<RevisionCounts>>,
    counted: bool,
}

impl<'a> RequestInProgress<'a> {
    pub(crate) fn front(&self) -> &'a InferenceHandler {
        self.front
    }

    /// Executes the request up to the outputs.
    pub(crate) async fn answer<Reading: Future<Output = Result<RequestContents, Failure>>>(
        &mut self,
        name: &str,
        version: &str,
        read: impl FnOnce(Arc<ModelRevision>) -> Reading,
    ) -> Result<InferenceResponse, Failure> {
        let backend = &self.front.backend;
        let mut model = self.front.find(self.call, name, version)?;
        self.tally = Some(self.front.meters.tally(&model, |key| backend.resolve(key, None).is_ok()));
        if model.availability != ModelAvailability::Ready && !model.availability.may_become_ready() {
            return Err(model.refusal());
        }
        let contents = read(Arc::clone(&model)).await?;
        let deadline = deadline(self.call, &contents.parameters, &model, self.arrived);
        if model.availability != ModelAvailability::Ready {
            model = self.front.wait_for(&model, deadline).await?;
        }
        let requested = contents.outputs.clone();
        let invocation = ModelRequest {
            request_id: self.request_id.clone(),
            caller: self.call.caller.clone(),
            timeout: deadline.saturating_duration_since(Instant::now()),
            contents,
        };
        if invocation.timeout.is_zero() {
            return Err(Failure::new(
                Reason::TimedOut,
                "the request's timeout expired before the request could begin",
            ));
        }
        let completion = match timeout_at(deadline, backend.invoke(&model, invocation)).await {
            Ok(completion) => completion?,
            Err(_) => {
                let message =
                    format!("no response within the request's timeout of {:?}", deadline - self.arrived);
                return Err(Failure::new(Reason::TimedOut, message).after_execution());
            }
        };
        check_outputs(&model, &requested, &completion.outputs)?;
        Ok(InferenceResponse { model, completion, received: Instant::now() })
    }

    /// Counts a failure, and returns the failure.
    pub(crate) fn fail(mut self, failure: Failure) -> Failure {
        self.count_failure(failure.reason);
        failure
    }

    /// Counts a request whose response is ready.
    pub(crate) fn succeed(mut self, answer: &InferenceResponse) -> RequestTimes {
        let now = Instant::now();
        let times = RequestTimes {
            split: answer.completion.split,
            output: now - answer.received,
            total: now - self.arrived,
        };
        if let Some(tally) = &self.tally {
            let unix_ms = u64::try_from((self.front.wall_clock)().as_millis()).unwrap_or(u64::MAX);
            tally.answered(&times, unix_ms, trace::recorded_id());
        }
        self.counted = true;
        times
    }

    pub(crate) fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    fn count_failure(&mut self, reason: Reason) {
        self.counted = true;
        self.front.meters.failed(self.tally.as_deref(), reason, self.arrived.elapsed());
    }
}

impl Drop for RequestInProgress<'_> {
    fn drop(&mut self) {
        if !self.counted {
            self.count_failure(Reason::Cancelled);
        }
        self.front.meters.in_flight.dec();
    }
}

/// Returns the earliest of the client's deadlines, or the model's own timeout if the client has none.
fn deadline(
    call: &CallContext,
    parameters: &RequestParameters,
    model: &ModelRevision,
    arrived: Instant,
) -> Instant {
    let asked = parameters.timeout.map(|timeout| arrived + timeout);
    let soonest = match (asked, call.deadline) {
        (Some(asked), Some(grpc)) => asked.min(grpc),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => arrived + model.timeout,
    };
    soonest.min(arrived + TIMEOUT_MAX)
}

/// An input as the protocol describes it, before its contents are read.
pub(crate) struct ClaimedInput<'a> {
    pub(crate) name: &'a str,
    pub(crate) datatype: &'a str,
    pub(crate) shape: &'a [i64],
}

/// Checks the inputs' names, datatypes and shapes, and returns the datatype and size of each input.
/// The sum of the sizes is at most `len_max`, because a shape is only a claim of the client, and no
/// message could contain more bytes.
pub(crate) fn check_named(
    specs: &[TensorSpec],
    named: &[ClaimedInput<'_>],
    len_max: usize,
) -> Result<Vec<(DataType, usize)>, Failure> {
    let invalid = |message: String| Failure::new(Reason::InvalidInput, message);
    let mut given = Vec::new();
    for &ClaimedInput { name, datatype, shape } in named {
        if name.len() > NAME_BYTES_MAX {
            let len = name.len();
            return Err(invalid(format!(
                "a tensor's name has {len} bytes: at most {NAME_BYTES_MAX} are read"
            )));
        }
        if shape.len() > SHAPE_RANK_MAX {
            let rank = shape.len();
            return Err(invalid(format!(
                "input {name:?} has {rank} dimensions: a tensor has at most {SHAPE_RANK_MAX}"
            )));
        }
        let datatype =
            shown(datatype).parse().map_err(|error| invalid(format!("input {name:?} has {error}")))?;
        given.push(RequestInput { name, datatype, shape });
    }
    check_inputs(specs, &given).map_err(|error| invalid(error.to_string()))?;
    let mut left = len_max;
    let mut sizes = Vec::new();
    for RequestInput { name, datatype, shape } in given {
        let size = datatype.size().and_then(|size| element_count(shape)?.checked_mul(size));
        let rest = size.and_then(|size| left.checked_sub(size));
        let (Some(size), Some(rest)) = (size, rest) else {
            let why = match datatype {
                DataType::Bytes => "BYTES tensors are not served".to_owned(),
                _ => format!("its shape needs more memory than a message of {len_max} bytes can contain"),
            };
            return Err(invalid(format!("input {name:?} of shape {shape:?}: {why}")));
        };
        left = rest;
        sizes.push((datatype, size));
    }
    Ok(sizes)
}

/// Checks the size of raw contents against the datatype and shape.
pub(crate) fn check_size(name: &str, expected: usize, found: usize) -> Result<(), Failure> {
    if expected == found {
        return Ok(());
    }
    let message =
        format!("input {name:?} has {found} bytes of contents: its datatype and shape need {expected}");
    Err(Failure::new(Reason::InvalidInput, message))
}

/// Checks that the requested outputs exist, and that none is requested twice.
pub(crate) fn check_requested<'a>(
    model: &ModelRevision,
    names: impl Iterator<Item = &'a str>,
) -> Result<Vec<String>, Failure> {
    let mut requested: Vec<String> = Vec::new();
    for name in names {
        let refused = if !model.outputs.iter().any(|output| output.name == name) {
            let known: Vec<_> = model.outputs.iter().map(|output| format!("{:?}", output.name)).collect();
            Some(format!("output {:?} is unknown: the model gives {}", shown(name), known.join(", ")))
        } else if requested.iter().any(|earlier| earlier == name) {
            Some(format!("output {name:?} is requested twice: name it once"))
        } else {
            None
        };
        if let Some(message) = refused {
            return Err(Failure::new(Reason::InvalidOutput, message));
        }
        requested.push(name.to_owned());
    }
    Ok(requested)
}

/// Checks that the backend returned the requested outputs, because the outputs came from another process.
fn check_outputs(
    model: &ModelRevision,
    requested: &[String],
    outputs: &[NamedTensor],
) -> Result<(), Failure> {
    let named = |name: &str, at: usize| outputs.get(at).is_some_and(|output| output.name == name);
    let complete = match requested {
        [] => {
            outputs.len() == model.outputs.len()
                && model.outputs.iter().enumerate().all(|(at, output)| named(&output.name, at))
        }
        _ => {
            outputs.len() == requested.len() && requested.iter().enumerate().all(|(at, name)| named(name, at))
        }
    };
    let whole = outputs.iter().all(|output| {
        let size = output.datatype.size().and_then(|size| element_count(&output.shape)?.checked_mul(size));
        size == Some(output.data.len())
    });
    if complete && whole {
        return Ok(());
    }
    let message = format!("the worker's outputs do not match the declaration of {}: {outputs:?}", model.key);
    Err(Failure::new(Reason::Internal, message).after_execution())
}

impl fmt::Display for RequestTimes {
    /// Formats the times for the `server-timing` header, in milliseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Uses whole microseconds, because the formatting of floats shows in a profile of small models.
        let entry = |f: &mut fmt::Formatter<'_>, name: &str, span: Duration| {
            let us = span.as_micros();
            write!(f, "{name};dur={}.{:03}", us / 1000, us % 1000)
        };
        if self.split.cold > Duration::ZERO {
            entry(f, "cold", self.split.cold)?;
            f.write_str(", ")?;
        }
        entry(f, "queue", self.split.queue)?;
        entry(f, ", swap", self.split.swap)?;
        entry(f, ", run", self.split.run)?;
        if self.split.token > Duration::ZERO {
            entry(f, ", token", self.split.token)?;
        }
        entry(f, ", total", self.total)
    }
}

impl RevisionCounts {
    /// Returns the time of the last inference, in milliseconds since 1970.
    pub(crate) fn last_inference_ms(&self) -> u64 {
        self.last_inference_ms.load(Ordering::Relaxed)
    }
}
