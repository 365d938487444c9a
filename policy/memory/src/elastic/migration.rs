//! Admission to the store, migration to the host, and reloads.

use millrace_types::Bytes;

use super::config::MigrationPolicy;
use super::object::{ObjectLocation, ObjectRank, StoredObject};
use super::pool::AllocationPurpose;
use super::protocol::Action;
use super::{ElasticStore, RELOADS_MAX};

/// Divisor of the limit: this share stays free after the reload of the next object to leave.
const MARGIN_DIVISOR: u64 = 8;

impl ElasticStore {
    /// Places waiting objects, the nearest first. Makes room for the first object that finds none,
    /// or refuses that object.
    pub(super) fn admit(&mut self, actions: &mut Vec<Action>) {
        while let Some(&(rank, key)) = self.orders.waiting.first() {
            let Some(size) = self.objects.get(&key).map(|object| object.size) else { break };
            if let Some(extents) = self.pool.take(size, self.limit, AllocationPurpose::Object, actions) {
                self.pool.mapped(&extents);
                actions.push(Action::Place { object: key, extents: extents.clone() });
                self.change(key, |object| {
                    (object.place, object.extents) = (ObjectLocation::Filling, extents)
                });
                continue;
            }
            match self.make_room(self.pool.takes(size), Some(rank), actions) {
                EvictionOutcome::Coming => break,
                EvictionOutcome::None => {
                    self.counts.refused += 1;
                    self.change(key, |object| object.place = ObjectLocation::Refused);
                    actions.push(Action::Refuse { object: key });
                }
            }
        }
    }

    /// Migrates objects that are beyond a lowered limit, as far as they may move.
    pub(super) fn shed(&mut self, actions: &mut Vec<Action>) {
        if self.pool.used() > self.limit {
            self.make_room(Bytes::ZERO, None, actions);
        }
    }

    /// Migrates as few objects as `wanted` requires, and only objects further back than `for_whom`.
    /// Migrates none if all of them would not be enough, unless the limit falls.
    fn make_room(
        &mut self,
        wanted: Bytes,
        for_whom: Option<ObjectRank>,
        actions: &mut Vec<Action>,
    ) -> EvictionOutcome {
        let needed = (self.pool.used() + wanted).saturating_sub(self.limit);
        let mut freed = self.orders.leaving;
        let mut victims = Vec::new();
        // In segments, an object may find no piece although enough bytes are free: then evict a
        // single object.
        let mut one_more = self.orders.leaving == Bytes::ZERO && needed == Bytes::ZERO;
        for &(rank, key) in self.orders.movable.iter().rev() {
            let nearer = |newcomer| self.config.migration == MigrationPolicy::QueueAware && rank < newcomer;
            if (freed >= needed && !one_more) || for_whom.is_some_and(nearer) {
                break;
            }
            one_more = false;
            freed += self.objects.get(&key).map_or(Bytes::ZERO, StoredObject::held);
            victims.push(key);
        }
        let enough = freed >= needed && !one_more;
        if enough || for_whom.is_none() {
            for key in victims {
                self.counts.migrated += 1;
                self.change(key, |object| object.place = ObjectLocation::Migrating);
                actions.push(Action::Migrate { object: key });
            }
        }
        if enough { EvictionOutcome::Coming } else { EvictionOutcome::None }
    }

    /// Reloads the objects needed first, while no object waits and there is room without a
    /// migration.
    pub(super) fn reload(&mut self, actions: &mut Vec<Action>) {
        if self.config.migration != MigrationPolicy::QueueAware || !self.orders.waiting.is_empty() {
            return;
        }
        while self.orders.reloading < RELOADS_MAX {
            let Some(&(rank, key)) = self.orders.away.first() else { break };
            let Some(size) = self.objects.get(&key).map(|object| object.size) else { break };
            if !self.has_room_for(rank, self.pool.takes(size), self.pool.used()) {
                break;
            }
            let Some(extents) = self.pool.take(size, self.limit, AllocationPurpose::Ahead, actions) else {
                break;
            };
            self.counts.reloaded += 1;
            actions.push(Action::Reload { object: key, extents: extents.clone() });
            self.change(key, |object| (object.place, object.extents) = (ObjectLocation::Reloading, extents));
        }
    }

    /// Returns whether an object of `size` may be on the GPU beside `used` bytes. An object that
    /// would be the next to leave must leave room for a new object.
    pub(super) fn has_room_for(&self, rank: ObjectRank, size: Bytes, used: Bytes) -> bool {
        let leaves_first = self.orders.movable.last().is_some_and(|&(last, _)| last < rank);
        let margin = if leaves_first { Bytes(self.limit.0 / MARGIN_DIVISOR) } else { Bytes::ZERO };
        size + margin <= self.limit.saturating_sub(used)
    }
}

/// Outcome of an attempt to make room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EvictionOutcome {
    /// Enough room is free once the migrating objects have left.
    Coming,
    /// No eviction can make enough room.
    None,
}
