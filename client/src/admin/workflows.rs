//! Workflows: functions joined into a graph, and invoked as one model.

use futures::stream::BoxStream;
use millrace_proto::admin::{self, DeleteWorkflowRequest, GetWorkflowRequest, ListWorkflowsRequest};
use millrace_proto::convert::workflow_spec_wire;
use millrace_types::{FunctionKey, TenantName, WorkflowSpec};

use super::call::{admin_client, stamped};
use super::pages::{self, PAGE};
use super::{Admin, ApplyOptions, ApplyOutcome, DeleteOptions};
use crate::error::Error;

/// The response to an apply of a workflow.
#[derive(Debug, Clone, PartialEq)]
pub struct AppliedWorkflow {
    /// The effect of the apply.
    pub outcome: ApplyOutcome,
    /// The workflow after the apply.
    pub workflow: admin::Workflow,
}

impl Admin {
    /// Creates or changes a workflow. The functions and workflows that it runs must exist.
    ///
    /// # Errors
    /// [`Error::Refused`] when the spec is invalid, alone or with the functions that it runs; with
    /// `NAME_TAKEN` when a function has the name; when another client changed the workflow
    /// meanwhile.
    pub async fn apply_workflow(
        &self,
        spec: &WorkflowSpec,
        options: ApplyOptions,
    ) -> Result<AppliedWorkflow, Error> {
        let request = admin::ApplyWorkflowRequest {
            spec: Some(workflow_spec_wire(spec)),
            dry_run: options.dry_run,
            resource_version: options.resource_version.unwrap_or(0),
            idempotency_key: self.endpoints.next_id(),
        };
        let answer =
            self.ask(request, async |mut client, request| client.apply_workflow(request).await).await?;
        let outcome = ApplyOutcome::read(answer.outcome)?;
        let workflow =
            answer.workflow.ok_or_else(|| Error::BadAnswer("the response has no workflow".to_owned()))?;
        Ok(AppliedWorkflow { outcome, workflow })
    }

    /// Returns a workflow.
    ///
    /// # Errors
    /// [`Error::Refused`] with `WORKFLOW_NOT_FOUND` when the workflow does not exist.
    pub async fn workflow(&self, key: &FunctionKey) -> Result<admin::Workflow, Error> {
        self.workflow_with(key, false).await
    }

    /// Returns a workflow with the traffic between its functions, which the server collects from
    /// every controller.
    ///
    /// # Errors
    /// As [`Self::workflow`].
    pub async fn workflow_with_traffic(&self, key: &FunctionKey) -> Result<admin::Workflow, Error> {
        self.workflow_with(key, true).await
    }

    async fn workflow_with(&self, key: &FunctionKey, passed: bool) -> Result<admin::Workflow, Error> {
        let request = GetWorkflowRequest {
            tenant: key.tenant.to_string(),
            name: key.name.to_string(),
            consistency: self.consistency.into(),
            read_mask: None,
            passed,
        };
        self.ask(request, async |mut client, request| client.get_workflow(request).await).await
    }

    /// Lists every workflow of a tenant, or of all tenants, page by page.
    #[must_use]
    pub fn workflows(
        &self,
        tenant: Option<&TenantName>,
    ) -> BoxStream<'static, Result<admin::Workflow, Error>> {
        let request = ListWorkflowsRequest {
            tenant: tenant.map(TenantName::to_string).unwrap_or_default(),
            page_size: PAGE,
            page_token: String::new(),
            consistency: self.consistency.into(),
            read_mask: None,
        };
        pages::all(self.endpoints.clone(), move |channel, left, page_token| {
            let request = ListWorkflowsRequest { page_token, ..request.clone() };
            Box::pin(async move { admin_client(channel).list_workflows(stamped(request, left)).await })
        })
    }

    /// Deletes a workflow. The functions and workflows that it runs stay.
    ///
    /// # Errors
    /// [`Error::Refused`] with `WORKFLOW_NOT_FOUND` when the workflow does not exist, with `IN_USE`
    /// when another workflow runs it.
    pub async fn delete_workflow(&self, key: &FunctionKey, options: DeleteOptions) -> Result<(), Error> {
        let request = DeleteWorkflowRequest {
            tenant: key.tenant.to_string(),
            name: key.name.to_string(),
            resource_version: options.resource_version.unwrap_or(0),
            dry_run: options.dry_run,
            idempotency_key: self.endpoints.next_id(),
        };
        self.ask(request, async |mut client, request| client.delete_workflow(request).await).await?;
        Ok(())
    }
}
