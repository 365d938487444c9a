//! The elastic store of one GPU for intermediate data (FaaSTube §7; D23 to D28). The store decides
//! which objects are in the GPU's memory, which migrate to the host and back, and how much memory
//! stays allocated for them. Each GPU has its own store.
//!
//! ```text
//! Requested, Executed ───────────────► ┌─────────┐
//! Store, ConsumerMoved, ─────────────► │         │ ──► Allocate, Release        to the device
//!   Consumed, Discard
//! Filled, Migrated, Reloaded, ───────► │  store  │ ──► Place, Refuse, Decline   to the producer
//!   CopyFailed                         │         │ ──► Migrate, Reload, …       to the copies
//! Limit, Tick ───────────────────────► └─────────┘ ──► Free, Lost               to the data index
//! ```
//!
//! An object is in one [`ObjectLocation`] at a time:
//!
//! ```text
//! Store ─► Waiting ──Place──► Filling ──Filled──► Gpu ◄──Reloaded── Reloading
//!             │                                   │ ▲                   ▲
//!           Refuse                         Migrate│ │CancelMigration    │Reload
//!             ▼                                   ▼ │                   │
//!          Refused                             Migrating ──Migrated──► Host
//!             └─────────────────Migrated────────────────────────────────▲
//! ```
//!
//! The store frees an object as soon as its last consumer has read, before any other decision
//! (D28). If a copy of the object is still running, its memory is free when that copy is reported
//! as ended; until then the object is [`ObjectLocation::Ending`].
//!
//! **Size** ([`demand`], [`pool`]). The target is the expected need of all functions, at least the
//! floor and at most the cap (D23 to D25). An elastic pool is always as large as its target, or as
//! the memory in use if that is more. The target changes at requests, at executions and when a
//! window ends. Memory under a running copy counts as in use, so the pool never passes the cap
//! (D26).
//!
//! **Migration** (D27). When an object finds no room, other objects are copied to the host. The
//! object whose first consumer is furthest back in the queue leaves first; an unqueued consumer is
//! furthest; ties go to the object stored last. If the new object is further back than every
//! candidate, the new object itself is sent to the host. Objects that are being written or copied
//! never migrate, nor do objects with a consumer that runs or is next. `lru` chooses the object
//! stored or read longest ago and ignores the queue.
//!
//! **Reloads** (D28). While no object waits for room, the queued object on the host whose consumer
//! is nearest is reloaded. A reload needs room that is already free, so a reload never causes a
//! migration. If the reloaded object would be the next to leave, an eighth of the limit must stay
//! free as well; otherwise each new object would cause another migration. At most [`RELOADS_MAX`]
//! reloads run at once. An object that is claimed on the host is read there, because a reload would
//! cost its consumer as much. `lru` ignores the queue and could reload only at that moment, so
//! `lru` reloads nothing.
//!
//! **One authority with the models.** The GPU's memory map owns the memory. This store asks for
//! blocks with `Allocate`, and `Limit` sets the most it may have. Live objects have priority over
//! idle models: the limit is the free memory plus the memory of idle models, and never less than
//! running and pinned models leave. When the limit falls, free memory is released at once, even
//! below the floor; then objects migrate in the order above. Objects that cannot move stay until
//! they are read. The pool may exceed the limit meanwhile, but does not grow. The sender of `Limit`
//! has to raise the limit again; the store never does.
//!
//! **Failed copies.** An object that could not be written to the store is refused to the host. An
//! object that could not be copied from its producer to the host waits for room again; until then
//! its bytes stay with the producer. After [`FAILURES_MAX`] such failures the object is lost. After
//! a failed migration or reload the object stays in its place for [`MOVES_AFTER`], twice as long
//! each time, and for good after [`MOVES_FAILED_MAX`]. So no copy is retried for ever.
//!
//! Bounds: [`OBJECTS_MAX`] objects, [`CONSUMERS_MAX`] consumers each.
//!
//! Out of scope: the bytes, the links, the index of object holders, and the host's memory.

mod blocks;
mod config;
pub mod demand;
mod lifecycle;
mod migration;
mod object;
pub mod pool;
mod protocol;
mod segments;
mod slots;

use std::collections::BTreeMap;

use millrace_types::{Bytes, Timestamp};

pub use self::config::{
    CAP_MAX, Config, ConfigError, MIGRATIONS, MigrationPolicy, POOL_FLOOR, POOLS, PoolPolicy, STORE_CAP,
};
pub use self::object::{MOVES_AFTER, MOVES_FAILED_MAX, ObjectLocation};
pub use self::pool::{AllocationPurpose, MemoryPool, NativeCalls};
pub use self::protocol::{Action, ConsumerDistance, Event, StoreExtent};
use millrace_core::ids::ObjectKey;

use self::demand::DemandTable;
use self::object::{ObjectOrders, StoredObject};
use millrace_core::Core;

/// Maximum number of objects of a GPU, in any place.
pub const OBJECTS_MAX: usize = 65_536;
/// Maximum number of consumers of an object.
pub const CONSUMERS_MAX: usize = 64;
/// Failed copies from the producer's memory after which an object is lost.
pub const FAILURES_MAX: u32 = 3;
/// Maximum number of concurrent reloads: enough to keep a link busy between two of them.
pub const RELOADS_MAX: usize = 2;

