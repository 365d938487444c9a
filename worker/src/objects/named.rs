//! Objects that processes of functions name themselves (D02, D03): each is given blocks of this
//! worker's counts, so that no name is ever given twice and none costs a message.

use std::sync::Arc;
use std::time::Duration;

use millrace_types::{Bytes, DataId, Epoch, NodeName};

use super::{Contents, KEEP_MAX, Objects};
use crate::clock::Clock;

impl Objects {
    /// The node whose objects these are.
    pub(crate) fn node(&self) -> &NodeName {
        &self.0.feed.node
    }

    /// The node's time.
    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        &self.0.clock
    }

    /// So many counts in a row that nothing else will have: the registration they are of, and the
    /// first. `None` before any controller has named this worker.
    pub(crate) fn reserve(&self, count: u64) -> Option<(Epoch, u64)> {
        let epoch = self.0.feed.registration.borrow().current?;
        Some((epoch, self.shelf().reserve(count)))
    }

    /// Keeps an object under a reserved name. Gives it back where there is no room, something has the
    /// name, or it is of a registration that is over.
    pub(crate) async fn keep_as(
        &self,
        id: DataId,
        contents: Contents,
        time: Duration,
    ) -> Result<(), Contents> {
        if self.0.feed.registration.borrow().current != Some(id.epoch) {
            return Err(contents);
        }
        let Some(place) = self.0.feed.place().await else { return Err(contents) };
        let bytes = Bytes(contents.len());
        let until = self.0.clock.now() + time.min(KEEP_MAX);
        self.shelf().put_as(id.epoch, id.counter, contents, until)?;
        place.stored(id, bytes);
        Ok(())
    }

    /// Keeps an object for so long from now on. Says whether it is here.
    pub(crate) fn keep_on(&self, id: &DataId, time: Duration) -> bool {
        let until = self.0.clock.now() + time.min(KEEP_MAX);
        id.home == *self.node() && self.shelf().keep_on(id.epoch, id.counter, until)
    }
}
