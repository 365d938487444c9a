//! Tests that a controller with a corrupt state stops, and that the other controllers continue.

use std::num::NonZeroU64;

use millrace_cluster_state::{CallerName, Proposal, State, StateCommand, UnixMillis};

use crate::plain::Group;
use crate::planted::name;

/// Log entries between two digests; a run with one digest per thousand entries takes long.
const DIGEST_EVERY: NonZeroU64 = NonZeroU64::new(50).unwrap();

/// Corrupts a state by moving the clock by centuries: a refused command changes only the clock.
fn corrupt(state: &mut State) {
    let refused = Proposal {
        stamp: UnixMillis(10_000_000_000_000),
        caller: CallerName("corruption".into()),
        idempotency: None,
        command: StateCommand::RemoveNode { name: name("none") },
    };
    assert!(state.apply(0, &refused).is_err());
}

#[test]
fn a_controller_with_a_diverged_state_stops_and_the_others_continue() {
    let mut group = Group::form_opening(|id, store| {
        store.machine.set_digest_every(DIGEST_EVERY);
        if id == 3 {
            store.machine.corrupt(corrupt);
        }
    });
    group.until("stopping", |group| group.diverged(3).is_some());
    let before = [1, 2].map(|id| group.written(id));
    group.until("writes without it", |group| {
        [1, 2].iter().zip(before).all(|(&id, before)| group.written(id) > before + 3 * DIGEST_EVERY.get())
    });
    assert_eq!([1, 2].map(|id| group.diverged(id)), [None, None]);
    assert!(group.leader().is_some_and(|(_, leader)| leader != 3));
}

#[test]
fn controllers_with_equal_states_all_continue() {
    let mut group = Group::form_opening(|_, store| store.machine.set_digest_every(DIGEST_EVERY));
    group.until("several digests", |group| {
        [1, 2, 3].iter().all(|&id| group.written(id) > 6 * DIGEST_EVERY.get())
    });
    assert_eq!([1, 2, 3].map(|id| group.diverged(id)), [None; 3]);
}
