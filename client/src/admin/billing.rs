//! The bills of functions and tenants.

use futures::stream::BoxStream;
use millrace_proto::admin::{Bill, ListBillingRequest};
use millrace_types::{FunctionName, TenantName};

use super::Admin;
use super::call::{admin_client, stamped};
use super::pages::{self, PAGE};
use crate::error::Error;

impl Admin {
    /// Lists the usage and cost of one function, or of every function of a tenant or of all
    /// tenants. Includes deleted functions.
    pub fn billing(
        &self,
        tenant: Option<&TenantName>,
        function: Option<&FunctionName>,
    ) -> BoxStream<'static, Result<Bill, Error>> {
        let request = ListBillingRequest {
            tenant: tenant.map(TenantName::to_string).unwrap_or_default(),
            function: function.map(FunctionName::to_string).unwrap_or_default(),
            page_size: PAGE,
            page_token: String::new(),
            consistency: self.consistency.into(),
            read_mask: None,
        };
        pages::all(self.endpoints.clone(), move |channel, left, page_token| {
            let request = ListBillingRequest { page_token, ..request.clone() };
            Box::pin(async move { admin_client(channel).list_billing(stamped(request, left)).await })
        })
    }
}
