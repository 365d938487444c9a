//! Dispatches every call of the admin API. This module decides nothing.

use millrace_proto::BUILD;
use millrace_proto::admin as api;
use millrace_proto::admin::admin_server::Admin;
use millrace_proto::status::to_status;
use millrace_types::Failure;
use tonic::{Request, Response, Status, Streaming};

use super::AdminService;

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

    async fn dry_run_apply(
        &self,
        request: Request<api::DryRunApplyRequest>,
    ) -> Result<Response<api::DryRunApplyResponse>, Status> {
        answer(self.dry_run_apply(request).await)
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
            cluster_version: state.rules().0,
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

    async fn list_slices(
        &self,
        request: Request<api::ListSlicesRequest>,
    ) -> Result<Response<api::ListSlicesResponse>, Status> {
        answer(self.list_slices(request.into_inner()).await)
    }

    async fn profile_function(
        &self,
        request: Request<api::ProfileFunctionRequest>,
    ) -> Result<Response<api::Operation>, Status> {
        answer(self.profile_function(request).await)
    }

    async fn list_profiles(
        &self,
        request: Request<api::ListProfilesRequest>,
    ) -> Result<Response<api::ListProfilesResponse>, Status> {
        answer(self.list_profiles(request.into_inner()).await)
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

/// Returns the build profile of this binary.
fn build() -> &'static str {
    if cfg!(debug_assertions) { "debug" } else { "release" }
}
