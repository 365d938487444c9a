//! The controllers themselves. Any controller answers status requests, also without a majority; changes
//! go to the leader.

use millrace_cluster_state::State;
use millrace_cluster_state::operations::OperationKind;
use millrace_proto::admin as api;
use millrace_types::{Failure, Reason};
use tonic::Request;

use super::{AdminService, caller};
use crate::raft::MembershipRequest;

impl AdminService {
    pub(super) async fn promote_controller(
        &self,
        request: Request<api::PromoteControllerRequest>,
    ) -> Result<api::ChangeMembershipResponse, Failure> {
        let api::PromoteControllerRequest { id, no_wait } = *request.get_ref();
        self.change(request, MembershipRequest::Promote(id), no_wait).await
    }

    pub(super) async fn remove_controller(
        &self,
        request: Request<api::RemoveControllerRequest>,
    ) -> Result<api::ChangeMembershipResponse, Failure> {
        let api::RemoveControllerRequest { id, no_wait } = *request.get_ref();
        self.change(request, MembershipRequest::Remove(id), no_wait).await
    }

    async fn change<T>(
        &self,
        request: Request<T>,
        change: MembershipRequest,
        no_wait: bool,
    ) -> Result<api::ChangeMembershipResponse, Failure> {
        let caller = caller(&request)?;
        tracing::info!(%caller, ?change, "a client requests a membership change");
        let replica = self.replica.clone();
        let begun = self.begun(change);
        // Run in a separate task: a caller that goes away must not leave a change half done.
        let changed = tokio::spawn(async move { replica.change_group(change, caller).await });
        if !no_wait {
            return finished(changed.await).map(Into::into);
        }
        tokio::select! {
            // A change that is refused at once never begins.
            changed = changed => finished(changed).map(Into::into),
            operation = begun => {
                Ok(api::ChangeMembershipResponse { operation: operation.to_string(), ..Default::default() })
            }
        }
    }

    /// Waits until a membership change that begins from now on appears in this controller's state.
    fn begun(&self, change: MembershipRequest) -> impl Future<Output = u64> + use<> {
        let replica = self.replica.clone();
        let kind = change.kind();
        let from = self.replica.state().version();
        async move {
            let mut changes = replica.changes();
            loop {
                if let Some(id) = newest(&replica.state(), &kind).filter(|&id| id > from) {
                    return id;
                }
                if changes.changed().await.is_err() {
                    // The controller is shutting down: the change ends too and reports that.
                    return std::future::pending().await;
                }
            }
        }
    }

    pub(super) async fn transfer_leadership(
        &self,
        request: Request<api::TransferLeadershipRequest>,
    ) -> Result<api::TransferLeadershipResponse, Failure> {
        let caller = caller(&request)?;
        let successor = request.get_ref().id;
        tracing::info!(%caller, successor, "a client requests a leadership transfer");
        let replica = self.replica.clone();
        let led = tokio::spawn(async move { replica.transfer(successor).await });
        let led = finished(led.await)?;
        Ok(api::TransferLeadershipResponse { leader: led.leader, term: led.term })
    }
}

/// Returns the last operation of a kind.
fn newest(state: &State, kind: &OperationKind) -> Option<u64> {
    state.operations().rev().find(|it| it.kind == *kind).map(|it| it.id)
}

fn finished<T>(task: Result<Result<T, Failure>, tokio::task::JoinError>) -> Result<T, Failure> {
    task.unwrap_or_else(|error| {
        Err(Failure::new(Reason::Internal, format!("the operation did not finish: {error}"))
            .after_execution())
    })
}
