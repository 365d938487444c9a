//! The bidirectional stream. Requests run concurrently up to a bound, except that requests of the
//! same sequence of a stateful model run one after another. Responses have the order of the requests.
//! A failed request is answered with an error, and the stream continues.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use futures::FutureExt as _;
use futures::stream::{self, Stream, StreamExt as _};
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Request, Response};
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::inference::{
    InferParameter, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse,
};
use millrace_proto::status::to_status;
use millrace_types::{Failure, Reason, RequestId};
use tokio::time::Instant;
use tonic::Status;

use super::frames::{self, ResponseStream};
use super::infer;
use super::sequences::StreamSequences;
use crate::budget::ByteCharge;
use crate::call::CallContext;
use crate::decompression::ContentEncoding;
use crate::handler::InferenceHandler;
use crate::header_names::{GRPC_ACCEPT_ENCODING, GRPC_ENCODING, SERVED_BY, SERVER_TIMING};
use crate::parameters::SEQUENCE_ID;
use crate::request_id;

/// Triton's mark of the last response to a request, which every response here has.
const FINAL: &str = "triton_final_response";

/// A request of a stream, with the charge until the request is answered.
struct StreamRequest {
    number: u64,
    arrived: Instant,
    request: ModelInferRequest,
    charge: Option<ByteCharge>,
}

/// Serves `ModelStreamInfer`.
pub(crate) async fn serve(front: Arc<InferenceHandler>, request: Request<Body>) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let Some(call) = parts.extensions.get::<CallContext>().cloned() else {
        return Status::internal("the call did not pass the gateway's middleware").into_http();
    };
    // The middleware removed this header if the gateway supports the encoding.
    let foreign = parts.headers.get(GRPC_ENCODING).filter(|name| *name != "identity");
    if let Some(name) = foreign {
        let message = format!("compression {name:?} is not served: use gzip, deflate or identity");
        let mut refused = Status::unimplemented(message).into_http();
        refused.headers_mut().insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("gzip,deflate,identity"));
        return refused;
    }
    let wanted = parts.headers.get(GRPC_ACCEPT_ENCODING).map(HeaderValue::as_bytes);
    let encoding = wanted.and_then(ContentEncoding::from_name);
    let answers = answers(front, call, frames::requests(body));
    let mut response = Response::new(frames::body(answers, encoding));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    if let Some(encoding) = encoding {
        response.headers_mut().insert(GRPC_ENCODING, HeaderValue::from_static(encoding.name()));
    }
    response
}

/// Answers every request of a stream. The stream ends when the client ends it, when the client breaks
/// the protocol, or when the server shuts down, which a final status reports.
fn answers(
    front: Arc<InferenceHandler>,
    call: CallContext,
    requests: impl Stream<Item = Result<ModelInferRequest, Status>> + Send + 'static,
) -> ResponseStream {
    let concurrency = front.limits.stream_concurrency;
    let mut number = 0;
    let arrivals = call.ledger.clone();
    let departures = call.ledger.clone();
    let asked = requests.map(move |request| {
        number += 1;
        let charge = arrivals.claim();
        request.map(|request| StreamRequest { number, arrived: Instant::now(), request, charge })
    });
    let cut_off = Arc::new(AtomicBool::new(false));
    let end = end(Arc::clone(&cut_off));
    let closing = front.closing.clone().wait();
    let asked = asked.take_until(closing.map(move |()| cut_off.store(true, Ordering::Relaxed)));
    let call = Arc::new(call);
    let mut sequences = StreamSequences::new(concurrency);
    let answers = asked.map(move |asked| {
        let front = Arc::clone(&front);
        let call = Arc::clone(&call);
        let in_order = asked.as_ref().ok().filter(|asked| keeps_state(&front, &call, &asked.request));
        let mut place = in_order.map(|asked| sequences.follow(&asked.request)).unwrap_or_default();
        async move {
            place.first().await;
            match asked {
                Ok(asked) => Ok(answer(&front, &call, asked).await),
                Err(status) => Err(status),
            }
        }
    });
    let answers = answers.buffered(concurrency).map(move |answered| {
        let (answer, charge) = answered?;
        // Added before the response is returned, because the body takes the charge in the same poll.
        if let Some(charge) = charge {
            departures.answer(charge);
        }
        Ok(answer)
    });
    Box::pin(answers.chain(end))
}

