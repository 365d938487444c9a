//! Workflows: apply, get, list, delete.

use futures::future::join_all;
use millrace_cluster_state::{State, StateCommand, WorkflowRecord};
use millrace_nodes::placement::FunctionPair;
use millrace_proto::admin as api;
use millrace_proto::convert;
use millrace_types::{Failure, FunctionKey, Reason, Revision};
use tonic::Request;

use super::functions::{expected, outcome};
use super::listing::Listing;
use super::masks::ResponseMask;
use super::{AdminService, caller, idempotency, views};
use crate::passed::sum_traffic;
use crate::peers::traffic;
use crate::raft::TrafficClass;

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
        let command = StateCommand::ApplyWorkflow { spec, expected: expected(request.resource_version) };
        let (applied, state) = self.write(caller, idempotency, request.dry_run, command).await?;
        Ok(api::ApplyWorkflowResponse {
            outcome: outcome(applied).into(),
            // The workflow is absent if it was deleted again meanwhile.
            workflow: state.workflow(&key).map(|workflow| self.workflow_view(&state, workflow)),
        })
    }

    pub(super) async fn get_workflow(
        &self,
        request: api::GetWorkflowRequest,
    ) -> Result<api::Workflow, Failure> {
        let key = convert::function_key(&request.tenant, &request.name)?;
        let consistency = request.consistency();
        let mask = ResponseMask::read(request.read_mask, "Workflow")?;
        let state = self.read(consistency).await?;
        let workflow = state.workflow(&key).ok_or_else(|| {
            let message = format!("no workflow {key}: list them with 'millrace get workflows'");
            Failure::new(Reason::WorkflowNotFound, message)
        })?;
        let generation = workflow.generation;
        let mut view = self.workflow_view(&state, workflow);
        if request.passed {
            view.passed = Some(self.passed(state, &key, generation).await);
        }
        Ok(mask.cut(view))
    }

    /// Returns the traffic of the runs of one version, summed over all controllers.
    async fn passed(&self, state: State, key: &FunctionKey, generation: Revision) -> api::WorkflowPassed {
        let others = self.replica.others(TrafficClass::Requests).into_iter();
        let mut told = self.passed.told(&state);
        let mut missing = Vec::new();
        for (id, others) in join_all(others.map(traffic::ask)).await {
            match others {
                Some(others) => told.extend(others),
                None => missing.push(id),
            }
        }
        let sum = sum_traffic(key, generation, told);
        let pair = |((from, to), bytes): (FunctionPair, u64)| api::PassedPair {
            from: from.to_string(),
            to: to.to_string(),
            bytes,
        };
        let uncounted = sum.pairs.is_none();
        let pairs = sum.pairs.into_iter().flatten().map(pair).collect();
        api::WorkflowPassed { runs: sum.runs, pairs, missing, uncounted }
    }

    pub(super) async fn list_workflows(
        &self,
        request: api::ListWorkflowsRequest,
    ) -> Result<api::ListWorkflowsResponse, Failure> {
        let listing = Listing::read(&request.tenant, request.page_size, &request.page_token)?;
        let consistency = request.consistency();
        let mask = ResponseMask::read(request.read_mask, "Workflow")?;
        let state = self.read(consistency).await?;
        let found = state.workflows_from(listing.start().as_ref());
        let view =
            |workflow: &&std::sync::Arc<WorkflowRecord>| mask.cut(self.workflow_view(&state, workflow));
        let (workflows, next_page_token) = listing.page(found, |workflow| &workflow.key, view);
        Ok(api::ListWorkflowsResponse { workflows, next_page_token })
    }

    pub(super) async fn delete_workflow(
        &self,
        request: Request<api::DeleteWorkflowRequest>,
    ) -> Result<api::DeleteWorkflowResponse, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let key = convert::function_key(&request.tenant, &request.name)?;
        let idempotency = idempotency(request.idempotency_key)?;
        let command = StateCommand::DeleteWorkflow { key, expected: expected(request.resource_version) };
        self.write(caller, idempotency, request.dry_run, command).await?;
        Ok(api::DeleteWorkflowResponse {})
    }

    fn workflow_view(&self, state: &State, workflow: &WorkflowRecord) -> api::Workflow {
        views::workflow(state, workflow, &self.fleet.workers(), &self.outlook.shortages())
    }
}
