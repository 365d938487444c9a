//! State of one object, and the orders in which objects migrate, reload and wait for room.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_types::{Bytes, Timestamp};

use super::config::MigrationPolicy;
use super::pool::held;
use super::protocol::{ConsumerDistance, StoreExtent};
use millrace_core::ids::FunctionIndex;
use millrace_core::ids::ObjectKey;

/// Failed migrations and reloads after which an object stays in its place for good.
pub const MOVES_FAILED_MAX: u32 = 6;
/// Time for which an object is not moved after its first failed migration or reload. Each further
/// failure doubles it: 31 s in all, which gives a destination without free memory time to regain
/// some.
pub const MOVES_AFTER: Duration = Duration::from_secs(1);

/// Location and copy state of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ObjectLocation {
    /// With its producer, until there is room.
    Waiting,
    /// In the store, being written.
    Filling,
    /// In the store.
    Gpu,
    /// In the store, being copied to the host.
    Migrating,
    /// With its producer, being copied to the host.
    Refused,
    /// On the host alone.
    Host,
    /// On the host, being copied to the store.
    Reloading,
    /// Gone, except for a copy that has not ended and still uses memory in the store.
    Ending,
}

/// Distance of an object's first consumer; of two equal ones, the object stored later is further.
/// The object with the greatest rank leaves first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ObjectRank {
    pub(super) distance: ConsumerDistance,
    age: u64,
}

/// Whether an object may be moved to the host and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MoveBackoff {
    Now,
    /// A copy of the object failed: no move before this time.
    From(Timestamp),
    /// Too many copies failed: the object stays in its place.
    NoMore,
}

#[derive(Debug)]
pub(super) struct StoredObject {
    pub(super) function: FunctionIndex,
    pub(super) size: Bytes,
    /// Distance of each consumer; `None` once the consumer has read the object.
    pub(super) consumers: Vec<Option<ConsumerDistance>>,
    /// Distance of the first consumer.
    pub(super) distance: ConsumerDistance,
    pub(super) place: ObjectLocation,
    pub(super) extents: Vec<StoreExtent>,
    /// Logical time at which the object was stored.
    pub(super) stored: u64,
    /// Logical time at which the object was last stored or claimed.
    pub(super) used: u64,
    pub(super) moves: MoveBackoff,
    /// Failed migrations and reloads.
    pub(super) moves_failed: u32,
    /// Failed copies from the producer's memory.
    pub(super) failures: u32,
}

impl StoredObject {
    /// Returns the memory that the object has in the store.
    pub(super) fn held(&self) -> Bytes {
        held(&self.extents)
    }

    /// Returns the memory in the store that the object will soon free without having been read.
    fn leaving(&self) -> Bytes {
        let claimed = self.distance == ConsumerDistance::Claimed;
        match self.place {
            ObjectLocation::Ending => self.held(),
            ObjectLocation::Migrating if !claimed => self.held(),
            _ => Bytes::ZERO,
        }
    }

    /// Records a failed migration or reload: no further move for twice as long each time, and in
    /// the end never again.
    pub(super) fn record_failed_move(&mut self, now: Timestamp) {
        let longer = 1 << self.moves_failed;
        self.moves_failed += 1;
        self.moves = if self.moves_failed < MOVES_FAILED_MAX {
            MoveBackoff::From(now + MOVES_AFTER * longer)
        } else {
            MoveBackoff::NoMore
        };
    }

    /// Recomputes the first consumer's distance, and returns whether a consumer is left.
    pub(super) fn update_distance(&mut self) -> bool {
        let first = self.consumers.iter().flatten().min().copied();
        self.distance = first.unwrap_or(ConsumerDistance::Unqueued);
        first.is_some()
    }

    pub(super) fn rank(&self) -> ObjectRank {
        ObjectRank { distance: self.distance, age: self.stored }
    }

    /// Returns the object's rank in the order in which objects leave.
    fn leaves(&self, policy: MigrationPolicy) -> ObjectRank {
        match policy {
            MigrationPolicy::QueueAware => self.rank(),
            MigrationPolicy::Lru => {
                ObjectRank { distance: ConsumerDistance::Unqueued, age: u64::MAX - self.used }
            }
        }
    }
}

type Order = BTreeSet<(ObjectRank, ObjectKey)>;

#[derive(Debug)]
pub(super) struct ObjectOrders {
    policy: MigrationPolicy,
    /// Objects that may migrate: no consumer runs or is next, and no copy is under way. The last
    /// leaves first.
    pub(super) movable: Order,
    /// Objects that wait for room, the nearest first.
    pub(super) waiting: Order,
    /// Queued objects on the host, the nearest first. Claimed objects are absent because their
    /// consumers read on the host: a reload costs as much. Unqueued objects are absent because no
    /// request waits for them.
    pub(super) away: Order,
    /// Objects that may not move for a while, by the end of that time.
    pub(super) staying: BTreeSet<(Timestamp, ObjectKey)>,
    /// Memory that migrating and ending objects will free.
    pub(super) leaving: Bytes,
    /// Number of objects that are being reloaded.
    pub(super) reloading: usize,
}

impl ObjectOrders {
    pub(super) fn new(policy: MigrationPolicy) -> Self {
        Self {
            policy,
            movable: Order::new(),
            waiting: Order::new(),
            away: Order::new(),
            staying: BTreeSet::new(),
            leaving: Bytes::ZERO,
            reloading: 0,
        }
    }

    fn of(&mut self, object: &StoredObject) -> Option<(&mut Order, ObjectRank)> {
        match (object.place, object.distance) {
            (ObjectLocation::Waiting, _) => Some((&mut self.waiting, object.rank())),
            (ObjectLocation::Gpu, ConsumerDistance::Queued(_) | ConsumerDistance::Unqueued)
                if object.moves == MoveBackoff::Now =>
            {
                let rank = object.leaves(self.policy);
                Some((&mut self.movable, rank))
            }
            (ObjectLocation::Host, ConsumerDistance::Queued(_)) if object.moves == MoveBackoff::Now => {
                Some((&mut self.away, object.rank()))
            }
            _ => None,
        }
    }

    pub(super) fn enter(&mut self, key: ObjectKey, object: &StoredObject) {
        if let Some((order, rank)) = self.of(object) {
            order.insert((rank, key));
        }
        if let MoveBackoff::From(at) = object.moves {
            self.staying.insert((at, key));
        }
        self.leaving += object.leaving();
        self.reloading += usize::from(object.place == ObjectLocation::Reloading);
    }

    pub(super) fn leave(&mut self, key: ObjectKey, object: &StoredObject) {
        if let Some((order, rank)) = self.of(object) {
            order.remove(&(rank, key));
        }
        if let MoveBackoff::From(at) = object.moves {
            self.staying.remove(&(at, key));
        }
        self.leaving = self.leaving - object.leaving();
        self.reloading -= usize::from(object.place == ObjectLocation::Reloading);
    }
}
