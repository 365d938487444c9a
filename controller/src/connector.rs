//! The controller's calls to workers: over the network, or directly into a service of the same process.

use std::fmt::Debug;
use std::sync::Arc;

use millrace_proto::activity::Activity;
use millrace_proto::log::{Page, Query};
use millrace_proto::trace::wire::Spans;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_client::WorkerClient;
use millrace_proto::worker::worker_server::Worker;
use millrace_transport::channel::{ChannelConfig, endpoint};
use millrace_types::NodeName;
use millrace_types::limits::ANSWER_BYTES_MAX;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use crate::config::{KEEP_ALIVE, MESSAGE_BYTES_MAX};

/// Carries calls to one worker. For a worker in this process, the transport is the worker's own service
/// and passes a request's tensors unchanged; otherwise the transport is a client that encodes the
/// tensors. Clones share the transport.
pub type Transport = Arc<dyn Worker>;

/// Error of an address that cannot be called.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address does not parse.
    #[error("cannot call a worker at {address:?} ({cause}): give host:port")]
    Address {
        /// The address that the worker reported.
        address: String,
        cause: String,
    },
}

/// Provides the transport to a worker. The connection itself may be made at the first call.
pub trait Connector: Debug + Send + Sync + 'static {
    /// Returns the transport to the worker `name`, which reports to listen at `address`.
    ///
    /// # Errors
    /// [`ConnectError`] if no call to this address can ever succeed.
    fn connect(&self, name: &NodeName, address: &str) -> Result<Transport, ConnectError>;
}

/// Reaches workers over TCP.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp;

impl Connector for Tcp {
    fn connect(&self, _name: &NodeName, address: &str) -> Result<Transport, ConnectError> {
        let config = ChannelConfig { keep_alive: Some(KEEP_ALIVE), ..ChannelConfig::default() };
        let endpoint = endpoint(address, config).map_err(|error| ConnectError::Address {
            address: address.to_owned(),
            cause: error.to_string(),
        })?;
        let client = WorkerClient::new(endpoint.connect_lazy())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Arc::new(Remote(client)))
    }
}

/// A client of a worker in another process.
struct Remote(WorkerClient<Channel>);

impl Remote {
    /// Returns a client for calls whose responses carry no tensors.
    fn asking(&self) -> WorkerClient<Channel> {
        self.0.clone().max_decoding_message_size(ANSWER_BYTES_MAX)
    }
}

#[tonic::async_trait]
impl Worker for Remote {
    async fn invoke(
        &self,
        request: Request<wire::InvokeRequest>,
    ) -> Result<Response<wire::InvokeResponse>, Status> {
        self.0.clone().invoke(request).await
    }

    async fn run_trial(
        &self,
        request: Request<wire::RunTrialRequest>,
    ) -> Result<Response<wire::RunTrialResponse>, Status> {
        self.asking().run_trial(request).await
    }

    async fn inject_fault(
        &self,
        request: Request<wire::InjectFaultRequest>,
    ) -> Result<Response<wire::InjectFaultResponse>, Status> {
        self.0.clone().inject_fault(request).await
    }

    async fn release_objects(
        &self,
        request: Request<wire::ReleaseObjectsRequest>,
    ) -> Result<Response<wire::ReleaseObjectsResponse>, Status> {
        self.0.clone().release_objects(request).await
    }

    async fn get_spans(&self, request: Request<wire::GetSpansRequest>) -> Result<Response<Spans>, Status> {
        self.asking().get_spans(request).await
    }

    async fn get_logs(&self, request: Request<Query>) -> Result<Response<Page>, Status> {
        self.asking().get_logs(request).await
    }

    async fn get_activity(
        &self,
        request: Request<wire::GetActivityRequest>,
    ) -> Result<Response<Activity>, Status> {
        self.asking().get_activity(request).await
    }
}
