//! What data a node holds, under which names and until when: tier 1 of the index, and the truth about
//! it (`FaaSTube` §5.2; D02, D03, D09). And whom to ask for what is not here: [`Lookup`]. No clock: callers
//! pass what time it is. Absent: the bytes, the messages, and tier 2, which learns of what outlives a sync
//! period by the node's checkpoints ([`crate::checkpoint`]).
//!
//! The node that makes an object is its **home**, which its name says. Objects do not move off it: others
//! have copies, and go on having them when the home lets go of it. Nobody changes an object, so a copy is
//! never out of date. Copies give way to what the node made itself, and to newer ones.
//!
//! ```text
//! put, put_copy, keep_on ─► ┌───────┐ ─► get: what is here
//! remove, let_go          ─► │ index │ ─► expire: its own that nobody came for
//! set_aside, give_back    ─► └───────┘ ─► take_gone: what else went
//! claim, unclaim          ─►     room for what is held elsewhere, without a name
//! ```

mod lookup;
mod pages;
mod table;

use millrace_types::{Bytes, DataId, Epoch, NodeName, Timestamp};

pub use self::lookup::{Calls, LOOKUP_ORDERS, Lookup, LookupOrder, Step};
use self::table::Table;

/// The most objects of a node, copies included: what the index itself takes is bounded too. How much that
/// is, `cargo bench -p millrace-policy --bench index` says.
pub const OBJECTS_MAX: u64 = 1_000_000;

/// What is kept of an object.
pub trait Held {
    /// How many bytes it counts for. Always the same.
    fn bytes(&self) -> Bytes;

    /// How many files it may have open. Always the same.
    fn files(&self) -> u64;
}

/// How much there may be, or is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limit {
    /// Of bytes.
    pub bytes: Bytes,
    /// Of open files.
    pub files: u64,
    /// Of objects, copies included.
    pub objects: u64,
}

impl Limit {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            bytes: Bytes(self.bytes.get().saturating_add(other.bytes.get())),
            files: self.files.saturating_add(other.files),
            objects: self.objects.saturating_add(other.objects),
        }
    }

    fn minus(self, less: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(less.bytes),
            files: self.files.saturating_sub(less.files),
            objects: self.objects.saturating_sub(less.objects),
        }
    }

    fn within(self, limit: Self) -> bool {
        self.bytes <= limit.bytes && self.files <= limit.files && self.objects <= limit.objects
    }
}

fn one(held: &impl Held) -> Limit {
    Limit { bytes: held.bytes(), files: held.files(), objects: 1 }
}

/// What of objects a node holds, and has held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Objects held.
    pub objects: u64,
    /// Their bytes.
    pub bytes: Bytes,
    /// Objects kept since the node began.
    pub kept: u64,
    /// Of those, how many nobody let go of in their time.
    pub expired: u64,
    /// Objects that there was no room for.
    pub refused: u64,
    /// Copies of other nodes' objects.
    pub copies: u64,
    /// Their bytes.
    pub copied: Bytes,
}

/// Why an object was not taken under a name of its maker's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// There is no room.
    NoRoom,
    /// Something here has the name.
    Taken,
}

/// All objects of a node, each with what is kept of it.
#[derive(Debug)]
pub struct Index<T> {
    node: NodeName,
    own: Table<T>,
    copies: Table<T>,
    /// What is set aside for copies on their way, which gives way to nobody.
    coming: Limit,
    /// What is held elsewhere takes of it.
    claimed: Limit,
    limit: Limit,
    /// The count of the next name, which is never given twice by one process.
    next: u64,
    kept: u64,
    expired: u64,
    refused: u64,
    /// What went, until somebody says so.
    gone: Vec<DataId>,
}

impl<T: Held> Index<T> {
    /// A node that holds nothing.
    #[must_use]
    pub fn new(node: NodeName, limit: Limit) -> Self {
        Self {
            node,
            own: Table::new(),
            copies: Table::new(),
            coming: Limit::default(),
            claimed: Limit::default(),
            limit,
            next: 1,
            kept: 0,
            expired: 0,
            refused: 0,
            gone: Vec::new(),
        }
    }

    /// Counts that nothing else is given: so many, from the one returned on (D02).
    pub fn reserve(&mut self, count: u64) -> u64 {
        let first = self.next;
        self.next += count;
        first
    }

