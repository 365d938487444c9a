//! Sequences of requests, for functions that keep state: each client sends one after the other. Pure.
//!
//! A request that fails breaks its sequence, whether or not the server still has its state: the next
//! request begins another. All sequences of a client have one id, so that what is left of a broken one
//! goes as the next begins.

use std::num::NonZeroU32;

/// Numbers of one generator: more than it has clients.
const CLIENTS_MAX: i64 = 1 << 20;

/// The sequences of all clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sequences {
    first_id: i64,
    length: NonZeroU32,
}

/// A client's place in its present sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sequence {
    id: i64,
    length: NonZeroU32,
    answered: u32,
}

/// A request's place in its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Above zero.
    pub(super) id: i64,
    pub(super) start: bool,
    pub(super) end: bool,
}

/// How sequences ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ended {
    /// Every request was answered.
    pub(super) whole: u64,
    /// A request failed.
    pub(super) broken: u64,
}

impl Sequences {
    /// Of so many requests each. `generator` tells one from others that load the same function.
    pub(super) fn new(length: NonZeroU32, generator: u64) -> Self {
        let generators = u64::try_from(i64::MAX / CLIENTS_MAX).unwrap_or(1);
        let generator = i64::try_from(generator % generators).unwrap_or(0);
        Self { first_id: 1 + generator * CLIENTS_MAX, length }
    }

    /// Those of one client, the first of them.
    pub(super) fn of(self, client: usize) -> Sequence {
        let client = i64::try_from(client).unwrap_or(0) % CLIENTS_MAX;
        Sequence { id: self.first_id.saturating_add(client), length: self.length, answered: 0 }
    }
}

impl Sequence {
    /// The place of the client's next request.
    pub(super) fn next(&self) -> Place {
        let Self { id, length, answered } = *self;
        Place { id, start: answered == 0, end: answered + 1 == length.get() }
    }

    /// The next request was answered.
    pub(super) fn answered(&mut self, ended: &mut Ended) {
        self.answered += 1;
        if self.answered == self.length.get() {
            self.answered = 0;
            ended.whole += 1;
        }
    }

    /// The next request failed.
    pub(super) fn failed(&mut self, ended: &mut Ended) {
        self.answered = 0;
        ended.broken += 1;
    }

    /// The place of a request that ends the sequence before its time, where it has begun.
    pub(super) fn cut(&self) -> Option<Place> {
        (self.answered > 0).then_some(Place { id: self.id, start: false, end: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequences(length: u32) -> Sequences {
        Sequences::new(NonZeroU32::new(length).unwrap(), 7)
    }

    #[test]
    fn a_client_sends_one_sequence_after_the_other() {
        let (mut sequence, mut ended) = (sequences(3).of(2), Ended::default());
        let mut next = || {
            let Place { start, end, .. } = sequence.next();
            sequence.answered(&mut ended);
            (start, end)
        };
        let one = [(true, false), (false, false), (false, true)];
        assert_eq!([next(), next(), next()], one);
        assert_eq!([next(), next(), next()], one);
        assert_eq!(ended, Ended { whole: 2, broken: 0 });
        let alone = sequences(1).of(0).next();
        assert!(alone.start && alone.end);
    }

    #[test]
    fn a_failed_request_breaks_its_sequence_and_one_under_way_can_be_cut() {
        let (mut sequence, mut ended) = (sequences(3).of(0), Ended::default());
        assert_eq!(sequence.cut(), None);
        sequence.answered(&mut ended);
        let Place { id, .. } = sequence.next();
        assert_eq!(sequence.cut(), Some(Place { id, start: false, end: true }));
        sequence.failed(&mut ended);
        assert_eq!((sequence.cut(), sequence.next().start), (None, true));
        assert_eq!(ended, Ended { whole: 0, broken: 1 });
    }

    #[test]
    fn clients_and_generators_have_ids_of_their_own() {
        let id = |generator, client| {
            let id = Sequences::new(NonZeroU32::MIN, generator).of(client).next().id;
            assert!(id > 0, "{generator} {client}");
            id
        };
        let ids = [id(0, 0), id(0, 1), id(1, 0), id(u64::MAX, 0), id(u64::MAX, 1_000_000)];
        assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), ids.len());
    }
}
