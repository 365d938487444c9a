//! Objects that processes of functions name themselves (D02, D03): each is given blocks of this
//! worker's counts, so that no name is ever given twice and none costs a message.

use std::sync::Arc;
use std::time::Duration;

use millrace_policy::index::Refused;
use millrace_types::{Bytes, DataId, Epoch, NodeName};

use super::{Contents, KEEP_MAX, Objects};
use crate::clock::Clock;

/// Why an object was not kept under a name of its maker's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotKept {
    /// There is no room.
    NoRoom,
    /// Something has the name.
    Taken,
    /// The name is of a registration that is over, or the worker goes.
    Over,
}

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
        Some((epoch, self.index().reserve(count)))
    }

    /// Keeps an object under a reserved name.
    pub(crate) async fn keep_as(
        &self,
        id: DataId,
        contents: Contents,
        time: Duration,
    ) -> Result<(), NotKept> {
        if self.0.feed.registration.borrow().current != Some(id.epoch) {
            return Err(NotKept::Over);
        }
        let Some(place) = self.0.feed.place().await else { return Err(NotKept::Over) };
        let bytes = Bytes(contents.len());
        let until = self.0.clock.now() + time.min(KEEP_MAX);
        let put = self.index().put_as(id.epoch, id.counter, contents, until);
        let id = put.map_err(|(refused, _)| match refused {
            Refused::NoRoom => NotKept::NoRoom,
            Refused::Taken => NotKept::Taken,
        })?;
        place.stored(id, bytes);
        Ok(())
    }

    /// Keeps an object for so long from now on. Says whether it is here.
    pub(crate) fn keep_on(&self, id: &DataId, time: Duration) -> bool {
        let until = self.0.clock.now() + time.min(KEEP_MAX);
        self.index().keep_on(id, until)
    }

    /// Lets go of objects that nobody takes. The cluster hears of it with the next look at what is over.
    pub(crate) fn let_go<'a>(&self, ids: impl IntoIterator<Item = &'a DataId>) {
        let mut index = self.index();
        ids.into_iter().for_each(|id| index.let_go(id));
        drop(index);
        self.0.over.notify_one();
    }
}
