//! The protocol over REST, with Triton's binary and repository extensions, and `/metrics`.

mod body;
mod describe;
pub(crate) mod elements;
pub(crate) mod error;
mod json;
pub(crate) mod request;
pub(crate) mod response;

use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequestParts, RawPathParams, State};
use axum::routing::{get, post};
use axum::{Extension, Router};
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Response, StatusCode, Uri};
use http_body::Body as _;
use millrace_proto::metrics::MetricsPage;
use millrace_transport::SharedResult;
use millrace_types::{Failure, Reason};
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde::Deserialize;
use serde_json::{Value as Json, json};

use self::error::RestError;
use self::json::FirstParameter;
use crate::backend::{Intent, ModelAvailability, ModelRevision};
use crate::call::CallContext;
use crate::config::message_len;
use crate::descriptions as said;
use crate::handler::InferenceHandler;
use crate::header_names::{SERVED_BY, SERVER_TIMING};

const TIMING: HeaderName = HeaderName::from_static(SERVER_TIMING);
const SERVER: HeaderName = HeaderName::from_static(SERVED_BY);

type Shared = State<Arc<InferenceHandler>>;
type Called = Extension<CallContext>;
type Answered = Result<Response<Body>, RestError>;

/// Returns a router with every REST route.
pub(crate) fn router(front: Arc<InferenceHandler>, registry: Registry) -> Router {
    let model = |suffix: &str| {
        [
            format!("/v2/models/{{model}}{suffix}"),
            format!("/v2/models/{{model}}/versions/{{version}}{suffix}"),
        ]
    };
    let mut router = Router::new()
        .route("/v2", get(server))
        .route("/v2/", get(server))
        .route("/v2/health/live", get(live))
        .route("/v2/health/ready", get(ready))
        .route("/v2/models/stats", get(statistics))
        .route("/v2/repository/index", post(index).get(index))
        .route("/v2/repository/models/{model}/load", post(load))
        .route("/v2/repository/models/{model}/unload", post(unload));
    for (suffix, methods) in [
        ("", get(metadata)),
        ("/ready", get(model_ready)),
        ("/infer", post(infer)),
        ("/config", get(config)),
        ("/stats", get(statistics)),
    ] {
        for path in model(suffix) {
            router = router.route(&path, methods.clone());
        }
    }
    let metrics = {
        let front = Arc::clone(&front);
        let registry = Arc::new(registry);
        let page = Arc::new(SharedResult::every(MetricsPage::EVERY));
        move |headers: HeaderMap| {
            let front = front.clone();
            let registry = registry.clone();
            let page = page.clone();
            async move { answer_metrics(page.get(async || metrics(&front, &registry)).await, &headers) }
        }
    };
    router.route("/metrics", get(metrics)).fallback(unknown_path).with_state(front)
}

/// The model and version of a path; empty if the path has none.
struct ModelPath {
    name: String,
    version: String,
}

impl<S: Send + Sync> FromRequestParts<S> for ModelPath {
    type Rejection = RestError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RestError> {
        let params = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|error| Failure::malformed(format!("cannot read the path: {error}")))?;
        let of = |wanted: &str| {
            let found = params.iter().find(|(name, _)| *name == wanted);
            found.map_or_else(String::new, |(_, value)| value.to_owned())
        };
        Ok(Self { name: of("model"), version: of("version") })
    }
}

fn json_response(status: StatusCode, body: &Json) -> Response<Body> {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, error::JSON);
    response
}

fn ok(body: &Json) -> Response<Body> {
    json_response(StatusCode::OK, body)
}

