//! The slices of GPUs.

use futures::TryStreamExt as _;
use millrace_proto::admin::{ListSlicesRequest, Slice};
use millrace_types::NodeName;

use super::Admin;
use super::call::{admin_client, stamped};
use super::pages::{self, PAGE};
use crate::error::Error;

impl Admin {
    /// Returns the slices of a node's GPUs or, without a node, of all GPUs, and then also the slices that
    /// wait for a GPU.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn slices(&self, node: Option<&NodeName>) -> Result<Vec<Slice>, Error> {
        let request = ListSlicesRequest {
            node: node.map(ToString::to_string).unwrap_or_default(),
            consistency: self.consistency.into(),
            page_size: PAGE,
            page_token: String::new(),
        };
        let slices = pages::all(self.endpoints.clone(), move |channel, left, page_token| {
            let request = ListSlicesRequest { page_token, ..request.clone() };
            Box::pin(async move { admin_client(channel).list_slices(stamped(request, left)).await })
        });
        slices.try_collect().await
    }
}
