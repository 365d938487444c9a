//! The last log lines of controllers and workers.

use std::time::Duration;

use millrace_proto::admin::{ListLogsRequest, ListLogsResponse};
use millrace_proto::convert::duration_wire;
use millrace_proto::log::Filter;
use millrace_proto::logs::PAGE_MAX;

use super::{Admin, CALL_TIMEOUT};
use crate::endpoints::Repeat;
use crate::error::Error;

impl Admin {
    /// Lines of these nodes and controllers (none: everybody's) after an earlier answer's `next` (empty:
    /// from the oldest that is kept), waiting so long where there is nothing new. An answer that has `more`
    /// is not all: ask again at once.
    ///
    /// # Errors
    /// [`Error::Refused`] with `NODE_NOT_FOUND` when nobody has one of the names.
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
        self.ask_with(Repeat::Allowed, CALL_TIMEOUT + wait, request, async |mut client, request| {
            client.list_logs(request).await
        })
        .await
    }
}
