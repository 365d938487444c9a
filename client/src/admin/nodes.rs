//! The workers: what there is, and what is wished of each.

use futures::TryStreamExt as _;
use millrace_proto::admin::{
    ListNodesRequest, Node, NodeScheduling, RemoveNodeRequest, SetNodeSchedulingRequest,
};
use millrace_types::NodeName;

use super::pages::{self, PAGE};
use super::{Admin, admin_client, stamped};
use crate::error::Error;

impl Admin {
    /// Every node, with its GPUs and what is resident on them.
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

    /// Says whether a node takes functions on, keeps what it has, or is to be emptied. The node as it
    /// is then: a drain is over when it has no placements left.
    ///
    /// # Errors
    /// [`Error::Refused`] with `NODE_NOT_FOUND` when there is none, `NODE_STATE` when it is lost.
    pub async fn set_scheduling(&self, node: &NodeName, scheduling: NodeScheduling) -> Result<Node, Error> {
        let request = SetNodeSchedulingRequest {
            name: node.to_string(),
            scheduling: scheduling.into(),
            idempotency_key: self.endpoints.next_id(),
        };
        self.ask(request, async |mut client, request| client.set_node_scheduling(request).await).await
    }

    /// Forgets a node that is lost.
    ///
    /// # Errors
    /// [`Error::Refused`] with `NODE_NOT_FOUND` when there is none, `NODE_STATE` when it is live.
    pub async fn remove_node(&self, node: &NodeName) -> Result<(), Error> {
        let request = RemoveNodeRequest { name: node.to_string(), idempotency_key: self.endpoints.next_id() };
        self.ask(request, async |mut client, request| client.remove_node(request).await).await?;
        Ok(())
    }
}
