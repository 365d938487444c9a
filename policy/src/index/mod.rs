//! Which data this node holds, and where: tier 1 of the index, and the truth about it (`FaaSTube`
//! §5.2; D02, D03, D09). Absent: the bytes, the messages, and tier 2, which learns of what outlives
//! a sync period by the node's checkpoints.
//!
//! Of this, workers run [`Lookup`]. The rest runs in tests and a bench only: what a worker holds is in
//! its own tables, and nothing moves off its home as yet; it is copied.
//!
//! The node that makes an object is its **home**, for as long as it is registered: it knows whether
//! it still holds it, and else where it went. Nobody else needs to be told when an object moves.
//!
//! ```text
//!                                     ┌───────┐
//! unique_id, store, moved, drop ────► │ index │ ──► entries: what is here
//! note (from where it went on) ─────► │       │ ──► Forward: what tier 2 has to know from now on
//! lookup (for here), answer ────────► └───────┘
//!   (for others)
//! ```
//!
//! Notes of where objects went are bounded: the oldest is handed over to tier 2.

mod lookup;
mod method;

use std::collections::hash_map::{DefaultHasher, HashMap};
use std::collections::{BTreeMap, hash_map};
use std::hash::BuildHasherDefault;

use millrace_types::{Bytes, DataId, Epoch, NodeName};

pub use self::lookup::{Answer, Calls, LOOKUP_ORDERS, Lookup, LookupOrder, STEPS_MAX, Step};
pub use self::method::{Location, Method, Place, method};

/// The most objects of a node.
pub const OBJECTS_MAX: usize = 4_000_000;
/// The most notes of where objects went.
pub const NOTES_MAX: usize = 65_536;

/// A map that is only looked into. Its hasher has no seed: it is the same everywhere.
type Table<K, T> = HashMap<K, T, BuildHasherDefault<DefaultHasher>>;
/// By counter, under one home and epoch.
type Counters<T> = Table<u64, T>;

/// An object that is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Where on the node.
    pub place: Place,
    /// Its size.
    pub bytes: Bytes,
}

/// There may be millions of them, each beside its counter in a table.
const _: () = assert!(size_of::<(u64, Entry)>() <= 32);

/// Where an object goes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Destination {
    /// Elsewhere on this node.
    Here(Place),
    /// To another node, which holds it by now.
    Node(NodeName),
}

/// An object whose home does not know any more where it went: tier 2 has to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Forward {
    /// Which.
    pub id: DataId,
    /// Where it went.
    pub to: NodeName,
}

/// Who has to learn that an object moved.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Tell {
    /// Nobody.
    Nobody,
    /// Its home: it notes where it went.
    Home(NodeName),
    /// Tier 2, of one that had moved longer ago.
    Tier2(Forward),
}

/// What a home says of an object that it made.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum HomeAnswer {
    /// It holds it.
    Held,
    /// It gave it away.
    Moved {
        /// To this node.
        to: NodeName,
    },
    /// It knows nothing of it: it was dropped, or forwarded to tier 2, or made before this epoch.
    UnknownSince(Epoch),
}

/// Why nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A name stands for one object, which is here.
    #[error("{0} is stored already")]
    Stored(DataId),
    /// This node never gave that name.
    #[error("{0} was never given as a name")]
    NeverGiven(DataId),
    /// It is not here.
    #[error("{0} is not on this node")]
    NotHere(DataId),
    /// This node did not make it under this epoch.
    #[error("{0} has another home")]
    NotHome(DataId),
    /// There are as many objects as can be.
    #[error("the node holds {max} objects, no more are taken", max = OBJECTS_MAX)]
    Full,
}

/// Where an object of this home went.
#[derive(Debug)]
struct Note {
    to: NodeName,
    /// Its place in the order of notes.
    turn: u64,
}

/// All objects of a node.
#[derive(Debug)]
pub struct Index {
    node: NodeName,
    epoch: Epoch,
    /// The counter of the next name.
    next: u64,
    own: Counters<Entry>,
    /// Objects that other nodes made, or this one under another epoch. No map is empty.
    foreign: Table<NodeName, BTreeMap<Epoch, Counters<Entry>>>,
    objects: usize,
    notes: Counters<Note>,
    /// How many of them are kept.
    notes_max: usize,
    /// The counters of notes, the oldest first.
    turns: BTreeMap<u64, u64>,
    next_turn: u64,
}

impl Index {
    /// A node that holds nothing, as it is after it registered.
    #[must_use]
    pub fn new(node: NodeName, epoch: Epoch) -> Self {
        Self {
            node,
            epoch,
            next: 0,
            own: Counters::default(),
            foreign: Table::default(),
            objects: 0,
            notes: Counters::default(),
            notes_max: NOTES_MAX,
            turns: BTreeMap::new(),
            next_turn: 0,
        }
    }

