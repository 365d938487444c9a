//! The life of an object, from its arrival to its end.

use millrace_types::{Bytes, Timestamp};

use super::config::MigrationPolicy;
use super::object::{MoveBackoff, ObjectLocation, StoredObject};
use super::protocol::{Action, ConsumerDistance};
use super::{CONSUMERS_MAX, ElasticStore, FAILURES_MAX, OBJECTS_MAX};
use millrace_core::ids::FunctionIndex;
use millrace_core::ids::ObjectKey;

impl ElasticStore {
    pub(super) fn store(
        &mut self,
        key: ObjectKey,
        function: FunctionIndex,
        size: Bytes,
        consumers: &[ConsumerDistance],
        actions: &mut Vec<Action>,
    ) {
        let unfit = consumers.is_empty() || consumers.len() > CONSUMERS_MAX;
        if unfit || self.objects.len() >= OBJECTS_MAX || self.objects.contains_key(&key) {
            actions.push(Action::Decline { object: key });
            return;
        }
        let now = self.tick();
        let mut object = StoredObject {
            function,
            size,
            consumers: consumers.iter().copied().map(Some).collect(),
            distance: ConsumerDistance::Unqueued,
            place: ObjectLocation::Waiting,
            extents: Vec::new(),
            stored: now,
            used: now,
            moves: MoveBackoff::Now,
            moves_failed: 0,
            failures: 0,
        };
        object.update_distance();
        self.orders.enter(key, &object);
        self.objects.insert(key, object);
        if self.may_ever_fit(size) {
            self.demands.stored(function, size);
        }
    }

    /// Returns whether an object counts as its function's demand. An object above the cap is
    /// refused at any pool size, and must not enlarge the pool.
    fn may_ever_fit(&self, size: Bytes) -> bool {
        self.pool.takes(size) <= self.config.cap
    }

    fn counted_out(&mut self, function: FunctionIndex, size: Bytes) {
        if self.may_ever_fit(size) {
            self.demands.gone(function);
        }
    }

    pub(super) fn consumer_moved(&mut self, key: ObjectKey, consumer: usize, distance: ConsumerDistance) {
        let Some(object) = self.objects.get(&key).filter(|object| object.place != ObjectLocation::Ending)
        else {
            return;
        };
        let Some(&Some(before)) = object.consumers.get(consumer) else { return };
        let claimed = distance == ConsumerDistance::Claimed && before != ConsumerDistance::Claimed;
        let now = self.tick();
        self.change(key, |object| {
            object.consumers[consumer] = Some(distance);
            object.update_distance();
            object.used = if claimed { now } else { object.used };
        });
    }

    pub(super) fn consumed(&mut self, key: ObjectKey, consumer: usize, actions: &mut Vec<Action>) {
        let Some(object) = self.objects.get(&key).filter(|object| object.place != ObjectLocation::Ending)
        else {
            return;
        };
        let Some(&Some(before)) = object.consumers.get(consumer) else { return };
        // A consumer that was never claimed has not read the object.
        if before == ConsumerDistance::Claimed {
            self.pool.mapped(&object.extents);
            self.counts.host_reads +=
                u64::from(matches!(object.place, ObjectLocation::Host | ObjectLocation::Refused));
        }
        let mut wanted = true;
        self.change(key, |object| {
            object.consumers[consumer] = None;
            wanted = object.update_distance();
        });
        if !wanted {
            self.end(key, actions);
        }
    }

    /// Ends an object that no consumer needs any more (D28).
    pub(super) fn end(&mut self, key: ObjectKey, actions: &mut Vec<Action>) {
        let Some(object) = self.objects.get(&key) else { return };
        let function = object.function;
        let size = object.size;
        let place = object.place;
        match place {
            ObjectLocation::Ending => return,
            ObjectLocation::Filling | ObjectLocation::Migrating | ObjectLocation::Reloading => {
                self.change(key, |object| object.place = ObjectLocation::Ending);
            }
            ObjectLocation::Waiting
            | ObjectLocation::Gpu
            | ObjectLocation::Refused
            | ObjectLocation::Host => self.remove(key, actions),
        }
        self.counted_out(function, size);
        actions.push(Action::Free { object: key });
    }

