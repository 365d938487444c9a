//! The admin API of the fake.

use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_proto::activity::{Activity, FunctionActivity};
use millrace_proto::admin::{self, admin_server};
use millrace_proto::convert::duration_wire;
use millrace_types::Reason;
use tonic::{Request, Response, Status, Streaming};

use super::{Service, operations, refused};

#[tonic::async_trait]
impl admin_server::Admin for Service {
    async fn find_artifacts(
        &self,
        request: Request<admin::FindArtifactsRequest>,
    ) -> Result<Response<admin::FindArtifactsResponse>, Status> {
        let digests = request.into_inner().digests;
        if digests.len() > 1_000 {
            return refused(Reason::MalformedRequest, "ask after 1000 at a time");
        }
        let known = self.0.artifacts.lock().unwrap();
        let found = digests.into_iter().filter_map(|digest| {
            known.get(&digest).map(|&bytes| admin::Artifact { digest: digest.clone(), bytes })
        });
        let (found, models) = found.map(|artifact| (artifact, super::workflows::model())).unzip();
        Ok(Response::new(admin::FindArtifactsResponse { found, models, not_looked_at: 0 }))
    }

    async fn upload_artifact(
        &self,
        request: Request<Streaming<admin::UploadArtifactRequest>>,
    ) -> Result<Response<admin::UploadArtifactResponse>, Status> {
        let mut parts = request.into_inner();
        let mut artifact = admin::Artifact::default();
        let mut hasher = millrace_types::digest::Hasher::default();
        let mut bytes = 0;
        while let Some(part) = parts.message().await? {
            match part.part {
                Some(admin::upload_artifact_request::Part::Header(header)) => artifact = header,
                Some(admin::upload_artifact_request::Part::Data(data)) => {
                    hasher.update(&data);
                    bytes += data.len() as u64;
                }
                None => {}
            }
        }
        if hasher.finish().to_string() != artifact.digest || bytes != artifact.bytes {
            return refused(Reason::DigestMismatch, "the bytes are not the header's");
        }
        self.0.uploads.fetch_add(1, Ordering::Relaxed);
        self.0.artifacts.lock().unwrap().insert(artifact.digest.clone(), bytes);
        Ok(Response::new(admin::UploadArtifactResponse { artifact: Some(artifact), model: None }))
    }

