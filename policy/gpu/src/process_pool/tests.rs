use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use millrace_core::attempts::Idempotence;

const SECOND: Duration = Duration::from_secs(1);

struct World {
    pool: ProcessPool,
    now: Timestamp,
}

impl World {
    fn new(processes: u32) -> Self {
        let mut world = Self { pool: ProcessPool::new(processes, 0, 7), now: Timestamp(1) };
        world.tell(Event::Start);
        world
    }

    fn up(processes: u32) -> Self {
        let mut world = Self::new(processes);
        for place in 0..processes {
            world.tell(Event::Ready { place: ProcessSlot(place), incarnation: Incarnation(1) });
        }
        world
    }

    fn tell(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.pool.on_event(self.now, event, &mut actions);
        actions
    }

    fn enqueue(&mut self, key: u64, idempotent: Idempotence) -> Vec<Action> {
        let attempts = AttemptRecord::new(3, idempotent);
        let deadline = self.now + 60 * SECOND;
        self.tell(Event::Enqueue { key: RequestKey(key), attempts, deadline })
    }
}

fn run(place: u32, key: u64, attempt: u32) -> Action {
    Action::Run { place: ProcessSlot(place), key: RequestKey(key), attempt }
}

fn exited(place: u32, incarnation: u64) -> Event {
    Event::Exited { place: ProcessSlot(place), incarnation: Incarnation(incarnation) }
}

fn ready(place: u32, incarnation: u64) -> Event {
    Event::Ready { place: ProcessSlot(place), incarnation: Incarnation(incarnation) }
}

fn spawn(place: u32, incarnation: u64) -> Action {
    Action::Spawn { place: ProcessSlot(place), incarnation: Incarnation(incarnation) }
}

fn kill(place: u32, why: KillReason) -> Action {
    Action::Kill { place: ProcessSlot(place), why }
}

fn forget(key: u64) -> Action {
    Action::Forget { key: RequestKey(key) }
}

fn fail(key: u64, reason: Reason, may_have_executed: bool) -> Action {
    Action::Fail { key: RequestKey(key), reason, may_have_executed }
}

#[test]
fn each_process_has_one_request_and_the_others_wait_in_order() {
    let mut world = World::up(2);
    assert_eq!(world.enqueue(1, Idempotence::Yes), [run(0, 1, 1)]);
    assert_eq!(world.enqueue(2, Idempotence::Yes), [run(1, 2, 1)]);
    assert_eq!((world.enqueue(3, Idempotence::Yes), world.enqueue(4, Idempotence::Yes)), (vec![], vec![]));
    let returned = |place, key| Event::Returned {
        place: ProcessSlot(place),
        incarnation: Incarnation(1),
        key: RequestKey(key),
    };
    assert_eq!(world.tell(returned(1, 2)), [run(1, 3, 1)]);
    assert_eq!(world.tell(returned(1, 2)), [], "the process no longer has request 2");
    assert_eq!(world.tell(Event::Withdraw { key: RequestKey(4) }), [forget(4)]);
    assert_eq!(world.tell(returned(0, 1)), []);
}

#[test]
fn a_dying_process_has_its_request_run_again_or_refused() {
    let mut world = World::up(1);
    world.enqueue(1, Idempotence::No);
    world.enqueue(2, Idempotence::Yes);
    // The first restart is immediate.
    assert_eq!(world.tell(exited(0, 1)), [fail(1, Reason::ExecutorLost, true), spawn(0, 2)]);
    assert_eq!(world.tell(ready(0, 2)), [run(0, 2, 1)]);
    assert_eq!(world.tell(exited(0, 2)), []);
    world.now = world.pool.next_wake().unwrap();
    assert_eq!(world.tell(Event::Tick), [spawn(0, 3)]);
    assert_eq!(world.tell(ready(0, 3)), [run(0, 2, 2)]);
    assert_eq!(world.tell(exited(0, 3)), [fail(2, Reason::Quarantined, true)]);
    assert_eq!(world.pool.restarts(), 2, "the third restart still waits");
}

#[test]
fn a_process_with_an_abandoned_request_has_a_grace_and_is_replaced_at_once() {
    let mut world = World::up(1);
    world.enqueue(1, Idempotence::Yes);
    world.enqueue(2, Idempotence::Yes);
    // The client of request 1 disconnects.
    assert_eq!(world.tell(Event::Withdraw { key: RequestKey(1) }), [forget(1)]);
    assert_eq!(world.pool.next_wake(), Some(Timestamp(1) + GRACE));
    world.now = Timestamp(1) + GRACE;
    assert_eq!(world.tell(Event::Tick), [kill(0, KillReason::Abandoned)]);
    assert_eq!(world.tell(exited(0, 1)), [spawn(0, 2)]);
    assert_eq!(world.tell(ready(0, 2)), [run(0, 2, 1)]);
    // The same at a request's deadline. Every replacement is immediate, because the process is not
    // at fault.
    world.now = world.pool.next_wake().unwrap();
    assert_eq!(world.tell(Event::Tick), [forget(2)]);
    world.now = world.now + GRACE;
    assert_eq!(world.tell(Event::Tick), [kill(0, KillReason::Abandoned)]);
    assert_eq!(world.tell(exited(0, 2)), [spawn(0, 3)]);
}

