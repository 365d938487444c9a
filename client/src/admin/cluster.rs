//! The controllers: how far each is, and changes of their group.

use millrace_proto::admin::{
    ChangeMembershipResponse, ClusterStatus, GetClusterStatusRequest, PromoteControllerRequest,
    RemoveControllerRequest, TransferLeadershipRequest, TransferLeadershipResponse,
    admin_client::AdminClient,
};

use super::{Admin, CALL_TIMEOUT, stamped};
use crate::endpoints::Repeat;
use crate::error::Error;

impl Admin {
    /// The group of controllers, as the endpoint that answers sees it. Answered without a majority
    /// too.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn cluster_status(&self) -> Result<ClusterStatus, Error> {
        let answer = self
            .endpoints
            .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).get_cluster_status(stamped(GetClusterStatusRequest {}, left)).await
            })
            .await?;
        Ok(answer.into_inner())
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
        let answer = self
            .endpoints
            .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).promote_controller(stamped(request, left)).await
            })
            .await?;
        Ok(answer.into_inner())
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
        let answer = self
            .endpoints
            .call(Repeat::Forbidden, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).remove_controller(stamped(request, left)).await
            })
            .await?;
        Ok(answer.into_inner())
    }

    /// Lets a voter lead; without an id the one that has most of the log. Not repeated when the
    /// connection breaks: leadership would be handed on once more.
    ///
    /// # Errors
    /// [`Error::Refused`] with `MEMBERSHIP_REFUSED` when that controller cannot lead, `NO_LEADER` when
    /// it was not elected in time.
    pub async fn transfer_leadership(&self, to: Option<u64>) -> Result<TransferLeadershipResponse, Error> {
        let answer = self
            .endpoints
            .call(Repeat::Forbidden, CALL_TIMEOUT, async |channel, left| {
                let request = stamped(TransferLeadershipRequest { id: to.unwrap_or(0) }, left);
                AdminClient::new(channel).transfer_leadership(request).await
            })
            .await?;
        Ok(answer.into_inner())
    }
}
