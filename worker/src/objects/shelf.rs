//! Which objects are here, how many bytes they take and until when they are kept. No clock: callers
//! pass what time it is.

use std::collections::{BTreeSet, HashMap};

use millrace_types::{Bytes, Epoch, Timestamp};

use super::Contents;

/// Objects by the number they got, which is never given twice by one process.
#[derive(Debug)]
pub(super) struct Shelf {
    objects: HashMap<u64, Object>,
    expiries: BTreeSet<(Timestamp, u64)>,
    usage: Usage,
    limit: Limit,
    next: u64,
}

/// How much there may be of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
}

impl Shelf {
    pub(super) fn new(limit: Limit) -> Self {
        let (objects, expiries, usage) = (HashMap::new(), BTreeSet::new(), Usage::default());
        Self { objects, expiries, usage, limit, next: 1 }
    }

    /// Takes an object and numbers it, or gives it back where it does not fit.
    pub(super) fn put(
        &mut self,
        epoch: Epoch,
        contents: Contents,
        until: Timestamp,
    ) -> Result<u64, Contents> {
        let counter = self.reserve(1);
        self.put_as(epoch, counter, contents, until)?;
        Ok(counter)
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
    ) -> Result<(), Contents> {
        let bytes = Bytes(contents.len());
        let full = self.objects.contains_key(&counter)
            || self.usage.bytes.get().saturating_add(bytes.get()) > self.limit.bytes.get();
        if full || self.usage.objects >= self.limit.objects {
            self.usage.refused += 1;
            return Err(contents);
        }
        self.objects.insert(counter, Object { epoch, contents, until });
        self.expiries.insert((until, counter));
        self.usage.objects += 1;
        self.usage.kept += 1;
        self.usage.bytes += bytes;
        Ok(())
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
        self.usage
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
        assert!(shelf.put_as(Epoch(1), first, contents(1), Timestamp(10)).is_err());
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
    fn what_nobody_came_for_goes_in_its_time_and_numbers_never_return() {
        let mut shelf = Shelf::new(LIMIT);
        let numbers = [10, 30, 20].map(|until| shelf.put(Epoch(1), contents(10), Timestamp(until)).unwrap());
        assert_eq!(shelf.expire(Timestamp(9)), []);
        assert_eq!(shelf.expire(Timestamp(20)), [(Epoch(1), numbers[0]), (Epoch(1), numbers[2])]);
        let usage = Usage { objects: 1, bytes: Bytes(10), kept: 3, expired: 2, refused: 0 };
        assert_eq!(shelf.usage(), usage);
        assert!(shelf.put(Epoch(1), contents(1), Timestamp(5)).unwrap() > numbers[2]);
    }
}
