//! How a controller reaches its workers' own service: over the network, or straight into a service
//! of the same process.

use std::fmt::Debug;

use http::{Request, Response};
use millrace_proto::worker::worker_client::WorkerClient;
use millrace_types::NodeName;
use tonic::body::Body;
use tonic::transport::Endpoint;
use tower::ServiceExt as _;
use tower::util::BoxCloneSyncService;

use crate::config::{CONNECT_TIMEOUT, KEEP_ALIVE, MESSAGE_BYTES_MAX};

/// Carries calls to one worker. Cloning shares the connection.
pub type Transport = BoxCloneSyncService<Request<Body>, Response<Body>, TransportError>;

/// A call that did not reach the worker's service, or whose answer did not come back.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TransportError(#[source] tonic::transport::Error);

/// Why no call can be made to an address.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Not an address.
    #[error("{address:?} is no address a worker can be called at ({cause}): give host:port")]
    Address {
        /// What the worker said.
        address: String,
        /// What is wrong with it.
        cause: String,
    },
    /// The process has no such worker.
    #[error("worker {0} is not in this process")]
    NotHere(NodeName),
}

/// Gives the transport to a worker. Connecting itself may happen at the first call.
pub trait Connector: Debug + Send + Sync + 'static {
    /// The transport to the worker of that name, which says it listens at `address`.
    ///
    /// # Errors
    /// [`ConnectError`] when no call can ever be made there.
    fn connect(&self, name: &NodeName, address: &str) -> Result<Transport, ConnectError>;
}

/// Reaches workers over TCP.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp;

impl Connector for Tcp {
    fn connect(&self, _name: &NodeName, address: &str) -> Result<Transport, ConnectError> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| ConnectError::Address { address: address.to_owned(), cause: error.to_string() })?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        Ok(Transport::new(endpoint.connect_lazy().map_err(TransportError)))
    }
}

/// A transport straight into a service, such as a generated `WorkerServer`, without a socket.
pub fn in_process<S>(service: S) -> Transport
where
    S: tower::Service<Request<Body>, Response = Response<Body>, Error = std::convert::Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    Transport::new(service.map_err(|never| match never {}))
}

/// A client of a worker, with the limits both sides use.
pub(crate) fn client(transport: Transport) -> WorkerClient<Transport> {
    WorkerClient::new(transport)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}
