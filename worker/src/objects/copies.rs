//! Copies of other workers' objects, as processes fetched them by name: found here the next time, and
//! by others once the object's home is gone (D09). They give way to this worker's own. No clock: callers
//! pass what time it is.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{Bytes, DataId, Timestamp};

use super::Contents;

/// Copies by name. Nobody changes an object, so a copy is never out of date.
#[derive(Debug, Default)]
pub(super) struct Copies {
    copies: BTreeMap<DataId, Copy>,
    expiries: BTreeSet<(Timestamp, DataId)>,
    bytes: Bytes,
    /// What is set aside for copies on their way.
    coming: Bytes,
}

#[derive(Debug)]
struct Copy {
    contents: Contents,
    until: Timestamp,
}

impl Copies {
    pub(super) fn get(&self, id: &DataId) -> Option<&Contents> {
        self.copies.get(id).map(|copy| &copy.contents)
    }

    pub(super) fn len(&self) -> u64 {
        self.copies.len() as u64
    }

    /// What they take, and what is set aside for more.
    pub(super) fn bytes(&self) -> Bytes {
        self.bytes + self.coming
    }

    /// What is set aside, which gives way to nobody.
    pub(super) fn coming(&self) -> Bytes {
        self.coming
    }

    /// Sets room aside for one on its way. The caller has seen that there is as much.
    pub(super) fn set_aside(&mut self, bytes: Bytes) {
        self.coming += bytes;
    }

    /// Gives back what was set aside.
    pub(super) fn give_back(&mut self, bytes: Bytes) {
        self.coming = Bytes(self.coming.get().saturating_sub(bytes.get()));
    }

    /// Takes one that is not here, for which room was set aside.
    pub(super) fn put(&mut self, id: DataId, contents: Contents, until: Timestamp) {
        self.bytes += Bytes(contents.len());
        self.expiries.insert((until, id.clone()));
        self.copies.insert(id, Copy { contents, until });
    }

    /// Drops the one whose time is over first.
    pub(super) fn drop_first(&mut self) -> Option<DataId> {
        let (_, id) = self.expiries.pop_first()?;
        if let Some(copy) = self.copies.remove(&id) {
            self.bytes = Bytes(self.bytes.get() - copy.contents.len());
        }
        Some(id)
    }

    /// Drops one whose time is over.
    pub(super) fn expire(&mut self, now: Timestamp) -> Option<DataId> {
        self.expiries.first().is_some_and(|(until, _)| *until <= now).then(|| self.drop_first()).flatten()
    }

    /// Drops one. Whoever reads it has it to the end.
    pub(super) fn remove(&mut self, id: &DataId) -> bool {
        let Some(copy) = self.copies.remove(id) else { return false };
        self.expiries.remove(&(copy.until, id.clone()));
        self.bytes = Bytes(self.bytes.get() - copy.contents.len());
        true
    }
}
