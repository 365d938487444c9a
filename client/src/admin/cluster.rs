//! The controllers: how far each is, and changes of their group.

use millrace_proto::admin::{
    ChangeMembershipResponse, ClusterStatus, GetClusterStatusRequest, PromoteControllerRequest,
    RemoveControllerRequest, TransferLeadershipRequest, TransferLeadershipResponse,
};

use super::{Admin, CALL_TIMEOUT};
use crate::endpoints::Repeat;
use crate::error::Error;

impl Admin {
    /// The group of controllers, as the endpoint that answers sees it. Answered without a majority
    /// too.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn cluster_status(&self) -> Result<ClusterStatus, Error> {
        self.ask(GetClusterStatusRequest {}, async |mut client, request| {
            client.get_cluster_status(request).await
        })
        .await
    }

    /// Makes a learner a voter. A voter stays one.
    ///
    /// # Errors
    /// [`Error::Refused`] with `MEMBERSHIP_REFUSED` where that would not be safe.
    pub async fn promote_controller(&self, id: u64) -> Result<ChangeMembershipResponse, Error> {
        self.promote(PromoteControllerRequest { id, no_wait: false }).await
    }

    /// The same without waiting: the answer names the operation alone, unless the change is refused or
    /// done at once.
    ///
    /// # Errors
    /// As [`Self::promote_controller`].
    pub async fn begin_promotion(&self, id: u64) -> Result<ChangeMembershipResponse, Error> {
        self.promote(PromoteControllerRequest { id, no_wait: true }).await
    }

    async fn promote(&self, request: PromoteControllerRequest) -> Result<ChangeMembershipResponse, Error> {
        self.ask(request, async |mut client, request| client.promote_controller(request).await).await
    }

    /// Removes a controller for good: its id is not given again. Not repeated when the connection
    /// breaks: the second answer would be that there is no such controller.
    ///
    /// # Errors
    /// [`Error::Refused`] with `MEMBERSHIP_REFUSED` where that would not be safe.
    pub async fn remove_controller(&self, id: u64) -> Result<ChangeMembershipResponse, Error> {
        self.remove(RemoveControllerRequest { id, no_wait: false }).await
    }

    /// The same without waiting: the answer names the operation alone, unless the change is refused or
    /// done at once.
    ///
    /// # Errors
    /// As [`Self::remove_controller`].
    pub async fn begin_removal(&self, id: u64) -> Result<ChangeMembershipResponse, Error> {
        self.remove(RemoveControllerRequest { id, no_wait: true }).await
    }

    async fn remove(&self, request: RemoveControllerRequest) -> Result<ChangeMembershipResponse, Error> {
        self.ask_with(Repeat::Forbidden, CALL_TIMEOUT, request, async |mut client, request| {
            client.remove_controller(request).await
        })
        .await
    }

    /// Lets a voter lead; without an id the one that has most of the log. Not repeated when the
    /// connection breaks: leadership would be handed on once more.
    ///
    /// # Errors
    /// [`Error::Refused`] with `MEMBERSHIP_REFUSED` when that controller cannot lead, `NO_LEADER` when
    /// it was not elected in time.
    pub async fn transfer_leadership(&self, to: Option<u64>) -> Result<TransferLeadershipResponse, Error> {
        let request = TransferLeadershipRequest { id: to.unwrap_or(0) };
        self.ask_with(Repeat::Forbidden, CALL_TIMEOUT, request, async |mut client, request| {
            client.transfer_leadership(request).await
        })
        .await
    }
}
