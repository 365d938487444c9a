//! Workflows: apply, get, list, delete.

use std::ops::Bound;
use std::sync::Arc;

use millrace_cluster_state::{Applied, Command, State, Workflow};
use millrace_proto::admin as api;
use millrace_proto::convert;
use millrace_types::{Failure, FunctionKey, Reason, TenantName};
use tonic::Request;

use super::functions::{expected, page_token};
use super::{AdminService, caller, idempotency, invalid_name, page_size, views};

impl AdminService {
    pub(super) async fn apply_workflow(
        &self,
        request: Request<api::ApplyWorkflowRequest>,
    ) -> Result<api::ApplyWorkflowResponse, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let wanted = request.spec.ok_or_else(|| Failure::new(Reason::InvalidSpec, "there is no spec"))?;
        let spec = convert::workflow_spec(wanted)?;
        let key = spec.key.clone();
        let idempotency = idempotency(request.idempotency_key)?;
        let command = Command::ApplyWorkflow { spec, expected: expected(request.resource_version) };
        let (applied, state) = if request.dry_run {
            self.dry_run(caller, command).await?
        } else {
            (self.replica.propose(caller, idempotency, command).await?, self.replica.state())
        };
        let outcome = match applied {
            Applied::Created { .. } => api::ApplyOutcome::Created,
            Applied::Unchanged => api::ApplyOutcome::Unchanged,
            _ => api::ApplyOutcome::Configured,
        };
        Ok(api::ApplyWorkflowResponse {
            outcome: outcome.into(),
            // Absent when it was deleted again since.
            workflow: state.workflow(&key).map(|workflow| self.workflow_view(&state, workflow)),
        })
    }

    pub(super) async fn get_workflow(
        &self,
        request: api::GetWorkflowRequest,
    ) -> Result<api::Workflow, Failure> {
        let key = convert::function_key(&request.tenant, &request.name)?;
        let state = self.read(request.consistency()).await?;
        let workflow = state.workflow(&key).ok_or_else(|| {
            let message = format!("no workflow {key}: list them with 'millrace get workflows'");
            Failure::new(Reason::WorkflowNotFound, message)
        })?;
        Ok(self.workflow_view(&state, workflow))
    }

    pub(super) async fn list_workflows(
        &self,
        request: api::ListWorkflowsRequest,
    ) -> Result<api::ListWorkflowsResponse, Failure> {
        let tenant = match request.tenant.as_str() {
            "" => None,
            tenant => Some(TenantName::new(tenant).map_err(invalid_name)?),
        };
        let size = page_size(request.page_size);
        let after = page_token(&request.page_token)?;
        let state = self.read(request.consistency()).await?;
        let mut rest = listed(&state, tenant.as_ref(), after.as_ref()).peekable();
        let mut workflows: Vec<api::Workflow> = Vec::new();
        let mut last = None;
        while let Some(workflow) = rest.next_if(|_| workflows.len() < size) {
            workflows.push(self.workflow_view(&state, workflow));
            last = Some(&workflow.key);
        }
        let next = last.filter(|_| rest.peek().is_some());
        Ok(api::ListWorkflowsResponse {
            next_page_token: next.map(FunctionKey::to_string).unwrap_or_default(),
            workflows,
        })
    }

    pub(super) async fn delete_workflow(
        &self,
        request: Request<api::DeleteWorkflowRequest>,
    ) -> Result<api::DeleteWorkflowResponse, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let key = convert::function_key(&request.tenant, &request.name)?;
        let idempotency = idempotency(request.idempotency_key)?;
        let command = Command::DeleteWorkflow { key, expected: expected(request.resource_version) };
        if request.dry_run {
            self.dry_run(caller, command).await?;
        } else {
            self.replica.propose(caller, idempotency, command).await?;
        }
        Ok(api::DeleteWorkflowResponse {})
    }

    fn workflow_view(&self, state: &State, workflow: &Workflow) -> api::Workflow {
        views::workflow(state, workflow, &self.fleet.workers(), &self.outlook.shortages())
    }
}

/// The workflows of a tenant, or of all, after a key.
fn listed<'a>(
    state: &'a State,
    tenant: Option<&'a TenantName>,
    after: Option<&FunctionKey>,
) -> Box<dyn Iterator<Item = &'a Arc<Workflow>> + 'a> {
    let of_tenant =
        move |workflow: &&Arc<Workflow>| tenant.is_none_or(|tenant| workflow.key.tenant == *tenant);
    match (after, tenant) {
        (Some(after), _) => Box::new(state.workflows_from(Bound::Excluded(after)).take_while(of_tenant)),
        (None, Some(tenant)) => Box::new(state.workflows_of(tenant)),
        (None, None) => Box::new(state.workflows()),
    }
}