/// Returns the status for readiness. KServe's servers respond with 503 if something is not ready.
const fn readiness(ready: bool) -> StatusCode {
    if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn server() -> Response<Body> {
    ok(&describe::server(&said::server()))
}

async fn live() -> Response<Body> {
    ok(&json!({ "live": true }))
}

async fn ready(State(front): Shared) -> Response<Body> {
    let ready = front.ready();
    json_response(readiness(ready), &json!({ "ready": ready }))
}

async fn metadata(State(front): Shared, Extension(call): Called, wanted: ModelPath) -> Answered {
    let model = front.find_loaded(&call, &wanted.name, &wanted.version)?;
    Ok(ok(&describe::metadata(&said::metadata(&model))))
}

async fn model_ready(State(front): Shared, Extension(call): Called, wanted: ModelPath) -> Answered {
    let model = front.find(&call, &wanted.name, &wanted.version)?;
    let ready = model.availability == ModelAvailability::Ready;
    Ok(json_response(readiness(ready), &json!({ "name": wanted.name, "ready": ready })))
}

async fn config(State(front): Shared, Extension(call): Called, wanted: ModelPath) -> Answered {
    let model = front.find_loaded(&call, &wanted.name, &wanted.version)?;
    Ok(ok(&describe::config(&said::config(&model))))
}

async fn statistics(State(front): Shared, Extension(call): Called, wanted: ModelPath) -> Answered {
    let stats = said::statistics(&front, &call, &wanted.name, &wanted.version)?;
    Ok(ok(&describe::statistics(&stats)))
}

async fn infer(
    State(front): Shared,
    Extension(call): Called,
    wanted: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let mut run = front.begin(&call);
    let len_max = message_len(front.limits.message_max);
    let terms = body::RestBodyBounds {
        share: &call.shares.inference,
        len_max,
        minimum_rate: front.limits.minimum_rate,
        bulk: &front.bulk,
    };
    let collected = body::collect(terms, &headers, body).await;
    let (body, mut charge) = match collected {
        Ok(collected) => collected,
        Err(error) => {
            run.fail(error.failure().clone());
            return Err(error);
        }
    };
    let mut asked = None;
    let read = {
        let front = &front;
        let headers = &headers;
        let asked = &mut asked;
        move |model: Arc<ModelRevision>| async move {
            let cut = request::cut(headers, body)?;
            let json_len = cut.json_len();
            let read = move || {
                let read = request::read_request(&model, cut, len_max, &mut charge);
                read.map(|(contents, form)| (contents, form, charge))
            };
            let (contents, form, charge) = front.convert(json_len, read).await??;
            *asked = Some((form, charge));
            Ok(contents)
        }
    };
    let answered = run.answer(&wanted.name, &wanted.version, read).await;
    let answered = match (answered, asked) {
        (Ok(answer), Some((form, mut charge))) => {
            let len = response::json_data_len(&answer, &form);
            let encode = move || {
                charge.become_response(answer.bytes())?;
                let encoded = response::encode(&answer, &form, &mut charge)?;
                Ok::<_, Failure>((answer, encoded, charge))
            };
            front.convert(len, encode).await.flatten()
        }
        (Ok(_), None) => {
            Err(Failure::new(Reason::Internal, "a response arrived for a request that was not read"))
        }
        (Err(failure), _) => Err(failure),
    };
    let (answer, encoded, charge) = match answered {
        Ok(answered) => answered,
        Err(failure) => return Err(run.fail(failure).into()),
    };
    let (mut response, mut charge) = match response::response(&front, encoded, &headers, charge).await {
        Ok(response) => response,
        Err(failure) => return Err(run.fail(failure).into()),
    };
    if let Some(len) = response.body().size_hint().exact() {
        charge.settle(len);
    }
    call.ledger.answer(charge);
    let times = run.succeed(&answer);
    // The value has only digits, letters and punctuation, so the value is always valid.
    if let Ok(timing) = HeaderValue::from_str(&times.to_string()) {
        response.headers_mut().insert(TIMING, timing);
    }
    // A worker may report a GPU type that no header can carry.
    let served_by = answer.completion.served_by.as_deref().map(HeaderValue::from_str);
    if let Some(Ok(served_by)) = served_by {
        response.headers_mut().insert(SERVER, served_by);
    }
    Ok(response)
}

#[derive(Default, Deserialize)]
struct IndexRequest {
    #[serde(default)]
    ready: bool,
}

#[derive(Default, Deserialize)]
struct RepositoryRequest {
    #[serde(default)]
    parameters: FirstParameter,
}

/// Type that libcurl sends with a body without a stated type.
const FORM: &str = "application/x-www-form-urlencoded";
/// Header in which browsers describe the page that makes a request.
const SEC_FETCH_SITE: &str = "sec-fetch-site";

/// Parses a small JSON body, which may be absent.
///
/// A browser sends types other than JSON without a preflight request, so most other types are refused.
/// tritonclient sends no type at all, and Triton's C++ client and `curl -d` send the type of a form. A
/// browser that sends either of these names its page's origin, which the middleware refuses, or
/// identifies itself with `Sec-Fetch-Site`.
async fn optional<T: Default + for<'de> Deserialize<'de>>(
    front: &InferenceHandler,
    call: &CallContext,
    headers: &HeaderMap,
    body: Body,
) -> Result<T, RestError> {
    let is_form = |kind: &HeaderValue| kind == FORM && !headers.contains_key(SEC_FETCH_SITE);
    if let Some(kind) = headers.get(CONTENT_TYPE).filter(|kind| !is_json(kind) && !is_form(kind)) {
        let message = format!("content-type {kind:?} is not served here: send application/json");
        return Err(RestError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Reason::MalformedRequest, message));
    }
    let terms = body::RestBodyBounds {
        share: &call.shares.admin,
        len_max: message_len(front.limits.admin_message_max()),
        minimum_rate: front.limits.minimum_rate,
        bulk: &front.bulk,
    };
    let (body, _charge) = body::collect(terms, headers, body).await?;
    if body.is_empty() {
        return Ok(T::default());
    }
    json::read(&body).map_err(RestError::from)
}

