//! Where the data plane says which data this node holds, for tier 2 of the index (DESIGN §5). What
//! lives shorter than a sync period is never told to anybody.

use millrace_policy::checkpoint::Event;
use millrace_types::{Bytes, DataId, NodeName};
use tokio::sync::{mpsc, watch};

use super::registration::Registration;

/// Changes said and not yet taken in. Whoever says more waits.
pub(super) const CHANGES_MAX: usize = 1024;

/// The way in. Cheap to clone. What is said after the worker's end is heard by nobody.
#[derive(Debug, Clone)]
pub struct IndexFeed {
    pub(super) changes: mpsc::Sender<Event>,
    pub(crate) registration: watch::Receiver<Registration>,
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
    pub async fn place(&self) -> Option<IndexPermit<'_>> {
        self.changes.reserve().await.ok().map(IndexPermit)
    }
}

#[cfg(test)]
impl IndexFeed {
    /// One that nobody hears, of a worker that no controller has taken in.
    pub(crate) fn unheard() -> Self {
        let registration = watch::Sender::new(Registration::default()).subscribe();
        let node = NodeName::new("node").unwrap();
        Self { changes: mpsc::channel(1).0, registration, node }
    }

    /// One of a worker that is registered under this epoch, and what is said to it.
    pub(crate) fn heard(epoch: millrace_types::Epoch) -> (Self, mpsc::Receiver<Event>) {
        let known = Registration { current: Some(epoch), seen: epoch };
        let registration = watch::Sender::new(known).subscribe();
        let (changes, changed) = mpsc::channel(CHANGES_MAX);
        (Self { changes, registration, node: NodeName::new("node").unwrap() }, changed)
    }
}
