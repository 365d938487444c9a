//! Cordon, drain, uncordon and removal of nodes. The request is committed, and the reconciler moves
//! functions. A node's listing shows the number of functions that remain.

use millrace_cluster_state::{SchedulingState, StateCommand};
use millrace_proto::admin as api;
use millrace_types::{Failure, Reason};
use tonic::Request;

use super::{AdminService, caller, idempotency, node_name};

impl AdminService {
    pub(super) async fn set_node_scheduling(
        &self,
        request: Request<api::SetNodeSchedulingRequest>,
    ) -> Result<api::Node, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let scheduling = scheduling(request.scheduling())?;
        let name = node_name(&request.name)?;
        let idempotency = idempotency(request.idempotency_key)?;
        let command = StateCommand::SetNodeScheduling { name: name.clone(), scheduling };
        self.replica.propose(caller, idempotency, command).await?;
        let state = self.replica.state();
        // The node is absent if it was removed again meanwhile.
        let node = state.node(&name).ok_or_else(|| {
            Failure::new(Reason::NodeNotFound, format!("node {name} was removed meanwhile"))
        })?;
        Ok(self.node(&state, node))
    }

    pub(super) async fn remove_node(
        &self,
        request: Request<api::RemoveNodeRequest>,
    ) -> Result<api::RemoveNodeResponse, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let command = StateCommand::RemoveNode { name: node_name(&request.name)? };
        self.replica.propose(caller, idempotency(request.idempotency_key)?, command).await?;
        Ok(api::RemoveNodeResponse {})
    }
}

fn scheduling(wanted: api::NodeScheduling) -> Result<SchedulingState, Failure> {
    match wanted {
        api::NodeScheduling::Schedulable => Ok(SchedulingState::Schedulable),
        api::NodeScheduling::Cordoned => Ok(SchedulingState::Cordoned),
        api::NodeScheduling::Draining => Ok(SchedulingState::Draining),
        api::NodeScheduling::Unspecified => {
            Err(Failure::malformed("the request has no scheduling: give schedulable, cordoned or draining"))
        }
    }
}
