//! Errors over REST: `{"error": …}` with the matching status, together with the stable reason and its flags.

use axum::body::Body;
use axum::response::IntoResponse;
use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use millrace_proto::status::http_status;
use millrace_types::{Failure, Reason};
use serde_json::json;

/// Content type of JSON. The exact value matters, because KServe's client compares the value.
pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");
/// Value of `Retry-After` in seconds for a request that was refused for lack of capacity.
const RETRY_AFTER_SECS: HeaderValue = HeaderValue::from_static("1");

/// A failure with an HTTP status.
#[derive(Debug)]
pub(crate) struct RestError {
    status: StatusCode,
    failure: Failure,
}

impl RestError {
    /// Creates a failure whose status is more specific than the reason.
    pub(crate) fn new(status: StatusCode, reason: Reason, message: impl Into<String>) -> Self {
        Self { status, failure: Failure::new(reason, message) }
    }

    pub(crate) fn failure(&self) -> &Failure {
        &self.failure
    }
}

impl From<Failure> for RestError {
    fn from(failure: Failure) -> Self {
        // A message over its size limit is not refused for lack of capacity, so a later attempt
        // cannot succeed.
        let too_large = failure.reason == Reason::ByteBudgetExceeded && !failure.retryable;
        let status = if too_large { StatusCode::PAYLOAD_TOO_LARGE } else { http_status(failure.reason) };
        Self { status, failure }
    }
}

impl IntoResponse for RestError {
    fn into_response(self) -> Response<Body> {
        response(self)
    }
}

/// Builds the response for a failure.
pub(crate) fn response(error: RestError) -> Response<Body> {
    let RestError { status, failure } = error;
    let body = json!({
        "error": failure.message,
        "reason": failure.reason.as_str(),
        "retryable": failure.retryable,
        "may_have_executed": failure.may_have_executed,
    });
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) && failure.retryable
    {
        response.headers_mut().insert(RETRY_AFTER, RETRY_AFTER_SECS);
    }
    response
}

/// Replaces the body of the router's refusal of a method by the body of all other errors.
pub(crate) fn explain_method(refused: Response<Body>) -> Response<Body> {
    if refused.status() != StatusCode::METHOD_NOT_ALLOWED {
        return refused;
    }
    let allow = refused.headers().get(ALLOW).cloned();
    let methods = allow.as_ref().and_then(|allow| allow.to_str().ok()).unwrap_or("another method");
    let message = format!("this path accepts {methods}");
    let error = RestError::new(StatusCode::METHOD_NOT_ALLOWED, Reason::Unimplemented, message);
    let mut explained = response(error);
    if let Some(allow) = allow {
        explained.headers_mut().insert(ALLOW, allow);
    }
    explained
}
