//! What the store knows of an object, and the orders in which objects leave, come back and wait.

use std::collections::BTreeSet;

use millrace_types::{Bytes, Timestamp};

use super::config::MigrationPolicy;
use super::pool::held;
use super::protocol::{Extent, ObjectKey, Standing};
use super::{MOVES_AFTER, MOVES_FAILED_MAX};
use crate::ids::FunctionIndex;

/// Where an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Where it was produced, until there is room.
    Waiting,
    /// In the store, being written.
    Filling,
    /// In the store.
    Gpu,
    /// In the store, being copied to the host.
    Migrating,
    /// Where it was produced, being copied to the host.
    Refused,
    /// On the host alone.
    Host,
    /// On the host, being copied to the store.
    Reloading,
    /// Gone, but for a copy that has not ended and still uses its memory in the store.
    Ending,
}

/// How far back an object's first consumer is; of equals, the later stored is further. What is
/// greatest leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) standing: Standing,
    age: u64,
}

/// Whether an object is moved to the host and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moves {
    Now,
    /// A copy of it failed: not before then.
    From(Timestamp),
    /// So many failed that it stays where it is.
    NoMore,
}

/// What the store knows of an object.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) function: FunctionIndex,
    pub(super) size: Bytes,
    /// Where each consumer stands; `None` once it has read the object.
    pub(super) consumers: Vec<Option<Standing>>,
    /// Where the first consumer stands.
    pub(super) standing: Standing,
    pub(super) place: Place,
    pub(super) extents: Vec<Extent>,
    /// When it was stored, counted.
    pub(super) stored: u64,
    /// When it was stored or claimed last, counted.
    pub(super) used: u64,
    pub(super) moves: Moves,
    /// How many migrations and reloads of it failed.
    pub(super) moves_failed: u32,
    /// How many copies of it from where it was produced failed.
    pub(super) failures: u32,
}

impl Object {
    /// What of the store it has.
    pub(super) fn held(&self) -> Bytes {
        held(&self.extents)
    }

    /// What of the store it will free before long, though nobody has read it.
    fn leaving(&self) -> Bytes {
        let claimed = self.standing == Standing::Claimed;
        match self.place {
            Place::Ending => self.held(),
            Place::Migrating if !claimed => self.held(),
            _ => Bytes::ZERO,
        }
    }

    /// A migration or a reload of it failed: it stays where it is, longer each time, and in the end for
    /// good.
    pub(super) fn stays(&mut self, now: Timestamp) {
        let longer = 1 << self.moves_failed;
        self.moves_failed += 1;
        self.moves = if self.moves_failed < MOVES_FAILED_MAX {
            Moves::From(now + MOVES_AFTER * longer)
        } else {
            Moves::NoMore
        };
    }

    /// Sees who is first, and whether anybody is left.
    pub(super) fn look(&mut self) -> bool {
        let first = self.consumers.iter().flatten().min().copied();
        self.standing = first.unwrap_or(Standing::Unqueued);
        first.is_some()
    }

    pub(super) fn rank(&self) -> Rank {
        Rank { standing: self.standing, age: self.stored }
    }

    /// In which order it leaves.
    fn leaves(&self, policy: MigrationPolicy) -> Rank {
        match policy {
            MigrationPolicy::QueueAware => self.rank(),
            MigrationPolicy::Lru => Rank { standing: Standing::Unqueued, age: u64::MAX - self.used },
        }
    }
}

type Order = BTreeSet<(Rank, ObjectKey)>;

/// Objects in order.
#[derive(Debug)]
pub(super) struct Orders {
    policy: MigrationPolicy,
    /// Those that may leave: whose consumers neither run nor are next, and nothing is copied. The
    /// last leaves first.
    pub(super) movable: Order,
    /// Those that wait for room, the nearest first.
    pub(super) waiting: Order,
    /// Those on the host that are queued for, the nearest first. Those claimed are read there, for a
    /// reload costs as much; for those not queued nobody waits.
    pub(super) away: Order,
    /// Those that are not moved for a while, by when that ends.
    pub(super) staying: BTreeSet<(Timestamp, ObjectKey)>,
    /// What those that leave will free.
    pub(super) leaving: Bytes,
    /// How many are being reloaded.
    pub(super) reloading: usize,
}

impl Orders {
    pub(super) fn new(policy: MigrationPolicy) -> Self {
        let (movable, waiting, away) = (Order::new(), Order::new(), Order::new());
        let staying = BTreeSet::new();
        Self { policy, movable, waiting, away, staying, leaving: Bytes::ZERO, reloading: 0 }
    }

    fn of(&mut self, object: &Object) -> Option<(&mut Order, Rank)> {
        match (object.place, object.standing) {
            (Place::Waiting, _) => Some((&mut self.waiting, object.rank())),
            (Place::Gpu, Standing::Queued(_) | Standing::Unqueued) if object.moves == Moves::Now => {
                let rank = object.leaves(self.policy);
                Some((&mut self.movable, rank))
            }
            (Place::Host, Standing::Queued(_)) if object.moves == Moves::Now => {
                Some((&mut self.away, object.rank()))
            }
            _ => None,
        }
    }

    pub(super) fn enter(&mut self, key: ObjectKey, object: &Object) {
        if let Some((order, rank)) = self.of(object) {
            order.insert((rank, key));
        }
        if let Moves::From(at) = object.moves {
            self.staying.insert((at, key));
        }
        self.leaving += object.leaving();
        self.reloading += usize::from(object.place == Place::Reloading);
    }

    pub(super) fn leave(&mut self, key: ObjectKey, object: &Object) {
        if let Some((order, rank)) = self.of(object) {
            order.remove(&(rank, key));
        }
        if let Moves::From(at) = object.moves {
            self.staying.remove(&(at, key));
        }
        self.leaving = self.leaving - object.leaving();
        self.reloading -= usize::from(object.place == Place::Reloading);
    }
}
