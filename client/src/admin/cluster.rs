//! The status of the controllers, and changes of the controller group.

use millrace_proto::admin::{
    ChangeMembershipResponse, ClusterStatus, GetClusterStatusRequest, PromoteControllerRequest,
    RemoveControllerRequest, TransferLeadershipRequest, TransferLeadershipResponse,
};

use super::Admin;
use super::call::CALL_TIMEOUT;
use crate::error::Error;
use crate::failover::RetryPolicy;

impl Admin {
    /// Returns the group of controllers, as the answering endpoint sees it. Works without a
    /// majority.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn cluster_status(&self) -> Result<ClusterStatus, Error> {
        self.ask(GetClusterStatusRequest {}, async |mut client, request| {
            client.get_cluster_status(request).await
        })
        .await
    }

    /// Makes a learner a voter. Has no effect on a voter.
    ///
    /// # Errors
    /// [`Error::Refused`] with `MEMBERSHIP_REFUSED` when the change would not be safe.
    pub async fn promote_controller(&self, id: u64) -> Result<ChangeMembershipResponse, Error> {
        self.promote(PromoteControllerRequest { id, no_wait: false }).await
    }

    /// Starts a promotion without waiting for its end. The response names only the operation,
    /// unless the change is refused or complete at once.
    ///
    /// # Errors
    /// As [`Self::promote_controller`].
    pub async fn begin_promotion(&self, id: u64) -> Result<ChangeMembershipResponse, Error> {
        self.promote(PromoteControllerRequest { id, no_wait: true }).await
    }

    async fn promote(&self, request: PromoteControllerRequest) -> Result<ChangeMembershipResponse, Error> {
        self.ask(request, async |mut client, request| client.promote_controller(request).await).await
    }

    /// Removes a controller for good: the id is never assigned again. The call is not repeated when
    /// the connection breaks, because the second response would report an unknown controller.
    ///
    /// # Errors
    /// [`Error::Refused`] with `MEMBERSHIP_REFUSED` when the change would not be safe.
    pub async fn remove_controller(&self, id: u64) -> Result<ChangeMembershipResponse, Error> {
        self.remove(RemoveControllerRequest { id, no_wait: false }).await
    }

    /// Starts a removal without waiting for its end. The response names only the operation, unless
    /// the change is refused or complete at once.
    ///
    /// # Errors
    /// As [`Self::remove_controller`].
    pub async fn begin_removal(&self, id: u64) -> Result<ChangeMembershipResponse, Error> {
        self.remove(RemoveControllerRequest { id, no_wait: true }).await
    }

    async fn remove(&self, request: RemoveControllerRequest) -> Result<ChangeMembershipResponse, Error> {
        self.ask_with(RetryPolicy::Forbidden, CALL_TIMEOUT, request, async |mut client, request| {
            client.remove_controller(request).await
        })
        .await
    }

    /// Transfers leadership to a voter, or without an id to the voter with the most of the log. The
    /// call is not repeated when the connection breaks, because leadership would move once more.
    ///
    /// # Errors
    /// [`Error::Refused`] with `MEMBERSHIP_REFUSED` when the controller cannot lead, `NO_LEADER`
    /// when the controller was not elected in time.
    pub async fn transfer_leadership(&self, to: Option<u64>) -> Result<TransferLeadershipResponse, Error> {
        let request = TransferLeadershipRequest { id: to.unwrap_or(0) };
        self.ask_with(RetryPolicy::Forbidden, CALL_TIMEOUT, request, async |mut client, request| {
            client.transfer_leadership(request).await
        })
        .await
    }
}
