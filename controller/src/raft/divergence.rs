//! Compares the states of the controllers, and stops a controller with a corrupt state.
//!
//! Equal logs give equal states. A flipped bit in memory, a disk that returns wrong bytes, or a bug
//! gives a controller another state. The controller would serve that state, write that state into
//! snapshots and, as leader, decide by it. So each controller computes a digest of the state at every
//! thousandth entry (`raft_store::StateDigest`), and reports the newest digests in the status. Each
//! controller compares all digests, like etcd's corruption check:
//!
//! ```text
//!   after entry 3000   1: a  2: a  3: b    controller 3 differs from a majority and stops permanently
//!                      1: a  2: b          the correct state is unknown: an error, and a warning in the
//!                                          cluster's status
//! ```
//!
//! Absent: repair. A controller that stopped is replaced by an empty controller.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_raft_store::StateDigest;
use tokio_util::sync::CancellationToken;

use super::replica::Replica;

/// The interval between comparisons while the newest digest of a voter is missing.
const COMPARE_EVERY: Duration = Duration::from_secs(2);

/// Controllers whose states differ after the same log entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Divergence {
    /// A majority of the voters has one state, and the listed members have other states.
    Minority { index: u64, members: BTreeSet<u64> },
    /// No majority of the voters is known to have the same state.
    Split { index: u64, members: BTreeSet<u64> },
}

impl Divergence {
    fn index(&self) -> u64 {
        match self {
            Self::Minority { index, .. } | Self::Split { index, .. } => *index,
        }
    }

    /// Returns the warning for the operator.
    pub(super) fn warning(&self) -> String {
        let names =
            |members: &BTreeSet<u64>| members.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Self::Minority { index, members } => format!(
                "the state of controller {} differs from that of a majority after log entry {index}: replace that controller",
                names(members)
            ),
            Self::Split { index, members } => format!(
                "the states of controllers {} differ after log entry {index}, and no majority agrees: keep all data directories, stop writing, and report this",
                names(members)
            ),
        }
    }
}

/// Returns the newest entry after which a majority has one state and some member another. Without such
/// an entry, returns the newest entry after which states differ. `voters` has one set, or two sets
/// during a membership change; a majority needs a majority of each set.
pub(super) fn find(
    voters: &[BTreeSet<u64>],
    digests: &BTreeMap<u64, Vec<StateDigest>>,
) -> Option<Divergence> {
    let mut by_index: BTreeMap<u64, BTreeMap<_, BTreeSet<u64>>> = BTreeMap::new();
    for (&member, taken) in digests {
        for StateDigest { index, digest } in taken {
            by_index.entry(*index).or_default().entry(*digest).or_default().insert(member);
        }
    }
    let is_majority = |members: &BTreeSet<u64>| {
        voters.iter().all(|voters| 2 * voters.intersection(members).count() > voters.len())
    };
    let mut split = None;
    for (index, states) in by_index.into_iter().rev().filter(|(_, states)| states.len() > 1) {
        let majority = states.values().find(|members| is_majority(members));
        let others = |members: &BTreeSet<u64>| majority.is_none_or(|majority| majority != members);
        let members = states.values().filter(|members| others(members)).flatten().copied().collect();
        if majority.is_some() {
            return Some(Divergence::Minority { index, members });
        }
        split = split.or(Some(Divergence::Split { index, members }));
    }
    split
}

/// Whether every voter has reported the state after this entry, or after a later entry.
fn is_compared(index: u64, voters: &[BTreeSet<u64>], digests: &BTreeMap<u64, Vec<StateDigest>>) -> bool {
    let has = |voter: &u64| {
        let taken = digests.get(voter).and_then(|taken| taken.last());
        taken.is_some_and(|newest| newest.index >= index)
    };
    voters.iter().flatten().all(has)
}

/// Compares states until stopped, or until this controller is found to differ.
pub(crate) async fn run_until(stop: CancellationToken, replica: Replica) {
    // The result is `None` after a stop.
    stop.run_until_cancelled(run(replica)).await;
}

