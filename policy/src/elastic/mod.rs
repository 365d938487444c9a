//! The elastic store of intermediate data on one GPU (FaaSTube §7; D23 to D28): which objects are in
//! the GPU's memory, which leave for the host and come back, and how much memory stays allocated for
//! them. One core for each GPU.
//!
//! ```text
//! Requested, Executed ───────────────► ┌─────────┐
//! Store, Stands, Consumed, Discard ──► │         │ ──► Allocate, Release        to the device
//! Filled, Migrated, Reloaded, ───────► │  store  │ ──► Place, Refuse, Decline   to the producer
//!   CopyFailed                         │         │ ──► Migrate, Reload, …       to the copies
//! Limit, Tick ───────────────────────► └─────────┘ ──► Free, Lost               to the data index
//! ```
//!
//! An object is in one [`Place`] at a time:
//!
//! ```text
//! Store ─► Waiting ──Place──► Filling ──Filled──► Gpu ◄──Reloaded── Reloading
//!             │                                   │ ▲                   ▲
//!           Refuse                         Migrate│ │Keep               │Reload
//!             ▼                                   ▼ │                   │
//!          Refused                             Migrating ──Migrated──► Host
//!             └─────────────────Migrated────────────────────────────────▲
//! ```
//!
//! It is freed as soon as its last consumer has read it, before anything else is decided (D28). Where
//! a copy of it is under way then, its memory is free once that has been reported: until then it is
//! [`Place::Ending`].
//!
//! **How much** ([`demand`], [`pool`]). The target is what all functions are expected to need, at
//! least the floor and at most the cap (D23 to D25). An elastic pool is always as large as its target,
//! or as what is in use if that is more; it changes at requests, executions and when a window ends.
//! Memory whose copy is under way counts as in use, so nothing passes the cap (D26).
//!
//! **Who leaves** (D27). When an object finds no room, others are copied to the host: those whose first
//! consumer is furthest back in the queue, and not queued at all is furthest; of equals, what was
//! stored last. If the newcomer is further back than all that could make room, it is the one that goes
//! to the host. Never moved is what is being written or copied, and whatever has a consumer that runs
//! or is next. `lru` takes what was stored or read longest ago instead, whoever waits for it.
//!
//! **Who comes back** (D28). While nobody waits for room, the object on the host whose consumer is
//! nearest is reloaded if it fits without moving anything, so a reload never causes a migration. One
//! that would then be the first to leave also has to leave an eighth of the limit free, so that it
//! does not go back and forth with each newcomer; at most [`RELOADS_MAX`] are under way at once. An
//! object that is claimed on the host is read there: a reload would cost its consumer as much. So
//! `lru` reloads nothing.
//!
//! **One authority with the models.** The GPU's memory map owns the memory; this store asks it for
//! blocks by `Allocate`, and is told by `Limit` what it may have. Live objects come before idle models:
//! the limit is what is free plus what idle models hold, never less than what running and pinned models
//! leave. When it falls, free memory goes back at once, below the floor too; then objects migrate,
//! in the order above. What cannot be moved stays until it is read, so the pool may be above the
//! limit meanwhile, but takes no more. The limit has to be raised again by whoever lowered it.
//!
//! **Copies that fail.** What could not be written to the store is refused to the host instead, and
//! what could not be copied from its producer to the host waits for room again: until then its bytes
//! are where they were produced. After [`FAILURES_MAX`] of these it is lost. An object whose migration
//! or reload failed stays where it is for [`MOVES_AFTER`], twice as long each time, and after
//! [`MOVES_FAILED_MAX`] for good. So no copy is tried for ever.
//!
//! Bounds: [`OBJECTS_MAX`] objects, [`CONSUMERS_MAX`] consumers each.
//!
//! Not here: the bytes, the links they cross, the index of who holds what, and the host's memory.

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
use std::time::Duration;

use millrace_types::{Bytes, Timestamp};

pub use self::config::{
    CAP_MAX, Config, ConfigError, MIGRATIONS, MigrationPolicy, POOL_FLOOR, POOLS, PoolPolicy, STORE_CAP,
};
pub use self::object::Place;
pub use self::pool::{NativeCalls, Pool, Purpose};
pub use self::protocol::{Action, Event, Extent, ObjectKey, Standing};

use self::demand::Demands;
use self::object::{Object, Orders};
use crate::core::Core;
use crate::memory::BLOCK;

