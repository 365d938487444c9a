//! Determines which controller leads, from the controllers' own statements. Two controllers may
//! claim to lead while the deposed controller has not noticed: the higher term wins.

use std::collections::BTreeMap;

/// A stream to a controller. A stream that is reopened after a loss gets a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct StreamId(pub(super) u64);

/// The terms of the controllers that claim to lead, by stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct LeaderClaims(BTreeMap<StreamId, u64>);

impl LeaderClaims {
    /// Records that a controller leads, or no longer leads. Returns whether the leader changed.
    pub(super) fn heard(&mut self, stream: StreamId, term: u64, leads: bool) -> bool {
        let before = self.leader();
        if leads {
            self.0.insert(stream, term);
        } else {
            self.0.remove(&stream);
        }
        self.leader() != before
    }

    /// Records that a stream ended. Returns whether the leader changed.
    pub(super) fn gone(&mut self, stream: StreamId) -> bool {
        self.heard(stream, 0, false)
    }

    /// Returns the stream to the leader.
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
        let mut leaders = LeaderClaims::default();
        assert!(!leaders.heard(A, 7, false));
        assert_eq!(leaders.leader(), None);
        assert!(leaders.heard(A, 7, true));
        assert!(!leaders.heard(B, 6, true), "deposed, and unaware of it");
        assert_eq!(leaders.leader(), Some(A));
        assert!(leaders.heard(B, 8, true));
        assert!(!leaders.heard(A, 8, false));
        assert_eq!(leaders.leader(), Some(B));
        assert!(leaders.gone(B));
        assert_eq!(leaders.leader(), None);
    }
}