/// Whether a type is JSON, with or without parameters.
fn is_json(kind: &HeaderValue) -> bool {
    let kind = kind.to_str().unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

async fn index(State(front): Shared, Extension(call): Called, headers: HeaderMap, body: Body) -> Answered {
    let IndexRequest { ready } = optional(&front, &call, &headers, body).await?;
    Ok(ok(&describe::index(&said::index(&front, &call, ready)?)))
}

async fn load(
    State(front): Shared,
    Extension(call): Called,
    wanted: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    let RepositoryRequest { parameters } = optional(&front, &call, &headers, body).await?;
    if let Some(name) = parameters.0 {
        let message = format!("load parameter {name:?} is not served: change a function with millrace apply");
        return Err(Failure::new(Reason::Unimplemented, message).into());
    }
    front.set_intent(&call, &wanted.name, Intent::Serve).await?;
    Ok(ok(&json!({ "name": wanted.name, "load": true })))
}

async fn unload(
    State(front): Shared,
    Extension(call): Called,
    wanted: ModelPath,
    headers: HeaderMap,
    body: Body,
) -> Answered {
    // The only parameter, unload_dependents, concerns ensembles, and a function is none.
    let RepositoryRequest { .. } = optional(&front, &call, &headers, body).await?;
    front.set_intent(&call, &wanted.name, Intent::Refuse).await?;
    Ok(ok(&json!({ "name": wanted.name, "unload": true })))
}

/// Writes the current values of all metrics.
fn metrics(front: &InferenceHandler, registry: &Registry) -> Result<MetricsPage, fmt::Error> {
    front.meters.bytes_in_flight.set(i64::try_from(front.budget.used()).unwrap_or(i64::MAX));
    front.meters.waiting.set(i64::try_from(front.waiting_now()).unwrap_or(i64::MAX));
    let mut text = String::new();
    encode(&mut text, registry)?;
    Ok(MetricsPage::new(text))
}

fn answer_metrics(page: Result<MetricsPage, fmt::Error>, headers: &HeaderMap) -> Answered {
    let page =
        page.map_err(|error| Failure::new(Reason::Internal, format!("cannot write the metrics: {error}")))?;
    let (kind, text) = page.negotiated(headers);
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

async fn unknown_path(uri: Uri) -> RestError {
    let message = format!("unknown path {:?}: the protocol's paths begin with /v2", uri.path());
    RestError::new(StatusCode::NOT_FOUND, Reason::Unimplemented, message)
}