/// Cumulative counts of object movements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ObjectCounts {
    /// Migrations to the host that were started.
    pub migrated: u64,
    /// Reloads from the host that were started.
    pub reloaded: u64,
    /// Objects that the store had no room for, so that their producer sent them to the host.
    pub refused: u64,
    /// Reads by consumers while the object was on the host or on the way there, over PCIe.
    pub host_reads: u64,
}

/// The intermediate data of one GPU.
#[derive(Debug)]
pub struct ElasticStore {
    config: Config,
    objects: BTreeMap<ObjectKey, StoredObject>,
    orders: ObjectOrders,
    pool: MemoryPool,
    demands: DemandTable,
    limit: Bytes,
    /// Logical clock that orders stores and uses of objects.
    clock: u64,
    counts: ObjectCounts,
    begun: bool,
}

impl ElasticStore {
    /// Returns an empty store. An elastic store allocates its floor at its first event, and
    /// `next_wake` requests that event at once.
    ///
    /// # Errors
    /// [`ConfigError`], which names the faulty size and its bound.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let config = config.checked()?;
        Ok(Self {
            config,
            objects: BTreeMap::new(),
            orders: ObjectOrders::new(config.migration),
            pool: MemoryPool::new(config.pool, config.cap, config.block),
            demands: DemandTable::new(config.block),
            limit: config.cap,
            clock: 0,
            counts: ObjectCounts::default(),
            begun: false,
        })
    }

    /// Returns the place of an object, or `None` once the object is gone.
    #[must_use]
    pub fn place(&self, object: ObjectKey) -> Option<ObjectLocation> {
        self.objects.get(&object).map(|object| object.place)
    }

    /// Returns the memory that an object has in the store, which may be empty.
    #[must_use]
    pub fn extents(&self, object: ObjectKey) -> &[StoreExtent] {
        self.objects.get(&object).map_or(&[], |object| &object.extents)
    }

    /// Returns the number of objects that are not gone.
    #[must_use]
    pub fn objects(&self) -> usize {
        self.objects.len()
    }

    #[must_use]
    pub fn pool(&self) -> &MemoryPool {
        &self.pool
    }

    /// Returns the size that the pool keeps allocated if the limit permits: the expected need of
    /// all functions, between the floor and the cap (D23, D24).
    #[must_use]
    pub fn target(&self) -> Bytes {
        self.demands.total().clamp(self.config.floor, self.config.cap)
    }

    /// Returns the most memory that the store may have now.
    #[must_use]
    pub fn limit(&self) -> Bytes {
        self.limit
    }

    /// Returns the object that gets room next among the objects without room. Migrations make room
    /// for this object, unless the limit fell.
    #[must_use]
    pub fn waits_for_room(&self) -> Option<ObjectKey> {
        self.orders.waiting.first().map(|&(_, object)| object)
    }

    #[must_use]
    pub fn counts(&self) -> ObjectCounts {
        self.counts
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Changes an object and updates its position in the orders.
    fn change(&mut self, key: ObjectKey, change: impl FnOnce(&mut StoredObject)) {
        let Some(object) = self.objects.get_mut(&key) else { return };
        self.orders.leave(key, object);
        change(object);
        self.orders.enter(key, object);
    }

    fn remove(&mut self, key: ObjectKey, actions: &mut Vec<Action>) {
        let Some(object) = self.objects.remove(&key) else { return };
        self.orders.leave(key, &object);
        if !object.extents.is_empty() {
            self.pool.give_back(&object.extents, actions);
        }
    }

    /// Releases the store's memory of an object that now exists only on the host.
    fn only_on_host(&mut self, key: ObjectKey, actions: &mut Vec<Action>) {
        let mut extents = Vec::new();
        self.change(key, |object| {
            extents = std::mem::take(&mut object.extents);
            object.place = ObjectLocation::Host;
        });
        self.pool.give_back(&extents, actions);
    }

    fn handle(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Requested { function } => self.demands.requested(now, function),
            Event::Executed { function } => self.demands.recompute(now, function),
            Event::Forget { function } => self.demands.forget(function),
            Event::Store { object, function, size, consumers } => {
                self.store(object, function, size, &consumers, actions);
            }
            Event::Filled { object } => self.arrived(object, ObjectLocation::Filling, actions),
            Event::ConsumerMoved { object, consumer, distance } => {
                self.consumer_moved(object, consumer, distance)
            }
            Event::Consumed { object, consumer } => self.consumed(object, consumer, actions),
            Event::Discard { object } => self.end(object, actions),
            Event::Migrated { object } => self.migrated(object, actions),
            Event::Reloaded { object } => self.arrived(object, ObjectLocation::Reloading, actions),
            Event::CopyFailed { object } => self.copy_failed(now, object, actions),
            Event::Limit { limit } => {
                self.limit = self.config.block.round_down(limit).min(self.config.cap);
            }
            Event::Tick => {}
        }
    }
}

impl Core for ElasticStore {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        self.begun = true;
        self.handle(now, event, actions);
        self.demands.expire(now);
        self.pool.reclaim(now, actions);
        self.let_move(now);
        self.shed(actions);
        self.admit(actions);
        self.reload(actions);
        let target = self.target();
        self.pool.follow(target, self.limit, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        if !self.begun {
            return Some(Timestamp::ZERO);
        }
        let moves = self.orders.staying.first().map(|&(at, _)| at);
        self.demands.next_end().into_iter().chain(self.pool.next_reclaim()).chain(moves).min()
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
