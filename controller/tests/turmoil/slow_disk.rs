//! A leader whose disk is slow, and not so slow that the others depose it, hands leadership over; and
//! where all disks are slow, leadership does not run in circles.

use std::time::Duration;

use crate::plain::Group;

/// Below what followers wait before they stand: they never would.
const SLOW_MS: u64 = 300;

#[test]
fn a_leader_with_a_slow_disk_hands_over_and_the_next_one_stays() {
    let mut group = Group::form();
    let (_, leader) = group.leader().unwrap();
    group.slow(leader, SLOW_MS);
    group.until("another leads", |group| group.leader().is_some_and(|(_, id)| id != leader));
    // Whoever stood meanwhile stands no more.
    group.pass(Duration::from_secs(2));
    let next = group.leader().unwrap();
    assert_ne!(next.1, leader);
    group.pass(Duration::from_secs(15));
    assert_eq!(group.leader(), Some(next), "a slow disk of a follower moves nothing");
}

#[test]
fn leadership_stays_where_all_disks_are_slow() {
    let mut group = Group::form();
    let first = group.leader().unwrap();
    for id in 1..=3 {
        group.slow(id, SLOW_MS);
    }
    group.pass(Duration::from_secs(25));
    assert_eq!(group.leader(), Some(first), "nothing would be better");
}
