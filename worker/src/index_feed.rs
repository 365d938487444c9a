//! The feed by which the data plane reports the data on this node, for tier 2 of the
//! index. Data that lives shorter than a sync period is never reported.

use millrace_nodes::checkpoint::Event;
use millrace_types::{Bytes, DataId, NodeName};
use tokio::sync::{mpsc, watch};

use crate::registration::NodeEpochs;

/// Maximum number of unread changes. Further reporters wait.
pub(crate) const CHANGES_MAX: usize = 1024;

/// The sender of data changes. Cheap to clone. Changes sent after the worker's end are dropped.
#[derive(Debug, Clone)]
pub struct IndexFeed {
    pub(crate) changes: mpsc::Sender<Event>,
    pub(crate) registration: watch::Receiver<NodeEpochs>,
    pub(crate) node: NodeName,
}

/// A permit to report one change.
#[derive(Debug)]
pub struct IndexPermit<'a>(mpsc::Permit<'a, Event>);

impl IndexPermit<'_> {
    /// Reports that a piece of data is here.
    pub fn stored(self, id: DataId, bytes: Bytes) {
        self.0.send(Event::DataStored { id, bytes });
    }

    /// Reports that a piece of data is no longer here.
    pub fn dropped(self, id: DataId) {
        self.0.send(Event::DataDropped { id });
    }
}

impl IndexFeed {
    /// Waits for a permit to report one change. `None` once the worker ends.
    pub async fn reserve(&self) -> Option<IndexPermit<'_>> {
        self.changes.reserve().await.ok().map(IndexPermit)
    }
}

#[cfg(test)]
impl IndexFeed {
    /// Returns a feed without a receiver, of a worker that no controller has registered.
    pub(crate) fn unheard() -> Self {
        let registration = watch::Sender::new(NodeEpochs::default()).subscribe();
        let node = NodeName::new("node").unwrap();
        Self { changes: mpsc::channel(1).0, registration, node }
    }

    /// Returns a feed of a worker that is registered under this epoch, and its receiver.
    pub(crate) fn heard(epoch: millrace_types::Epoch) -> (Self, mpsc::Receiver<Event>) {
        let known = NodeEpochs { current: Some(epoch), seen: epoch };
        let registration = watch::Sender::new(known).subscribe();
        let (changes, changed) = mpsc::channel(CHANGES_MAX);
        (Self { changes, registration, node: NodeName::new("node").unwrap() }, changed)
    }
}