    /// Whose index it is.
    #[must_use]
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// Objects that are here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.objects
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.objects == 0
    }

    /// A name that no node ever gave (D02): an epoch is one registration's alone.
    pub fn unique_id(&mut self) -> DataId {
        let counter = self.next;
        self.next += 1;
        DataId { home: self.node.clone(), epoch: self.epoch, counter }
    }

    /// Takes an object: one that was made here, or that came from another node.
    ///
    /// # Errors
    /// [`Error::NeverGiven`], [`Error::Stored`] and [`Error::Full`]; nothing has changed then.
    pub fn store(&mut self, id: &DataId, entry: Entry) -> Result<(), Error> {
        let full = self.objects >= OBJECTS_MAX;
        let own = self.is_own(id);
        if own && id.counter >= self.next {
            return Err(Error::NeverGiven(id.clone()));
        }
        if self.lookup(id).is_some() {
            return Err(Error::Stored(id.clone()));
        }
        if full {
            return Err(Error::Full);
        }
        if own {
            self.own.insert(id.counter, entry);
            self.forget(id.counter);
        } else {
            let epochs = self.foreign.entry(id.home.clone()).or_default();
            epochs.entry(id.epoch).or_default().insert(id.counter, entry);
        }
        self.objects += 1;
        Ok(())
    }

    /// Where an object is on this node; `None` when it is not here.
    #[must_use]
    pub fn lookup(&self, id: &DataId) -> Option<Entry> {
        let counters =
            if self.is_own(id) { &self.own } else { self.foreign.get(&id.home)?.get(&id.epoch)? };
        counters.get(&id.counter).copied()
    }

    /// Notes that an object that is here went elsewhere, and says who has to learn of it.
    ///
    /// # Errors
    /// [`Error::NotHere`].
    pub fn moved(&mut self, id: &DataId, to: Destination) -> Result<Tell, Error> {
        match to {
            Destination::Here(place) => {
                let entry = self.entry(id).ok_or_else(|| Error::NotHere(id.clone()))?;
                entry.place = place;
                Ok(Tell::Nobody)
            }
            Destination::Node(to) => {
                self.take(id).ok_or_else(|| Error::NotHere(id.clone()))?;
                if !self.is_own(id) {
                    return Ok(Tell::Home(id.home.clone()));
                }
                Ok(self.keep_note(id.counter, to).map_or(Tell::Nobody, Tell::Tier2))
            }
        }
    }

    /// As its home, notes where an object went on to from where it was. Gives the oldest note when
    /// there are too many.
    ///
    /// # Errors
    /// [`Error::NotHome`], and [`Error::Stored`] when it is here again: the news is old.
    pub fn note(&mut self, id: &DataId, to: NodeName) -> Result<Option<Forward>, Error> {
        if !self.is_own(id) || id.counter >= self.next {
            return Err(Error::NotHome(id.clone()));
        }
        if self.own.contains_key(&id.counter) {
            return Err(Error::Stored(id.clone()));
        }
        Ok(self.keep_note(id.counter, to))
    }

    /// Forgets an object, and as its home where it went: whoever drops it elsewhere tells its home.
    /// Gives what was here.
    pub fn drop(&mut self, id: &DataId) -> Option<Entry> {
        if self.is_own(id) {
            self.forget(id.counter);
        }
        self.take(id)
    }

    /// As its home, says to another node where an object is.
    #[must_use]
    pub fn answer(&self, id: &DataId) -> HomeAnswer {
        if self.lookup(id).is_some() {
            return HomeAnswer::Held;
        }
        match self.notes.get(&id.counter).filter(|_| self.is_own(id)) {
            Some(note) => HomeAnswer::Moved { to: note.to.clone() },
            None => HomeAnswer::UnknownSince(self.epoch),
        }
    }

    fn is_own(&self, id: &DataId) -> bool {
        id.epoch == self.epoch && id.home == self.node
    }

    fn entry(&mut self, id: &DataId) -> Option<&mut Entry> {
        let counters = if self.is_own(id) {
            &mut self.own
        } else {
            self.foreign.get_mut(&id.home)?.get_mut(&id.epoch)?
        };
        counters.get_mut(&id.counter)
    }

    fn take(&mut self, id: &DataId) -> Option<Entry> {
        let taken = if self.is_own(id) {
            self.own.remove(&id.counter)?
        } else {
            let epochs = self.foreign.get_mut(&id.home)?;
            let counters = epochs.get_mut(&id.epoch)?;
            let taken = counters.remove(&id.counter)?;
            if counters.is_empty() {
                epochs.remove(&id.epoch);
            }
            if epochs.is_empty() {
                self.foreign.remove(&id.home);
            }
            taken
        };
        self.objects -= 1;
        Some(taken)
    }

    /// Notes where an object of this home went; gives the oldest note when there are too many.
    fn keep_note(&mut self, counter: u64, to: NodeName) -> Option<Forward> {
        self.forget(counter);
        let turn = self.next_turn;
        self.next_turn += 1;
        self.notes.insert(counter, Note { to, turn });
        self.turns.insert(turn, counter);
        if self.notes.len() <= self.notes_max {
            return None;
        }
        let (_, counter) = self.turns.pop_first()?;
        let note = self.notes.remove(&counter)?;
        let id = DataId { home: self.node.clone(), epoch: self.epoch, counter };
        Some(Forward { id, to: note.to })
    }

    fn forget(&mut self, counter: u64) {
        if let hash_map::Entry::Occupied(note) = self.notes.entry(counter) {
            self.turns.remove(&note.remove().turn);
        }
    }
}

#[cfg(test)]
mod tests;
