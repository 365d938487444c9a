//! The worker nodes, and their scheduling.

use futures::TryStreamExt as _;
use millrace_proto::admin::{
    ListNodesRequest, Node, NodeScheduling, RemoveNodeRequest, SetNodeSchedulingRequest,
};
use millrace_types::NodeName;

use super::Admin;
use super::call::{admin_client, stamped};
use super::pages::{self, PAGE};
use crate::error::Error;

impl Admin {
    /// Returns every node with its GPUs and their resident models.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn nodes(&self) -> Result<Vec<Node>, Error> {
        let request = ListNodesRequest {
            consistency: self.consistency.into(),
            read_mask: None,
            page_size: PAGE,
            page_token: String::new(),
        };
        let nodes = pages::all(self.endpoints.clone(), move |channel, left, page_token| {
            let request = ListNodesRequest { page_token, ..request.clone() };
            Box::pin(async move { admin_client(channel).list_nodes(stamped(request, left)).await })
        });
        nodes.try_collect().await
    }

    /// Sets whether a node accepts functions, keeps those that it has (cordoned), or is drained.
    /// Returns the node after the change. A drain is complete when the node has no placements left.
    ///
    /// # Errors
    /// [`Error::Refused`] with `NODE_NOT_FOUND` when the node does not exist, `NODE_STATE` when the
    /// node is lost.
    pub async fn set_scheduling(&self, node: &NodeName, scheduling: NodeScheduling) -> Result<Node, Error> {
        let request = SetNodeSchedulingRequest {
            name: node.to_string(),
            scheduling: scheduling.into(),
            idempotency_key: self.endpoints.next_id(),
        };
        self.ask(request, async |mut client, request| client.set_node_scheduling(request).await).await
    }

    /// Removes a lost node from the cluster's state.
    ///
    /// # Errors
    /// [`Error::Refused`] with `NODE_NOT_FOUND` when the node does not exist, `NODE_STATE` when the
    /// node is live.
    pub async fn remove_node(&self, node: &NodeName) -> Result<(), Error> {
        let request = RemoveNodeRequest { name: node.to_string(), idempotency_key: self.endpoints.next_id() };
        self.ask(request, async |mut client, request| client.remove_node(request).await).await?;
        Ok(())
    }
}