async fn run(replica: Replica) {
    let own = replica.id().0;
    let taken = replica.reader.digests();
    let mut compared = 0;
    let mut told = None;
    loop {
        tokio::time::sleep(COMPARE_EVERY).await;
        let newest = taken.borrow().last().map_or(0, |newest| newest.index);
        let voters = replica.membership().get_joint_config().clone();
        // A group of one has no other state to compare with.
        if newest <= compared || voters.iter().flatten().all(|&voter| voter == own) {
            continue;
        }
        let statuses = replica.statuses().await.into_iter();
        let digests = statuses.filter_map(|(id, status)| Some((id, status.ok()?.digests))).collect();
        if is_compared(newest, &voters, &digests) {
            compared = newest;
        }
        let Some(found) = find(&voters, &digests) else { continue };
        if told.replace(found.index()) != Some(found.index()) {
            tracing::error!(difference = found.warning(), "the states of the controllers differ");
        }
        if let Divergence::Minority { index, members } = &found
            && members.contains(&own)
        {
            replica.stop_diverged(*index).await;
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::Digest;

    use super::*;

    /// Members' states as letters: `(member, [(index, state)])`.
    fn find_in(voters: &[&[u64]], said: &[(u64, &[(u64, &str)])]) -> Option<Divergence> {
        let voters: Vec<BTreeSet<u64>> = voters.iter().map(|set| set.iter().copied().collect()).collect();
        let taken = |states: &[(u64, &str)]| {
            let digest =
                |&(index, state): &(u64, &str)| StateDigest { index, digest: Digest::of(state.as_bytes()) };
            states.iter().map(digest).collect()
        };
        find(&voters, &said.iter().map(|&(member, states)| (member, taken(states))).collect())
    }

    fn minority(index: u64, members: &[u64]) -> Option<Divergence> {
        Some(Divergence::Minority { index, members: members.iter().copied().collect() })
    }

    fn split(index: u64, members: &[u64]) -> Option<Divergence> {
        Some(Divergence::Split { index, members: members.iter().copied().collect() })
    }

    #[test]
    fn equal_states_and_states_of_different_entries_do_not_differ() {
        let three: &[&[u64]] = &[&[1, 2, 3]];
        assert_eq!(find_in(three, &[]), None);
        assert_eq!(find_in(three, &[(1, &[(1000, "a")]), (2, &[(1000, "a")]), (3, &[(1000, "a")])]), None);
        assert_eq!(find_in(three, &[(1, &[(1000, "a")]), (2, &[(2000, "b")]), (3, &[])]), None);
    }

    #[test]
    fn members_that_differ_from_a_majority_are_found() {
        let three: &[&[u64]] = &[&[1, 2, 3]];
        let a: &[_] = &[(1000, "a")];
        let b: &[_] = &[(1000, "b")];
        assert_eq!(find_in(three, &[(1, a), (2, a), (3, b)]), minority(1000, &[3]));
        assert_eq!(find_in(three, &[(1, a), (2, a), (3, a), (4, b)]), minority(1000, &[4]), "a learner");
        let five: &[&[u64]] = &[&[1, 2, 3, 4, 5]];
        let c: &[_] = &[(1000, "c")];
        assert_eq!(find_in(five, &[(1, a), (2, b), (3, a), (4, c), (5, a)]), minority(1000, &[2, 4]));
        let then_split: &[_] = &[(1000, "a"), (2000, "x")];
        let found = find_in(three, &[(1, then_split), (2, &[(1000, "a"), (2000, "y")]), (3, b)]);
        assert_eq!(
            found,
            minority(1000, &[3]),
            "an older entry with a majority counts before a newer without"
        );
    }

    #[test]
    fn a_difference_without_a_majority_is_a_split() {
        let a: &[_] = &[(1000, "a")];
        let b: &[_] = &[(1000, "b")];
        let c: &[_] = &[(1000, "c")];
        assert_eq!(find_in(&[&[1, 2]], &[(1, a), (2, b)]), split(1000, &[1, 2]));
        assert_eq!(
            find_in(&[&[1, 2, 3]], &[(1, a), (3, b)]),
            split(1000, &[1, 3]),
            "controller 2's state is missing"
        );
        assert_eq!(find_in(&[&[1, 2, 3]], &[(1, a), (2, b), (3, c)]), split(1000, &[1, 2, 3]));
        let learners = find_in(&[&[1]], &[(2, a), (3, b)]);
        assert_eq!(learners, split(1000, &[2, 3]), "learners are no majority");
        let joint: &[&[u64]] = &[&[1, 2, 3], &[3, 4, 5]];
        assert_eq!(find_in(joint, &[(1, a), (2, a), (3, a), (4, b), (5, b)]), split(1000, &[1, 2, 3, 4, 5]));
        assert_eq!(find_in(joint, &[(1, a), (2, b), (3, a), (4, a), (5, b)]), minority(1000, &[2, 5]));
    }

    #[test]
    fn a_comparison_is_complete_when_every_voter_has_reported_its_state() {
        let taken = |index| vec![StateDigest { index, digest: Digest::of(b"a") }];
        let voters = [BTreeSet::from([1, 2])];
        assert!(!is_compared(1000, &voters, &BTreeMap::from([(1, taken(1000))])));
        assert!(!is_compared(2000, &voters, &BTreeMap::from([(1, taken(2000)), (2, taken(1000))])));
        assert!(is_compared(1000, &voters, &BTreeMap::from([(1, taken(1000)), (2, taken(2000))])));
    }
}
