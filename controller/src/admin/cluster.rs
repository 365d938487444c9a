//! The controllers themselves. Status is answered by any of them, also without a majority; changes
//! go to the leader.

use millrace_proto::admin as api;
use millrace_types::{Failure, Reason};
use tonic::Request;

use super::{AdminService, caller};
use crate::raft::Change;

impl AdminService {
    pub(super) async fn promote_controller(
        &self,
        request: Request<api::PromoteControllerRequest>,
    ) -> Result<api::ChangeMembershipResponse, Failure> {
        let id = request.get_ref().id;
        self.change(request, Change::Promote(id)).await
    }

    pub(super) async fn remove_controller(
        &self,
        request: Request<api::RemoveControllerRequest>,
    ) -> Result<api::ChangeMembershipResponse, Failure> {
        let id = request.get_ref().id;
        self.change(request, Change::Remove(id)).await
    }

    async fn change<T>(
        &self,
        request: Request<T>,
        change: Change,
    ) -> Result<api::ChangeMembershipResponse, Failure> {
        let caller = caller(&request)?;
        tracing::info!(%caller, ?change, "a change of the group is asked for");
        let replica = self.replica.clone();
        // A task of its own: a caller that goes away must not leave a change half done.
        let changed = tokio::spawn(async move { replica.change_group(change).await });
        finished(changed.await).map(Into::into)
    }

    pub(super) async fn transfer_leadership(
        &self,
        request: Request<api::TransferLeadershipRequest>,
    ) -> Result<api::TransferLeadershipResponse, Failure> {
        let caller = caller(&request)?;
        let successor = request.get_ref().id;
        tracing::info!(%caller, successor, "a transfer of leadership is asked for");
        let replica = self.replica.clone();
        let led = tokio::spawn(async move { replica.transfer(successor).await });
        let led = finished(led.await)?;
        Ok(api::TransferLeadershipResponse { leader: led.leader, term: led.term })
    }
}

fn finished<T>(task: Result<Result<T, Failure>, tokio::task::JoinError>) -> Result<T, Failure> {
    task.unwrap_or_else(|error| {
        Err(Failure::new(Reason::Internal, format!("it was not finished: {error}")).after_execution())
    })
}
