//! The admin API. Every call is checked completely before anything is proposed, and every write goes
//! through the replicated state under the caller's name.
//!
//! | module | task |
//! |---|---|
//! | [`service`] | dispatches every call of the API |
//! | [`artifacts`] | look-up and upload of model files |
//! | [`billing`] | bills of tenants |
//! | [`cluster`] | the controllers: status, promotion, removal, leadership transfer |
//! | [`functions`] | apply, get, list and delete of functions |
//! | [`listing`] | pages of lists |
//! | [`logs`] | the latest log lines of all processes; [`positions`] has the page tokens |
//! | [`masks`] | field masks |
//! | [`nodes`] | the workers, their GPUs and resident models; fault injection |
//! | [`objective`] | whether a function meets its SLO |
//! | [`operations`] | long-running operations |
//! | [`policy`] | the scheduling policy of nodes |
//! | [`scheduling`] | cordon, drain, uncordon and removal of nodes |
//! | [`dry_run`] | the dry run of several applies |
//! | [`events`] | events of the cluster |
//! | [`scaling`] | the number of needed nodes |
//! | [`data`] | the location of intermediate data |
//! | [`tenants`] | tenants and their caps |
//! | [`workflows`] | apply, get, list and delete of workflows |
//! | [`views`] | conversion of records into API messages |

mod artifacts;
mod billing;
mod cluster;
mod data;
mod dry_run;
mod events;
mod functions;
mod listing;
mod logs;
mod masks;
mod nodes;
mod objective;
mod operations;
mod policy;
mod positions;
mod profiles;
mod scaling;
mod scheduling;
mod service;
mod slices;
mod tenants;
mod views;
mod workflows;

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{CallerName, IdempotencyKey, State};
use millrace_proto::admin as api;
use millrace_proto::convert;
use millrace_types::ids::NameError;
use millrace_types::limits::IDEMPOTENCY_KEY_BYTES_MAX;
use millrace_types::{Failure, NodeName, Reason};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::Request;

use crate::artifacts::ArtifactService;
use crate::events::ClusterEventLog;
use crate::fleet::WorkerFleet;
use crate::leadership::LeaderStatus;
use crate::passed::TrafficMatrix;
use crate::peers::{Activities, Traces};
use crate::raft::Replica;

/// The longest wait of a request: shorter than the timeouts of common proxies.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// The admin API, with its data sources.
#[derive(Debug, Clone)]
pub(crate) struct AdminService {
    pub(crate) replica: Replica,
    pub(crate) fleet: WorkerFleet,
    pub(crate) outlook: LeaderStatus,
    pub(crate) artifacts: Arc<ArtifactService>,
    pub(crate) traces: Traces,
    pub(crate) activities: Activities,
    /// The traffic of the runs that this controller drives.
    pub(crate) passed: TrafficMatrix,
    pub(crate) events: ClusterEventLog,
    /// Ends requests that wait.
    pub(crate) stop: CancellationToken,
    pub(crate) faults: FaultPermission,
    /// Permits for the search for an order of a dry run's items.
    pub(crate) order_searches: Arc<Semaphore>,
}

/// Dry runs of an apply that a controller carries out at a time. A client can request many, and each
/// may try thousands of items.
pub(crate) const ORDER_SEARCHES_MAX: usize = 1;

/// Whether fault injection is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultPermission {
    Refused,
    Allowed,
}

/// Returns the caller, whom the gateway put into the request's extensions. A request without a caller
/// is refused.
fn caller<T>(request: &Request<T>) -> Result<CallerName, Failure> {
    let caller = request.extensions().get::<millrace_gateway::authentication::Caller>();
    let caller = caller.ok_or_else(|| Failure::new(Reason::Unauthenticated, "the caller is not known"))?;
    Ok(CallerName(caller.as_str().into()))
}

/// Converts a client's idempotency key. Each key is a separate session in the state, so that a client
/// may have several writes in flight.
fn idempotency(key: String) -> Result<Option<IdempotencyKey>, Failure> {
    match key.len() {
        0 => Ok(None),
        1..=IDEMPOTENCY_KEY_BYTES_MAX => Ok(Some(IdempotencyKey { client: key.into(), seq: 1 })),
        len => {
            let message = format!(
                "the idempotency key has {len} bytes: at most {IDEMPOTENCY_KEY_BYTES_MAX} are allowed"
            );
            Err(Failure::malformed(message))
        }
    }
}

fn node_name(name: &str) -> Result<NodeName, Failure> {
    NodeName::new(name).map_err(invalid_name)
}

fn invalid_name(error: NameError) -> Failure {
    Failure::new(Reason::InvalidSpec, error.to_string())
}

/// Returns the wait that a request asks for in the field `field`, up to [`WAIT_MAX`].
fn wait(field: &str, asked: Option<&prost_types::Duration>) -> Result<Duration, Failure> {
    let asked = asked.map_or(Some(Duration::ZERO), convert::duration);
    let asked = asked.ok_or_else(|| Failure::malformed(format!("`{field}` is negative")))?;
    Ok(asked.min(WAIT_MAX))
}

fn unknown_token(token: &str) -> String {
    format!("page token {token:?} is not a token of this API")
}

impl AdminService {
    /// Returns the state with the requested consistency.
    async fn read(&self, consistency: api::Consistency) -> Result<State, Failure> {
        match consistency {
            api::Consistency::Stale => Ok(self.replica.state()),
            api::Consistency::Unspecified | api::Consistency::Linearizable => {
                self.replica.linearizable().await
            }
        }
    }
}
