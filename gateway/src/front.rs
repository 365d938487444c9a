//! The way of one inference request, the same for both protocols: find the model, read the request
//! against its declaration, invoke it within its timeout, count what came of it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_proto::trace;
use millrace_types::function::TIMEOUT_MAX;
use millrace_types::tensor::{Given, check_inputs, element_count};
use millrace_types::{DataType, Failure, FunctionKey, FunctionName, Reason, RequestId, Revision, TensorSpec};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::backend::{Availability, Backend, Completion, Intent, Invocation, Model, Tensor};
use crate::budget::Budget;
use crate::bulk::{BulkThreads, unfinished};
use crate::call::{Call, ConnectionShares};
use crate::closing::Closing;
use crate::config::{Limits, WallClock};
use crate::meters::{Meters, Tally, Times};
use crate::parameters::Parameters;
use crate::request_id::RequestIds;

/// Tensors that a request may name, and as many outputs.
pub(crate) const TENSORS_MAX: usize = 4_096;
/// Dimensions of one tensor.
pub(crate) const SHAPE_RANK_MAX: usize = 64;
/// Bytes of a tensor's name.
const NAME_BYTES_MAX: usize = 256;
/// Bytes from which on a message is converted by [`BulkThreads`]: 256 KiB of JSON take about a millisecond.
pub(crate) const BULK_BYTES_MIN: usize = 256 << 10;

/// What every handler shares.
pub(crate) struct Front {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) meters: Meters,
    pub(crate) ids: RequestIds,
    pub(crate) budget: Budget,
    /// For requests to services that do no inference.
    pub(crate) admin_budget: Budget,
    /// The places of requests that wait for their model to get ready.
    pub(crate) waiting: Semaphore,
    /// For large messages.
    pub(crate) bulk: BulkThreads,
    pub(crate) limits: Limits,
    pub(crate) wall_clock: WallClock,
    pub(crate) closing: Closing,
}

/// A request read and checked against its model.
#[derive(Debug, PartialEq)]
pub(crate) struct Question {
    pub(crate) inputs: Vec<Tensor>,
    /// Empty: every output.
    pub(crate) outputs: Vec<String>,
    pub(crate) parameters: Parameters,
}

/// A request answered.
pub(crate) struct Answer {
    pub(crate) model: Arc<Model>,
    pub(crate) completion: Completion,
    received: Instant,
}

impl Answer {
    /// The size of its outputs.
    pub(crate) fn bytes(&self) -> u64 {
        self.completion.outputs.iter().map(|output| output.data.len() as u64).sum()
    }
}

impl Front {
    /// Finds a model by the names a client uses. An empty version is the latest.
    pub(crate) fn find(&self, call: &Call, name: &str, version: &str) -> Result<Arc<Model>, Failure> {
        self.backend.resolve(&key(call, name)?, revision(version)?)
    }

    /// The same, of a model that its owner lets serve: an unloaded one shows nothing of itself.
    pub(crate) fn find_loaded(&self, call: &Call, name: &str, version: &str) -> Result<Arc<Model>, Failure> {
        let model = self.find(call, name, version)?;
        match model.availability {
            Availability::Disabled => Err(model.refusal()),
            _ => Ok(model),
        }
    }

    /// Whether inference is served: the backend can, the door is open, and the byte budget has room.
    pub(crate) fn ready(&self) -> bool {
        self.backend.ready() && !self.closing.is_closing() && !self.budget.is_locked_out()
    }

    /// The shares of a new connection.
    pub(crate) fn shares(&self) -> ConnectionShares {
        ConnectionShares { inference: self.budget.share(), admin: self.admin_budget.share() }
    }

    /// Requests that wait for their model now.
    pub(crate) fn waiting_now(&self) -> usize {
        self.limits.waiting_max.saturating_sub(self.waiting.available_permits())
    }