    /// Takes an object that was made here and names it.
    ///
    /// # Errors
    /// Gives it back where it does not fit.
    pub fn put(&mut self, epoch: Epoch, held: T, until: Timestamp) -> Result<DataId, T> {
        let counter = self.reserve(1);
        self.put_as(epoch, counter, held, until).map_err(|(_, held)| held)
    }

    /// The same under a reserved count.
    ///
    /// # Errors
    /// Gives it back where it does not fit, or something has the name.
    pub fn put_as(
        &mut self,
        epoch: Epoch,
        counter: u64,
        held: T,
        until: Timestamp,
    ) -> Result<DataId, (Refused, T)> {
        let id = DataId { home: self.node.clone(), epoch, counter };
        if self.get(&id).is_some() {
            return Err((Refused::Taken, held));
        }
        if !self.make_room(one(&held)) {
            self.refused += 1;
            return Err((Refused::NoRoom, held));
        }
        self.own.put(&id, held, until);
        self.kept += 1;
        Ok(id)
    }

    /// Has copies give way until there is room for so much. Says whether there is.
    fn make_room(&mut self, more: Limit) -> bool {
        let stays = self.own.takes().plus(self.claimed).plus(self.coming).plus(more);
        // It would not do if all of them went: none does.
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

    /// Sets room aside for a copy on its way, or for more of one, and says whether there is.
    pub fn set_aside(&mut self, more: Limit) -> bool {
        let room = self.make_room(more);
        if room {
            self.coming = self.coming.plus(more);
        }
        room
    }

    /// Gives back what was set aside.
    pub fn give_back(&mut self, less: Limit) {
        self.coming = self.coming.minus(less);
    }

    /// Takes room for what is held elsewhere, and says whether there is.
    pub fn claim(&mut self, more: Limit) -> bool {
        let room = self.make_room(more);
        if room {
            self.claimed = self.claimed.plus(more);
        }
        room
    }

    /// That is gone.
    pub fn unclaim(&mut self, less: Limit) {
        self.claimed = self.claimed.minus(less);
    }

    /// Takes a copy for which room was set aside, which is given back first. Says whether it is new, and has
    /// room.
    pub fn put_copy(&mut self, id: &DataId, held: T, until: Timestamp) -> bool {
        // Room would be made by others, or by itself, for what is here.
        if self.get(id).is_some() || !self.make_room(one(&held)) {
            return false;
        }
        // It is back before anybody said that it went.
        self.gone.retain(|gone| gone != id);
        self.copies.put(id, held, until);
        true
    }

    /// An object that is here, the node's own or a copy. Of its own it may have let go, and have a copy back.
    #[must_use]
    pub fn get(&self, id: &DataId) -> Option<&T> {
        let own = if id.home == self.node { self.own.get(id) } else { None };
        own.or_else(|| self.copies.get(id))
    }

    /// Drops an object, whichever it is, and says whether it was here. Whoever reads it has it to the end.
    pub fn remove(&mut self, id: &DataId) -> bool {
        self.own.remove(id) || self.copies.remove(id)
    }

    /// Drops an object of its own, which is named with what else went.
    pub fn let_go(&mut self, id: &DataId) {
        if self.own.remove(id) {
            self.gone.push(id.clone());
        }
    }

    /// Keeps an object of its own until another time. Says whether it is here.
    pub fn keep_on(&mut self, id: &DataId, until: Timestamp) -> bool {
        self.own.keep_on(id, until)
    }

    /// Drops its own whose time is over, and names them.
    pub fn expire(&mut self, now: Timestamp) -> Vec<DataId> {
        let expired: Vec<_> = std::iter::from_fn(|| self.own.expire(now)).collect();
        self.expired += expired.len() as u64;
        expired
    }

    /// Drops copies whose time is over, and names all that went since the last time, but for what was
    /// removed or expired.
    pub fn take_gone(&mut self, now: Timestamp) -> Vec<DataId> {
        self.gone.extend(std::iter::from_fn(|| self.copies.expire(now)));
        std::mem::take(&mut self.gone)
    }

    /// How much it holds, and has held.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            objects: self.own.takes().objects,
            bytes: self.own.takes().bytes,
            kept: self.kept,
            expired: self.expired,
            refused: self.refused,
            copies: self.copies.takes().objects,
            // Of what is on its way, too, the bytes are there.
            copied: self.copies.takes().plus(self.coming).bytes,
        }
    }
}

#[cfg(test)]
mod tests;
