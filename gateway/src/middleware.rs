//! The middleware that every request passes before any service. A request is checked against the
//! rules for browsers, and gets an id, a caller, a tenant and a span. Its body and its response are
//! charged to the byte budget. gRPC requests and all other requests then take separate routes.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, Response, Uri};
use millrace_proto::WAITING_METHODS;
use millrace_proto::browser::AllowedHosts;
use millrace_proto::decoding::MessageType;
use millrace_proto::status::to_status;
use millrace_proto::trace::{self, KeyValue};
use millrace_types::{Failure, Reason, RequestId};
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status};
use tower::ServiceExt as _;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use crate::authentication::Authenticate;
use crate::call::{self, CallContext, ConnectionShares};
use crate::config::message_len;
use crate::decompression::ContentEncoding;
use crate::delivery::{charge_answer, deliver};
use crate::framing::{BodyBounds, CallCharges, ChargeRelease, ChargedMessages};
use crate::handler::InferenceHandler;
use crate::header_names::{GRPC_ACCEPT_ENCODING, GRPC_ENCODING};
use crate::request_id;
use crate::rest::error::{self, RestError};

const REQUEST_ID: HeaderName = HeaderName::from_static(request_id::HEADER);
const TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");
/// Largest message of a method outside this project's schemas, and of a method that waits. Health and
/// reflection requests contain only names, and the others little more.
const NAME_MESSAGE_MAX: usize = 64 << 10;
/// Path of the method for a single inference request.
const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
/// Path of the method whose handler works on several messages at a time.
pub(crate) const STREAM: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

/// The middleware of a server, for a single connection. Cheap to clone.
#[derive(Clone)]
pub(crate) struct RequestLayer {
    pub(crate) front: Arc<InferenceHandler>,
    pub(crate) own_names: AllowedHosts,
    pub(crate) shares: ConnectionShares,
    /// Paths of the methods with client streaming.
    pub(crate) streams: Arc<BTreeSet<String>>,
    pub(crate) authenticate: Arc<dyn Authenticate>,
    pub(crate) grpc: Router,
    pub(crate) rest: Router,
}

impl RequestLayer {
    /// Returns the middleware for another connection, which has its own shares of the byte budgets.
    pub(crate) fn for_connection(&self) -> Self {
        Self { shares: self.front.shares(), ..self.clone() }
    }