    /// Keeps a request until its model is ready: whoever waits for a model that is on its way, or for
    /// the place of a lost worker to be taken, need not ask again and again.
    async fn wait_for(&self, model: &Model, deadline: Instant) -> Result<Arc<Model>, Failure> {
        let Ok(_place) = self.waiting.try_acquire() else {
            let message = "too many requests wait for models already: try again soon";
            return Err(Failure::new(Reason::FunctionNotReady, message));
        };
        loop {
            let until = deadline.min(Instant::now() + self.limits.away_max);
            // Settled, or what it still waits for.
            let now = match timeout_at(until, self.backend.awaited(model)).await {
                Ok(awaited) => awaited?,
                Err(_) => self.backend.resolve(&model.key, Some(model.revision))?,
            };
            match now.availability {
                Availability::Ready => return Ok(now),
                // It has workers, on which it is on its way.
                Availability::Preparing if until < deadline => {}
                _ => return Err(now.refusal()),
            }
        }
    }

    /// Converts a message of `len` bytes.
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

    /// Lets a function serve, or stops it. Whether there is one is for the backend to say: what can
    /// be resolved here may be behind.
    pub(crate) async fn set_intent(&self, call: &Call, name: &str, intent: Intent) -> Result<(), Failure> {
        self.backend.set_intent(&key(call, name)?, intent, &call.caller).await
    }

    /// Starts the count of one inference request.
    pub(crate) fn begin<'a>(&'a self, call: &'a Call) -> Run<'a> {
        self.begin_part(call, call.request_id.clone(), call.arrived)
    }

    /// The same, of one of several requests that a call carries.
    pub(crate) fn begin_part<'a>(
        &'a self,
        call: &'a Call,
        request_id: RequestId,
        arrived: Instant,
    ) -> Run<'a> {
        self.meters.in_flight.inc();
        Run { front: self, call, request_id, arrived, tally: None, counted: false }
    }
}

/// The beginning of a client's text, as long as an error shows.
fn shown(text: &str) -> &str {
    &text[..text.floor_char_boundary(NAME_BYTES_MAX)]
}

/// The function a client means by a name.
fn key(call: &Call, name: &str) -> Result<FunctionKey, Failure> {
    let Ok(function) = FunctionName::new(name) else {
        let message = format!("no function {:?} in tenant {}", shown(name), call.tenant);
        return Err(Failure::new(Reason::FunctionNotFound, message));
    };
    Ok(FunctionKey { tenant: call.tenant.clone(), name: function })
}

/// Reads a version as a revision.
fn revision(version: &str) -> Result<Option<Revision>, Failure> {
    if version.is_empty() {
        return Ok(None);
    }
    let digits = version.bytes().all(|c| c.is_ascii_digit());
    let number = version.parse().ok().filter(|_| digits).and_then(Revision::new);
    let message = || {
        format!(
            "model version {:?} is not a whole number from 1: leave it out for the latest",
            shown(version)
        )
    };
    number.map(Some).ok_or_else(|| Failure::malformed(message()))
}

/// One inference request under way. Whatever becomes of it is counted once; one that is dropped was
/// cancelled.
pub(crate) struct Run<'a> {
    front: &'a Front,
    call: &'a Call,
    request_id: RequestId,
    arrived: Instant,
    tally: Option<Arc<Tally>>,
    counted: bool,
}

impl<'a> Run<'a> {
    pub(crate) fn front(&self) -> &'a Front {
        self.front
    }

    /// Carries the request out, as far as its outputs.
    pub(crate) async fn answer<Reading: Future<Output = Result<Question, Failure>>>(
        &mut self,
        name: &str,
        version: &str,
        read: impl FnOnce(Arc<Model>) -> Reading,
    ) -> Result<Answer, Failure> {
        let backend = &self.front.backend;
        let mut model = self.front.find(self.call, name, version)?;
        self.tally = Some(self.front.meters.tally(&model, |key| backend.resolve(key, None).is_ok()));
        if model.availability != Availability::Ready && !model.availability.may_come() {
            return Err(model.refusal());
        }
        let question = read(Arc::clone(&model)).await?;
        let deadline = deadline(self.call, &question.parameters, &model, self.arrived);
        if model.availability != Availability::Ready {
            model = self.front.wait_for(&model, deadline).await?;
        }
        let invocation = Invocation {
            request_id: self.request_id.clone(),
            caller: self.call.caller.clone(),
            inputs: question.inputs,
            outputs: question.outputs.clone(),
            timeout: deadline.saturating_duration_since(Instant::now()),
            priority: question.parameters.priority,
            sequence: question.parameters.sequence,
        };
        if invocation.timeout.is_zero() {
            return Err(Failure::new(Reason::TimedOut, "the request's timeout passed before it could begin"));
        }
        let completion = match timeout_at(deadline, backend.invoke(&model, invocation)).await {
            Ok(completion) => completion?,
            Err(_) => {
                let message =
                    format!("no answer within the request's timeout of {:?}", deadline - self.arrived);
                return Err(Failure::new(Reason::TimedOut, message).after_execution());
            }
        };
        check_outputs(&model, &question.outputs, &completion.outputs)?;
        Ok(Answer { model, completion, received: Instant::now() })
    }

    /// Counts a failure, and passes it on.
    pub(crate) fn fail(mut self, failure: Failure) -> Failure {
        self.count_failure(failure.reason);
        failure
    }

    /// Counts an answer whose response is ready.
    pub(crate) fn succeed(mut self, answer: &Answer) -> Times {
        let now = Instant::now();
        let times = Times {
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

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if !self.counted {
            self.count_failure(Reason::Cancelled);
        }
        self.front.meters.in_flight.dec();
    }
}

