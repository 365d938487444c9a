//! A leader that others hear and that hears none of them makes room for one that does.

use std::time::Duration;

use crate::plain::Group;

/// What an operator is promised after a leader is lost (docs/operating.md, *What is promised*).
const ANOTHER_WITHIN: Duration = Duration::from_secs(2);

/// The others' names.
fn others(of: u64) -> Vec<String> {
    (1..=3).filter(|&id| id != of).map(|id| format!("c{id}")).collect()
}

#[test]
fn a_leader_that_cannot_hear_is_replaced_as_soon_as_one_that_is_gone() {
    let mut group = Group::form();
    let (_, deaf) = group.leader().unwrap();
    for other in others(deaf) {
        group.sim.partition_oneway(other, format!("c{deaf}"));
    }
    let cut = group.sim.elapsed();
    group.until("another leads", |group| group.leader().is_some_and(|(_, id)| id != deaf));
    let took = group.sim.elapsed() - cut;
    assert!(took <= ANOTHER_WITHIN, "after {took:?}");
    let next = group.leader().unwrap();
    group.pass(Duration::from_secs(5));
    assert_eq!(group.leader(), Some(next));
    for other in others(deaf) {
        group.sim.repair_oneway(other, format!("c{deaf}"));
    }
    group.pass(Duration::from_secs(10));
    assert_eq!(group.leader(), Some(next), "who comes back follows");
}

/// It must not keep quiet for good: nobody else may be able to lead.
#[test]
fn a_leader_that_was_alone_for_a_while_leads_on_where_nobody_else_can() {
    let mut group = Group::form();
    let (_, leader) = group.leader().unwrap();
    for other in others(leader) {
        group.sim.crash(other);
    }
    group.pass(Duration::from_secs(5));
    // The one that comes back may lack what the leader had written since.
    let back = others(leader).remove(0);
    group.sim.bounce(back);
    let written = group.written(leader);
    group.until("writes go on", |group| {
        let (_, now) = group.leader().unwrap();
        group.written(now) > written + 20
    });
}
