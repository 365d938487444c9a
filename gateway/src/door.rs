//! Where every request comes in, before any service: it gets an id, a caller, a tenant and a span;
//! its body is held to the byte budget; and gRPC goes one way, everything else the other.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Request, Response};
use millrace_proto::status::to_status;
use millrace_proto::trace;
use millrace_types::{Failure, Reason, RequestId};
use tokio::time::{Instant, timeout_at};
use tower::ServiceExt as _;
use tracing::Instrument as _;

use crate::auth::Authenticate;
use crate::call::{self, Call};
use crate::framing::{Hold, Ledger, Messages, Terms};
use crate::front::Front;
use crate::inflate::Encoding;
use crate::request_id;
use crate::rest::error::{self, RestError};

const REQUEST_ID: HeaderName = HeaderName::from_static(request_id::HEADER);
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");
/// The one method whose handler works on several messages at a time.
const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// The door of one server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) front: Arc<Front>,
    pub(crate) authenticate: Arc<dyn Authenticate>,
    pub(crate) grpc: Router,
    pub(crate) rest: Router,
}

impl Door {
    /// Answers a request. Never fails: what goes wrong is in the response.
    pub(crate) async fn admit<B>(&self, peer: SocketAddr, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<tonic::codegen::StdError>,
    {
        let request_id = self.front.ids.of(request.headers());
        let span = tracing::info_span!("request", %request_id, path = request.uri().path());
        if request.headers().contains_key(TRACE_PARENT) {
            trace::adopt(&span, trace::extract_headers(request.headers()));
        }
        let mut response = match is_grpc(request.headers()) {
            true => self.admit_grpc(peer, &request_id, request).instrument(span).await,
            false => self.admit_rest(peer, &request_id, request).instrument(span).await,
        };
        // An id is visible ASCII: always a valid value.
        if let Ok(value) = HeaderValue::from_str(request_id.as_str()) {
            response.headers_mut().insert(REQUEST_ID, value);
        }
        response
    }

    async fn admit_grpc<B>(
        &self,
        peer: SocketAddr,
        request_id: &RequestId,
        mut request: Request<B>,
    ) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<tonic::codegen::StdError>,
    {
        let call = match self.call(peer, request_id, request.headers()) {
            Ok(call) => call,
            Err(failure) => return to_status(&failure).into_http(),
        };
        let deadline = call.deadline;
        // What its messages are charged is given back when the call is answered, or, by a stream,
        // message by message.
        let ledger = Ledger::default();
        let terms = self.terms(&mut request);
        request.extensions_mut().insert(call.caller.clone());
        request.extensions_mut().insert(call);
        request.extensions_mut().insert(ledger.clone());
        let request = request.map(|body| Body::new(Messages::new(body, terms, ledger.clone())));
        let answer = infallible(self.grpc.clone().oneshot(request));
        let response = match deadline {
            None => answer.await,
            Some(deadline) => timeout_at(deadline, answer).await.unwrap_or_else(|_| {
                let message = "the call's timeout passed";
                to_status(&Failure::new(Reason::TimedOut, message).after_execution()).into_http()
            }),
        };
        drop(ledger);
        response
    }

    async fn admit_rest<B>(
        &self,
        peer: SocketAddr,
        request_id: &RequestId,
        mut request: Request<B>,
    ) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<tonic::codegen::StdError>,
    {
        match self.call(peer, request_id, request.headers()) {
            Ok(call) => {
                request.extensions_mut().insert(call);
                let response = infallible(self.rest.clone().oneshot(request.map(Body::new))).await;
                error::explain_method(response)
            }
            Err(failure) => error::response(RestError::from(failure)),
        }
    }

    fn call(&self, peer: SocketAddr, request_id: &RequestId, headers: &HeaderMap) -> Result<Call, Failure> {
        let arrived = Instant::now();
        Ok(Call {
            request_id: request_id.clone(),
            caller: self.authenticate.authenticate(peer, headers)?,
            tenant: call::tenant(headers)?,
            arrived,
            deadline: call::grpc_timeout(headers).map(|timeout| arrived + timeout),
        })
    }

    /// What a gRPC body is held to. Its messages leave plain, so tonic is told of no encoding; and
    /// answers are compressed as the request was: clients offer every encoding they know with each
    /// call, and compressing unasked would cost more than it saves.
    fn terms<B>(&self, request: &mut Request<B>) -> Terms {
        let headers = request.headers_mut();
        let encoding = headers.get(&GRPC_ENCODING).and_then(|name| Encoding::from_name(name.as_bytes()));
        headers.remove(&GRPC_ACCEPT_ENCODING);
        if let Some(encoding) = encoding {
            headers.remove(&GRPC_ENCODING);
            headers.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static(encoding.name()));
        }
        let limits = &self.front.limits;
        Terms {
            budget: self.front.budget.clone(),
            message_len_max: limits.message_len_max(),
            stall_max: limits.stall_max,
            encoding,
            hold: if request.uri().path() == STREAM { Hold::UntilClaimed } else { Hold::UntilNext },
        }
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// A router's answer: it has no other way to fail.
async fn infallible(
    answer: impl Future<Output = Result<Response<Body>, std::convert::Infallible>>,
) -> Response<Body> {
    match answer.await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// What an unknown gRPC method gets.
pub(crate) async fn unknown_method(request: Request<Body>) -> Response<Body> {
    let message = format!("no method {:?} here: ask the server's reflection", request.uri().path());
    to_status(&Failure::new(Reason::Unimplemented, message)).into_http()
}
