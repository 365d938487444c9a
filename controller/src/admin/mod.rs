//! The admin API. Every call is checked in full before anything is proposed, and every write goes
//! through the replicated state under the caller's name.
//!
//! | module | holds |
//! |---|---|
//! | [`billing`] | what was used and what it costs |
//! | [`cluster`] | the controllers: status, promote, remove, transfer of leadership |
//! | [`functions`] | apply, get, list, delete |
//! | [`listing`] | a page of functions or workflows |
//! | [`logs`] | the last log lines of everybody |
//! | [`masks`] | which fields of an answer are wanted |
//! | [`nodes`] | the workers, their GPUs and what is resident; fault injection |
//! | [`objective`] | whether a function is answered as its SLO asks |
//! | [`operations`] | what takes its time |
//! | [`policy`] | how nodes schedule |
//! | [`scheduling`] | cordon, drain, uncordon and removal of nodes |
//! | [`events`] | what happened |
//! | [`scaling`] | how many nodes are needed |
//! | [`data`] | where intermediate data is |
//! | [`tenants`] | tenants and their caps |
//! | [`workflows`] | apply, get, list, delete of workflows |
//! | [`views`] | records as the API shows them |

mod billing;
mod cluster;
mod data;
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
mod tenants;
mod views;
mod workflows;

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{CLUSTER_VERSION, Caller, IdempotencyKey, State};
use millrace_proto::BUILD;
use millrace_proto::admin::admin_server::Admin;
use millrace_proto::admin::{self as api};
use millrace_proto::convert;
use millrace_proto::status::to_status;
use millrace_types::ids::NameError;
use millrace_types::{Failure, NodeName, Reason};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::activity::Activities;
use crate::artifacts::Artifacts;
use crate::events::Events;
use crate::fleet::Fleet;
use crate::leader::Outlook;
use crate::passed::Passed;
use crate::raft::Replica;
use crate::traces::Traces;

/// Digests asked after at a time.
const DIGESTS_MAX: usize = 1_000;
/// The longest idempotency key.
const IDEMPOTENCY_KEY_LEN_MAX: usize = 128;

