//! Tier 1 of the data index: the data that a node holds, under which names and until when. Tier 1
//! is authoritative for its node (`FaaSTube` §5.2; D02, D03, D09). [`Lookup`] decides which node to
//! ask for data that is not here. The index reads no clock: callers pass the time. Out of scope:
//! the bytes, the messages, and tier 2, which learns from the node's checkpoints
//! ([`crate::checkpoint`]) about objects that outlive a sync period.
//!
//! The node that makes an object is its **home**, and the object's name contains the home. An
//! object does not move away from its home: other nodes have copies, and keep them after the home
//! drops the object. Objects are immutable, so a copy is never out of date. Copies are evicted to
//! make room for the node's own objects and for newer copies.
//!
//! ```text
//! put, put_copy, keep_on ─► ┌───────┐ ─► get: objects that are present
//! remove, drop_own        ─► │ index │ ─► expire: own objects that no consumer released
//! set_aside, give_back    ─► └───────┘ ─► take_gone: other dropped objects
//! reserve_room            ─►     room for data held elsewhere, without a name
//! ```

mod capacity;
mod lookup;
mod pages;
mod table;

use millrace_types::{Bytes, DataId, Epoch, NodeName, Timestamp};

use self::capacity::one;
pub use self::capacity::{IndexCapacity, IndexedObject};
pub use self::lookup::{LOOKUP_ORDERS, Lookup, LookupAction, LookupCounts, LookupOrder};
use self::table::IndexTable;

/// Maximum number of objects of a node, copies included, which bounds the memory of the index
/// itself. `cargo bench -p millrace-core-benches --bench index` measures that memory.
pub const OBJECTS_MAX: u64 = 1_000_000;

/// Present objects of a node, and counts since the node started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IndexUsage {
    /// Own objects that are present.
    pub objects: u64,
    /// Bytes of the own objects.
    pub bytes: Bytes,
    /// Own objects stored since the node started.
    pub kept: u64,
    /// Own objects that expired because no consumer released them in time.
    pub expired: u64,
    /// Objects refused for lack of room.
    pub refused: u64,
    /// Copies of other nodes' objects.
    pub copies: u64,
    /// Bytes of the copies.
    pub copied: Bytes,
}

/// Reason why an object was not stored under a reserved counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InsertError {
    /// The index has no room.
    NoRoom,
    /// An object with that name is present.
    Taken,
}

/// All objects of a node, with the value stored for each.
#[derive(Debug)]
pub struct DataIndex<T> {
    node: NodeName,
    own: IndexTable<T>,
    copies: IndexTable<T>,
    /// Room set aside for copies in transit. No other object may use this room.
    coming: IndexCapacity,
    /// Room used by data that is held outside the index.
    claimed: IndexCapacity,
    limit: IndexCapacity,
    /// Next counter of a name. A process never uses a counter twice.
    next: u64,
    kept: u64,
    expired: u64,
    refused: u64,
    /// Names of dropped objects, until the caller collects them.
    gone: Vec<DataId>,
}

impl<T: IndexedObject> DataIndex<T> {
    /// Returns the index of a node that holds nothing.
    #[must_use]
    pub fn new(node: NodeName, limit: IndexCapacity) -> Self {
        Self {
            node,
            own: IndexTable::new(),
            copies: IndexTable::new(),
            coming: IndexCapacity::default(),
            claimed: IndexCapacity::default(),
            limit,
            next: 1,
            kept: 0,
            expired: 0,
            refused: 0,
            gone: Vec::new(),
        }
    }

    /// Reserves `count` counters for the caller alone, and returns the first (D02).
    pub fn reserve(&mut self, count: u64) -> u64 {
        let first = self.next;
        self.next += count;
        first
    }

    /// Stores and names an object that was made here.
    ///
    /// # Errors
    /// Returns an object that does not fit.
    pub fn put(&mut self, epoch: Epoch, held: T, until: Timestamp) -> Result<DataId, T> {
        let counter = self.reserve(1);
        self.put_as(epoch, counter, held, until).map_err(|(_, held)| held)
    }

    /// Stores an object that was made here under a reserved counter.
    ///
    /// # Errors
    /// Returns an object that does not fit or has a name in use.
    pub fn put_as(
        &mut self,
        epoch: Epoch,
        counter: u64,
        held: T,
        until: Timestamp,
    ) -> Result<DataId, (InsertError, T)> {
        let id = DataId { home: self.node.clone(), epoch, counter };
        if self.get(&id).is_some() {
            return Err((InsertError::Taken, held));
        }
        if !self.make_room(one(&held)) {
            self.refused += 1;
            return Err((InsertError::NoRoom, held));
        }
        self.own.put(&id, held, until);
        self.kept += 1;
        Ok(id)
    }