/// The shortest of what the client asked for; the model's own timeout when it asked for none.
fn deadline(call: &Call, parameters: &Parameters, model: &Model, arrived: Instant) -> Instant {
    let asked = parameters.timeout.map(|timeout| arrived + timeout);
    let soonest = match (asked, call.deadline) {
        (Some(asked), Some(grpc)) => asked.min(grpc),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => arrived + model.timeout,
    };
    soonest.min(arrived + TIMEOUT_MAX)
}

/// One input as a protocol named it, before its contents are looked at.
pub(crate) struct Named<'a> {
    pub(crate) name: &'a str,
    pub(crate) datatype: &'a str,
    pub(crate) shape: &'a [i64],
}

/// Checks the inputs' names, datatypes and shapes, and returns each one's datatype and size. The sizes are
/// together at most `len_max`, as no message could carry more: a shape is a client's number.
pub(crate) fn check_named(
    specs: &[TensorSpec],
    named: &[Named<'_>],
    len_max: usize,
) -> Result<Vec<(DataType, usize)>, Failure> {
    let invalid = |message: String| Failure::new(Reason::InvalidInput, message);
    let mut given = Vec::new();
    for &Named { name, datatype, shape } in named {
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
        given.push(Given { name, datatype, shape });
    }
    check_inputs(specs, &given).map_err(|error| invalid(error.to_string()))?;
    let mut left = len_max;
    let mut sizes = Vec::new();
    for Given { name, datatype, shape } in given {
        let size = datatype.size().and_then(|size| element_count(shape)?.checked_mul(size));
        let rest = size.and_then(|size| left.checked_sub(size));
        let (Some(size), Some(rest)) = (size, rest) else {
            let why = match datatype {
                DataType::Bytes => "BYTES tensors are not served".to_owned(),
                _ => format!("its shape takes more memory than a message of {len_max} bytes can bring"),
            };
            return Err(invalid(format!("input {name:?} of shape {shape:?}: {why}")));
        };
        left = rest;
        sizes.push((datatype, size));
    }
    Ok(sizes)
}

/// Checks raw contents against the size that datatype and shape demand.
pub(crate) fn check_size(name: &str, expected: usize, found: usize) -> Result<(), Failure> {
    if expected == found {
        return Ok(());
    }
    let message =
        format!("input {name:?} has {found} bytes of contents: its datatype and shape take {expected}");
    Err(Failure::new(Reason::InvalidInput, message))
}

/// Checks that the outputs a client names exist, each once.
pub(crate) fn check_requested<'a>(
    model: &Model,
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

/// Checks that the backend gave what was asked for: its answer came from another process.
fn check_outputs(model: &Model, requested: &[String], outputs: &[Tensor]) -> Result<(), Failure> {
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
    let message = format!("the worker's outputs are not what {} declares: {outputs:?}", model.key);
    Err(Failure::new(Reason::Internal, message).after_execution())
}

impl fmt::Display for Times {
    /// As the `server-timing` header writes it, in milliseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // In whole microseconds: formatting floats shows in a profile of small models.
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
        entry(f, ", total", self.total)
    }
}

impl Tally {
    /// When the last inference ended, in milliseconds since 1970.
    pub(crate) fn last_inference_ms(&self) -> u64 {
        self.last_inference_ms.load(Ordering::Relaxed)
    }
}