    /// Responds to a request. Never fails: errors are in the response.
    pub(crate) async fn admit<B>(&self, peer: SocketAddr, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<tonic::codegen::StdError>,
    {
        let request_id = self.front.ids.of(request.headers());
        let span = span(&request, &request_id);
        if request.headers().contains_key(TRACE_PARENT) {
            trace::adopt(&span, trace::extract_headers(request.headers()));
        }
        let mut response = match is_grpc(request.headers()) {
            true => self.admit_grpc(peer, &request_id, request).instrument(span.clone()).await,
            false => self.admit_rest(peer, &request_id, request).instrument(span.clone()).await,
        };
        record_outcome(&span, &response);
        // An id is visible ASCII, so the value is always valid.
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
        let call = match self.call(peer, request_id, request.uri(), request.headers()) {
            Ok(call) => call,
            Err(failure) => return to_status(&failure).into_http(),
        };
        let deadline = call.deadline;
        let ledger = call.ledger.clone();
        let terms = self.body_bounds(&mut request);
        let hold = terms.hold;
        let infers = request.uri().path() == INFER;
        request.extensions_mut().insert(call.caller.clone());
        request.extensions_mut().insert(call);
        let request = request.map(|body| Body::new(ChargedMessages::new(body, terms, ledger.clone())));
        let answer = infallible(self.grpc.clone().oneshot(request));
        let response = match deadline {
            None => answer.await,
            Some(deadline) => timeout_at(deadline, answer).await.unwrap_or_else(|_| {
                let message = "the call's timeout expired";
                to_status(&Failure::new(Reason::TimedOut, message).after_execution()).into_http()
            }),
        };
        match hold {
            ChargeRelease::WholeCall if infers => ledger.move_arrived_to_answered(),
            ChargeRelease::WholeCall => ledger.clear(),
            // The charges are released message by message.
            ChargeRelease::UntilDecoded | ChargeRelease::UntilNext | ChargeRelease::UntilClaimed => {}
        }
        deliver(response, &ledger, &self.shares.admin)
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
        match self.call(peer, request_id, request.uri(), request.headers()) {
            Ok(call) => {
                let ledger = call.ledger.clone();
                request.extensions_mut().insert(call);
                let response = infallible(self.rest.clone().oneshot(request.map(Body::new))).await;
                let response = error::explain_method(response);
                match charge_answer(&response, &ledger, &self.shares.admin) {
                    Ok(()) => deliver(response, &ledger, &self.shares.admin),
                    Err(refused) => error::response(RestError::from(refused)),
                }
            }
            Err(failure) => error::response(RestError::from(failure)),
        }
    }

    fn call(
        &self,
        peer: SocketAddr,
        request_id: &RequestId,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<CallContext, Failure> {
        self.own_names.check(uri, headers)?;
        let arrived = Instant::now();
        Ok(CallContext {
            request_id: request_id.clone(),
            caller: self.authenticate.authenticate(peer, headers)?,
            tenant: call::tenant(headers)?,
            arrived,
            deadline: call::grpc_timeout(headers).map(|timeout| arrived + timeout),
            shares: self.shares.clone(),
            ledger: CallCharges::default(),
        })
    }

    /// Returns the bounds of a gRPC body. Its messages are passed on decompressed, so the encoding
    /// header is removed for tonic. Responses are compressed only if the request was: clients offer
    /// every encoding that they know with each call, and compressing unasked would cost more than it
    /// saves.
    fn body_bounds<B>(&self, request: &mut Request<B>) -> BodyBounds {
        let headers = request.headers_mut();
        let encoding =
            headers.get(&GRPC_ENCODING).and_then(|name| ContentEncoding::from_name(name.as_bytes()));
        headers.remove(&GRPC_ACCEPT_ENCODING);
        if let Some(encoding) = encoding {
            headers.remove(&GRPC_ENCODING);
            headers.insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static(encoding.name()));
        }
        let limits = &self.front.limits;
        let path = request.uri().path();
        let inference = (&self.shares.inference, limits.message_max);
        let admin = (&self.shares.admin, limits.admin_message_max());
        let (hold, (share, message_max)) = match path {
            INFER => (ChargeRelease::WholeCall, inference),
            STREAM => (ChargeRelease::UntilClaimed, inference),
            _ if self.streams.contains(path) => (ChargeRelease::UntilNext, admin),
            _ if WAITING_METHODS.contains(&path) => (ChargeRelease::UntilDecoded, admin),
            _ => (ChargeRelease::WholeCall, admin),
        };
        let message_type = MessageType::of_requests(path);
        let message_len_max = message_len(message_max);
        BodyBounds {
            share: share.clone(),
            message_len_max: if message_type.is_some() && hold != ChargeRelease::UntilDecoded {
                message_len_max
            } else {
                message_len_max.min(NAME_MESSAGE_MAX)
            },
            minimum_rate: limits.minimum_rate,
            bulk: self.front.bulk.clone(),
            encoding,
            message_type,
            hold,
        }
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// Returns a router's response; a router cannot fail.
async fn infallible(
    answer: impl Future<Output = Result<Response<Body>, std::convert::Infallible>>,
) -> Response<Body> {
    match answer.await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// Responds to an unknown gRPC method.
pub(crate) async fn unknown_method(request: Request<Body>) -> Response<Body> {
    let message = format!("unknown method {:?}: list the methods with reflection", request.uri().path());
    to_status(&Failure::new(Reason::Unimplemented, message)).into_http()
}

/// Creates the span of a request, by OpenTelemetry's conventions for RPC and HTTP servers.
fn span<B>(request: &Request<B>, request_id: &RequestId) -> Span {
    let path = request.uri().path();
    if !is_grpc(request.headers()) {
        return tracing::info_span!(
            "http",
            otel.name = route(request.method(), path),
            otel.kind = "server",
            millrace.request.id = %request_id,
            http.request.method = %request.method(),
            url.path = path,
            http.response.status_code = Empty,
        );
    }
    let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or((path, ""));
    tracing::info_span!(
        "rpc",
        otel.name = path.trim_start_matches('/'),
        otel.kind = "server",
        millrace.request.id = %request_id,
        rpc.system = "grpc",
        rpc.service = service,
        rpc.method = method,
        rpc.grpc.status_code = Empty,
    )
}

/// Returns a path without the names, so that there are few different values.
fn route(method: &Method, path: &str) -> String {
    let mut after = "";
    let parts = path.split('/').map(|part| {
        let shown = match after {
            "models" if part != "index" => "{model}",
            "versions" => "{version}",
            _ => part,
        };
        after = if shown == part { part } else { "" };
        shown
    });
    format!("{method} {}", parts.collect::<Vec<_>>().join("/"))
}

/// Records the outcome of a request, without waiting for the end of a stream.
fn record_outcome(span: &Span, response: &Response<Body>) {
    if span.is_disabled() {
        return;
    }
    // A failed gRPC call has its status in the headers, because nothing precedes its trailers.
    if let Some(status) = Status::from_header_map(response.headers()) {
        span.record("rpc.grpc.status_code", i32::from(status.code()));
        if is_ours(status.code()) {
            trace::fail(span, status.message());
        } else if status.code() != Code::Ok {
            trace::add_attributes(span, || {
                vec![KeyValue::new("millrace.refused", status.message().to_owned())]
            });
        }
        return;
    }
    let status = response.status();
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        trace::fail(span, status);
    }
}

/// Whether a status is a failure of the server, by OpenTelemetry's conventions. Other statuses are
/// the caller's fault.
fn is_ours(code: Code) -> bool {
    matches!(
        code,
        Code::Unknown
            | Code::DeadlineExceeded
            | Code::Unimplemented
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_contains_no_model_name() {
        let of = |path: &str| route(&Method::POST, path);
        assert_eq!(of("/v2/models/digits/infer"), "POST /v2/models/{model}/infer");
        assert_eq!(
            of("/v2/models/digits/versions/3/infer"),
            "POST /v2/models/{model}/versions/{version}/infer"
        );
        assert_eq!(of("/v2/repository/index"), "POST /v2/repository/index");
        assert_eq!(of("/v2/models/models/infer"), "POST /v2/models/{model}/infer");
    }
}
