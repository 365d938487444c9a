//! Which objects are here, how many bytes they take and until when they are kept. No clock: callers
//! pass what time it is.

use std::collections::{BTreeSet, HashMap};

use millrace_types::{Bytes, DataId, Epoch, Timestamp};

use super::Contents;
use super::copies::Copies;

/// Objects by the number they got, which is never given twice by one process.
#[derive(Debug)]
pub(super) struct Shelf {
    objects: HashMap<u64, Object>,
    expiries: BTreeSet<(Timestamp, u64)>,
    usage: Usage,
    limit: Limit,
    /// What functions' state takes of it, which is held elsewhere.
    claimed: Limit,
    next: u64,
    copies: Copies,
    /// What went, until somebody says so.
    gone: Vec<DataId>,
}

/// How much there may be of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Limit {
    pub(super) bytes: Bytes,
    /// Each may take a descriptor.
    pub(super) objects: u64,
}

#[derive(Debug)]
struct Object {
    epoch: Epoch,
    contents: Contents,
    until: Timestamp,
}

/// What of objects a worker holds, and has held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Objects held.
    pub(crate) objects: u64,
    /// Their bytes.
    pub(crate) bytes: Bytes,
    /// Objects kept since the worker began.
    pub(crate) kept: u64,
    /// Of those, how many nobody let go of in their time.
    pub(crate) expired: u64,
    /// Objects that there was no room for.
    pub(crate) refused: u64,
    /// Copies of other workers' objects.
    pub(crate) copies: u64,
    /// Their bytes.
    pub(crate) copied: Bytes,
}

/// Why an object was not taken under a name of its maker's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    NoRoom,
    Taken,
}

impl Shelf {
    pub(super) fn new(limit: Limit) -> Self {
        let (objects, expiries, usage) = (HashMap::new(), BTreeSet::new(), Usage::default());
        let (copies, gone, claimed) = (Copies::default(), Vec::new(), Limit::default());
        Self { objects, expiries, usage, limit, claimed, next: 1, copies, gone }
    }

    /// Takes an object and numbers it, or gives it back where it does not fit.
    pub(super) fn put(
        &mut self,
        epoch: Epoch,
        contents: Contents,
        until: Timestamp,
    ) -> Result<u64, Contents> {
        let counter = self.reserve(1);
        match self.put_as(epoch, counter, contents, until) {
            Ok(()) => Ok(counter),
            Err((_, contents)) => Err(contents),
        }
    }

    /// Counts that nothing is given after this: so many, from the one returned on.
    pub(super) fn reserve(&mut self, count: u64) -> u64 {
        let first = self.next;
        self.next += count;
        first
    }

    /// Takes an object under a reserved number, or gives it back where it does not fit or the number has
    /// one.
    pub(super) fn put_as(
        &mut self,
        epoch: Epoch,
        counter: u64,
        contents: Contents,
        until: Timestamp,
    ) -> Result<(), (Refused, Contents)> {
        if self.objects.contains_key(&counter) {
            return Err((Refused::Taken, contents));
        }
        let bytes = Bytes(contents.len());
        if !self.make_room(Limit { bytes, objects: 1 }) {
            self.usage.refused += 1;
            return Err((Refused::NoRoom, contents));
        }
        self.objects.insert(counter, Object { epoch, contents, until });
        self.expiries.insert((until, counter));
        self.usage.objects += 1;
        self.usage.kept += 1;
        self.usage.bytes += bytes;
        Ok(())
    }

    /// Has copies give way until there is room for so much. Says whether there is.
    fn make_room(&mut self, more: Limit) -> bool {
        let (limit, claimed) = (self.limit, self.claimed);
        let objects = self.usage.objects + claimed.objects + more.objects;
        let own = self.usage.bytes.get().saturating_add(claimed.bytes.get()).saturating_add(more.bytes.get());
        if own.saturating_add(self.copies.coming().get()) > limit.bytes.get() || objects > limit.objects {
            return false;
        }
        let full = |copies: &Copies| {
            own.saturating_add(copies.bytes().get()) > limit.bytes.get()
                || objects + copies.len() > limit.objects
        };
        while full(&self.copies) {
            match self.copies.drop_first() {
                Some(id) => self.gone.push(id),
                None => return false,
            }
        }
        true
    }

    /// Sets room aside for a copy on its way, and says whether there is.
    pub(super) fn set_aside(&mut self, bytes: Bytes) -> bool {
        let room = self.make_room(Limit { bytes, objects: 1 });
        if room {
            self.copies.set_aside(bytes);
        }
        room
    }

    /// Takes room for what is held elsewhere, and says whether there is.
    pub(super) fn claim(&mut self, more: Limit) -> bool {
        let room = self.make_room(more);
        if room {
            self.claimed.bytes += more.bytes;
            self.claimed.objects += more.objects;
        }
        room
    }

    /// That is gone.
    pub(super) fn unclaim(&mut self, less: Limit) {
        self.claimed.bytes = Bytes(self.claimed.bytes.get().saturating_sub(less.bytes.get()));
        self.claimed.objects = self.claimed.objects.saturating_sub(less.objects);
    }

