//! Long-running operations: listed, waited for, and cancelled if possible. An operation is committed
//! with the commands at the beginning and the end, so every controller can show the operation, also
//! under another leader.

use std::collections::BTreeSet;

use millrace_cluster_state::operations::{OperationKind, OperationRecord, OperationResult};
use millrace_cluster_state::{CommandRefusal, NodeStatus, State, StateCommand};
use millrace_nodes::placement::Unplaced;
use millrace_proto::admin as api;
use millrace_proto::convert::timestamp_wire;
use millrace_types::Failure;
use tonic::Request;

use super::listing::{fill, page_size_or_all};
use super::masks::ResponseMask;
use super::{AdminService, caller, idempotency, unknown_token, wait};
use crate::fleet::Workers;
use crate::leadership::Shortages;
use crate::profile_trials::{ProfileStep, next_step};
use crate::raft::refused;

impl AdminService {
    pub(super) async fn list_operations(
        &self,
        request: api::ListOperationsRequest,
    ) -> Result<api::ListOperationsResponse, Failure> {
        let consistency = request.consistency();
        let size = page_size_or_all(request.page_size);
        let before = match request.page_token.as_str() {
            "" => u64::MAX,
            token => token.parse().map_err(|_| Failure::malformed(unknown_token(token)))?,
        };
        let mask = ResponseMask::read(request.read_mask, "Operation")?;
        let state = self.read(consistency).await?;
        let wanted = state.operations().rev().filter(|it| it.is_running() || !request.running);
        let rest = wanted.filter(|it| it.id < before);
        let shortages = self.outlook.shortages();
        let workers = self.fleet.workers();
        let (operations, last) = fill(rest, size, |it| mask.cut(view(&state, &shortages, &workers, it)));
        let next_page_token = last.map(|it| it.id.to_string()).unwrap_or_default();
        Ok(api::ListOperationsResponse { operations, next_page_token })
    }

    pub(super) async fn get_operation(
        &self,
        request: api::GetOperationRequest,
    ) -> Result<api::Operation, Failure> {
        let consistency = request.consistency();
        let mask = ResponseMask::read(request.read_mask, "Operation")?;
        let state = self.read(consistency).await?;
        self.found_operation(&state, read_id(&request.id)?).map(|operation| mask.cut(operation))
    }

    pub(super) async fn wait_operation(
        &self,
        request: api::WaitOperationRequest,
    ) -> Result<api::Operation, Failure> {
        let id = read_id(&request.id)?;
        let wait = wait("timeout", request.timeout.as_ref())?;
        // Free the request before the wait.
        drop(request);
        let mut changes = self.replica.changes();
        let first = self.replica.linearizable().await?;
        self.found_operation(&first, id)?;
        let ended = async {
            while self.replica.state().operation(id).is_some_and(|it| it.is_running()) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        // A server that stops ends the wait at once. The operation is returned whether or not it has
        // ended.
        let ended = tokio::time::timeout(wait, self.stop.run_until_cancelled(ended));
        drop(ended.await);
        self.found_operation(&self.replica.state(), id)
    }

    pub(super) async fn cancel_operation(
        &self,
        request: Request<api::CancelOperationRequest>,
    ) -> Result<api::Operation, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let id = read_id(&request.id)?;
        let command = StateCommand::EndOperation { id, end: OperationResult::Cancelled };
        self.replica.propose(caller, idempotency(request.idempotency_key)?, command).await?;
        self.found_operation(&self.replica.state(), id)
    }

    pub(super) fn found_operation(&self, state: &State, id: u64) -> Result<api::Operation, Failure> {
        let operation = state.operation(id);
        let operation = operation
            .map(|operation| view(state, &self.outlook.shortages(), &self.fleet.workers(), operation));
        operation.ok_or_else(|| refused(&CommandRefusal::OperationNotFound { id }))
    }
}

fn read_id(id: &str) -> Result<u64, Failure> {
    id.parse().map_err(|_| {
        Failure::malformed(format!(
            "operation {id:?} does not exist: list operations with 'millrace get operations'"
        ))
    })
}

fn view(
    state: &State,
    shortages: &Shortages,
    workers: &Workers,
    operation: &OperationRecord,
) -> api::Operation {
    let (kind, object) = match &operation.kind {
        OperationKind::DrainNode { node } => ("DrainNode", format!("node/{node}")),
        OperationKind::PromoteController { id } => ("PromoteController", format!("controller/{}", id.0)),
        OperationKind::RemoveController { id } => ("RemoveController", format!("controller/{}", id.0)),
        OperationKind::ProfileFunction { function, .. } => {
            ("ProfileFunction", format!("function/{function}"))
        }
    };
    let waits = match next_step(state, workers, operation, &BTreeSet::new()) {
        Some(ProfileStep::Wait(why)) => Some(why.to_string()),
        _ => None,
    };
    let stands = match operation.ended.as_ref().map(|(_, end)| end) {
        None => api::OperationState::Running,
        Some(OperationResult::Succeeded) => api::OperationState::Succeeded,
        Some(OperationResult::Failed { .. }) => api::OperationState::Failed,
        Some(OperationResult::Cancelled) => api::OperationState::Cancelled,
    };
    api::Operation {
        id: operation.id.to_string(),
        kind: kind.into(),
        object,
        state: stands.into(),
        done: state.steps_done(operation),
        total: operation.total,
        message: waits.unwrap_or_else(|| message(state, shortages, operation)),
        started_at: Some(timestamp_wire(operation.started_at.0)),
        ended_at: operation.ended.as_ref().map(|(at, _)| timestamp_wire(at.0)),
        started_by: operation.started_by.to_string(),
        cancellable: operation.is_cancellable(),
    }
}

