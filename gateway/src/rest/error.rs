//! What goes wrong over REST: `{"error": …}` with the right status, and beside it the stable reason
//! and its flags.

use axum::body::Body;
use axum::response::IntoResponse;
use http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use millrace_proto::status::http_status;
use millrace_types::{Failure, Reason};
use serde_json::json;

/// Exactly this: KServe's client compares it.
pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");
/// Seconds after which a request that found no room may be sent again.
const RETRY_AFTER_SECS: HeaderValue = HeaderValue::from_static("1");

/// A failure with its HTTP status.
#[derive(Debug)]
pub(crate) struct RestError {
    status: StatusCode,
    failure: Failure,
}

impl RestError {
    /// A failure whose status says more than its reason does.
    pub(crate) fn new(status: StatusCode, reason: Reason, message: impl Into<String>) -> Self {
        Self { status, failure: Failure::new(reason, message) }
    }

    pub(crate) fn failure(&self) -> &Failure {
        &self.failure
    }
}

impl From<Failure> for RestError {
    fn from(failure: Failure) -> Self {
        // One message over its limit is not for want of room: nothing that comes later helps.
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

/// Writes a failure.
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

/// Gives the router's own refusal of a method a body like every other error's.
pub(crate) fn explain_method(refused: Response<Body>) -> Response<Body> {
    if refused.status() != StatusCode::METHOD_NOT_ALLOWED {
        return refused;
    }
    let allow = refused.headers().get(ALLOW).cloned();
    let methods = allow.as_ref().and_then(|allow| allow.to_str().ok()).unwrap_or("another method");
    let message = format!("this path takes {methods}");
    let error = RestError::new(StatusCode::METHOD_NOT_ALLOWED, Reason::Unimplemented, message);
    let mut explained = response(error);
    if let Some(allow) = allow {
        explained.headers_mut().insert(ALLOW, allow);
    }
    explained
}
