//! The data names that were assigned to a process, with their use (D02). A name identifies a single piece
//! of data for good: releasing the data does not free the name, because others may have copies. The table
//! also records the names in answers: the receiver of an answer owns the data from then on.

use std::collections::{BTreeMap, VecDeque};

use millrace_types::{DataId, Epoch};

/// Number of names that are assigned to a process at a time.
pub(crate) const IDS_PER_BLOCK: u64 = 1 << 24;
/// Maximum number of remembered blocks of a process. Names of older blocks count as never assigned.
const BLOCKS_MAX: usize = 16;

/// Number of names in a page of marks.
const PAGE: u64 = 4096;
/// Number of 64-bit words in a page of marks.
const WORDS: usize = (PAGE / 64) as usize;

/// The state of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NameState {
    /// The name was never assigned to the process.
    NotGiven,
    /// No data was stored under the name.
    Free,
    /// Data was stored under the name.
    Used,
    /// Data was stored under the name, and an answer named the data.
    Answered,
}

/// The names of a process.
#[derive(Debug, Default)]
pub(super) struct AssignedNames(VecDeque<NameBlock>);

#[derive(Debug)]
struct NameBlock {
    epoch: Epoch,
    first: u64,
    used: NameBitmap,
    answered: NameBitmap,
}

/// The marked names of a block, with a bit for each name. Pages without marks are absent.
#[derive(Debug, Default)]
struct NameBitmap(BTreeMap<u64, Box<[u64; WORDS]>>);

impl NameBitmap {
    fn has(&self, place: u64) -> bool {
        let (page, word, bit) = bit(place);
        self.0.get(&page).is_some_and(|page| page[word] & bit != 0)
    }

    fn mark(&mut self, place: u64) {
        let (page, word, bit) = bit(place);
        self.0.entry(page).or_insert_with(|| Box::new([0; WORDS]))[word] |= bit;
    }
}

impl NameBlock {
    fn place(&self, id: &DataId) -> Option<u64> {
        let place = id.counter.checked_sub(self.first)?;
        (id.epoch == self.epoch && place < IDS_PER_BLOCK).then_some(place)
    }
}

/// Returns the page, the word and the bit of a name.
fn bit(place: u64) -> (u64, usize, u64) {
    // The word is below WORDS, so the cast and the index are safe.
    (place / PAGE, (place % PAGE / 64) as usize, 1 << (place % 64))
}

impl AssignedNames {
    /// Assigns a block of names to the process, from this counter on.
    pub(super) fn give(&mut self, epoch: Epoch, first: u64) {
        if self.0.len() == BLOCKS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(NameBlock {
            epoch,
            first,
            used: NameBitmap::default(),
            answered: NameBitmap::default(),
        });
    }

    pub(super) fn of(&self, id: &DataId) -> NameState {
        let found = self.0.iter().find_map(|block| Some((block, block.place(id)?)));
        let Some((block, place)) = found else { return NameState::NotGiven };
        match () {
            () if block.answered.has(place) => NameState::Answered,
            () if block.used.has(place) => NameState::Used,
            () => NameState::Free,
        }
    }

    /// Marks a name as used: data is stored under the name.
    pub(super) fn uses(&mut self, id: &DataId) {
        for block in &mut self.0 {
            if let Some(place) = block.place(id) {
                block.used.mark(place);
            }
        }
    }

    /// Marks a name as answered: an answer named the data.
    pub(super) fn answers(&mut self, id: &DataId) {
        for block in &mut self.0 {
            if let Some(place) = block.place(id) {
                block.answered.mark(place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::NodeName;

    use super::*;

    fn id(epoch: u64, counter: u64) -> DataId {
        DataId { home: NodeName::new("w1").unwrap(), epoch: Epoch(epoch), counter }
    }

    #[test]
    fn only_assigned_names_become_used_and_answered() {
        let mut names = AssignedNames::default();
        assert_eq!(names.of(&id(1, 7)), NameState::NotGiven);
        names.give(Epoch(1), 7);
        let last = 7 + IDS_PER_BLOCK - 1;
        for counter in [7, 7 + 63, 7 + 64, 7 + PAGE - 1, 7 + PAGE, last] {
            assert_eq!(names.of(&id(1, counter)), NameState::Free, "{counter}");
            names.uses(&id(1, counter));
            assert_eq!(names.of(&id(1, counter)), NameState::Used, "{counter}");
            names.answers(&id(1, counter));
            assert_eq!(names.of(&id(1, counter)), NameState::Answered, "{counter}");
        }
        assert_eq!(names.of(&id(1, 8)), NameState::Free);
        for (epoch, counter) in [(2, 7), (1, 6), (1, last + 1)] {
            assert_eq!(names.of(&id(epoch, counter)), NameState::NotGiven, "{epoch} {counter}");
        }
    }

    #[test]
    fn the_oldest_blocks_are_forgotten() {
        let mut names = AssignedNames::default();
        for block in 0..=BLOCKS_MAX as u64 {
            names.give(Epoch(1), block * IDS_PER_BLOCK);
        }
        assert_eq!(names.of(&id(1, 0)), NameState::NotGiven);
        assert_eq!(names.of(&id(1, IDS_PER_BLOCK)), NameState::Free);
    }
}