/// Returns the cause of the operation's wait, or the reason for its failure.
fn message(state: &State, shortages: &Shortages, operation: &OperationRecord) -> String {
    match (&operation.ended, &operation.kind) {
        (Some((_, OperationResult::Failed { why })), _) => why.clone(),
        (Some(_), _) => String::new(),
        (None, OperationKind::DrainNode { node }) => {
            let others = state.nodes().any(|it| it.name != *node && it.takes_functions());
            let lost = state.node(node).is_some_and(|node| node.status == NodeStatus::Lost);
            let left = match (state.placements_on(node).count(), others || lost) {
                (_, false) => return "no other node takes functions: add or uncordon a node".into(),
                (1, _) => "one function is still to move".to_owned(),
                (left, _) => format!("{left} functions are still to move"),
            };
            match state.placements_on(node).find_map(|it| stuck(shortages.get(it)?)) {
                Some(why) => format!("{left}; {why}"),
                None => left,
            }
        }
        (None, OperationKind::PromoteController { .. }) => "the voters are agreeing on another voter".into(),
        (None, OperationKind::RemoveController { .. }) => {
            "copying the controller's model files, and waiting for the voters to agree".into()
        }
        (None, OperationKind::ProfileFunction { .. }) => {
            "running trials while other requests leave room".into()
        }
    }
}

/// Returns the reason why a function cannot leave its node. A function with another copy leaves
/// regardless.
fn stuck(short: &Unplaced) -> Option<String> {
    (short.copies == 0).then(|| format!("{} fits on no other node: {}", short.function, short.why))
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::{
        CallerName, ControllerId, PlacementReason, Proposal, SchedulingState, UnixMillis,
    };
    use millrace_nodes::placement::UnplacedReason;
    use millrace_proto::convert;
    use millrace_types::{Bytes, ClusterId, Digest, Epoch, FunctionSpec, NodeName};

    use super::*;
    use crate::fixtures::bare_model;

    /// Returns the state with a function on `n1`, which is being drained, and another node.
    fn draining(function: &FunctionSpec) -> State {
        let digest = Digest::of(b"m");
        let name = |name: &str| NodeName::new(name).unwrap();
        let register = |node: &str| StateCommand::RegisterNode {
            name: name(node),
            instance: node.into(),
            address: String::new(),
            gpus: Vec::new(),
            topology: String::new(),
            host_memory: Bytes::gib(1),
            seen: Epoch(0),
        };
        let model = bare_model();
        let spec = function.clone();
        let key = function.key.clone();
        let node = name("n1");
        let commands = [
            StateCommand::InitCluster { cluster_id: ClusterId("c".into()) },
            StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder: ControllerId(1) },
            StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() },
            register("n1"),
            register("n2"),
            StateCommand::Place { function: key, node, reason: PlacementReason::MissingReplica },
            StateCommand::SetNodeScheduling { name: name("n1"), scheduling: SchedulingState::Draining },
        ];
        let mut state = State::default();
        for (index, command) in (1..).zip(commands) {
            let stamp = UnixMillis(1);
            let caller = CallerName("test".into());
            state.apply(index, &Proposal { stamp, caller, idempotency: None, command }).unwrap();
        }
        state
    }

    #[test]
    fn a_drain_that_cannot_end_reports_the_reason() {
        let spec = FunctionSpec::new(convert::function_key("", "f").unwrap());
        let state = draining(&spec);
        let operation = state.operations().next().unwrap();
        let said = |copies| {
            let why = UnplacedReason::HostMemory { needs: Bytes::gib(2), free: Bytes::gib(1) };
            let short = Unplaced { function: spec.key.clone(), copies, missing: 1, why };
            message(&state, &Shortages::new([(spec.key.clone(), short)].into()), operation)
        };
        let without_room = said(0);
        assert!(
            without_room.starts_with("one function is still to move; default/f fits on no other node: "),
            "{without_room}"
        );
        assert!(without_room.contains("host memory"), "{without_room}");
        assert_eq!(said(1), "one function is still to move", "another copy serves");
        assert_eq!(message(&state, &Shortages::default(), operation), "one function is still to move");
    }
}
