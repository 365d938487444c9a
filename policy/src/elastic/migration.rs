//! Who gets room, who makes it, and who comes back.

use millrace_types::Bytes;

use super::config::MigrationPolicy;
use super::object::{Object, Place, Rank};
use super::pool::Purpose;
use super::protocol::Action;
use super::{RELOADS_MAX, Store};

/// What of the limit stays free after a reload of an object that would be the next to leave.
const MARGIN_DIVISOR: u64 = 8;

impl Store {
    /// Gives room to those who wait, the nearest first; makes room for the first that finds none, or
    /// refuses it.
    pub(super) fn admit(&mut self, actions: &mut Vec<Action>) {
        while let Some(&(rank, key)) = self.orders.waiting.first() {
            let Some(size) = self.objects.get(&key).map(|object| object.size) else { break };
            if let Some(extents) = self.pool.take(size, self.limit, Purpose::Object, actions) {
                self.pool.mapped(&extents);
                actions.push(Action::Place { object: key, extents: extents.clone() });
                self.change(key, |object| (object.place, object.extents) = (Place::Filling, extents));
                continue;
            }
            match self.make_room(self.pool.takes(size), Some(rank), actions) {
                Room::Coming => break,
                Room::None => {
                    self.counts.refused += 1;
                    self.change(key, |object| object.place = Place::Refused);
                    actions.push(Action::Refuse { object: key });
                }
            }
        }
    }

    /// Makes objects leave that are beyond the limit since it was lowered, as far as they may.
    pub(super) fn shed(&mut self, actions: &mut Vec<Action>) {
        if self.pool.used() > self.limit {
            self.make_room(Bytes::ZERO, None, actions);
        }
    }

    /// Has as few leave as there have to for `wanted`, of those further than who it is for. None
    /// leaves where that would not be enough, unless the limit demands it.
    fn make_room(&mut self, wanted: Bytes, for_whom: Option<Rank>, actions: &mut Vec<Action>) -> Room {
        let needed = (self.pool.used() + wanted).saturating_sub(self.limit);
        let (mut freed, mut victims) = (self.orders.leaving, Vec::new());
        // Where size is not all that matters, what fits by size may have found no room.
        let mut one_more = self.orders.leaving == Bytes::ZERO && needed == Bytes::ZERO;
        for &(rank, key) in self.orders.movable.iter().rev() {
            let nearer = |newcomer| self.config.migration == MigrationPolicy::QueueAware && rank < newcomer;
            if (freed >= needed && !one_more) || for_whom.is_some_and(nearer) {
                break;
            }
            one_more = false;
            freed += self.objects.get(&key).map_or(Bytes::ZERO, Object::held);
            victims.push(key);
        }
        let enough = freed >= needed && !one_more;
        if enough || for_whom.is_none() {
            for key in victims {
                self.counts.migrated += 1;
                self.change(key, |object| object.place = Place::Migrating);
                actions.push(Action::Migrate { object: key });
            }
        }
        if enough { Room::Coming } else { Room::None }
    }

    /// Has those come back that are needed first, while nobody waits and there is room without moving
    /// anything.
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
            let Some(extents) = self.pool.take(size, self.limit, Purpose::Ahead, actions) else { break };
            self.counts.reloaded += 1;
            actions.push(Action::Reload { object: key, extents: extents.clone() });
            self.change(key, |object| (object.place, object.extents) = (Place::Reloading, extents));
        }
    }

    /// Whether an object that takes `size` may be on the GPU beside what is `used` there. One that
    /// would be the first to leave again has to leave room for the next newcomer.
    pub(super) fn has_room_for(&self, rank: Rank, size: Bytes, used: Bytes) -> bool {
        let leaves_first = self.orders.movable.last().is_some_and(|&(last, _)| last < rank);
        let margin = if leaves_first { Bytes(self.limit.0 / MARGIN_DIVISOR) } else { Bytes::ZERO };
        size + margin <= self.limit.saturating_sub(used)
    }
}

/// What came of making room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    /// There will be when those that leave have left.
    Coming,
    /// There cannot be.
    None,
}
