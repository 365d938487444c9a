//! Names of headers that several parts of the gateway use.

use http::HeaderName;

pub(crate) const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
pub(crate) const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");

/// Key of a request's latency breakdown, in headers, in metadata and in the response parameters of a stream.
pub(crate) const SERVER_TIMING: &str = "server-timing";

/// Key of the worker and the GPU of an answer, in the same places.
pub(crate) const SERVED_BY: &str = "millrace-served-by";
