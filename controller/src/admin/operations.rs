//! What takes its time: shown, waited for, and ended before its time where that can be. Operations are
//! committed with what begins and ends them, so that any controller shows them, and another leader too.

use std::time::Duration;

use millrace_cluster_state::operations::{End, Kind, Operation};
use millrace_cluster_state::{Command, NodeStatus, State};
use millrace_proto::admin as api;
use millrace_proto::convert::{self, timestamp_wire};
use millrace_types::{Failure, Reason};
use tonic::Request;

use super::masks::Mask;
use super::{AdminService, caller, idempotency};

/// The longest that a request waits: shorter than what proxies cut off.
const WAIT_MAX: Duration = Duration::from_secs(30);

impl AdminService {
    pub(super) async fn list_operations(
        &self,
        request: api::ListOperationsRequest,
    ) -> Result<api::ListOperationsResponse, Failure> {
        let consistency = request.consistency();
        let mask = Mask::read(request.read_mask, "Operation")?;
        let state = self.read(consistency).await?;
        let wanted = state.operations().rev().filter(|it| it.runs() || !request.running);
        let operations = wanted.map(|it| mask.cut(view(&state, it))).collect();
        Ok(api::ListOperationsResponse { operations })
    }

    pub(super) async fn get_operation(
        &self,
        request: api::GetOperationRequest,
    ) -> Result<api::Operation, Failure> {
        let consistency = request.consistency();
        let mask = Mask::read(request.read_mask, "Operation")?;
        let state = self.read(consistency).await?;
        found(&state, read_id(&request.id)?).map(|operation| mask.cut(operation))
    }

    pub(super) async fn wait_operation(
        &self,
        request: api::WaitOperationRequest,
    ) -> Result<api::Operation, Failure> {
        let id = read_id(&request.id)?;
        let wait = request.timeout.as_ref().map(convert::duration).unwrap_or(Some(Duration::ZERO));
        let wait = wait.ok_or_else(|| malformed("`timeout` is negative"))?.min(WAIT_MAX);
        let mut changes = self.replica.changes();
        let first = self.replica.linearizable().await?;
        found(&first, id)?;
        let ended = async {
            while self.replica.state().operation(id).is_some_and(|it| it.runs()) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        // A server that stops makes nobody wait; whether it has ended or not, it is shown.
        let ended = tokio::time::timeout(wait, self.stop.run_until_cancelled(ended));
        drop(ended.await);
        found(&self.replica.state(), id)
    }

    pub(super) async fn cancel_operation(
        &self,
        request: Request<api::CancelOperationRequest>,
    ) -> Result<api::Operation, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let id = read_id(&request.id)?;
        let command = Command::EndOperation { id, end: End::Cancelled };
        self.replica.propose(caller, idempotency(request.idempotency_key)?, command).await?;
        found(&self.replica.state(), id)
    }
}

fn malformed(message: impl Into<String>) -> Failure {
    Failure::new(Reason::MalformedRequest, message.into())
}

fn read_id(id: &str) -> Result<u64, Failure> {
    id.parse()
        .map_err(|_| malformed(format!("operation {id:?} is none: list them with 'millrace get operations'")))
}

fn found(state: &State, id: u64) -> Result<api::Operation, Failure> {
    let operation = state.operation(id).map(|operation| view(state, operation));
    operation.ok_or_else(|| {
        let message = format!("no operation {id}: list them with 'millrace get operations'");
        Failure::new(Reason::OperationNotFound, message)
    })
}

fn view(state: &State, operation: &Operation) -> api::Operation {
    let (kind, object) = match &operation.kind {
        Kind::DrainNode { node } => ("DrainNode", format!("node/{node}")),
        Kind::PromoteController { id } => ("PromoteController", format!("controller/{}", id.0)),
        Kind::RemoveController { id } => ("RemoveController", format!("controller/{}", id.0)),
    };
    let stands = match operation.ended.as_ref().map(|(_, end)| end) {
        None => api::OperationState::Running,
        Some(End::Succeeded) => api::OperationState::Succeeded,
        Some(End::Failed { .. }) => api::OperationState::Failed,
        Some(End::Cancelled) => api::OperationState::Cancelled,
    };
    api::Operation {
        id: operation.id.to_string(),
        kind: kind.into(),
        object,
        state: stands.into(),
        done: state.steps_done(operation),
        total: operation.total,
        message: message(state, operation),
        started_at: Some(timestamp_wire(operation.started_at.0)),
        ended_at: operation.ended.as_ref().map(|(at, _)| timestamp_wire(at.0)),
        started_by: operation.started_by.to_string(),
        cancellable: operation.is_cancellable(),
    }
}

/// What it waits for, or why it failed.
fn message(state: &State, operation: &Operation) -> String {
    match (&operation.ended, &operation.kind) {
        (Some((_, End::Failed { why })), _) => why.clone(),
        (Some(_), _) => String::new(),
        (None, Kind::DrainNode { node }) => {
            let others = state.nodes().any(|it| it.name != *node && it.takes_functions());
            let lost = state.node(node).is_some_and(|node| node.status == NodeStatus::Lost);
            match (state.placements_on(node).count(), others || lost) {
                (_, false) => "no other node takes functions: add one, or uncordon one".into(),
                (1, _) => "one function is still to move".into(),
                (left, _) => format!("{left} functions are still to move"),
            }
        }
        (None, Kind::PromoteController { .. }) => "the voters agree on another".into(),
        (None, Kind::RemoveController { .. }) => "what it holds is copied, and the voters agree".into(),
    }
}
