//! The newest entries of the log, in memory. The replication to each follower and the state machine
//! read an entry soon after it was appended, so they need not read and decode it from sled.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::Entry;
use crate::machine::StateMachine;

/// Maximum size of the entries in memory, in encoded bytes. The newest entry stays, even if it
/// alone is larger.
const BYTES_MAX: usize = 2 << 20;

/// The newest entries, without gaps between them. Clones share the entries.
pub(crate) struct RecentEntries<M: StateMachine>(Arc<Mutex<Window<M>>>);

impl<M: StateMachine> Clone for RecentEntries<M> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<M: StateMachine> Default for RecentEntries<M> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Window { entries: VecDeque::new(), bytes: 0 })))
    }
}

struct Window<M: StateMachine> {
    entries: VecDeque<SizedEntry<M>>,
    /// The sum of the entries' bytes.
    bytes: usize,
}

struct SizedEntry<M: StateMachine> {
    entry: Arc<Entry<M>>,
    /// The size of the encoded entry.
    bytes: usize,
}

impl<M: StateMachine> RecentEntries<M> {
    /// Adds entries that were appended to the log, with their encoded sizes.
    pub(crate) fn append(&self, entries: impl IntoIterator<Item = (Entry<M>, usize)>) {
        let mut window = self.window();
        for (entry, bytes) in entries {
            if window.end() != Some(entry.log_id.index) {
                window.truncate(0);
            }
            window.bytes += bytes;
            window.entries.push_back(SizedEntry { entry: Arc::new(entry), bytes });
        }
        while window.bytes > BYTES_MAX && window.entries.len() > 1 {
            window.bytes -= window.entries.pop_front().map_or(0, |oldest| oldest.bytes);
        }
    }

    /// Forgets the entries from this index on.
    pub(crate) fn truncate(&self, from: u64) {
        self.window().truncate(from);
    }

    /// Returns the entries in `from..to` up to the entry that passes `bytes_max`, or `None` if one
    /// of the entries is not in memory.
    pub(crate) fn read(&self, from: u64, to: u64, bytes_max: usize) -> Option<Vec<Entry<M>>> {
        let mut found = Vec::new();
        {
            let window = self.window();
            let first = window.first()?;
            if from < first || from >= to || window.end()? < to {
                return None;
            }
            let mut bytes = 0;
            let skipped = usize::try_from(from - first).ok()?;
            for sized in window.entries.range(skipped..) {
                if sized.entry.log_id.index >= to || bytes >= bytes_max {
                    break;
                }
                bytes += sized.bytes;
                found.push(Arc::clone(&sized.entry));
            }
        }
        // Copied without the lock, which the appends need.
        Some(found.into_iter().map(|entry| Entry::clone(&entry)).collect())
    }

    fn window(&self) -> MutexGuard<'_, Window<M>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: StateMachine> Window<M> {
    fn first(&self) -> Option<u64> {
        self.entries.front().map(|oldest| oldest.entry.log_id.index)
    }

    /// Returns the index after the newest entry.
    fn end(&self) -> Option<u64> {
        self.entries.back().map(|newest| newest.entry.log_id.index + 1)
    }

    fn truncate(&mut self, from: u64) {
        while self.end().is_some_and(|end| end > from) {
            self.bytes -= self.entries.pop_back().map_or(0, |newest| newest.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::tally::{self, RecordingMachine, position};

    fn entry(term: u64, index: u64) -> Entry<RecordingMachine> {
        tally::entry(term, index, Vec::new())
    }

    fn recent(indices: std::ops::Range<u64>, bytes: usize) -> RecentEntries<RecordingMachine> {
        let recent = RecentEntries::default();
        recent.append(indices.map(|index| (entry(1, index), bytes)));
        recent
    }

    fn indices(read: Option<Vec<Entry<RecordingMachine>>>) -> Option<Vec<u64>> {
        read.map(|entries| entries.iter().map(|entry| entry.log_id.index).collect())
    }

    #[test]
    fn a_range_is_read_whole_or_not_at_all() {
        let recent = recent(5..9, 10);
        assert_eq!(indices(recent.read(6, 9, usize::MAX)), Some(vec![6, 7, 8]));
        for (from, to) in [(4, 6), (8, 10), (9, 10), (6, 6)] {
            assert_eq!(indices(recent.read(from, to, usize::MAX)), None, "{from}..{to}");
        }
        assert_eq!(indices(recent.read(5, 9, 11)), Some(vec![5, 6]), "the second entry passes 11 bytes");
    }

    #[test]
    fn the_oldest_entries_leave_and_the_newest_stays() {
        let recent = recent(1..4, BYTES_MAX / 2);
        assert_eq!(indices(recent.read(1, 4, usize::MAX)), None);
        assert_eq!(indices(recent.read(2, 4, usize::MAX)), Some(vec![2, 3]));
        recent.append([(entry(1, 4), 2 * BYTES_MAX)]);
        assert_eq!(indices(recent.read(4, 5, usize::MAX)), Some(vec![4]));
        assert_eq!(indices(recent.read(3, 5, usize::MAX)), None);
    }

    #[test]
    fn truncated_entries_are_replaced_and_a_gap_starts_anew() {
        let recent = recent(1..6, 10);
        recent.truncate(3);
        recent.append([(entry(2, 3), 10)]);
        let read = recent.read(1, 4, usize::MAX).unwrap();
        assert_eq!(read.last().map(|entry| entry.log_id), Some(position(2, 3)));
        recent.append([(entry(2, 9), 10)]);
        assert_eq!(indices(recent.read(1, 4, usize::MAX)), None);
        assert_eq!(indices(recent.read(9, 10, usize::MAX)), Some(vec![9]));
    }
}
