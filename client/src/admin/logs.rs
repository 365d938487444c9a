//! The last log lines of controllers and workers.

use std::time::Duration;

use millrace_proto::admin::{ListLogsRequest, ListLogsResponse};
use millrace_proto::convert::duration_wire;
use millrace_proto::log::Filter;
use millrace_proto::logs::PAGE_MAX;

use super::Admin;
use super::call::CALL_TIMEOUT;
use crate::error::Error;
use crate::failover::RetryPolicy;

impl Admin {
    /// Returns log lines of these nodes and controllers after an earlier response's `next`. An
    /// empty `of` selects all processes; an empty `after` starts at the oldest line that is kept.
    /// Without new lines, the server waits up to `wait`. If the response has `more`, further lines
    /// are ready at once.
    ///
    /// # Errors
    /// [`Error::Refused`] with `NODE_NOT_FOUND` when no process has one of the names.
    pub async fn logs(
        &self,
        of: &[String],
        filter: &Filter,
        after: &str,
        wait: Duration,
    ) -> Result<ListLogsResponse, Error> {
        let request = ListLogsRequest {
            of: of.to_vec(),
            filter: Some(filter.clone()),
            after: after.to_owned(),
            wait: Some(duration_wire(wait)),
            page_size: PAGE_MAX,
        };
        self.ask_with(RetryPolicy::Allowed, CALL_TIMEOUT + wait, request, async |mut client, request| {
            client.list_logs(request).await
        })
        .await
    }
}
