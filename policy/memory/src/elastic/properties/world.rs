//! A store, and a model of its objects and memory that is derived from its actions alone.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// Model of an object.
#[derive(Debug, Clone)]
pub(super) struct ModelledObject {
    pub(super) place: ObjectLocation,
    pub(super) extents: Vec<StoreExtent>,
    pub(super) consumers: Vec<Option<ConsumerDistance>>,
    /// Failed migrations and reloads.
    pub(super) failed: u32,
    /// Time until which the object is not moved.
    pub(super) stays_until: Timestamp,
    /// Value of `StoreModel::clock` when the object was last stored or claimed.
    pub(super) used: u64,
}

impl ModelledObject {
    fn distance(&self) -> ConsumerDistance {
        self.consumers.iter().flatten().min().copied().unwrap_or(ConsumerDistance::Unqueued)
    }

    fn stays(&mut self, now: Timestamp) {
        self.failed += 1;
        let waits = MOVES_AFTER * 2u32.pow(self.failed - 1);
        self.stays_until = if self.failed == MOVES_FAILED_MAX { Timestamp(u64::MAX) } else { now + waits };
    }

    pub(super) fn is_copied(&self) -> bool {
        matches!(
            self.place,
            ObjectLocation::Filling
                | ObjectLocation::Migrating
                | ObjectLocation::Refused
                | ObjectLocation::Reloading
                | ObjectLocation::Ending
        )
    }
}

pub(super) struct StoreModel {
    pub(super) store: ElasticStore,
    pub(super) config: Config,
    pub(super) now: Timestamp,
    pub(super) seen: BTreeMap<ObjectKey, ModelledObject>,
    /// End of each backed stretch, by its start.
    pub(super) backed: BTreeMap<u64, u64>,
    pub(super) stored: u64,
    /// Logical clock of stores and claims.
    pub(super) clock: u64,
    /// All actions so far.
    pub(super) done: Vec<Action>,
}

impl StoreModel {
    pub(super) fn new(config: Config) -> Self {
        Self {
            store: ElasticStore::new(config).unwrap(),
            config,
            now: Timestamp(0),
            seen: BTreeMap::new(),
            backed: BTreeMap::new(),
            stored: 0,
            clock: 0,
            done: Vec::new(),
        }
    }

    pub(super) fn tell(&mut self, event: Event) {
        let freed = match &event {
            Event::Consumed { object, .. } | Event::Discard { object } => self.read(*object, &event),
            _ => None,
        };
        let actions = self.on_event(event);
        if let Some(object) = freed {
            // D28: the object is freed before any memory is given out. Only an unpooled release
            // precedes `Free`.
            let first = actions.iter().find(|action| !matches!(action, Action::Release { .. }));
            assert_eq!(first, Some(&Action::Free { object }));
        }
        self.check_victims(&actions);
        actions.into_iter().for_each(|action| self.carry_out(action));
        self.check();
    }

    fn on_event(&mut self, event: Event) -> Vec<Action> {
        let size = self.store.pool().size();
        let used = self.store.pool().used();
        let mut actions = Vec::new();
        self.store.on_event(self.now, event, &mut actions);
        self.done.extend(actions.iter().cloned());
        let pool = self.store.pool();
        let limit = self.store.limit();
        assert!(pool.size() <= size.max(limit), "{} is allocated beyond the limit", pool.size());
        assert!(pool.used() <= used.max(limit), "{} is taken beyond the limit", pool.used());
        actions
    }

    /// Returns the object if this event ends it.
    fn read(&mut self, object: ObjectKey, event: &Event) -> Option<ObjectKey> {
        let seen = self.seen.get_mut(&object).filter(|seen| seen.place != ObjectLocation::Ending)?;
        match event {
            Event::Consumed { consumer, .. } => *seen.consumers.get_mut(*consumer)? = None,
            _ => seen.consumers.clear(),
        }
        seen.consumers.iter().flatten().next().is_none().then_some(object)
    }

    /// Checks D27: no object leaves that is needed before an object that stays.
    fn check_victims(&self, actions: &[Action]) {
        let leave = |action: &Action| match *action {
            Action::Migrate { object } => Some(object),
            _ => None,
        };
        let victims: Vec<_> = actions.iter().filter_map(leave).collect();
        for victim in &victims {
            let seen = &self.seen[victim];
            let may = seen.place == ObjectLocation::Gpu && self.may_move(seen);
            assert!(may, "{victim} is {:?}", seen.place);
            assert_ne!(seen.distance(), ConsumerDistance::Claimed, "{victim} is running or next");
        }
        match self.config.migration {
            MigrationPolicy::QueueAware => {
                self.check_order(&victims, actions, |object, seen| (seen.distance(), object));
            }
            MigrationPolicy::Lru => {
                self.check_order(&victims, actions, |_, seen| std::cmp::Reverse(seen.used));
            }
        }
    }

