//! The names that one process was given, and which of them it has used (D02). A name stands for one
//! piece of data for good: what was let go of does not free it, since others may have copies. And which of
//! them an answer named: whoever took that has the data from then on.

use std::collections::{BTreeMap, VecDeque};

use millrace_types::{DataId, Epoch};

/// How many names a process is given at a time.
pub(crate) const IDS_PER_BLOCK: u64 = 1 << 24;
/// Blocks of a process that are remembered. The names of older ones count as never given.
const BLOCKS_MAX: usize = 16;

/// Names are marked as used in pages of so many.
const PAGE: u64 = 4096;
/// What such a page takes.
const WORDS: usize = (PAGE / 64) as usize;

/// What is to be said of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Name {
    /// The process has it from nobody.
    NotGiven,
    /// Nothing was stored under it.
    Free,
    /// Something was.
    Used,
    /// Something was, and an answer named it.
    Answered,
}

/// The names of one process.
#[derive(Debug, Default)]
pub(super) struct Names(VecDeque<Block>);

#[derive(Debug)]
struct Block {
    epoch: Epoch,
    first: u64,
    used: Marked,
    answered: Marked,
}

/// Which names of a block are marked: by page, of those that were begun, a bit for each.
#[derive(Debug, Default)]
struct Marked(BTreeMap<u64, Box<[u64; WORDS]>>);

impl Marked {
    fn has(&self, place: u64) -> bool {
        let (page, word, bit) = bit(place);
        self.0.get(&page).is_some_and(|page| page[word] & bit != 0)
    }

    fn mark(&mut self, place: u64) {
        let (page, word, bit) = bit(place);
        self.0.entry(page).or_insert_with(|| Box::new([0; WORDS]))[word] |= bit;
    }
}

impl Block {
    fn place(&self, id: &DataId) -> Option<u64> {
        let place = id.counter.checked_sub(self.first)?;
        (id.epoch == self.epoch && place < IDS_PER_BLOCK).then_some(place)
    }
}

/// A name's page, word and bit.
fn bit(place: u64) -> (u64, usize, u64) {
    // Below WORDS.
    (place / PAGE, (place % PAGE / 64) as usize, 1 << (place % 64))
}

impl Names {
    /// The process was given a block, from this count on.
    pub(super) fn give(&mut self, epoch: Epoch, first: u64) {
        if self.0.len() == BLOCKS_MAX {
            self.0.pop_front();
        }
        let (used, answered) = (Marked::default(), Marked::default());
        self.0.push_back(Block { epoch, first, used, answered });
    }

    pub(super) fn of(&self, id: &DataId) -> Name {
        let found = self.0.iter().find_map(|block| Some((block, block.place(id)?)));
        let Some((block, place)) = found else { return Name::NotGiven };
        match () {
            () if block.answered.has(place) => Name::Answered,
            () if block.used.has(place) => Name::Used,
            () => Name::Free,
        }
    }

    /// Something is stored under it from now on.
    pub(super) fn uses(&mut self, id: &DataId) {
        for block in &mut self.0 {
            if let Some(place) = block.place(id) {
                block.used.mark(place);
            }
        }
    }

    /// An answer names what is stored under it.
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
    fn a_name_is_used_once_and_only_by_whom_it_was_given_to() {
        let mut names = Names::default();
        assert_eq!(names.of(&id(1, 7)), Name::NotGiven);
        names.give(Epoch(1), 7);
        let last = 7 + IDS_PER_BLOCK - 1;
        for counter in [7, 7 + 63, 7 + 64, 7 + PAGE - 1, 7 + PAGE, last] {
            assert_eq!(names.of(&id(1, counter)), Name::Free, "{counter}");
            names.uses(&id(1, counter));
            assert_eq!(names.of(&id(1, counter)), Name::Used, "{counter}");
            names.answers(&id(1, counter));
            assert_eq!(names.of(&id(1, counter)), Name::Answered, "{counter}");
        }
        assert_eq!(names.of(&id(1, 8)), Name::Free);
        for (epoch, counter) in [(2, 7), (1, 6), (1, last + 1)] {
            assert_eq!(names.of(&id(epoch, counter)), Name::NotGiven, "{epoch} {counter}");
        }
    }

    #[test]
    fn the_oldest_blocks_are_forgotten() {
        let mut names = Names::default();
        for block in 0..=BLOCKS_MAX as u64 {
            names.give(Epoch(1), block * IDS_PER_BLOCK);
        }
        assert_eq!(names.of(&id(1, 0)), Name::NotGiven);
        assert_eq!(names.of(&id(1, IDS_PER_BLOCK)), Name::Free);
    }
}
