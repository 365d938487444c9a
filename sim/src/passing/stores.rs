//! The stores of all GPUs (`policy::elastic`), the cost of their native calls, and the memory that the stores
//! have allocated over time.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_policy::core::Core as _;
use millrace_policy::elastic::{
    Action, Config, Counts, Event, NativeCalls, ObjectKey, Place, PoolPolicy, Store,
};
use millrace_types::Timestamp;

use super::Error;
use super::fabric::Site;
use super::outcome::Memory;
use super::requests::Key;
use super::setup::Setup;
use super::system::Costs;

/// A copy that a store requests for an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The object is written into the store.
    Place(Key),
    /// The object is copied to the host. The store frees its memory only after the copy.
    Migrate(Key),
    /// The object is copied back from the host.
    Reload(Key),
    /// The store has no memory for the object, so its maker copies the object to the host.
    Refuse(Key),
}

/// The reaction of a store to an event.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) wanted: Vec<Wanted>,
    /// The time of native calls that delays the writer or the reader of the object.
    pub(super) wait: Duration,
}

#[derive(Debug)]
pub(super) struct Stores {
    stores: BTreeMap<Site, Store>,
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

impl Stores {
    pub(super) fn new(setup: &Setup, sites: impl Iterator<Item = Site>) -> Result<Self, Error> {
        let floor = Config::default().floor.min(setup.store_cap);
        let pool = setup.system.pool;
        let config = Config { cap: setup.store_cap, floor, pool, migration: setup.system.migration };
        let mut stores = Self {
            stores: sites.map(|site| Ok((site, Store::new(config)?))).collect::<Result<_, Error>>()?,
            pool,
            costs: setup.costs,
            allocated: 0,
            used: 0,
            since: Timestamp::ZERO,
            sum: (0.0, 0.0),
            peak: 0,
        };
        for site in stores.stores.keys().copied().collect::<Vec<_>>() {
            stores.tell(Timestamp::ZERO, site, Event::Tick)?;
        }
        Ok(stores)
    }

    pub(super) fn tell(&mut self, now: Timestamp, site: Site, event: Event) -> Result<Told, Error> {
        self.pass(now);
        let Some(store) = self.stores.get_mut(&site) else { return Ok(Told::default()) };
        let has = |store: &Store| (store.pool().size().0, store.pool().used().0, store.pool().calls());
        let before = has(store);
        let mut actions = Vec::new();
        store.on_event(now, event, &mut actions);
        let after = has(store);
        self.allocated = self.allocated - before.0 + after.0;
        self.used = self.used - before.1 + after.1;
        self.peak = self.peak.max(self.allocated);
        let mut told = Told { wait: self.price(before.2, after.2), ..Told::default() };
        for action in actions {
            told.wanted.push(match action {
                Action::Place { object, .. } => Wanted::Place(object.0),
                Action::Migrate { object } => Wanted::Migrate(object.0),
                Action::Reload { object, .. } => Wanted::Reload(object.0),
                Action::Refuse { object } => Wanted::Refuse(object.0),
                Action::Lost { .. } | Action::Decline { .. } => return Err(Error::GaveUp),
                // `price` charges for allocations and releases, by the counts of native calls.
                Action::Allocate { .. }
                | Action::Release { .. }
                | Action::Keep { .. }
                | Action::Left { .. }
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
    pub(super) fn is_on_host(&self, site: Site, key: Key) -> bool {
        let place = self.stores.get(&site).and_then(|store| store.place(ObjectKey(key)));
        matches!(place, Some(Place::Host | Place::Reloading))
    }

    /// Returns the earliest time at which a store needs a tick, and the GPU of the store.
    pub(super) fn next_wake(&self) -> Option<(Timestamp, Site)> {
        self.stores.iter().filter_map(|(&site, store)| Some((store.next_wake()?, site))).min()
    }

    fn pass(&mut self, now: Timestamp) {
        let span = now.since(self.since).as_secs_f64();
        self.sum.0 += self.allocated as f64 * span;
        self.sum.1 += self.used as f64 * span;
        self.since = now;
    }

    pub(super) fn memory(&mut self, now: Timestamp) -> Memory {
        self.pass(now);
        let span = now.since(Timestamp::ZERO).as_secs_f64().max(1e-9);
        Memory { allocated: self.sum.0 / span, used: self.sum.1 / span, peak: self.peak as f64 }
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

    pub(super) fn counts(&self) -> Counts {
        self.stores.values().map(Store::counts).fold(Counts::default(), |sum, it| Counts {
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
                self.tell(at.max(self.since), site, Event::Tick)?;
            }
        }
        let floor = Config::default().floor;
        Ok(self.stores.values().all(|store| {
            let at_floor = self.pool != PoolPolicy::Elastic || store.pool().size() <= floor;
            store.objects() == 0 && store.pool().used().0 == 0 && at_floor
        }))
    }
}