    /// Evicts copies until `more` fits. Returns whether there is room.
    fn make_room(&mut self, more: IndexCapacity) -> bool {
        let stays = self.own.takes().plus(self.claimed).plus(self.coming).plus(more);
        // If evicting all copies would not suffice, none is evicted.
        if !stays.within(self.limit) {
            return false;
        }
        while !stays.plus(self.copies.takes()).within(self.limit) {
            match self.copies.pop_first() {
                Some(id) => self.gone.push(id),
                None => return false,
            }
        }
        true
    }

    /// Sets room aside for a copy in transit, or for its growth. Returns whether there was room.
    pub fn set_aside(&mut self, more: IndexCapacity) -> bool {
        let room = self.make_room(more);
        if room {
            self.coming = self.coming.plus(more);
        }
        room
    }

    /// Gives back room that was set aside.
    pub fn give_back(&mut self, less: IndexCapacity) {
        self.coming = self.coming.minus(less);
    }

    /// Reserves room for data that is held outside the index. Returns whether there was room.
    pub fn reserve_room(&mut self, more: IndexCapacity) -> bool {
        let room = self.make_room(more);
        if room {
            self.claimed = self.claimed.plus(more);
        }
        room
    }

    /// Releases room of data that was held outside the index.
    pub fn unclaim(&mut self, less: IndexCapacity) {
        self.claimed = self.claimed.minus(less);
    }

    /// Stores a copy, and returns whether it was stored: the copy must be new and fit. The caller
    /// first gives back the room set aside for the copy.
    pub fn put_copy(&mut self, id: &DataId, held: T, until: Timestamp) -> bool {
        // Presence is checked first: making room for a copy that is present could evict any copy,
        // even the same.
        if self.get(id).is_some() || !self.make_room(one(&held)) {
            return false;
        }
        // The copy returned before its eviction was reported.
        self.gone.retain(|gone| gone != id);
        self.copies.put(id, held, until);
        true
    }

    /// Returns a present object, own or copy. An own object that was dropped may have returned as a
    /// copy.
    #[must_use]
    pub fn get(&self, id: &DataId) -> Option<&T> {
        let own = if id.home == self.node { self.own.get(id) } else { None };
        own.or_else(|| self.copies.get(id))
    }

    /// Drops an object, own or copy, and returns whether it was present. A reader that already has
    /// the object is not affected.
    pub fn remove(&mut self, id: &DataId) -> bool {
        self.own.remove(id) || self.copies.remove(id)
    }

    /// Drops an own object, and reports its name with the next dropped objects.
    pub fn drop_own(&mut self, id: &DataId) {
        if self.own.remove(id) {
            self.gone.push(id.clone());
        }
    }

    /// Changes the expiry of an own object. Returns whether the object is present.
    pub fn keep_on(&mut self, id: &DataId, until: Timestamp) -> bool {
        self.own.keep_on(id, until)
    }

    /// Drops expired own objects, and returns their names.
    pub fn expire(&mut self, now: Timestamp) -> Vec<DataId> {
        let expired: Vec<_> = std::iter::from_fn(|| self.own.expire(now)).collect();
        self.expired += expired.len() as u64;
        expired
    }

    /// Drops expired copies, and returns the names of all objects dropped since the last call.
    /// Objects dropped by [`Self::remove`] or [`Self::expire`] are left out, because their callers
    /// know them.
    pub fn take_gone(&mut self, now: Timestamp) -> Vec<DataId> {
        self.gone.extend(std::iter::from_fn(|| self.copies.expire(now)));
        std::mem::take(&mut self.gone)
    }

    /// Returns the present objects and the counts so far.
    #[must_use]
    pub fn usage(&self) -> IndexUsage {
        IndexUsage {
            objects: self.own.takes().objects,
            bytes: self.own.takes().bytes,
            kept: self.kept,
            expired: self.expired,
            refused: self.refused,
            copies: self.copies.takes().objects,
            // The bytes of copies in transit are already allocated.
            copied: self.copies.takes().plus(self.coming).bytes,
        }
    }
}

#[cfg(test)]
mod tests;
