//! The workers: what there is, and what is wished of each.

use millrace_proto::admin::{
    ListNodesRequest, Node, NodeScheduling, RemoveNodeRequest, SetNodeSchedulingRequest,
    admin_client::AdminClient,
};
use millrace_types::NodeName;

use super::{Admin, CALL_TIMEOUT, stamped};
use crate::endpoints::Repeat;
use crate::error::Error;

impl Admin {
    /// Every node, with its GPUs and what is resident on them.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn nodes(&self) -> Result<Vec<Node>, Error> {
        let request = ListNodesRequest { consistency: self.consistency.into(), read_mask: None };
        let answer = self
            .endpoints
            .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).list_nodes(stamped(request.clone(), left)).await
            })
            .await?;
        Ok(answer.into_inner().nodes)
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
        let answer = self
            .endpoints
            .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).set_node_scheduling(stamped(request.clone(), left)).await
            })
            .await?;
        Ok(answer.into_inner())
    }

    /// Forgets a node that is lost.
    ///
    /// # Errors
    /// [`Error::Refused`] with `NODE_NOT_FOUND` when there is none, `NODE_STATE` when it is live.
    pub async fn remove_node(&self, node: &NodeName) -> Result<(), Error> {
        let request = RemoveNodeRequest { name: node.to_string(), idempotency_key: self.endpoints.next_id() };
        self.endpoints
            .call(Repeat::Allowed, CALL_TIMEOUT, async |channel, left| {
                AdminClient::new(channel).remove_node(stamped(request.clone(), left)).await
            })
            .await?;
        Ok(())
    }
}
