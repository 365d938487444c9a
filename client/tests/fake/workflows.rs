//! The workflows of the fake: in a map, two to a page. A workflow's functions must exist, and
//! cannot be deleted while the workflow runs them. All workflows and functions have the same inputs
//! and outputs: rows of 64.

use millrace_proto::admin::{self, workflow_step::Run};
use millrace_types::Reason;
use tonic::Status;

use super::{State, refused};

/// Returns the model of every function.
pub(super) fn model() -> admin::ModelSummary {
    let rows = |name: &str| admin::TensorSpec {
        name: name.into(),
        datatype: "FP32".into(),
        shape: vec![-1, 64],
        ..Default::default()
    };
    admin::ModelSummary {
        // A summary without launches would describe a program.
        launches: 1,
        inputs: vec![rows("x")],
        outputs: vec![rows("y")],
        ..Default::default()
    }
}

impl State {
    pub(super) fn apply_workflow(
        &self,
        request: admin::ApplyWorkflowRequest,
    ) -> Result<admin::ApplyWorkflowResponse, Status> {
        let spec = request.spec.unwrap();
        let mut workflows = self.workflows.lock().unwrap();
        let functions = self.functions.lock().unwrap();
        if functions.contains_key(&spec.name) {
            return refused(Reason::NameTaken, "a function has this name");
        }
        for step in &spec.steps {
            let known = match step.run.as_ref().unwrap() {
                Run::Function(name) => functions.contains_key(name),
                Run::Workflow(name) => workflows.contains_key(name),
            };
            if !known {
                return refused(
                    Reason::InvalidSpec,
                    &format!("step {:?} runs a function or workflow that does not exist", step.name),
                );
            }
        }
        let outcome = match workflows.get(&spec.name) {
            None => admin::ApplyOutcome::Created,
            Some(before) if before.spec.as_ref() == Some(&spec) => admin::ApplyOutcome::Unchanged,
            Some(_) => admin::ApplyOutcome::Configured,
        };
        let ready = admin::Condition {
            r#type: "Ready".into(),
            status: admin::ConditionStatus::True.into(),
            reason: "Ready".into(),
            message: String::new(),
        };
        let name = spec.name.clone();
        let admin::ModelSummary { inputs, outputs, .. } = model();
        let conditions = vec![ready];
        let workflow =
            admin::Workflow { spec: Some(spec), inputs, outputs, conditions, ..Default::default() };
        if !request.dry_run {
            workflows.insert(name, workflow.clone());
        }
        Ok(admin::ApplyWorkflowResponse { outcome: outcome.into(), workflow: Some(workflow) })
    }

    pub(super) fn workflow(&self, name: &str) -> Result<admin::Workflow, Status> {
        match self.workflows.lock().unwrap().get(name) {
            Some(workflow) => Ok(workflow.clone()),
            None => refused(Reason::WorkflowNotFound, &format!("there is no workflow {name:?}")),
        }
    }

    pub(super) fn workflows(&self, from: String) -> admin::ListWorkflowsResponse {
        let workflows = self.workflows.lock().unwrap();
        let mut rest = workflows.range(from..);
        let page: Vec<_> = rest.by_ref().take(2).map(|(_, workflow)| workflow.clone()).collect();
        let next_page_token = rest.next().map(|(name, _)| name.clone()).unwrap_or_default();
        admin::ListWorkflowsResponse { workflows: page, next_page_token }
    }

    /// Refuses to delete a function or workflow that a workflow runs.
    pub(super) fn not_run(&self, run: &Run) -> Result<(), Status> {
        let workflows = self.workflows.lock().unwrap();
        let runs = |it: &&admin::Workflow| {
            it.spec.iter().flat_map(|spec| &spec.steps).any(|step| step.run.as_ref() == Some(run))
        };
        match workflows.values().find(runs).and_then(|it| it.spec.as_ref()) {
            Some(user) => refused(Reason::InUse, &format!("workflow {} runs it", user.name)),
            None => Ok(()),
        }
    }

    pub(super) fn delete_workflow(
        &self,
        request: &admin::DeleteWorkflowRequest,
    ) -> Result<admin::DeleteWorkflowResponse, Status> {
        self.workflow(&request.name)?;
        self.not_run(&Run::Workflow(request.name.clone()))?;
        if !request.dry_run {
            self.workflows.lock().unwrap().remove(&request.name);
        }
        Ok(admin::DeleteWorkflowResponse {})
    }
}
