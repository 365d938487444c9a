//! What takes its time: drains of nodes, and changes of the controller group.

use std::time::Duration;

use millrace_proto::admin::{self, Operation, OperationState, admin_client::AdminClient};
use millrace_proto::convert::duration_wire;

use super::{Admin, CALL_TIMEOUT, stamped};
use crate::endpoints::Repeat;
use crate::error::Error;

/// The longest that one call waits. Shorter than what a server would wait.
const WAIT_MAX: Duration = Duration::from_secs(20);

impl Admin {
    /// Every operation that is known, the newest first.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn operations(&self) -> Result<Vec<Operation>, Error> {
        let request = admin::ListOperationsRequest {
            running: false,
            consistency: self.consistency.into(),
            read_mask: None,
        };
        let answer = self
            .endpoints
            .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).list_operations(stamped(request.clone(), left)).await
            })
            .await?;
        Ok(answer.into_inner().operations)
    }

    /// One operation.
    ///
    /// # Errors
    /// [`Error::Refused`] with `OPERATION_NOT_FOUND` when there is none, or it ended long ago.
    pub async fn operation(&self, id: &str) -> Result<Operation, Error> {
        let request = admin::GetOperationRequest {
            id: id.to_owned(),
            consistency: self.consistency.into(),
            read_mask: None,
        };
        let answer = self
            .endpoints
            .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).get_operation(stamped(request.clone(), left)).await
            })
            .await?;
        Ok(answer.into_inner())
    }

    /// Waits until an operation has ended, for as long as the caller does. `seen` is shown it now and
    /// then.
    ///
    /// # Errors
    /// As [`Self::operation`].
    pub async fn wait_operation(
        &self,
        id: &str,
        step: Duration,
        mut seen: impl FnMut(&Operation),
    ) -> Result<Operation, Error> {
        let wait = step.min(WAIT_MAX);
        let request = admin::WaitOperationRequest { id: id.to_owned(), timeout: Some(duration_wire(wait)) };
        loop {
            let answer = self
                .endpoints
                .call(Repeat::Allowed, CALL_TIMEOUT + wait, async |channel, left| {
                    AdminClient::new(channel).wait_operation(stamped(request.clone(), left)).await
                })
                .await?;
            let operation = answer.into_inner();
            seen(&operation);
            if operation.state() != OperationState::Running {
                return Ok(operation);
            }
        }
    }

    /// Ends an operation before its time. A drain that is cancelled leaves its node cordoned.
    ///
    /// # Errors
    /// [`Error::Refused`] with `OPERATION_STATE` when it ends by itself.
    pub async fn cancel_operation(&self, id: &str) -> Result<Operation, Error> {
        let request =
            admin::CancelOperationRequest { id: id.to_owned(), idempotency_key: self.endpoints.next_id() };
        let answer = self
            .endpoints
            .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).cancel_operation(stamped(request.clone(), left)).await
            })
            .await?;
        Ok(answer.into_inner())
    }
}