    pub(super) fn give_back(&mut self, bytes: Bytes) {
        self.copies.give_back(bytes);
    }

    /// Takes a copy for which room was set aside, which is given back first. Says whether it is new.
    pub(super) fn put_copy(&mut self, id: DataId, contents: Contents, until: Timestamp) -> bool {
        // Room would be made by others, or by itself, for what is here.
        let more = Limit { bytes: Bytes(contents.len()), objects: 1 };
        if self.copies.get(&id).is_some() || !self.make_room(more) {
            return false;
        }
        // It is back before anybody said that it went.
        self.gone.retain(|gone| *gone != id);
        self.copies.put(id, contents, until);
        true
    }

    pub(super) fn copy(&self, id: &DataId) -> Option<&Contents> {
        self.copies.get(id)
    }

    pub(super) fn remove_copy(&mut self, id: &DataId) -> bool {
        self.copies.remove(id)
    }

    /// Drops an object, which is named with what else went.
    pub(super) fn let_go(&mut self, id: &DataId) {
        if self.remove(id.epoch, id.counter) {
            self.gone.push(id.clone());
        }
    }

    /// Drops copies whose time is over, and names all that went since the last time, but for what was
    /// removed or expired.
    pub(super) fn take_gone(&mut self, now: Timestamp) -> Vec<DataId> {
        while let Some(id) = self.copies.expire(now) {
            self.gone.push(id);
        }
        std::mem::take(&mut self.gone)
    }

    /// Keeps an object until another time. Says whether it is here.
    pub(super) fn keep_on(&mut self, epoch: Epoch, counter: u64, until: Timestamp) -> bool {
        let Some(object) = self.objects.get_mut(&counter).filter(|object| object.epoch == epoch) else {
            return false;
        };
        self.expiries.remove(&(object.until, counter));
        self.expiries.insert((until, counter));
        object.until = until;
        true
    }

    pub(super) fn get(&self, epoch: Epoch, counter: u64) -> Option<&Contents> {
        let object = self.objects.get(&counter).filter(|object| object.epoch == epoch)?;
        Some(&object.contents)
    }

    /// Drops an object. Whoever reads it has it to the end.
    pub(super) fn remove(&mut self, epoch: Epoch, counter: u64) -> bool {
        let held = self.get(epoch, counter).is_some();
        if held && let Some(object) = self.objects.remove(&counter) {
            self.expiries.remove(&(object.until, counter));
            self.usage.objects -= 1;
            self.usage.bytes = Bytes(self.usage.bytes.get() - object.contents.len());
        }
        held
    }

    /// Drops all whose time is over, and names them.
    pub(super) fn expire(&mut self, now: Timestamp) -> Vec<(Epoch, u64)> {
        let mut expired = Vec::new();
        while let Some(&(until, counter)) = self.expiries.first()
            && until <= now
        {
            let epoch = self.objects[&counter].epoch;
            self.remove(epoch, counter);
            self.usage.expired += 1;
            expired.push((epoch, counter));
        }
        expired
    }

