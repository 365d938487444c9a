//! What was used, and what it costs.

use futures::stream::BoxStream;
use millrace_proto::admin::{Bill, ListBillingRequest, admin_client::AdminClient};
use millrace_types::{FunctionName, TenantName};

use super::{Admin, CALL_TIMEOUT, PAGE, stamped};
use crate::endpoints::Repeat;
use crate::error::Error;

impl Admin {
    /// What a function, or each, of a tenant, or of all, used and what it costs; deleted ones
    /// included.
    pub fn billing(
        &self,
        tenant: Option<&TenantName>,
        function: Option<&FunctionName>,
    ) -> BoxStream<'static, Result<Bill, Error>> {
        let mut request = ListBillingRequest {
            tenant: tenant.map(TenantName::to_string).unwrap_or_default(),
            function: function.map(FunctionName::to_string).unwrap_or_default(),
            page_size: PAGE,
            page_token: String::new(),
            consistency: self.consistency.into(),
        };
        let endpoints = self.endpoints.clone();
        Box::pin(async_stream::try_stream! {
            loop {
                let page = endpoints
                    .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                        AdminClient::new(channel).list_billing(stamped(request.clone(), left)).await
                    })
                    .await?
                    .into_inner();
                for bill in page.bills {
                    yield bill;
                }
                if page.next_page_token.is_empty() {
                    break;
                }
                request.page_token = page.next_page_token;
            }
        })
    }
}
