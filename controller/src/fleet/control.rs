//! The sources of the service to which workers attach.

use std::sync::Arc;

use millrace_types::ClusterId;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::worker_fleet::WorkerFleet;
use crate::artifacts::ArtifactService;
use crate::connector::Connector;
use crate::leadership::LeaderStatus;
use crate::raft::Replica;

/// The service, with its sources.
#[derive(Debug, Clone)]
pub(crate) struct WorkerControlService {
    pub(crate) cluster_id: ClusterId,
    pub(crate) replica: Replica,
    pub(crate) fleet: WorkerFleet,
    pub(crate) artifacts: Arc<ArtifactService>,
    pub(crate) connector: Arc<dyn Connector>,
    /// The runtime of the connections to workers. This service runs on Raft's threads, which must not
    /// carry requests.
    pub(crate) requests: Handle,
    pub(crate) outlook: LeaderStatus,
    /// Ends every stream.
    pub(crate) stop: CancellationToken,
}
