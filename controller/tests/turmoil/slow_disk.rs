//! Tests of a leader with a slow disk that is too fast for the followers to depose the leader: the
//! leader hands leadership over itself. If all disks are slow, leadership does not circle.

use std::time::Duration;

use crate::plain::Group;

/// A write time below the election timeout, so that no follower ever calls an election.
const SLOW_MS: u64 = 300;

#[test]
fn a_leader_with_a_slow_disk_hands_over_and_the_next_one_stays() {
    let mut group = Group::form();
    let (_, leader) = group.leader().unwrap();
    group.slow(leader, SLOW_MS);
    group.until("another leader", |group| group.leader().is_some_and(|(_, id)| id != leader));
    // Elections that began meanwhile have ended.
    group.pass(Duration::from_secs(2));
    let next = group.leader().unwrap();
    assert_ne!(next.1, leader);
    group.pass(Duration::from_secs(15));
    assert_eq!(group.leader(), Some(next), "a follower's slow disk changes nothing");
}

#[test]
fn leadership_stays_if_all_disks_are_slow() {
    let mut group = Group::form();
    let first = group.leader().unwrap();
    for id in 1..=3 {
        group.slow(id, SLOW_MS);
    }
    group.pass(Duration::from_secs(25));
    assert_eq!(group.leader(), Some(first), "no voter has a faster disk");
}