/// The most objects of a GPU, wherever they are.
pub const OBJECTS_MAX: usize = 65_536;
/// The most consumers of an object.
pub const CONSUMERS_MAX: usize = 64;
/// The most copies of an object from where it was produced that may fail: the last makes it lost.
pub const FAILURES_MAX: u32 = 3;
/// The most migrations and reloads of an object that may fail: after the last it stays where it is.
pub const MOVES_FAILED_MAX: u32 = 6;
/// How long an object is not moved after the first of these. Each one doubles it: 31 s in all, in which
/// whoever had no memory for its copy may have some again.
pub const MOVES_AFTER: Duration = Duration::from_secs(1);
/// The most reloads at once: enough to keep a link busy between two of them.
pub const RELOADS_MAX: usize = 2;

/// What became of objects so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Begun to be copied to the host.
    pub migrated: u64,
    /// Begun to be copied back.
    pub reloaded: u64,
    /// Sent to the host by their producer, since there was no room.
    pub refused: u64,
    /// Read by consumers while they were on the host, or on the way there: over PCIe.
    pub host_reads: u64,
}

/// The intermediate data of one GPU.
#[derive(Debug)]
pub struct Store {
    config: Config,
    objects: BTreeMap<ObjectKey, Object>,
    orders: Orders,
    pool: Pool,
    demands: Demands,
    limit: Bytes,
    /// Counts up, to tell what was stored or used before what.
    clock: u64,
    counts: Counts,
    begun: bool,
}

impl Store {
    /// An empty store. An elastic one allocates its floor at its first event: it asks for one at once.
    ///
    /// # Errors
    /// [`ConfigError`], which names the size and what it may be.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let config = config.checked()?;
        Ok(Self {
            config,
            objects: BTreeMap::new(),
            orders: Orders::new(config.migration),
            pool: Pool::new(config.pool, config.cap),
            demands: Demands::default(),
            limit: config.cap,
            clock: 0,
            counts: Counts::default(),
            begun: false,
        })
    }

    /// Where an object is; `None` once it is gone.
    #[must_use]
    pub fn place(&self, object: ObjectKey) -> Option<Place> {
        self.objects.get(&object).map(|object| object.place)
    }

    /// What of the store an object has; empty where none.
    #[must_use]
    pub fn extents(&self, object: ObjectKey) -> &[Extent] {
        self.objects.get(&object).map_or(&[], |object| &object.extents)
    }

    /// Objects that are not gone.
    #[must_use]
    pub fn objects(&self) -> usize {
        self.objects.len()
    }

    /// The memory.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// What is kept allocated if the limit permits: what functions are expected to need, between the
    /// floor and the cap (D23, D24).
    #[must_use]
    pub fn target(&self) -> Bytes {
        self.demands.total().clamp(self.config.floor, self.config.cap)
    }

    /// What the store may have now.
    #[must_use]
    pub fn limit(&self) -> Bytes {
        self.limit
    }

    /// The object that has room next, of those that have none yet: what leaves makes it for this one,
    /// unless the limit fell.
    #[must_use]
    pub fn waits_for_room(&self) -> Option<ObjectKey> {
        self.orders.waiting.first().map(|&(_, object)| object)
    }

    /// What became of objects.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Changes an object, and its place in the orders with it.
    fn change(&mut self, key: ObjectKey, change: impl FnOnce(&mut Object)) {
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

    /// Takes an object's memory in the store, which only the host has now.
    fn only_on_host(&mut self, key: ObjectKey, actions: &mut Vec<Action>) {
        let mut extents = Vec::new();
        self.change(key, |object| {
            extents = std::mem::take(&mut object.extents);
            object.place = Place::Host;
        });
        self.pool.give_back(&extents, actions);
    }

    fn heed(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Requested { function } => self.demands.requested(now, function),
            Event::Executed { function } => self.demands.recompute(now, function),
            Event::Forget { function } => self.demands.forget(function),
            Event::Store { object, function, size, consumers } => {
                self.store(object, function, size, &consumers, actions);
            }
            Event::Filled { object } => self.arrived(object, Place::Filling, actions),
            Event::Stands { object, consumer, standing } => self.stands(object, consumer, standing),
            Event::Consumed { object, consumer } => self.consumed(object, consumer, actions),
            Event::Discard { object } => self.end(object, actions),
            Event::Migrated { object } => self.migrated(object, actions),
            Event::Reloaded { object } => self.arrived(object, Place::Reloading, actions),
            Event::CopyFailed { object } => self.copy_failed(now, object, actions),
            Event::Limit { limit } => {
                self.limit = Bytes(limit.0 / BLOCK.0 * BLOCK.0).min(self.config.cap);
            }
            Event::Tick => {}
        }
    }
}

impl Core for Store {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        self.begun = true;
        self.heed(now, event, actions);
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