    pub(super) fn migrated(&mut self, key: ObjectKey, actions: &mut Vec<Action>) {
        let Some(object) = self.objects.get(&key) else { return };
        match object.place {
            ObjectLocation::Migrating if self.stays(object) => {
                self.change(key, |object| object.place = ObjectLocation::Gpu);
                actions.push(Action::CancelMigration { object: key });
            }
            ObjectLocation::Migrating => {
                actions.push(Action::MigrationCompleted { object: key });
                self.only_on_host(key, actions);
            }
            ObjectLocation::Refused => self.change(key, |object| object.place = ObjectLocation::Host),
            ObjectLocation::Ending => self.remove(key, actions),
            ObjectLocation::Waiting
            | ObjectLocation::Filling
            | ObjectLocation::Gpu
            | ObjectLocation::Host
            | ObjectLocation::Reloading => {}
        }
    }

    /// Returns whether a migrating object stays, because a consumer claimed it or because a reload
    /// would follow at once.
    fn stays(&self, object: &StoredObject) -> bool {
        let comes_back = self.config.migration == MigrationPolicy::QueueAware
            && self.orders.waiting.is_empty()
            && matches!(object.distance, ConsumerDistance::Queued(_));
        let beside = self.pool.used() - object.held();
        object.distance == ConsumerDistance::Claimed
            || comes_back && self.has_room_for(object.rank(), object.held(), beside)
    }

    pub(super) fn arrived(&mut self, key: ObjectKey, from: ObjectLocation, actions: &mut Vec<Action>) {
        match self.place(key) {
            Some(place) if place == from => self.change(key, |object| object.place = ObjectLocation::Gpu),
            Some(ObjectLocation::Ending) => self.remove(key, actions),
            _ => {}
        }
    }

    pub(super) fn copy_failed(&mut self, now: Timestamp, key: ObjectKey, actions: &mut Vec<Action>) {
        match self.place(key) {
            Some(ObjectLocation::Migrating) => self.change(key, |object| {
                object.place = ObjectLocation::Gpu;
                object.record_failed_move(now);
            }),
            Some(ObjectLocation::Reloading) => {
                self.only_on_host(key, actions);
                self.change(key, |object| object.record_failed_move(now));
            }
            Some(ObjectLocation::Filling | ObjectLocation::Refused) => self.not_taken(key, actions),
            Some(ObjectLocation::Ending) => self.remove(key, actions),
            Some(ObjectLocation::Waiting | ObjectLocation::Gpu | ObjectLocation::Host) | None => {}
        }
    }

    /// Permits moves again for objects whose waiting time after a failure is over.
    pub(super) fn let_move(&mut self, now: Timestamp) {
        while let Some(&(at, key)) = self.orders.staying.first()
            && at <= now
        {
            self.change(key, |object| object.moves = MoveBackoff::Now);
        }
    }

    /// Tries the other destination for an object that is still with its producer. An object that
    /// could not be written is sent to the host; an object that could not be copied to the host
    /// waits for room again.
    fn not_taken(&mut self, key: ObjectKey, actions: &mut Vec<Action>) {
        let Some(object) = self.objects.get(&key) else { return };
        if object.failures + 1 >= FAILURES_MAX {
            return self.lost(key, actions);
        }
        let to_host = object.place == ObjectLocation::Filling;
        let mut extents = Vec::new();
        self.change(key, |object| {
            extents = std::mem::take(&mut object.extents);
            object.failures += 1;
            object.place = if to_host { ObjectLocation::Refused } else { ObjectLocation::Waiting };
        });
        self.pool.give_back(&extents, actions);
        if to_host {
            self.counts.refused += 1;
            actions.push(Action::Refuse { object: key });
        }
    }

    fn lost(&mut self, key: ObjectKey, actions: &mut Vec<Action>) {
        if let Some(object) = self.objects.get(&key) {
            self.counted_out(object.function, object.size);
            self.remove(key, actions);
            actions.push(Action::Lost { object: key });
        }
    }
}
