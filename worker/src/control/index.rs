//! Where the data plane says which data this node holds, for tier 2 of the index (DESIGN §5). What
//! lives shorter than a sync period is never told to anybody.

use millrace_policy::checkpoint::Event;
use millrace_types::{Bytes, DataId, NodeName};
use tokio::sync::{mpsc, watch};

use super::registration::Registration;

/// Changes said and not yet taken in. Whoever says more waits.
pub(super) const CHANGES_MAX: usize = 1024;
/// The size of a made-up piece of data.
const MADE_UP: Bytes = Bytes(4096);

/// The way in. Cheap to clone. What is said after the worker's end is heard by nobody.
#[derive(Debug, Clone)]
pub struct IndexFeed {
    pub(super) changes: mpsc::Sender<Event>,
    pub(crate) registration: watch::Receiver<Registration>,
    pub(crate) node: NodeName,
}

/// Room for one thing to say.
#[derive(Debug)]
pub(crate) struct Place<'a>(mpsc::Permit<'a, Event>);

impl Place<'_> {
    /// A piece of data is here.
    pub(crate) fn stored(self, id: DataId, bytes: Bytes) {
        self.0.send(Event::DataStored { id, bytes });
    }

    /// It is no longer here.
    pub(crate) fn dropped(self, id: DataId) {
        self.0.send(Event::DataDropped { id });
    }
}

impl IndexFeed {
    /// A piece of data is here.
    pub async fn stored(&self, id: DataId, bytes: Bytes) {
        // Closed only when the worker goes, and its data with it.
        drop(self.changes.send(Event::DataStored { id, bytes }).await);
    }

    /// It is no longer here.
    pub async fn dropped(&self, id: DataId) {
        drop(self.changes.send(Event::DataDropped { id }).await);
    }

    /// Room for one thing to say, which then waits for nobody; `None` once the worker goes.
    pub(crate) async fn place(&self) -> Option<Place<'_>> {
        self.changes.reserve().await.ok().map(Place)
    }

    /// Says that `entries` pieces of data are here, which are not: an index of real size to test
    /// and measure the control plane with. Waits for the registration that names them.
    pub async fn make_up(&self, entries: u64) {
        let mut registration = self.registration.clone();
        // Without a worker there is nothing to name.
        let Ok(Some(epoch)) = registration.wait_for(|it| it.current.is_some()).await.map(|it| it.current)
        else {
            return;
        };
        for counter in 1..=entries {
            self.stored(DataId { home: self.node.clone(), epoch, counter }, MADE_UP).await;
        }
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
