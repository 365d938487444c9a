//! Events of the cluster, in pages.

use millrace_proto::admin as api;
use millrace_types::Failure;

use super::listing::page_size;
use super::{AdminService, wait};
use crate::events::EventPosition;

impl AdminService {
    pub(super) async fn list_events(
        &self,
        request: api::ListEventsRequest,
    ) -> Result<api::ListEventsResponse, Failure> {
        let token: Option<EventPosition> = match request.after.as_str() {
            "" => None,
            text => Some(
                text.parse()
                    .map_err(|()| Failure::malformed("`after` is not a token of this API: omit the field"))?,
            ),
        };
        let wait = wait("wait", request.wait.as_ref())?;
        let max = page_size(request.page_size);
        // Free the request before the wait.
        drop(request);
        let mut page = self.events.after(token, max);
        if page.events.is_empty() && !wait.is_zero() {
            // A server that stops ends the wait at once.
            let next = page.next;
            self.stop.run_until_cancelled(self.events.wait(next, wait)).await;
            page = self.events.after(Some(next), max);
        }
        Ok(api::ListEventsResponse { events: page.events, next: page.next.to_string(), missed: page.missed })
    }
}
