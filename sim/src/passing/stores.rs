//! The stores of all GPUs (`memory::elastic`), the cost of their native calls, and the memory that the stores
//! have allocated over time.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_core::Core as _;
use millrace_core::ids::ObjectKey;
use millrace_memory::elastic::{
    Action, Config, ElasticStore, Event, NativeCalls, ObjectCounts, ObjectLocation, PoolPolicy,
};
use millrace_types::Timestamp;

use super::error::Error;
use super::fabric::GpuSite;
use super::outcome::StoreMemory;
use super::requests::SimulatedObjectKey;
use super::setup::DataflowSetup;
use super::system::Costs;

/// A copy that a store requests for an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestedCopy {
    /// The object is written into the store.
    Place(SimulatedObjectKey),
    /// The object is copied to the host. The store frees its memory only after the copy.
    Migrate(SimulatedObjectKey),
    /// The object is copied back from the host.
    Reload(SimulatedObjectKey),
    /// The store has no memory for the object, so its maker copies the object to the host.
    Refuse(SimulatedObjectKey),
}

/// The reaction of a store to an event.
#[derive(Debug, Default)]
pub(super) struct StoreReaction {
    pub(super) wanted: Vec<RequestedCopy>,
    /// The time of native calls that delays the writer or the reader of the object.
    pub(super) wait: Duration,
}

#[derive(Debug)]
pub(super) struct GpuStores {
    stores: BTreeMap<GpuSite, ElasticStore>,
    pool: PoolPolicy,
    costs: Costs,
    /// The bytes that all stores have allocated now.
    allocated: u64,
    /// The bytes that objects use now.
    used: u64,
    since: Timestamp,
    /// The byte-seconds of allocated and of used memory up to `since`.
    sum: (f64, f64),
    peak: u64,
}

impl GpuStores {
    pub(super) fn new(setup: &DataflowSetup, sites: impl Iterator<Item = GpuSite>) -> Result<Self, Error> {
        let floor = Config::default().floor.min(setup.store_cap);
        let pool = setup.system.pool;
        let migration = setup.system.migration;
        let config = Config { cap: setup.store_cap, floor, pool, migration, ..Config::default() };
        let mut stores = Self {
            stores: sites.map(|site| Ok((site, ElasticStore::new(config)?))).collect::<Result<_, Error>>()?,
            pool,
            costs: setup.costs,
            allocated: 0,
            used: 0,
            since: Timestamp::ZERO,
            sum: (0.0, 0.0),
            peak: 0,
        };
        for site in stores.stores.keys().copied().collect::<Vec<_>>() {
            stores.handle_event(Timestamp::ZERO, site, Event::Tick)?;
        }
        Ok(stores)
    }

    pub(super) fn handle_event(
        &mut self,
        now: Timestamp,
        site: GpuSite,
        event: Event,
    ) -> Result<StoreReaction, Error> {
        self.pass(now);
        let Some(store) = self.stores.get_mut(&site) else { return Ok(StoreReaction::default()) };
        let has = |store: &ElasticStore| (store.pool().size().0, store.pool().used().0, store.pool().calls());
        let before = has(store);
        let mut actions = Vec::new();
        store.on_event(now, event, &mut actions);
        let after = has(store);
        self.allocated = self.allocated - before.0 + after.0;
        self.used = self.used - before.1 + after.1;
        self.peak = self.peak.max(self.allocated);
        let mut told = StoreReaction { wait: self.price(before.2, after.2), ..StoreReaction::default() };
        for action in actions {
            told.wanted.push(match action {
                Action::Place { object, .. } => RequestedCopy::Place(object.0),
                Action::Migrate { object } => RequestedCopy::Migrate(object.0),
                Action::Reload { object, .. } => RequestedCopy::Reload(object.0),
                Action::Refuse { object } => RequestedCopy::Refuse(object.0),
                Action::Lost { .. } | Action::Decline { .. } => return Err(Error::GaveUp),
                // `price` charges for allocations and releases, by the counts of native calls.
                Action::Allocate { .. }
                | Action::Release { .. }
                | Action::CancelMigration { .. }
                | Action::MigrationCompleted { .. }
                | Action::Free { .. } => {
                    continue;
                }
            });
        }
        Ok(told)
    }

    /// Returns the time of the native calls between two counts. Memory that is new to a process is mapped
    /// into the process first. A release delays the object only without a pool, where the release is the
    /// object's own and the device waits for it.
    fn price(&self, before: NativeCalls, after: NativeCalls) -> Duration {
        let times = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        let allocations = times(after.allocations - before.allocations);
        let releases =
            if self.pool == PoolPolicy::Unpooled { times(after.releases - before.releases) } else { 0 };
        let mapped = times(after.ipc - before.ipc) + allocations;
        self.costs.native * (allocations + releases) + self.costs.ipc * mapped
    }

    /// Returns whether an object must be read from the host.
    pub(super) fn is_on_host(&self, site: GpuSite, key: SimulatedObjectKey) -> bool {
        let place = self.stores.get(&site).and_then(|store| store.place(ObjectKey(key)));
        matches!(place, Some(ObjectLocation::Host | ObjectLocation::Reloading))
    }

    /// Returns the earliest time at which a store needs a tick, and the GPU of the store.
    pub(super) fn next_wake(&self) -> Option<(Timestamp, GpuSite)> {
        self.stores.iter().filter_map(|(&site, store)| Some((store.next_wake()?, site))).min()
    }

    fn pass(&mut self, now: Timestamp) {
        let span = now.since(self.since).as_secs_f64();
        self.sum.0 += self.allocated as f64 * span;
        self.sum.1 += self.used as f64 * span;
        self.since = now;
    }

    pub(super) fn memory(&mut self, now: Timestamp) -> StoreMemory {
        self.pass(now);
        let span = now.since(Timestamp::ZERO).as_secs_f64().max(1e-9);
        StoreMemory { allocated: self.sum.0 / span, used: self.sum.1 / span, peak: self.peak as f64 }
    }

    pub(super) fn calls(&self) -> NativeCalls {
        self.stores.values().map(|store| store.pool().calls()).fold(NativeCalls::default(), |sum, it| {
            NativeCalls {
                allocations: sum.allocations + it.allocations,
                ahead: sum.ahead + it.ahead,
                releases: sum.releases + it.releases,
                ipc: sum.ipc + it.ipc,
            }
        })
    }

    pub(super) fn counts(&self) -> ObjectCounts {
        self.stores.values().map(ElasticStore::counts).fold(ObjectCounts::default(), |sum, it| ObjectCounts {
            migrated: sum.migrated + it.migrated,
            reloaded: sum.reloaded + it.reloaded,
            refused: sum.refused + it.refused,
            host_reads: sum.host_reads + it.host_reads,
        })
    }

    /// Lets the windows of elastic stores expire. Returns whether no store holds an object, and whether all
    /// elastic stores are at their floor.
    pub(super) fn settle(&mut self) -> Result<bool, Error> {
        if self.pool == PoolPolicy::Elastic {
            while let Some((at, site)) = self.next_wake() {
                self.handle_event(at.max(self.since), site, Event::Tick)?;
            }
        }
        let floor = Config::default().floor;
        Ok(self.stores.values().all(|store| {
            let at_floor = self.pool != PoolPolicy::Elastic || store.pool().size() <= floor;
            store.objects() == 0 && store.pool().used().0 == 0 && at_floor
        }))
    }
}