/// Whether the order of a request's sequence matters. A stateless model ignores the sequence.
fn keeps_state(front: &InferenceHandler, call: &CallContext, request: &ModelInferRequest) -> bool {
    let model = || front.find(call, &request.model_name, &request.model_version);
    request.parameters.contains_key(SEQUENCE_ID) && model().is_ok_and(|model| model.sequences.is_some())
}

/// Returns the item after a stream's last response: none, unless the server is shutting down.
fn end(cut_off: Arc<AtomicBool>) -> impl Stream<Item = Result<ModelStreamInferResponse, Status>> {
    let last = move || {
        let message =
            "the server is shutting down: open the stream again, and resend the unanswered requests";
        let status = || Err(to_status(&Failure::new(Reason::ShuttingDown, message)));
        cut_off.load(Ordering::Relaxed).then(status)
    };
    stream::once(async move { last() }).filter_map(std::future::ready)
}

/// Answers a request. The response's charge replaces the charge of the request.
async fn answer(
    front: &InferenceHandler,
    call: &CallContext,
    asked: StreamRequest,
) -> (ModelStreamInferResponse, Option<ByteCharge>) {
    let StreamRequest { number, arrived, request, charge } = asked;
    let mut run = front.begin_part(call, request_id(front, call, number), arrived);
    let request_id = run.request_id().clone();
    let name = request.model_name.clone();
    let id = request.id.clone();
    match infer::answer(&mut run, request, charge).await {
        Ok((answer, id, charge)) => {
            let (answer, mut response) = infer::response(answer, id);
            let times = run.succeed(&answer);
            response.parameters = parameters(&request_id);
            response.parameters.insert(SERVER_TIMING.to_owned(), text(times.to_string()));
            if let Some(served_by) = &answer.completion.served_by {
                response.parameters.insert(SERVED_BY.to_owned(), text(served_by.to_string()));
            }
            let answer =
                ModelStreamInferResponse { error_message: String::new(), infer_response: Some(response) };
            (answer, charge)
        }
        Err(failure) => {
            // Charges large names and ids while this response waits behind an earlier one.
            let charge = call.shares.inference.take_held((name.len() + id.len()) as u64);
            (failed(&run.fail(failure), name, id, &request_id), Some(charge))
        }
    }
}

/// Returns the call's id for the first request of a call, and a new id for each further request.
fn request_id(front: &InferenceHandler, call: &CallContext, number: u64) -> RequestId {
    if number == 1 { call.request_id.clone() } else { front.ids.next() }
}

fn failed(
    failure: &Failure,
    model_name: String,
    id: String,
    request_id: &RequestId,
) -> ModelStreamInferResponse {
    let mut parameters = parameters(request_id);
    parameters.insert("reason".to_owned(), text(failure.reason.as_str().to_owned()));
    parameters.insert("retryable".to_owned(), flag(failure.retryable));
    parameters.insert("may_have_executed".to_owned(), flag(failure.may_have_executed));
    let response = ModelInferResponse { model_name, id, parameters, ..ModelInferResponse::default() };
    ModelStreamInferResponse { error_message: failure.message.clone(), infer_response: Some(response) }
}

fn parameters(request_id: &RequestId) -> BTreeMap<String, InferParameter> {
    BTreeMap::from([
        (FINAL.to_owned(), flag(true)),
        (request_id::HEADER.to_owned(), text(request_id.to_string())),
    ])
}

fn text(text: String) -> InferParameter {
    InferParameter { parameter_choice: Some(ParameterChoice::StringParam(text)) }
}

fn flag(flag: bool) -> InferParameter {
    InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(flag)) }
}