    async fn apply_function(
        &self,
        request: Request<admin::ApplyFunctionRequest>,
    ) -> Result<Response<admin::ApplyFunctionResponse>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        self.0.apply_function(request).map(Response::new)
    }

    async fn get_function(
        &self,
        request: Request<admin::GetFunctionRequest>,
    ) -> Result<Response<admin::Function>, Status> {
        self.0.function(&request.into_inner().name).map(Response::new)
    }

    async fn list_functions(
        &self,
        request: Request<admin::ListFunctionsRequest>,
    ) -> Result<Response<admin::ListFunctionsResponse>, Status> {
        self.0.pages.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(self.0.functions(request.into_inner().page_token)))
    }

    async fn delete_function(
        &self,
        request: Request<admin::DeleteFunctionRequest>,
    ) -> Result<Response<admin::DeleteFunctionResponse>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        self.0.delete_function(&request).map(Response::new)
    }

    async fn apply_workflow(
        &self,
        request: Request<admin::ApplyWorkflowRequest>,
    ) -> Result<Response<admin::ApplyWorkflowResponse>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        self.0.apply_workflow(request).map(Response::new)
    }

    async fn dry_run_apply(
        &self,
        request: Request<admin::DryRunApplyRequest>,
    ) -> Result<Response<admin::DryRunApplyResponse>, Status> {
        Ok(Response::new(self.0.dry_run_apply(request.into_inner())))
    }

    async fn get_workflow(
        &self,
        request: Request<admin::GetWorkflowRequest>,
    ) -> Result<Response<admin::Workflow>, Status> {
        self.0.workflow(&request.into_inner().name).map(Response::new)
    }

    async fn list_workflows(
        &self,
        request: Request<admin::ListWorkflowsRequest>,
    ) -> Result<Response<admin::ListWorkflowsResponse>, Status> {
        self.0.pages.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(self.0.workflows(request.into_inner().page_token)))
    }

    async fn delete_workflow(
        &self,
        request: Request<admin::DeleteWorkflowRequest>,
    ) -> Result<Response<admin::DeleteWorkflowResponse>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        self.0.delete_workflow(&request).map(Response::new)
    }

    async fn list_nodes(
        &self,
        _: Request<admin::ListNodesRequest>,
    ) -> Result<Response<admin::ListNodesResponse>, Status> {
        self.0.scheduling.lock().unwrap().1 += 1;
        Ok(Response::new(admin::ListNodesResponse { nodes: vec![self.0.node()], ..Default::default() }))
    }

    async fn get_version(
        &self,
        _: Request<admin::GetVersionRequest>,
    ) -> Result<Response<admin::GetVersionResponse>, Status> {
        Ok(Response::new(admin::GetVersionResponse { version: "fake".into(), ..Default::default() }))
    }

    async fn inject_fault(
        &self,
        _: Request<admin::InjectFaultRequest>,
    ) -> Result<Response<admin::InjectFaultResponse>, Status> {
        refused(Reason::PermissionDenied, "faults are not allowed here")
    }

    async fn set_node_scheduling(
        &self,
        request: Request<admin::SetNodeSchedulingRequest>,
    ) -> Result<Response<admin::Node>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        if request.name != "node-0" {
            return refused(Reason::NodeNotFound, &format!("there is no node {:?}", request.name));
        }
        *self.0.scheduling.lock().unwrap() = (request.scheduling(), 0);
        Ok(Response::new(self.0.node()))
    }

    async fn remove_node(
        &self,
        request: Request<admin::RemoveNodeRequest>,
    ) -> Result<Response<admin::RemoveNodeResponse>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        match request.name.as_str() {
            "lost" => Ok(Response::new(admin::RemoveNodeResponse {})),
            _ => refused(Reason::NodeState, "it is live: drain and stop it first"),
        }
    }

    async fn get_scaling_signal(
        &self,
        _: Request<admin::GetScalingSignalRequest>,
    ) -> Result<Response<admin::ScalingSignal>, Status> {
        Err(Status::unimplemented("the fake has no planner"))
    }

    async fn lookup_data(
        &self,
        _: Request<admin::LookupDataRequest>,
    ) -> Result<Response<admin::LookupDataResponse>, Status> {
        Err(Status::unimplemented("the fake has no data"))
    }

    async fn get_cluster_status(
        &self,
        _: Request<admin::GetClusterStatusRequest>,
    ) -> Result<Response<admin::ClusterStatus>, Status> {
        Ok(Response::new(self.0.status.lock().unwrap().clone()))
    }

    /// Returns bills, two to a page: of a function that runs, of a deleted function, and of the
    /// tenant's forgotten functions.
    async fn list_billing(
        &self,
        request: Request<admin::ListBillingRequest>,
    ) -> Result<Response<admin::ListBillingResponse>, Status> {
        let request = request.into_inner();
        let after = request.page_token.parse::<usize>().unwrap_or(0);
        let bill = |tenant: &str, function: &str, requests, busy_ms: u64, idle_s: u64| admin::Bill {
            tenant: tenant.into(),
            function: function.into(),
            requests,
            busy: Some(duration_wire(Duration::from_millis(busy_ms))),
            idle: Some(duration_wire(Duration::from_millis(idle_s * 1_000))),
            charge: Some(duration_wire(Duration::from_millis(busy_ms + idle_s * 100))),
            deleted: function != "digits",
        };
        let all = [
            bill("acme", "digits", 3, 250, 10),
            bill("default", "", 1, 1, 0),
            bill("default", "digits", 1_000, 7_200_000, 36_000),
            bill("default", "gone", 2, 2, 0),
        ];
        let wanted = all.into_iter().filter(|bill| {
            (request.tenant.is_empty() || request.tenant == bill.tenant)
                && (request.function.is_empty() || request.function == bill.function)
        });
        let mut rest = wanted.skip(after).peekable();
        let bills: Vec<_> = rest.by_ref().take(2).collect();
        let next_page_token = rest.peek().map(|_| (after + 2).to_string()).unwrap_or_default();
        Ok(Response::new(admin::ListBillingResponse { bills, next_page_token }))
    }

    async fn set_tenant(
        &self,
        request: Request<admin::SetTenantRequest>,
    ) -> Result<Response<admin::Tenant>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        let quota = request.quota.unwrap();
        if request.name == "one-too-many" {
            return refused(Reason::QueueFull, "10000 tenants with caps are kept at most");
        }
        // An older server would ignore the dry run and store the caps.
        if request.dry_run && request.update_mask.is_none_or(|mask| mask.paths != ["dry_run"]) {
            return refused(Reason::MalformedRequest, "a trial that its mask does not name");
        }
        if !request.dry_run {
            self.0.quotas.lock().unwrap().insert(request.name.clone(), quota);
        }
        Ok(Response::new(tenant(&request.name, quota)))
    }

    async fn list_tenants(
        &self,
        request: Request<admin::ListTenantsRequest>,
    ) -> Result<Response<admin::ListTenantsResponse>, Status> {
        let from = request.into_inner().page_token;
        let quotas = self.0.quotas.lock().unwrap();
        let mut rest = quotas.range(from..);
        let tenants: Vec<_> = rest.by_ref().take(2).map(|(name, quota)| tenant(name, *quota)).collect();
        let next_page_token = rest.next().map(|(name, _)| name.clone()).unwrap_or_default();
        Ok(Response::new(admin::ListTenantsResponse { tenants, next_page_token }))
    }

    async fn list_events(
        &self,
        request: Request<admin::ListEventsRequest>,
    ) -> Result<Response<admin::ListEventsResponse>, Status> {
        let request = request.into_inner();
        let from: usize = request.after.parse().unwrap_or(0);
        let events: Vec<_> = self.0.events.lock().unwrap().iter().skip(from).take(2).cloned().collect();
        let next = (from + events.len()).to_string();
        Ok(Response::new(admin::ListEventsResponse { events, next, missed: 0 }))
    }

    async fn get_trace(
        &self,
        request: Request<admin::GetTraceRequest>,
    ) -> Result<Response<admin::Trace>, Status> {
        let id = request.into_inner().id;
        let trace = self.0.trace.lock().unwrap().clone();
        let known = trace.filter(|trace| trace.trace_id == id);
        known.map_or_else(
            || refused(Reason::TraceNotFound, &format!("no span of {id} is kept")),
            |trace| Ok(Response::new(trace)),
        )
    }

    async fn get_activity(
        &self,
        request: Request<admin::GetActivityRequest>,
    ) -> Result<Response<admin::GetActivityResponse>, Status> {
        let max = request.into_inner().functions_max;
        let named = |name: &str| FunctionActivity {
            tenant: "default".into(),
            function: name.into(),
            answered: 3,
            ..Default::default()
        };
        let functions: Vec<_> = ["echo", "never"].map(named).into_iter().take(max as usize).collect();
        let functions_left_out = 2u32.saturating_sub(max);
        let activity = Some(Activity { functions, ..Default::default() });
        Ok(Response::new(admin::GetActivityResponse { activity, functions_left_out, missing: Vec::new() }))
    }

    async fn get_policy(
        &self,
        _request: Request<admin::GetPolicyRequest>,
    ) -> Result<Response<admin::Policy>, Status> {
        self.policy()
    }

    async fn list_policy_changes(
        &self,
        _request: Request<admin::ListPolicyChangesRequest>,
    ) -> Result<Response<admin::ListPolicyChangesResponse>, Status> {
        Ok(Response::new(admin::ListPolicyChangesResponse::default()))
    }

    async fn update_policy(
        &self,
        request: Request<admin::UpdatePolicyRequest>,
    ) -> Result<Response<admin::Policy>, Status> {
        self.set_policy(request.into_inner()).await
    }

    async fn profile_function(
        &self,
        _request: Request<admin::ProfileFunctionRequest>,
    ) -> Result<Response<admin::Operation>, Status> {
        Ok(Response::new(admin::Operation::default()))
    }

    async fn list_profiles(
        &self,
        _request: Request<admin::ListProfilesRequest>,
    ) -> Result<Response<admin::ListProfilesResponse>, Status> {
        Ok(Response::new(admin::ListProfilesResponse::default()))
    }

    async fn list_slices(
        &self,
        _request: Request<admin::ListSlicesRequest>,
    ) -> Result<Response<admin::ListSlicesResponse>, Status> {
        Ok(Response::new(admin::ListSlicesResponse::default()))
    }

    async fn list_operations(
        &self,
        _request: Request<admin::ListOperationsRequest>,
    ) -> Result<Response<admin::ListOperationsResponse>, Status> {
        Ok(Response::new(admin::ListOperationsResponse {
            operations: vec![operations::drain("1")],
            ..Default::default()
        }))
    }

    async fn get_operation(
        &self,
        request: Request<admin::GetOperationRequest>,
    ) -> Result<Response<admin::Operation>, Status> {
        operations::find(&request.into_inner().id)
    }

    async fn wait_operation(
        &self,
        request: Request<admin::WaitOperationRequest>,
    ) -> Result<Response<admin::Operation>, Status> {
        self.advance(&request.into_inner().id)
    }

    async fn cancel_operation(
        &self,
        request: Request<admin::CancelOperationRequest>,
    ) -> Result<Response<admin::Operation>, Status> {
        let found = operations::find(&request.into_inner().id)?;
        *self.0.scheduling.lock().unwrap() = (admin::NodeScheduling::Cordoned, 0);
        Ok(found)
    }

    async fn list_logs(
        &self,
        request: Request<admin::ListLogsRequest>,
    ) -> Result<Response<admin::ListLogsResponse>, Status> {
        Ok(Response::new(operations::lines(&request.into_inner().after)))
    }

    async fn promote_controller(
        &self,
        request: Request<admin::PromoteControllerRequest>,
    ) -> Result<Response<admin::ChangeMembershipResponse>, Status> {
        let id = request.into_inner().id;
        self.0.enter(&format!("promote {id}")).await?;
        let mut status = self.0.status.lock().unwrap();
        let Some(controller) = status.controllers.iter_mut().find(|it| it.id == id) else {
            return refused(Reason::MembershipRefused, &format!("controller {id} is no member"));
        };
        controller.voter = true;
        Ok(Response::new(members(&status)))
    }

    async fn remove_controller(
        &self,
        request: Request<admin::RemoveControllerRequest>,
    ) -> Result<Response<admin::ChangeMembershipResponse>, Status> {
        let id = request.into_inner().id;
        self.0.enter(&format!("remove {id}")).await?;
        let mut status = self.0.status.lock().unwrap();
        status.controllers.retain(|it| it.id != id);
        Ok(Response::new(members(&status)))
    }

    async fn transfer_leadership(
        &self,
        request: Request<admin::TransferLeadershipRequest>,
    ) -> Result<Response<admin::TransferLeadershipResponse>, Status> {
        let id = request.into_inner().id;
        self.0.enter(&format!("transfer {id}")).await?;
        let mut status = self.0.status.lock().unwrap();
        (status.leader, status.term) = (id, status.term + 1);
        Ok(Response::new(admin::TransferLeadershipResponse { leader: id, term: status.term }))
    }
}

fn tenant(name: &str, quota: admin::Quota) -> admin::Tenant {
    let updated_by = "anonymous".to_owned();
    admin::Tenant { name: name.into(), quota: Some(quota), functions: 2, updated_by, ..Default::default() }
}

fn members(status: &admin::ClusterStatus) -> admin::ChangeMembershipResponse {
    let member = |it: &admin::Controller| admin::Member {
        id: it.id,
        internal_address: it.internal_address.clone(),
        voter: it.voter,
    };
    let warnings = status.warnings.clone();
    let members = status.controllers.iter().map(member).collect();
    admin::ChangeMembershipResponse { members, warnings, operation: "7".into() }
}
