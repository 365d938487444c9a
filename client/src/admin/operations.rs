//! Long-running operations: drains of nodes, profiles of functions, and changes of the controller group.

use std::time::Duration;

use futures::TryStreamExt as _;
use millrace_proto::admin::{self, Operation, OperationState};
use millrace_proto::convert::duration_wire;

use super::Admin;
use super::call::{CALL_TIMEOUT, admin_client, stamped};
use super::pages::{self, PAGE};
use crate::error::Error;
use crate::failover::RetryPolicy;

/// The longest wait of a call, below the limit of a server.
const WAIT_MAX: Duration = Duration::from_secs(20);

impl Admin {
    /// Returns every operation that the cluster still keeps, the newest first.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn operations(&self) -> Result<Vec<Operation>, Error> {
        let request = admin::ListOperationsRequest {
            running: false,
            consistency: self.consistency.into(),
            read_mask: None,
            page_size: PAGE,
            page_token: String::new(),
        };
        let operations = pages::all(self.endpoints.clone(), move |channel, left, page_token| {
            let request = admin::ListOperationsRequest { page_token, ..request.clone() };
            Box::pin(async move { admin_client(channel).list_operations(stamped(request, left)).await })
        });
        operations.try_collect().await
    }

    /// Returns an operation.
    ///
    /// # Errors
    /// [`Error::Refused`] with `OPERATION_NOT_FOUND` when the operation does not exist, or ended
    /// long ago.
    pub async fn operation(&self, id: &str) -> Result<Operation, Error> {
        let request = admin::GetOperationRequest {
            id: id.to_owned(),
            consistency: self.consistency.into(),
            read_mask: None,
        };
        self.ask(request, async |mut client, request| client.get_operation(request).await).await
    }

    /// Waits until an operation has ended. There is no timeout: drop the future to stop waiting.
    /// `seen` receives the operation at least once per `step`.
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
            let asked = self.ask_with(
                RetryPolicy::Allowed,
                CALL_TIMEOUT + wait,
                request.clone(),
                async |mut client, request| client.wait_operation(request).await,
            );
            let operation = asked.await?;
            seen(&operation);
            if operation.state() != OperationState::Running {
                return Ok(operation);
            }
        }
    }

    /// Cancels an operation. A cancelled drain leaves its node cordoned.
    ///
    /// # Errors
    /// [`Error::Refused`] with `OPERATION_STATE` when the operation cannot be cancelled.
    pub async fn cancel_operation(&self, id: &str) -> Result<Operation, Error> {
        let request =
            admin::CancelOperationRequest { id: id.to_owned(), idempotency_key: self.endpoints.next_id() };
        self.ask(request, async |mut client, request| client.cancel_operation(request).await).await
    }
}
