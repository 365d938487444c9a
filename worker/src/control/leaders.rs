//! Which of the controllers leads, as each says of itself. Two may say so for a while, when one was
//! deposed and has not heard of it: the higher term is right.

use std::collections::BTreeMap;

/// One stream to one controller. What is opened again after a loss is another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct StreamId(pub(super) u64);

/// The controllers that say they lead, by stream, and in which term.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Leaders(BTreeMap<StreamId, u64>);

impl Leaders {
    /// A controller leads, or leads no more. Gives whether another one is to be taken for the
    /// leader now.
    pub(super) fn heard(&mut self, stream: StreamId, term: u64, leads: bool) -> bool {
        let before = self.leader();
        if leads {
            self.0.insert(stream, term);
        } else {
            self.0.remove(&stream);
        }
        self.leader() != before
    }

    /// A stream ended.
    pub(super) fn gone(&mut self, stream: StreamId) -> bool {
        self.heard(stream, 0, false)
    }

    /// Where the leader is.
    pub(super) fn leader(&self) -> Option<StreamId> {
        self.0.iter().max_by_key(|&(_, term)| term).map(|(&stream, _)| stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: StreamId = StreamId(1);
    const B: StreamId = StreamId(2);

    #[test]
    fn the_leader_of_the_highest_term_is_believed() {
        let mut leaders = Leaders::default();
        assert!(!leaders.heard(A, 7, false));
        assert_eq!(leaders.leader(), None);
        assert!(leaders.heard(A, 7, true));
        assert!(!leaders.heard(B, 6, true), "deposed, and has not heard of it");
        assert_eq!(leaders.leader(), Some(A));
        assert!(leaders.heard(B, 8, true));
        assert!(!leaders.heard(A, 8, false));
        assert_eq!(leaders.leader(), Some(B));
        assert!(leaders.gone(B));
        assert_eq!(leaders.leader(), None);
    }
}
