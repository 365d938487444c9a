//! The admin API. Every call is checked in full before anything is proposed, and every write goes
//! through the replicated state under the caller's name.
//!
//! | module | holds |
//! |---|---|
//! | [`service`] | every call of the API, and who answers it |
//! | [`artifacts`] | model files: which there are, and new ones |
//! | [`billing`] | what was used and what it costs |
//! | [`cluster`] | the controllers: status, promote, remove, transfer of leadership |
//! | [`functions`] | apply, get, list, delete |
//! | [`listing`] | a page of a list |
//! | [`logs`] | the last log lines of everybody |
//! | [`masks`] | which fields of an answer are wanted |
//! | [`nodes`] | the workers, their GPUs and what is resident; fault injection |
//! | [`objective`] | whether a function is answered as its SLO asks |
//! | [`operations`] | what takes its time |
//! | [`policy`] | how nodes schedule |
//! | [`scheduling`] | cordon, drain, uncordon and removal of nodes |
//! | [`dry_run`] | several applies tried as one |
//! | [`events`] | what happened |
//! | [`scaling`] | how many nodes are needed |
//! | [`data`] | where intermediate data is |
//! | [`tenants`] | tenants and their caps |
//! | [`workflows`] | apply, get, list, delete of workflows |
//! | [`views`] | records as the API shows them |

mod artifacts;
mod billing;
mod cluster;
mod data;
mod dry_run;
mod events;
mod functions;
mod listing;
pub(crate) mod logs;
mod masks;
mod nodes;
mod objective;
mod operations;
mod policy;
mod positions;
mod scaling;
mod scheduling;
mod service;
mod tenants;
mod views;
mod workflows;

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{Caller, IdempotencyKey, State};
use millrace_proto::admin as api;
use millrace_proto::convert;
use millrace_types::ids::NameError;
use millrace_types::limits::IDEMPOTENCY_KEY_BYTES_MAX;
use millrace_types::{Failure, NodeName, Reason};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::Request;

use crate::activity::Activities;
use crate::artifacts::Artifacts;
use crate::events::Events;
use crate::fleet::Fleet;
use crate::leader::Outlook;
use crate::passed::Passed;
use crate::raft::Replica;
use crate::traces::Traces;

/// The longest that a request waits: shorter than what proxies cut off.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// What the API answers from.
#[derive(Debug, Clone)]
pub(crate) struct AdminService {
    pub(crate) replica: Replica,
    pub(crate) fleet: Fleet,
    pub(crate) outlook: Outlook,
    pub(crate) artifacts: Arc<Artifacts>,
    pub(crate) traces: Traces,
    pub(crate) activities: Activities,
    /// What the runs that this controller drives passed.
    pub(crate) passed: Passed,
    pub(crate) events: Events,
    /// Ends what waits.
    pub(crate) stop: CancellationToken,
    pub(crate) faults: Faults,
    /// Permits for the search for an order of a dry run's items.
    pub(crate) order_searches: Arc<Semaphore>,
}

/// The dry runs of an apply that a controller carries out at a time. A client can ask for many, and each may try
/// thousands of items.
pub(crate) const ORDER_SEARCHES_MAX: usize = 1;

/// Whether fault injection is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Faults {
    Refused,
    Allowed,
}

/// Who asks: the front door put it into the request. Without one nothing is served.
fn caller<T>(request: &Request<T>) -> Result<Caller, Failure> {
    let caller = request.extensions().get::<millrace_gateway::auth::Caller>();
    let caller = caller.ok_or_else(|| Failure::new(Reason::Unauthenticated, "the caller is not known"))?;
    Ok(Caller(caller.as_str().into()))
}

/// A client's idempotency key. Each is a session of its own in the state, so that a client may have
/// several writes in flight.
fn idempotency(key: String) -> Result<Option<IdempotencyKey>, Failure> {
    match key.len() {
        0 => Ok(None),
        1..=IDEMPOTENCY_KEY_BYTES_MAX => Ok(Some(IdempotencyKey { client: key.into(), seq: 1 })),
        len => {
            let message =
                format!("the idempotency key has {len} bytes: at most {IDEMPOTENCY_KEY_BYTES_MAX} are taken");
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

/// How long a request waits, of what it asks for in a field of this name.
fn wait(field: &str, asked: Option<&prost_types::Duration>) -> Result<Duration, Failure> {
    let asked = asked.map_or(Some(Duration::ZERO), convert::duration);
    let asked = asked.ok_or_else(|| Failure::malformed(format!("`{field}` is negative")))?;
    Ok(asked.min(WAIT_MAX))
}

fn unknown_token(token: &str) -> String {
    format!("page token {token:?} was not given by this server")
}

impl AdminService {
    /// The state as a read wants it.
    async fn read(&self, consistency: api::Consistency) -> Result<State, Failure> {
        match consistency {
            api::Consistency::Stale => Ok(self.replica.state()),
            api::Consistency::Unspecified | api::Consistency::Linearizable => {
                self.replica.linearizable().await
            }
        }
    }
}