#[test]
fn a_process_that_answers_in_its_grace_goes_on() {
    let mut world = World::up(1);
    world.enqueue(1, Idempotence::Yes);
    world.tell(Event::Withdraw { key: RequestKey(1) });
    world.enqueue(2, Idempotence::Yes);
    let place = ProcessSlot(0);
    let incarnation = Incarnation(1);
    assert_eq!(world.pool.running(place, incarnation), Some(RequestKey(1)));
    let returned = Event::Returned { place, incarnation, key: RequestKey(1) };
    assert_eq!(world.tell(returned), [run(0, 2, 1)]);
}

#[test]
fn a_process_that_dies_with_an_abandoned_request_fails_no_request() {
    let mut world = World::up(1);
    world.enqueue(1, Idempotence::Yes);
    world.tell(Event::Withdraw { key: RequestKey(1) });
    assert_eq!(world.tell(exited(0, 1)), [spawn(0, 2)]);
    assert_eq!(world.tell(ready(0, 2)), []);
}

#[test]
fn a_request_withdrawn_after_its_process_died_is_not_run_again() {
    let mut world = World::up(1);
    // The first death restarts the process at once, the second after a wait.
    world.enqueue(1, Idempotence::Yes);
    assert_eq!(world.tell(exited(0, 1)), [spawn(0, 2)]);
    assert_eq!(world.tell(Event::Withdraw { key: RequestKey(1) }), [forget(1)]);
    assert_eq!(world.tell(ready(0, 2)), []);
    world.enqueue(2, Idempotence::Yes);
    assert_eq!(world.tell(exited(0, 2)), []);
    assert_eq!(world.tell(Event::Withdraw { key: RequestKey(2) }), [forget(2)]);
    world.now = world.pool.next_wake().unwrap();
    assert_eq!(world.tell(Event::Tick), [spawn(0, 3)]);
    assert_eq!(world.tell(ready(0, 3)), []);
}

#[test]
fn a_request_running_at_the_stop_is_not_run_by_a_process_that_becomes_ready_later() {
    let mut world = World::new(2);
    world.tell(ready(0, 1));
    assert_eq!(world.enqueue(1, Idempotence::Yes), [run(0, 1, 1)]);
    assert_eq!(world.enqueue(2, Idempotence::Yes), []);
    let stopped = [forget(2), forget(1), kill(0, KillReason::Stop), kill(1, KillReason::Stop)];
    assert_eq!(world.tell(Event::Stop), stopped);
    assert_eq!(
        world.pool.running(ProcessSlot(0), Incarnation(1)),
        None,
        "the answer of request 1 is ignored"
    );
    assert_eq!(world.tell(exited(0, 1)), []);
    assert_eq!(world.tell(ready(1, 1)), [], "the process became ready before it was killed");
    assert!(!world.pool.is_over());
    assert_eq!(world.tell(exited(1, 1)), []);
    assert_eq!((world.pool.waiting.len(), world.pool.next_wake()), (0, None));
    assert!(world.pool.is_over());
}

#[test]
fn a_stopped_pool_is_over_when_its_last_process_has_ended() {
    assert!(!World::new(0).pool.is_over());
    let mut world = World::up(2);
    for incarnation in [1, 2] {
        assert!(!world.tell(exited(0, incarnation)).contains(&spawn(0, 3)));
    }
    // Process 0 waits to be started again, and process 1 runs.
    assert_eq!(world.tell(Event::Stop), [kill(1, KillReason::Stop)]);
    assert!(!world.pool.is_over());
    assert_eq!(world.tell(exited(1, 1)), []);
    assert!(world.pool.is_over());
}

