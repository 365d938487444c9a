//! The functions of the fake: in a map, two to a page.

use millrace_proto::admin::{self, workflow_step::Run};
use millrace_types::Reason;
use tonic::Status;

use super::workflows::model;
use super::{LOOKS_UNTIL_READY, State, refused};

impl State {
    pub(super) fn apply_function(
        &self,
        request: admin::ApplyFunctionRequest,
    ) -> Result<admin::ApplyFunctionResponse, Status> {
        let spec = request.spec.unwrap();
        if spec.name == "refused" {
            return refused(Reason::InvalidSpec, "this name is refused");
        }
        if self.workflows.lock().unwrap().contains_key(&spec.name) {
            return refused(Reason::NameTaken, "a workflow has this name");
        }
        let mut functions = self.functions.lock().unwrap();
        let before = functions.get(&spec.name);
        let outcome = match before {
            None => admin::ApplyOutcome::Created,
            Some(before) if before.spec.as_ref() == Some(&spec) => admin::ApplyOutcome::Unchanged,
            Some(_) => admin::ApplyOutcome::Configured,
        };
        let name = spec.name.clone();
        let generation = before.map_or(0, |before| before.generation) + 1;
        let artifact = admin::Artifact { digest: request.digest, bytes: 34_000 };
        let revision = admin::Revision {
            number: generation,
            artifact: Some(artifact),
            model: Some(model()),
            ..Default::default()
        };
        let function = admin::Function {
            spec: Some(spec),
            generation,
            enabled: true,
            revisions: vec![revision],
            conditions: vec![condition(&name, 0)],
            ..Default::default()
        };
        if !request.dry_run {
            functions.insert(name, function.clone());
        }
        Ok(admin::ApplyFunctionResponse { outcome: outcome.into(), function: Some(function) })
    }

    pub(super) fn function(&self, name: &str) -> Result<admin::Function, Status> {
        let Some(mut function) = self.functions.lock().unwrap().get(name).cloned() else {
            return refused(Reason::FunctionNotFound, &format!("there is no function {name:?}"));
        };
        let mut looks = self.looks.lock().unwrap();
        let looks = looks.entry(name.to_owned()).or_default();
        *looks += 1;
        function.conditions = vec![condition(name, *looks)];
        Ok(function)
    }

    pub(super) fn functions(&self, from: String) -> admin::ListFunctionsResponse {
        let functions = self.functions.lock().unwrap();
        let mut rest = functions.range(from..);
        let page: Vec<_> = rest.by_ref().take(2).map(|(_, function)| function.clone()).collect();
        let next_page_token = rest.next().map(|(name, _)| name.clone()).unwrap_or_default();
        admin::ListFunctionsResponse { functions: page, next_page_token }
    }

    pub(super) fn delete_function(
        &self,
        request: &admin::DeleteFunctionRequest,
    ) -> Result<admin::DeleteFunctionResponse, Status> {
        let mut functions = self.functions.lock().unwrap();
        if !functions.contains_key(&request.name) {
            return refused(Reason::FunctionNotFound, &format!("there is no function {:?}", request.name));
        }
        self.not_run(&Run::Function(request.name.clone()))?;
        if !request.dry_run {
            functions.remove(&request.name);
        }
        Ok(admin::DeleteFunctionResponse {})
    }
}

/// Returns a function's readiness at the given number of reads.
fn condition(name: &str, looks: u64) -> admin::Condition {
    use admin::ConditionStatus::{False, True};
    let (status, reason, message) = match name {
        "broken" => (False, "PrepareFailed", "its weights do not fit"),
        "never" => (False, "NoWorker", "no worker has joined"),
        _ if looks < LOOKS_UNTIL_READY => (False, "Preparing", ""),
        _ => (True, "Prepared", ""),
    };
    admin::Condition {
        r#type: "Ready".into(),
        status: status.into(),
        reason: reason.into(),
        message: message.into(),
    }
}
