//! What happened in the cluster, page after page.

use std::time::Duration;

use millrace_proto::admin as api;
use millrace_proto::convert;
use millrace_types::{Failure, Reason};

use super::{AdminService, page_size};
use crate::events::Token;

/// The longest that a request waits for news: shorter than what proxies cut off.
const WAIT_MAX: Duration = Duration::from_secs(30);

impl AdminService {
    pub(super) async fn list_events(
        &self,
        request: api::ListEventsRequest,
    ) -> Result<api::ListEventsResponse, Failure> {
        let malformed = |message: &str| Failure::new(Reason::MalformedRequest, message);
        let token: Option<Token> = match request.after.as_str() {
            "" => None,
            text => Some(
                text.parse().map_err(|()| malformed("`after` was not given by a server: leave it out"))?,
            ),
        };
        let wait = request.wait.as_ref().map(convert::duration).unwrap_or(Some(Duration::ZERO));
        let wait = wait.ok_or_else(|| malformed("`wait` is negative"))?.min(WAIT_MAX);
        let max = page_size(request.page_size);
        let mut page = self.events.after(token, max);
        if page.events.is_empty() && !wait.is_zero() {
            // A server that stops makes nobody wait.
            let next = page.next;
            self.stop.run_until_cancelled(self.events.wait(next, wait)).await;
            page = self.events.after(Some(next), max);
        }
        Ok(api::ListEventsResponse { events: page.events, next: page.next.to_string(), missed: page.missed })
    }
}