#[test]
fn a_request_that_cannot_be_handed_over_is_refused_and_its_process_goes_on() {
    let mut world = World::up(1);
    let place = ProcessSlot(0);
    let incarnation = Incarnation(1);
    let unsent = |key| Event::Unsent { place, incarnation, key: RequestKey(key) };
    world.enqueue(1, Idempotence::No);
    world.enqueue(2, Idempotence::Yes);
    // Request 1 has not run and may be tried by another worker. The process runs the next request.
    assert_eq!(world.tell(unsent(1)), [fail(1, Reason::QueueFull, false), run(0, 2, 1)]);
    assert_eq!(world.tell(unsent(1)), [], "the process has another request");
    assert_eq!(world.tell(Event::Withdraw { key: RequestKey(2) }), [forget(2)]);
    world.enqueue(3, Idempotence::Yes);
    assert_eq!(world.tell(unsent(2)), [run(0, 3, 1)]);
    // A request may have run in an earlier process that died.
    world.tell(exited(0, 1));
    assert_eq!(world.tell(ready(0, 2)), [run(0, 3, 2)]);
    let unsent = Event::Unsent { place, incarnation: Incarnation(2), key: RequestKey(3) };
    assert_eq!(world.tell(unsent), [fail(3, Reason::QueueFull, true)]);
}

#[test]
fn a_given_up_process_is_replaced_at_once_and_its_request_is_not_quarantined() {
    let mut world = World::up(1);
    let given_up = |incarnation| Event::ResourceExhausted {
        place: ProcessSlot(0),
        incarnation: Incarnation(incarnation),
    };
    let attempts = AttemptRecord::new(9, Idempotence::Yes);
    let key = RequestKey(1);
    let deadline = world.now + 60 * SECOND;
    world.tell(Event::Enqueue { key, attempts, deadline });
    for incarnation in 1..=u64::from(2 * FAILED_STARTS_MAX) {
        assert_eq!(world.tell(given_up(incarnation)), [spawn(0, incarnation + 1)]);
        let again = run(0, 1, incarnation as u32 + 1);
        assert_eq!(world.tell(ready(0, incarnation + 1)), [again], "not quarantined");
    }
    // A request that is not idempotent is refused, because a run may have happened.
    let mut world = World::up(1);
    world.enqueue(1, Idempotence::No);
    assert_eq!(world.tell(given_up(1)), [fail(1, Reason::ExecutorLost, true), spawn(0, 2)]);
    // A given-up start counts as a failed start.
    assert_eq!(world.tell(given_up(2)), [spawn(0, 3)]);
    assert_eq!(world.tell(given_up(3)), []);
}

#[test]
fn a_program_is_up_once_a_process_is_ready_and_failing_while_none_starts() {
    let mut world = World::new(2);
    assert_eq!(world.pool.health(), ProgramHealth::Starting);
    world.tell(exited(0, 1));
    assert_eq!(world.pool.health(), ProgramHealth::Starting, "a single failed start may be an accident");
    for _ in 1..FAILED_STARTS_MAX {
        world.now = world.now + RESTARTS.ceiling;
        world.tell(Event::Tick);
        let incarnation = world.pool.processes[0].incarnation;
        world.tell(Event::Exited { place: ProcessSlot(0), incarnation });
    }
    assert_eq!(world.pool.health(), ProgramHealth::Failing);
    world.tell(ready(1, 1));
    assert_eq!(world.pool.health(), ProgramHealth::Up);
    // A process that never completes its handshake.
    let mut world = World::new(1);
    world.now = world.pool.next_wake().unwrap();
    world.tell(Event::Tick);
    assert_eq!(world.pool.health(), ProgramHealth::Failing);
    world.tell(exited(0, 1));
    world.tell(ready(0, 2));
    assert_eq!(world.pool.health(), ProgramHealth::Up);
}

#[test]
fn an_expired_request_is_not_started() {
    let mut world = World::new(1);
    world.enqueue(1, Idempotence::No);
    world.now = world.now + 30 * SECOND;
    world.tell(Event::Tick);
    world.enqueue(2, Idempotence::No);
    world.now = Timestamp(1) + 60 * SECOND;
    world.tell(exited(0, 1));
    assert_eq!(world.tell(ready(0, 2)), [forget(1), run(0, 2, 1)], "request 1 has expired");
}

#[test]
fn a_program_that_does_not_start_has_its_requests_refused() {
    let mut world = World::new(1);
    world.enqueue(1, Idempotence::Yes);
    for incarnation in 1..FAILED_STARTS_MAX.into() {
        world.tell(exited(0, incarnation));
        world.now = world.pool.next_wake().unwrap();
        world.tell(Event::Tick);
    }
    let last = world.tell(exited(0, FAILED_STARTS_MAX.into()));
    assert_eq!(last, [fail(1, Reason::FunctionNotReady, false)]);
    assert_eq!(world.enqueue(2, Idempotence::Yes), [fail(2, Reason::FunctionNotReady, false)]);
    world.now = world.pool.next_wake().unwrap();
    world.tell(Event::Tick);
    world.tell(ready(0, u64::from(FAILED_STARTS_MAX) + 1));
    assert_eq!(world.enqueue(3, Idempotence::Yes), [run(0, 3, 1)]);
}

