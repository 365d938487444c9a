//! Objects that functions' processes name themselves (D02, D03). Each process gets blocks of this
//! worker's counters, so that no name is used twice and naming costs no message.

use std::sync::Arc;
use std::time::Duration;

use millrace_nodes::index::InsertError;
use millrace_types::{Bytes, DataId, Epoch, NodeName};

use super::Contents;
use super::store::{KEEP_MAX, ObjectStore};
use crate::clock::Clock;

/// The reason why an object was not stored under the name that its process chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreError {
    /// The object does not fit.
    NoRoom,
    /// The name is in use.
    Taken,
    /// The name belongs to an ended registration, or the worker is shutting down.
    Over,
}

impl ObjectStore {
    /// Returns the node that owns these objects.
    pub(crate) fn node(&self) -> &NodeName {
        &self.0.feed.node
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        &self.0.clock
    }

    /// Reserves `count` consecutive counters that no other object will have. Returns their
    /// registration and the first counter; `None` before a controller registered this worker.
    pub(crate) fn reserve(&self, count: u64) -> Option<(Epoch, u64)> {
        let epoch = self.0.feed.registration.borrow().current?;
        Some((epoch, self.index().reserve(count)))
    }

    /// Stores an object under a reserved name.
    pub(crate) async fn keep_as(
        &self,
        id: DataId,
        contents: Contents,
        time: Duration,
    ) -> Result<(), StoreError> {
        if self.0.feed.registration.borrow().current != Some(id.epoch) {
            return Err(StoreError::Over);
        }
        let Some(place) = self.0.feed.reserve().await else { return Err(StoreError::Over) };
        let bytes = Bytes(contents.len());
        let until = self.0.clock.now() + time.min(KEEP_MAX);
        let put = self.index().put_as(id.epoch, id.counter, contents, until);
        let id = put.map_err(|(refused, _)| match refused {
            InsertError::NoRoom => StoreError::NoRoom,
            InsertError::Taken => StoreError::Taken,
        })?;
        place.stored(id, bytes);
        Ok(())
    }

    /// Extends an object's life to `time` from now. Returns whether the object is here.
    pub(crate) fn keep_on(&self, id: &DataId, time: Duration) -> bool {
        let until = self.0.clock.now() + time.min(KEEP_MAX);
        self.index().keep_on(id, until)
    }

    /// Drops objects that have no consumers. The cluster is told at the next sweep.
    pub(crate) fn let_go<'a>(&self, ids: impl IntoIterator<Item = &'a DataId>) {
        let mut index = self.index();
        ids.into_iter().for_each(|id| index.drop_own(id));
        drop(index);
        self.0.over.notify_one();
    }
}