/// Items of a page when none is said.
const PAGE_DEFAULT: usize = 100;
/// The most items of a page.
const PAGE_MAX: usize = 1_000;

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
}

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
        1..=IDEMPOTENCY_KEY_LEN_MAX => Ok(Some(IdempotencyKey { client: key.into(), seq: 1 })),
        len => {
            let message =
                format!("the idempotency key has {len} bytes: at most {IDEMPOTENCY_KEY_LEN_MAX} are taken");
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

/// How many items a page has.
fn page_size(asked: u32) -> usize {
    match asked as usize {
        0 => PAGE_DEFAULT,
        size => size.min(PAGE_MAX),
    }
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

fn answer<T>(result: Result<T, Failure>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|failure| to_status(&failure))
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn find_artifacts(
        &self,
        request: Request<api::FindArtifactsRequest>,
    ) -> Result<Response<api::FindArtifactsResponse>, Status> {
        answer(self.find_artifacts(request.into_inner()).await)
    }

    async fn upload_artifact(
        &self,
        request: Request<Streaming<api::UploadArtifactRequest>>,
    ) -> Result<Response<api::UploadArtifactResponse>, Status> {
        answer(self.upload_artifact(request).await)
    }

    async fn apply_function(
        &self,
        request: Request<api::ApplyFunctionRequest>,
    ) -> Result<Response<api::ApplyFunctionResponse>, Status> {
        answer(self.apply_function(request).await)
    }

    async fn get_function(
        &self,
        request: Request<api::GetFunctionRequest>,
    ) -> Result<Response<api::Function>, Status> {
        answer(self.get_function(request.into_inner()).await)
    }

    async fn list_functions(
        &self,
        request: Request<api::ListFunctionsRequest>,
    ) -> Result<Response<api::ListFunctionsResponse>, Status> {
        answer(self.list_functions(request.into_inner()).await)
    }

    async fn delete_function(
        &self,
        request: Request<api::DeleteFunctionRequest>,
    ) -> Result<Response<api::DeleteFunctionResponse>, Status> {
        answer(self.delete_function(request).await)
    }

    async fn apply_workflow(
        &self,
        request: Request<api::ApplyWorkflowRequest>,
    ) -> Result<Response<api::ApplyWorkflowResponse>, Status> {
        answer(self.apply_workflow(request).await)
    }

    async fn get_workflow(
        &self,
        request: Request<api::GetWorkflowRequest>,
    ) -> Result<Response<api::Workflow>, Status> {
        answer(self.get_workflow(request.into_inner()).await)
    }

    async fn list_workflows(
        &self,
        request: Request<api::ListWorkflowsRequest>,
    ) -> Result<Response<api::ListWorkflowsResponse>, Status> {
        answer(self.list_workflows(request.into_inner()).await)
    }

    async fn delete_workflow(
        &self,
        request: Request<api::DeleteWorkflowRequest>,
    ) -> Result<Response<api::DeleteWorkflowResponse>, Status> {
        answer(self.delete_workflow(request).await)
    }

    async fn list_nodes(
        &self,
        request: Request<api::ListNodesRequest>,
    ) -> Result<Response<api::ListNodesResponse>, Status> {
        answer(self.list_nodes(request.into_inner()).await)
    }

    async fn get_version(
        &self,
        _request: Request<api::GetVersionRequest>,
    ) -> Result<Response<api::GetVersionResponse>, Status> {
        let state = self.replica.state();
        answer(Ok(api::GetVersionResponse {
            version: BUILD.into(),
            build: build().into(),
            cluster_id: state.cluster().map(|cluster| cluster.id.to_string()).unwrap_or_default(),
            cluster_version: CLUSTER_VERSION,
            api_versions: vec![millrace_types::manifest::API_VERSION.into()],
            controller_id: self.replica.id().0,
        }))
    }

    async fn get_cluster_status(
        &self,
        _request: Request<api::GetClusterStatusRequest>,
    ) -> Result<Response<api::ClusterStatus>, Status> {
        answer(Ok(self.replica.cluster_status().await))
    }

    async fn promote_controller(
        &self,
        request: Request<api::PromoteControllerRequest>,
    ) -> Result<Response<api::ChangeMembershipResponse>, Status> {
        answer(self.promote_controller(request).await)
    }

    async fn remove_controller(
        &self,
        request: Request<api::RemoveControllerRequest>,
    ) -> Result<Response<api::ChangeMembershipResponse>, Status> {
        answer(self.remove_controller(request).await)
    }

    async fn transfer_leadership(
        &self,
        request: Request<api::TransferLeadershipRequest>,
    ) -> Result<Response<api::TransferLeadershipResponse>, Status> {
        answer(self.transfer_leadership(request).await)
    }

    async fn inject_fault(
        &self,
        request: Request<api::InjectFaultRequest>,
    ) -> Result<Response<api::InjectFaultResponse>, Status> {
        answer(self.inject_fault(request.into_inner()).await)
    }

    async fn set_node_scheduling(
        &self,
        request: Request<api::SetNodeSchedulingRequest>,
    ) -> Result<Response<api::Node>, Status> {
        answer(self.set_node_scheduling(request).await)
    }

    async fn remove_node(
        &self,
        request: Request<api::RemoveNodeRequest>,
    ) -> Result<Response<api::RemoveNodeResponse>, Status> {
        answer(self.remove_node(request).await)
    }

    async fn lookup_data(
        &self,
        request: Request<api::LookupDataRequest>,
    ) -> Result<Response<api::LookupDataResponse>, Status> {
        answer(self.lookup_data(request.into_inner()).await)
    }

    async fn get_scaling_signal(
        &self,
        _request: Request<api::GetScalingSignalRequest>,
    ) -> Result<Response<api::ScalingSignal>, Status> {
        answer(self.scaling_signal())
    }

    async fn list_billing(
        &self,
        request: Request<api::ListBillingRequest>,
    ) -> Result<Response<api::ListBillingResponse>, Status> {
        answer(self.list_billing(request.into_inner()).await)
    }

    async fn set_tenant(
        &self,
        request: Request<api::SetTenantRequest>,
    ) -> Result<Response<api::Tenant>, Status> {
        answer(self.set_tenant(request).await)
    }

    async fn list_tenants(
        &self,
        request: Request<api::ListTenantsRequest>,
    ) -> Result<Response<api::ListTenantsResponse>, Status> {
        answer(self.list_tenants(request.into_inner()).await)
    }

    async fn get_trace(
        &self,
        request: Request<api::GetTraceRequest>,
    ) -> Result<Response<api::Trace>, Status> {
        answer(self.traces.find(&request.into_inner().id).await)
    }

    async fn list_events(
        &self,
        request: Request<api::ListEventsRequest>,
    ) -> Result<Response<api::ListEventsResponse>, Status> {
        answer(self.list_events(request.into_inner()).await)
    }

    async fn get_activity(
        &self,
        request: Request<api::GetActivityRequest>,
    ) -> Result<Response<api::GetActivityResponse>, Status> {
        answer(Ok(self.activities.gather(request.get_ref()).await))
    }

    async fn get_policy(
        &self,
        request: Request<api::GetPolicyRequest>,
    ) -> Result<Response<api::Policy>, Status> {
        answer(self.get_policy(request.into_inner()).await)
    }

    async fn list_policy_changes(
        &self,
        request: Request<api::ListPolicyChangesRequest>,
    ) -> Result<Response<api::ListPolicyChangesResponse>, Status> {
        answer(self.list_policy_changes(request.into_inner()).await)
    }

    async fn update_policy(
        &self,
        request: Request<api::UpdatePolicyRequest>,
    ) -> Result<Response<api::Policy>, Status> {
        answer(self.update_policy(request).await)
    }

    async fn list_operations(
        &self,
        request: Request<api::ListOperationsRequest>,
    ) -> Result<Response<api::ListOperationsResponse>, Status> {
        answer(self.list_operations(request.into_inner()).await)
    }

    async fn get_operation(
        &self,
        request: Request<api::GetOperationRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        answer(self.get_operation(request.into_inner()).await)
    }

    async fn wait_operation(
        &self,
        request: Request<api::WaitOperationRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        answer(self.wait_operation(request.into_inner()).await)
    }

    async fn cancel_operation(
        &self,
        request: Request<api::CancelOperationRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        answer(self.cancel_operation(request).await)
    }

    async fn list_logs(
        &self,
        request: Request<api::ListLogsRequest>,
    ) -> Result<Response<api::ListLogsResponse>, Status> {
        answer(self.list_logs(request.into_inner()).await)
    }
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

    async fn find_artifacts(
        &self,
        request: api::FindArtifactsRequest,
    ) -> Result<api::FindArtifactsResponse, Failure> {
        if request.digests.len() > DIGESTS_MAX {
            return Err(Failure::malformed(format!(
                "{} digests: ask after {DIGESTS_MAX} at a time",
                request.digests.len()
            )));
        }
        let digests = request.digests.iter().map(|text| text.parse()).collect::<Result<_, _>>();
        let digests = digests
            .map_err(|error: millrace_types::digest::ParseError| Failure::malformed(error.to_string()))?;
        let found = self.artifacts.find(digests).await?;
        // One that was removed since is not found.
        let state = self.replica.state();
        let known = found.into_iter().filter_map(|(digest, bytes)| {
            let model = views::model(&state.artifact(&digest)?.model);
            Some((views::artifact(digest, bytes), model))
        });
        let (found, models) = known.unzip();
        Ok(api::FindArtifactsResponse { found, models })
    }

    async fn upload_artifact(
        &self,
        request: Request<Streaming<api::UploadArtifactRequest>>,
    ) -> Result<api::UploadArtifactResponse, Failure> {
        let caller = caller(&request)?;
        let uploaded = self.artifacts.clone().upload(request.into_inner(), caller).await?;
        Ok(api::UploadArtifactResponse {
            artifact: Some(views::artifact(uploaded.digest, uploaded.bytes)),
            model: Some(views::model(&uploaded.model)),
        })
    }
}

/// How this binary was built.
fn build() -> &'static str {
    if cfg!(debug_assertions) { "debug" } else { "release" }
}
