//! Tests of quorum loss: a leader that the others hear, but that hears no other, is replaced.

use std::time::Duration;

use crate::plain::Group;

/// The time within which operators are promised a new leader after a loss (docs/operate/promises.md).
const ANOTHER_WITHIN: Duration = Duration::from_secs(2);

/// Returns the hosts of the other controllers.
fn others(of: u64) -> Vec<String> {
    (1..=3).filter(|&id| id != of).map(|id| format!("c{id}")).collect()
}

#[test]
fn a_leader_that_hears_no_answers_is_replaced_as_soon_as_a_dead_one() {
    let mut group = Group::form();
    let (_, deaf) = group.leader().unwrap();
    for other in others(deaf) {
        group.sim.partition_oneway(other, format!("c{deaf}"));
    }
    let cut = group.sim.elapsed();
    group.until("another leader", |group| group.leader().is_some_and(|(_, id)| id != deaf));
    let took = group.sim.elapsed() - cut;
    assert!(took <= ANOTHER_WITHIN, "after {took:?}");
    let next = group.leader().unwrap();
    group.pass(Duration::from_secs(5));
    assert_eq!(group.leader(), Some(next));
    for other in others(deaf) {
        group.sim.repair_oneway(other, format!("c{deaf}"));
    }
    group.pass(Duration::from_secs(10));
    assert_eq!(group.leader(), Some(next), "the former leader follows");
}

/// A silent leader must act as leader again when a majority answers, because no other controller may be
/// able to lead.
#[test]
fn a_leader_that_was_alone_continues_if_no_other_controller_can_lead() {
    let mut group = Group::form();
    let (_, leader) = group.leader().unwrap();
    for other in others(leader) {
        group.sim.crash(other);
    }
    group.pass(Duration::from_secs(5));
    // The restarted controller may lack entries that the leader has written since.
    let back = others(leader).remove(0);
    group.sim.bounce(back);
    let written = group.written(leader);
    group.until("further writes", |group| {
        let (_, now) = group.leader().unwrap();
        group.written(now) > written + 20
    });
}