#[test]
fn a_start_that_takes_too_long_is_given_up() {
    let mut world = World::new(1);
    world.now = world.pool.next_wake().unwrap();
    assert_eq!(world.tell(Event::Tick), [kill(0, KillReason::Silent)]);
    assert_eq!(world.tell(ready(0, 1)), [], "too late");
    assert_eq!(world.tell(exited(0, 1)), [spawn(0, 2)]);
}

#[test]
fn the_queue_is_bounded_and_no_process_starts_after_the_stop() {
    let mut world = World::new(1);
    for key in 0..WAITING_MAX as u64 {
        assert_eq!(world.enqueue(key, Idempotence::Yes), []);
    }
    assert_eq!(world.enqueue(9999, Idempotence::Yes), [fail(9999, Reason::QueueFull, false)]);
    let waited = (0..WAITING_MAX as u64).map(forget);
    let stopped: Vec<_> = waited.chain([kill(0, KillReason::Stop)]).collect();
    assert_eq!(world.tell(Event::Stop), stopped);
    assert_eq!(world.tell(exited(0, 1)), []);
    assert_eq!(world.pool.next_wake(), None);
}

proptest! {
    /// For any sequence of events: each request ends once, no process has two requests, no running
    /// or waiting request is forgotten, and no ended request is run again.
    #[test]
    fn every_request_ends_once(steps in prop::collection::vec((0u8..10, 0u32..3, 0u64..4000), 1..200)) {
        let mut world = World::new(3);
        let mut incarnations = [1u64; 3];
        let mut running: BTreeMap<u32, u64> = BTreeMap::new();
        let mut open: BTreeMap<u64, bool> = BTreeMap::new();
        let mut next = 0;
        let mut stopped = false;
        let mut spawned = 0;
        for (what, place, ms) in steps {
            world.now = world.now + Duration::from_millis(ms);
            let incarnation = incarnations[place as usize];
            let actions = match what {
                0 | 1 => {
                    next += 1;
                    open.insert(next, true);
                    world.enqueue(next, if what == 0 { Idempotence::Yes } else { Idempotence::No })
                }
                2 => world.tell(ready(place, incarnation)),
                3 => {
                    running.remove(&place);
                    world.tell(exited(place, incarnation))
                }
                4 => match world.pool.running(ProcessSlot(place), Incarnation(incarnation)) {
                    Some(key) => {
                        open.remove(&key.0);
                        running.remove(&place);
                        let place = ProcessSlot(place);
                        let incarnation = Incarnation(incarnation);
                        world.tell(Event::Returned { place, incarnation, key })
                    }
                    None => vec![],
                },
                5 => match open.keys().nth(ms as usize % open.len().max(1)).copied() {
                    Some(key) => world.tell(Event::Withdraw { key: RequestKey(key) }),
                    None => vec![],
                },
                // Rare, because a stop ends the test's activity.
                6 if ms < 100 => {
                    stopped = true;
                    world.tell(Event::Stop)
                }
                7 => {
                    running.remove(&place);
                    let place = ProcessSlot(place);
                    let incarnation = Incarnation(incarnation);
                    world.tell(Event::ResourceExhausted { place, incarnation })
                }
                8 => match world.pool.running(ProcessSlot(place), Incarnation(incarnation)) {
                    Some(key) => {
                        running.remove(&place);
                        let place = ProcessSlot(place);
                        let incarnation = Incarnation(incarnation);
                        world.tell(Event::Unsent { place, incarnation, key })
                    }
                    None => vec![],
                },
                _ => world.tell(Event::Tick),
            };
            for action in actions {
                let begins = matches!(action, Action::Run { .. } | Action::Spawn { .. });
                prop_assert!(!stopped || !begins);
                match action {
                    Action::Spawn { place, incarnation } => {
                        spawned += 1;
                        prop_assert_eq!(incarnation.0, incarnations[place.0 as usize] + 1);
                        incarnations[place.0 as usize] = incarnation.0;
                    }
                    Action::Run { place, key, .. } => {
                        prop_assert!(open.contains_key(&key.0));
                        prop_assert!(running.values().all(|&other| other != key.0));
                        prop_assert!(running.insert(place.0, key.0).is_none());
                    }
                    Action::Fail { key, .. } => prop_assert!(open.remove(&key.0).is_some()),
                    // The Function actor has answered a withdrawn, expired or stopped request.
                    Action::Forget { key } => {
                        prop_assert!(open.remove(&key.0).is_some());
                        running.retain(|_, other| *other != key.0);
                    }
                    Action::Kill { place, .. } => drop(running.remove(&place.0)),
                }
            }
            prop_assert_eq!(open.len(), running.len() + world.pool.waiting.len());
            prop_assert_eq!(world.pool.restarts(), spawned);
        }
    }
}