    /// Checks that every object that leaves ranks after every movable object that stays.
    fn check_order<K: Ord + std::fmt::Debug>(
        &self,
        victims: &[ObjectKey],
        actions: &[Action],
        rank: impl Fn(ObjectKey, &ModelledObject) -> K,
    ) {
        let first = victims.iter().map(|object| rank(*object, &self.seen[object])).min();
        let stays = |(&object, seen): (&ObjectKey, &ModelledObject)| {
            let may = seen.place == ObjectLocation::Gpu && self.may_move(seen) && !victims.contains(&object);
            let may = may && !actions.contains(&Action::Free { object });
            (may && seen.distance() != ConsumerDistance::Claimed).then(|| rank(object, seen))
        };
        let last = self.seen.iter().filter_map(stays).max();
        assert!(first.is_none() || last < first, "{last:?} stays, {first:?} leaves");
    }

    fn may_move(&self, seen: &ModelledObject) -> bool {
        seen.stays_until <= self.now
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Allocate { extents } => extents.iter().for_each(|extent| self.back(*extent)),
            Action::Release { extents } => extents.iter().for_each(|extent| self.unback(*extent)),
            Action::Place { object, extents } => {
                self.get(object, ObjectLocation::Filling, ObjectLocation::Waiting, extents)
            }
            Action::Reload { object, extents } => {
                assert!(self.may_move(&self.seen[&object]), "{object} is copied again");
                assert!(matches!(self.seen[&object].distance(), ConsumerDistance::Queued(_)));
                self.get(object, ObjectLocation::Reloading, ObjectLocation::Host, extents);
            }
            Action::Migrate { object } => self.goes(object, ObjectLocation::Gpu, ObjectLocation::Migrating),
            Action::CancelMigration { object } => {
                self.goes(object, ObjectLocation::Host, ObjectLocation::Gpu)
            }
            Action::MigrationCompleted { .. } => {}
            Action::Refuse { object } => self.goes(object, ObjectLocation::Waiting, ObjectLocation::Refused),
            Action::Free { object } => {
                let seen = self.seen.get_mut(&object).unwrap();
                if seen.is_copied() && seen.place != ObjectLocation::Refused {
                    seen.place = ObjectLocation::Ending;
                } else {
                    self.seen.remove(&object);
                }
            }
            Action::Lost { object } => drop(self.seen.remove(&object).unwrap()),
            Action::Decline { object } => panic!("{object} is declined"),
        }
    }

    fn goes(&mut self, object: ObjectKey, from: ObjectLocation, to: ObjectLocation) {
        let seen = self.seen.get_mut(&object).unwrap();
        assert_eq!(seen.place, from, "{object} goes to {to:?}");
        seen.place = to;
    }

    fn get(
        &mut self,
        object: ObjectKey,
        to: ObjectLocation,
        from: ObjectLocation,
        extents: Vec<StoreExtent>,
    ) {
        self.goes(object, from, to);
        self.seen.get_mut(&object).unwrap().extents = extents;
    }

    fn back(&mut self, StoreExtent { at, len }: StoreExtent) {
        let before = self.backed.range(..at + len.0).next_back();
        assert!(before.is_none_or(|(_, &end)| end <= at), "{at} is backed twice");
        self.backed.insert(at, at + len.0);
    }

    fn unback(&mut self, StoreExtent { at, len }: StoreExtent) {
        let end = at + len.0;
        let mut at = at;
        while at < end {
            let (&start, &stop) = self.backed.range(..=at).next_back().expect("the stretch is backed");
            assert!(stop > at, "{at} is not backed");
            self.backed.remove(&start);
            if start < at {
                self.backed.insert(start, at);
            }
            if stop > end {
                self.backed.insert(end, stop);
            }
            at = stop;
        }
    }

    fn is_backed(&self, extent: StoreExtent) -> bool {
        let end = extent.at + extent.len.0;
        let mut at = extent.at;
        while at < end {
            match self.backed.range(..=at).next_back() {
                Some((_, &stop)) if stop > at => at = stop,
                _ => return false,
            }
        }
        true
    }

    fn check(&self) {
        let pool = self.store.pool();
        let size: u64 = self.backed.iter().map(|(start, end)| end - start).sum();
        assert_eq!(pool.size(), Bytes(size), "backed memory");
        let block = self.config.block.get().0;
        let whole = |(&start, &end): (&u64, &u64)| start.is_multiple_of(block) && end.is_multiple_of(block);
        assert!(self.backed.iter().all(whole), "backed memory is no whole blocks: {:?}", self.backed);
        assert!(pool.size() <= CAP, "{} is over the cap", pool.size());
        let mut owned: Vec<_> = self.seen.values().flat_map(|seen| &seen.extents).copied().collect();
        owned.sort_unstable();
        let apart = |pair: &[StoreExtent]| pair[0].at + pair[0].len.0 <= pair[1].at;
        assert!(owned.windows(2).all(apart), "a byte has two owners: {owned:?}");
        assert!(owned.iter().all(|&extent| self.is_backed(extent)), "an object has no memory");
        assert_eq!(pool.used(), owned.iter().map(|extent| extent.len).sum(), "live and in flight");
        assert_eq!(self.store.objects(), self.seen.len());
        for (&object, seen) in &self.seen {
            assert_eq!(self.store.place(object), Some(seen.place), "{object}");
            assert_eq!(self.store.extents(object), seen.extents, "{object}");
        }
        self.check_progress();
        let reached = self.store.target().min(self.store.limit()).max(pool.used());
        match self.config.pool {
            PoolPolicy::Elastic => assert_eq!(pool.size(), reached),
            PoolPolicy::Unpooled => assert_eq!(pool.size(), pool.used()),
            PoolPolicy::Caching { .. } | PoolPolicy::GmLake => {}
        }
        let coming = |seen: &&ModelledObject| seen.place == ObjectLocation::Reloading;
        assert!(self.seen.values().filter(coming).count() <= RELOADS_MAX);
    }

    /// Checks that waiting objects, and movable objects beyond the limit, exist only while a copy
    /// is running.
    fn check_progress(&self) {
        if self.seen.values().any(ModelledObject::is_copied) {
            return;
        }
        let places = |place: ObjectLocation| self.seen.values().filter(move |seen| seen.place == place);
        assert_eq!(places(ObjectLocation::Waiting).count(), 0, "an object waits although no copy is running");
        let stuck =
            |seen: &ModelledObject| !self.may_move(seen) || seen.distance() == ConsumerDistance::Claimed;
        let over = self.store.pool().used() > self.store.limit();
        assert!(!over || places(ObjectLocation::Gpu).all(stuck), "movable objects stay beyond the limit");
    }

    /// Ends an object's copy.
    pub(super) fn copied(&mut self, object: ObjectKey, well: bool) {
        let seen = self.seen.get_mut(&object).unwrap();
        let event = match (seen.place, well) {
            (_, false) => Event::CopyFailed { object },
            (ObjectLocation::Filling, true) => Event::Filled { object },
            (ObjectLocation::Migrating | ObjectLocation::Refused | ObjectLocation::Ending, true) => {
                Event::Migrated { object }
            }
            (ObjectLocation::Reloading, true) => Event::Reloaded { object },
            (place, true) => panic!("{object} has no running copy: {place:?}"),
        };
        let stays =
            well && seen.place == ObjectLocation::Migrating && seen.distance() == ConsumerDistance::Claimed;
        match (seen.place, well) {
            (ObjectLocation::Ending, _) => drop(self.seen.remove(&object)),
            (ObjectLocation::Filling | ObjectLocation::Reloading, true) => seen.place = ObjectLocation::Gpu,
            (ObjectLocation::Migrating, false) => {
                seen.place = ObjectLocation::Gpu;
                seen.stays(self.now);
            }
            (ObjectLocation::Migrating | ObjectLocation::Refused, true) => seen.place = ObjectLocation::Host,
            (ObjectLocation::Reloading, false) => {
                seen.place = ObjectLocation::Host;
                seen.stays(self.now);
            }
            // The object is still with its producer, and is refused, placed or lost at once.
            (ObjectLocation::Filling, false) => {
                seen.place = ObjectLocation::Waiting;
                seen.extents.clear();
            }
            (ObjectLocation::Refused, false) => seen.place = ObjectLocation::Waiting,
            _ => {}
        }
        let mut actions = self.on_event(event);
        let kept = actions.contains(&Action::CancelMigration { object });
        assert!(kept || !stays, "{object} is claimed");
        if let Some(seen) =
            self.seen.get_mut(&object).filter(|seen| seen.place == ObjectLocation::Host && !kept)
        {
            seen.extents.clear();
        }
        actions.retain(|action| *action != Action::CancelMigration { object });
        if kept {
            self.goes(object, ObjectLocation::Host, ObjectLocation::Gpu);
        }
        self.check_victims(&actions);
        actions.into_iter().for_each(|action| self.carry_out(action));
        self.check();
    }

    pub(super) fn pick(
        &self,
        index: prop::sample::Index,
        which: impl Fn(&ModelledObject) -> bool,
    ) -> Option<ObjectKey> {
        let keys: Vec<_> =
            self.seen.iter().filter(|(_, seen)| which(seen)).map(|(&object, _)| object).collect();
        (!keys.is_empty()).then(|| *index.get(&keys))
    }
}
