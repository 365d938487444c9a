//! The notices of moved objects to a node's queue, and the address of the queue.

use std::sync::{PoisonError, RwLock};

use millrace_core::ids::RequestKey;

use crate::actor_runtime::Mailbox;

/// An input of a request arrived in a GPU's memory, or left a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InputMoved(pub(crate) RequestKey);

/// The present address of a node's queue. A restarted Node actor publishes its new address here.
#[derive(Debug, Default)]
pub(crate) struct QueueAddress(RwLock<Option<Mailbox<InputMoved>>>);

impl QueueAddress {
    /// Publishes the address of the queue; `None` once the node is down for good.
    pub(crate) fn publish(&self, mailbox: Option<Mailbox<InputMoved>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = mailbox;
    }

    /// Sends a notice to the queue; without a queue, drops the notice.
    pub(super) fn post(&self, notice: InputMoved) {
        if let Some(queue) = &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            queue.post(notice);
        }
    }
}
