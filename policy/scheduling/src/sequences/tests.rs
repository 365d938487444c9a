use std::num::NonZeroU64;

use super::*;

mod properties;

const IDLE: Duration = Duration::from_secs(60);

fn id(number: u64) -> SequenceId {
    NonZeroU64::new(number).map(SequenceId::Number).unwrap()
}

/// Returns the position of a request in a sequence: `b` begins it, `e` ends it, and `-` does
/// neither.
fn place(sequence: u64, how: &str) -> InSequence {
    InSequence { id: id(sequence), start: how.contains('b'), end: how.contains('e') }
}

struct World {
    core: SequenceTable,
    now: Timestamp,
}

impl World {
    fn new(max: usize) -> Self {
        Self { core: SequenceTable::new(max, IDLE), now: Timestamp(1) }
    }

    fn tell(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.core.on_event(self.now, event, &mut actions);
        actions
    }

    fn arrive(&mut self, key: u64, sequence: u64, how: &str) -> Vec<Action> {
        self.tell(Event::Arrive { key: RequestKey(key), place: place(sequence, how) })
    }

    fn succeeded(&mut self, key: u64) -> Vec<Action> {
        self.tell(Event::Succeeded { key: RequestKey(key) })
    }
}

fn run(key: u64, reads: Option<u64>, writes: u64) -> Action {
    Action::Run { key: RequestKey(key), reads: reads.map(StateId), writes: StateId(writes) }
}

fn refuse(key: u64, why: SequenceRefusal) -> Action {
    Action::Refuse { key: RequestKey(key), why }
}

fn release(state: u64) -> Action {
    Action::Release { state: StateId(state) }
}

#[test]
fn each_request_reads_the_state_that_the_previous_one_wrote() {
    let mut world = World::new(2);
    assert_eq!(world.arrive(1, 7, "b"), [run(1, None, 1)]);
    assert_eq!((world.arrive(2, 7, "-"), world.arrive(3, 7, "e")), (vec![], vec![]));
    assert_eq!(world.arrive(4, 8, "be"), [run(4, None, 2)], "sequences do not wait for each other");
    assert_eq!(world.succeeded(1), [run(2, Some(1), 3)]);
    assert_eq!(world.succeeded(4), [release(2)]);
    assert_eq!(world.succeeded(2), [release(1), run(3, Some(3), 4)]);
    assert_eq!(world.succeeded(3), [release(3), release(4)]);
    assert_eq!((world.core.live(), world.arrive(5, 7, "-")), (0, vec![refuse(5, SequenceRefusal::Unknown)]));
}

#[test]
fn a_request_that_fails_leaves_the_state_as_it_was() {
    let mut world = World::new(1);
    world.arrive(1, 7, "b");
    world.succeeded(1);
    world.arrive(2, 7, "-");
    world.arrive(3, 7, "-");
    world.arrive(4, 7, "-");
    assert_eq!(world.tell(Event::Failed { key: RequestKey(3) }), [], "a waiting request was withdrawn");
    assert_eq!(world.tell(Event::Failed { key: RequestKey(2) }), [run(4, Some(1), 3)]);
    assert_eq!(world.succeeded(4), [release(1)]);
}

#[test]
fn a_request_that_restarts_a_sequence_releases_the_old_state_first() {
    let mut world = World::new(1);
    world.arrive(1, 7, "b");
    world.succeeded(1);
    assert_eq!(world.arrive(2, 7, "b"), [release(1), run(2, None, 2)]);
    world.arrive(3, 7, "-");
    world.arrive(4, 7, "b");
    let failed = world.tell(Event::Failed { key: RequestKey(2) });
    assert_eq!(failed, [refuse(3, SequenceRefusal::Unknown), run(4, None, 3)]);
}

#[test]
fn requests_for_a_lost_sequence_are_refused_until_it_restarts() {
    let mut world = World::new(1);
    world.arrive(1, 7, "b");
    world.succeeded(1);
    world.arrive(2, 7, "-");
    world.arrive(3, 7, "-");
    let lost = world.tell(Event::Lost { key: RequestKey(2) });
    assert_eq!(lost, [release(1), refuse(3, SequenceRefusal::Lost)]);
    assert_eq!(world.arrive(4, 7, "-"), [refuse(4, SequenceRefusal::Lost)]);
    assert_eq!(world.arrive(5, 7, "b"), [run(5, None, 3)]);
    world.succeeded(5);
    assert_eq!(world.tell(Event::StateLost { state: StateId(3) }), [release(3)]);
    assert_eq!(world.arrive(6, 7, "-"), [refuse(6, SequenceRefusal::Lost)]);
    assert_eq!(world.core.counts(), SequenceTotals { idle: 0, lost: 2 });
    world.now = world.now + IDLE;
    assert_eq!(world.arrive(7, 7, "-"), [refuse(7, SequenceRefusal::Unknown)]);
}

#[test]
fn an_idle_sequence_expires_and_a_running_one_does_not() {
    let mut world = World::new(2);
    world.arrive(1, 7, "b");
    world.succeeded(1);
    world.arrive(2, 8, "b");
    assert_eq!(world.core.next_wake(), Some(world.now + IDLE));
    world.now = world.now + IDLE;
    assert_eq!(world.tell(Event::Tick), [release(1)]);
    assert_eq!((world.core.live(), world.core.counts()), (1, SequenceTotals { idle: 1, lost: 0 }));
    assert_eq!(world.succeeded(2), []);
    assert_eq!(world.core.next_wake(), Some(world.now + IDLE), "from the end of the last request");
    assert_eq!(world.arrive(3, 7, "-"), [refuse(3, SequenceRefusal::Unknown)]);
}

#[test]
fn requests_beyond_each_bound_are_refused() {
    let mut world = World::new(1);
    assert_eq!(world.arrive(1, 7, "b"), [run(1, None, 1)]);
    assert_eq!(world.arrive(2, 8, "b"), [refuse(2, SequenceRefusal::TableFull)]);
    for key in 0..WAITING_MAX as u64 {
        assert_eq!(world.arrive(10 + key, 7, "-"), []);
    }
    assert_eq!(world.arrive(3, 7, "-"), [refuse(3, SequenceRefusal::QueueFull)]);
    world.succeeded(1);
    assert_eq!(world.arrive(4, 7, "-"), [], "one request has left the queue");
}
