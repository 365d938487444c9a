//! Sequences of requests, for functions that keep state: each client sends its sequences in
//! turn. Pure logic.
//!
//! A failed request breaks its sequence, whether or not the server still has the state. The
//! client's next request starts another sequence. All sequences of a client share an id, so the
//! start of the next sequence replaces the state of a broken sequence.

use std::num::NonZeroU32;

/// The number of ids per generator, above its number of clients.
const CLIENTS_MAX: i64 = 1 << 20;

/// The sequences of all clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClientSequences {
    first_id: i64,
    length: NonZeroU32,
}

/// A client's position in its current sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientSequence {
    id: i64,
    length: NonZeroU32,
    answered: u32,
}

/// A request's position in its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SequencePosition {
    /// The sequence's id, above zero.
    pub(super) id: i64,
    pub(super) start: bool,
    pub(super) end: bool,
}

/// The number of ended sequences, by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SequenceCounts {
    /// The number of sequences whose requests were all answered.
    pub(super) whole: u64,
    /// The number of sequences with a failed request.
    pub(super) broken: u64,
}

impl ClientSequences {
    /// Returns sequences of `length` requests. `generator` distinguishes generators that load the
    /// same function.
    pub(super) fn new(length: NonZeroU32, generator: u64) -> Self {
        let generators = u64::try_from(i64::MAX / CLIENTS_MAX).unwrap_or(1);
        let generator = i64::try_from(generator % generators).unwrap_or(0);
        Self { first_id: 1 + generator * CLIENTS_MAX, length }
    }

    /// Returns the first sequence of a client.
    pub(super) fn of(self, client: usize) -> ClientSequence {
        let client = i64::try_from(client).unwrap_or(0) % CLIENTS_MAX;
        ClientSequence { id: self.first_id.saturating_add(client), length: self.length, answered: 0 }
    }
}

impl ClientSequence {
    /// Returns the position of the client's next request.
    pub(super) fn next(&self) -> SequencePosition {
        let Self { id, length, answered } = *self;
        SequencePosition { id, start: answered == 0, end: answered + 1 == length.get() }
    }

    /// Records that the next request was answered.
    pub(super) fn answered(&mut self, ended: &mut SequenceCounts) {
        self.answered += 1;
        if self.answered == self.length.get() {
            self.answered = 0;
            ended.whole += 1;
        }
    }

    /// Records that the next request failed.
    pub(super) fn failed(&mut self, ended: &mut SequenceCounts) {
        self.answered = 0;
        ended.broken += 1;
    }

    /// Returns the position of a request that ends the sequence early, or `None` if the sequence
    /// has not begun.
    pub(super) fn end_early(&self) -> Option<SequencePosition> {
        (self.answered > 0).then_some(SequencePosition { id: self.id, start: false, end: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequences(length: u32) -> ClientSequences {
        ClientSequences::new(NonZeroU32::new(length).unwrap(), 7)
    }

    #[test]
    fn a_client_sends_one_sequence_after_another() {
        let mut sequence = sequences(3).of(2);
        let mut ended = SequenceCounts::default();
        let mut next = || {
            let SequencePosition { start, end, .. } = sequence.next();
            sequence.answered(&mut ended);
            (start, end)
        };
        let one = [(true, false), (false, false), (false, true)];
        assert_eq!([next(), next(), next()], one);
        assert_eq!([next(), next(), next()], one);
        assert_eq!(ended, SequenceCounts { whole: 2, broken: 0 });
        let alone = sequences(1).of(0).next();
        assert!(alone.start && alone.end);
    }

    #[test]
    fn a_failed_request_breaks_its_sequence_and_an_open_sequence_can_be_ended() {
        let mut sequence = sequences(3).of(0);
        let mut ended = SequenceCounts::default();
        assert_eq!(sequence.end_early(), None);
        sequence.answered(&mut ended);
        let SequencePosition { id, .. } = sequence.next();
        assert_eq!(sequence.end_early(), Some(SequencePosition { id, start: false, end: true }));
        sequence.failed(&mut ended);
        assert_eq!((sequence.end_early(), sequence.next().start), (None, true));
        assert_eq!(ended, SequenceCounts { whole: 0, broken: 1 });
    }

    #[test]
    fn clients_and_generators_have_distinct_ids() {
        let id = |generator, client| {
            let id = ClientSequences::new(NonZeroU32::MIN, generator).of(client).next().id;
            assert!(id > 0, "{generator} {client}");
            id
        };
        let ids = [id(0, 0), id(0, 1), id(1, 0), id(u64::MAX, 0), id(u64::MAX, 1_000_000)];
        assert_eq!(ids.iter().collect::<std::collections::BTreeSet<_>>().len(), ids.len());
    }
}
