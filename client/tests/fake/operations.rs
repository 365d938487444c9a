//! The policy, operations and log lines of the fake. There is one operation, which ends at the
//! third read. Each read of the log returns a new line.

use millrace_proto::admin;
use millrace_proto::log::Line;
use millrace_types::Reason;
use tonic::{Response, Status};

use super::{LOOKS_UNTIL_READY, Service, refused};

impl Service {
    pub(super) fn policy(&self) -> Result<Response<admin::Policy>, Status> {
        Ok(Response::new(self.0.policy.lock().unwrap().clone()))
    }

    pub(super) async fn set_policy(
        &self,
        request: admin::UpdatePolicyRequest,
    ) -> Result<Response<admin::Policy>, Status> {
        self.0.enter(&request.idempotency_key).await?;
        let mut policy = self.0.policy.lock().unwrap();
        if request.resource_version.is_some_and(|expected| expected != policy.resource_version) {
            return refused(Reason::Conflict, "the policy changed");
        }
        let mut after = policy.clone();
        after.spec = request.spec;
        after.generation += 1;
        after.resource_version += 10;
        after.updated_by = request.update_mask.map(|mask| mask.paths.join(",")).unwrap_or_default();
        if !request.dry_run {
            *policy = after.clone();
        }
        Ok(Response::new(after))
    }

    pub(super) fn advance(&self, id: &str) -> Result<Response<admin::Operation>, Status> {
        let mut found = find(id)?;
        let mut looks = self.0.looks.lock().unwrap();
        let looks = looks.entry(format!("operation {id}")).or_default();
        *looks += 1;
        found.get_mut().done = *looks;
        if *looks >= LOOKS_UNTIL_READY {
            found.get_mut().set_state(admin::OperationState::Succeeded);
        }
        Ok(found)
    }
}

pub(super) fn drain(id: &str) -> admin::Operation {
    admin::Operation {
        id: id.into(),
        kind: "DrainNode".into(),
        object: "node/worker-1".into(),
        state: admin::OperationState::Running.into(),
        total: 3,
        ..Default::default()
    }
}

pub(super) fn find(id: &str) -> Result<Response<admin::Operation>, Status> {
    match id {
        "1" => Ok(Response::new(drain(id))),
        _ => refused(Reason::OperationNotFound, &format!("no operation {id}")),
    }
}

pub(super) fn lines(after: &str) -> admin::ListLogsResponse {
    let seq = after.parse().unwrap_or(0) + 1;
    let line = Line { seq, message: format!("line {seq}"), process: "worker-1".into(), ..Line::default() };
    admin::ListLogsResponse { lines: vec![line], next: seq.to_string(), ..Default::default() }
}