    pub(super) fn usage(&self) -> Usage {
        Usage { copies: self.copies.len(), copied: self.copies.bytes(), ..self.usage }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Limit = Limit { bytes: Bytes(100), objects: 3 };

    fn contents(bytes: usize) -> Contents {
        Contents::Inline(vec![7; bytes].into())
    }

    #[test]
    fn an_object_is_found_under_its_own_name_until_it_is_let_go() {
        let mut shelf = Shelf::new(LIMIT);
        let number = shelf.put(Epoch(2), contents(60), Timestamp(10)).unwrap();
        assert!(shelf.get(Epoch(2), number).is_some());
        assert!(shelf.get(Epoch(1), number).is_none(), "another registration's object");
        assert!(!shelf.remove(Epoch(1), number));
        assert!(shelf.remove(Epoch(2), number) && !shelf.remove(Epoch(2), number));
        assert_eq!(shelf.usage(), Usage { kept: 1, ..Usage::default() });
    }

    #[test]
    fn a_reserved_number_is_nobody_elses_and_takes_one_object() {
        let mut shelf = Shelf::new(LIMIT);
        let first = shelf.reserve(10);
        let number = shelf.put(Epoch(1), contents(1), Timestamp(10)).unwrap();
        assert!(number >= first + 10);
        shelf.put_as(Epoch(1), first, contents(1), Timestamp(10)).unwrap();
        let twice = shelf.put_as(Epoch(1), first, contents(1), Timestamp(10)).unwrap_err();
        assert_eq!(twice.0, Refused::Taken);
        assert!(
            shelf.keep_on(Epoch(1), first, Timestamp(30)) && !shelf.keep_on(Epoch(2), first, Timestamp(40))
        );
        assert_eq!(shelf.expire(Timestamp(20)), [(Epoch(1), number)]);
        assert_eq!(shelf.expire(Timestamp(30)), [(Epoch(1), first)]);
    }

    #[test]
    fn what_does_not_fit_is_given_back() {
        let mut shelf = Shelf::new(LIMIT);
        shelf.put(Epoch(1), contents(60), Timestamp(10)).unwrap();
        let refused = shelf.put(Epoch(1), contents(41), Timestamp(10)).unwrap_err();
        assert_eq!((refused.len(), shelf.usage().refused), (41, 1));
        assert!(shelf.put(Epoch(1), contents(40), Timestamp(10)).is_ok());
        assert_eq!(shelf.usage().bytes, Bytes(100));
        shelf.put(Epoch(1), contents(0), Timestamp(10)).unwrap();
        assert!(shelf.put(Epoch(1), contents(0), Timestamp(10)).is_err(), "three of them");
    }

    #[test]
    fn state_that_is_held_elsewhere_takes_room_until_it_is_gone() {
        let mut shelf = Shelf::new(LIMIT);
        let state = Limit { bytes: Bytes(50), objects: 2 };
        assert!(shelf.put_copy(id(1), contents(60), Timestamp(10)));
        assert!(shelf.claim(state), "copies give way");
        assert!(shelf.copy(&id(1)).is_none());
        assert!(!shelf.claim(state), "one more object, and not two");
        assert!(shelf.put(Epoch(1), contents(51), Timestamp(10)).is_err());
        shelf.put(Epoch(1), contents(50), Timestamp(10)).unwrap();
        shelf.unclaim(state);
        assert!(shelf.claim(state));
    }

    #[test]
    fn what_nobody_came_for_goes_in_its_time_and_numbers_never_return() {
        let mut shelf = Shelf::new(LIMIT);
        let numbers = [10, 30, 20].map(|until| shelf.put(Epoch(1), contents(10), Timestamp(until)).unwrap());
        assert_eq!(shelf.expire(Timestamp(9)), []);
        assert_eq!(shelf.expire(Timestamp(20)), [(Epoch(1), numbers[0]), (Epoch(1), numbers[2])]);
        let usage = Usage { objects: 1, bytes: Bytes(10), kept: 3, expired: 2, ..Usage::default() };
        assert_eq!(shelf.usage(), usage);
        assert!(shelf.put(Epoch(1), contents(1), Timestamp(5)).unwrap() > numbers[2]);
    }
    fn id(counter: u64) -> DataId {
        DataId { home: millrace_types::NodeName::new("w2").unwrap(), epoch: Epoch(7), counter }
    }

    #[test]
    fn copies_give_way_to_the_nodes_own_and_to_newer_ones() {
        let mut shelf = Shelf::new(LIMIT);
        for (counter, until) in [(1, 20), (2, 10)] {
            assert!(shelf.set_aside(Bytes(40)));
            shelf.give_back(Bytes(40));
            assert!(shelf.put_copy(id(counter), contents(40), Timestamp(until)));
        }
        assert!(!shelf.put_copy(id(1), contents(10), Timestamp(20)), "it is here");
        assert_eq!((shelf.usage().copies, shelf.usage().copied, shelf.usage().objects), (2, Bytes(80), 0));
        // The one that would go first makes room for a third.
        assert!(shelf.set_aside(Bytes(50)));
        assert!(shelf.copy(&id(2)).is_none() && shelf.copy(&id(1)).is_some());
        // What is on its way is not taken from.
        assert!(shelf.put(Epoch(1), contents(60), Timestamp(30)).is_err());
        shelf.give_back(Bytes(50));
        shelf.put(Epoch(1), contents(100), Timestamp(30)).unwrap();
        assert_eq!(shelf.take_gone(Timestamp(0)), [id(2), id(1)]);
        assert!(!shelf.set_aside(Bytes(1)), "its own give way to none");
        assert_eq!(shelf.take_gone(Timestamp(50)), []);
    }

    #[test]
    fn a_copy_that_is_here_or_back_has_not_gone() {
        let mut shelf = Shelf::new(LIMIT);
        assert!(shelf.put_copy(id(1), contents(60), Timestamp(10)));
        assert!(!shelf.put_copy(id(1), contents(60), Timestamp(20)), "it is here, and stays");
        assert_eq!(shelf.take_gone(Timestamp(0)), []);
        assert!(shelf.put_copy(id(2), contents(60), Timestamp(30)), "the first makes room");
        assert!(shelf.copy(&id(1)).is_none());
        assert!(shelf.put_copy(id(1), contents(60), Timestamp(40)));
        assert_eq!(shelf.take_gone(Timestamp(0)), [id(2)]);
    }

    #[test]
    fn a_copy_goes_in_its_time() {
        let mut shelf = Shelf::new(LIMIT);
        assert!(shelf.put_copy(id(1), contents(1), Timestamp(10)));
        assert!(shelf.put_copy(id(2), contents(1), Timestamp(20)));
        assert_eq!(shelf.take_gone(Timestamp(10)), [id(1)]);
        assert!(shelf.remove_copy(&id(2)) && !shelf.remove_copy(&id(2)));
        assert_eq!((shelf.take_gone(Timestamp(30)), shelf.usage()), (vec![], Usage::default()));
        let counter = shelf.put(Epoch(7), contents(1), Timestamp(90)).unwrap();
        shelf.let_go(&id(counter));
        assert_eq!((shelf.take_gone(Timestamp(40)), shelf.usage().objects), (vec![id(counter)], 0));
    }
}
