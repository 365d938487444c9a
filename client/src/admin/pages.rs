//! Paged lists of the admin API.

use std::time::Duration;

use async_stream::try_stream;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use millrace_proto::admin;
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::call::CALL_TIMEOUT;
use crate::endpoints::Endpoints;
use crate::error::Error;
use crate::failover::RetryPolicy;

/// The number of items requested per page. A page that reaches the size limit in bytes has fewer.
pub(super) const PAGE: u32 = 500;

/// One page of a list, as the response carries it.
pub(super) trait ListPage {
    type Item;

    /// Returns the page's items and the token of the next page. The last page's token is empty.
    fn open(self) -> (Vec<Self::Item>, String);
}

macro_rules! page {
    ($answer:ident, $items:ident: $item:ident) => {
        impl ListPage for admin::$answer {
            type Item = admin::$item;

            fn open(self) -> (Vec<Self::Item>, String) {
                (self.$items, self.next_page_token)
            }
        }
    };
}

page!(ListFunctionsResponse, functions: Function);
page!(ListWorkflowsResponse, workflows: Workflow);
page!(ListTenantsResponse, tenants: Tenant);
page!(ListBillingResponse, bills: Bill);
page!(ListNodesResponse, nodes: Node);
page!(ListSlicesResponse, slices: Slice);
page!(ListProfilesResponse, profiles: Profile);
page!(ListOperationsResponse, operations: Operation);

/// Returns all items of a list, page by page. `ask` requests the page of a token from one endpoint.
pub(super) fn all<P, A>(endpoints: Endpoints, ask: A) -> BoxStream<'static, Result<P::Item, Error>>
where
    P: ListPage<Item: Send> + Send + 'static,
    A: Fn(Channel, Duration, String) -> BoxFuture<'static, Result<Response<P>, Status>>
        + Send
        + Sync
        + 'static,
{
    Box::pin(try_stream! {
        let mut token = String::new();
        loop {
            let page = endpoints
                .call(RetryPolicy::Allowed, CALL_TIMEOUT, |channel, left| ask(channel, left, token.clone()))
                .await?
                .into_inner();
            let (items, next) = page.open();
            for item in items {
                yield item;
            }
            if next.is_empty() {
                break;
            }
            token = next;
        }
    })
}
