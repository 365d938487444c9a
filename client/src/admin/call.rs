//! The parts of every call of the admin API: the timeout, the client of an endpoint, and the metadata.

use std::time::Duration;

use millrace_proto::admin::admin_client::AdminClient;
use millrace_proto::trace;
use millrace_types::limits::ANSWER_BYTES_MAX;
use tonic::Request;
use tonic::transport::Channel;

/// The timeout of every call except an upload.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns a client of a single endpoint that accepts responses up to the server's size limit.
pub(super) fn admin_client(channel: Channel) -> AdminClient<Channel> {
    AdminClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX)
}

pub(super) fn stamped<T>(message: T, left: Duration) -> Request<T> {
    let mut request = Request::new(message);
    stamp(&mut request, left);
    request
}

/// Adds the metadata of every call: the timeout and the trace context.
pub(super) fn stamp<T>(request: &mut Request<T>, left: Duration) {
    request.set_timeout(left);
    trace::inject(request.metadata_mut());
}
