use super::*;

const MS: u64 = 1_000_000;

fn function(in_flight_max: u32) -> Admission {
    let deadline = Some(Duration::from_millis(10));
    Admission::new(Config { in_flight_max, deadline, idempotent: Idempotence::Yes })
}

fn step(function: &mut Admission, at_ms: u64, event: Event) -> Vec<Action> {
    let mut actions = Vec::new();
    function.on_event(Timestamp(at_ms * MS), event, &mut actions);
    actions
}

fn arrive(function: &mut Admission, at_ms: u64, key: u64, timeout_ms: u64) -> Vec<Action> {
    let timeout = Duration::from_millis(timeout_ms);
    let accepted = Timestamp(at_ms * MS);
    let key = RequestKey(key);
    let counted = false;
    step(function, at_ms, Event::Arrive { key, accepted, timeout, attempts_left: 3, counted })
}

fn completed(key: u64, ran_us: u64) -> Event {
    Event::Completed { key: RequestKey(key), billed: Duration::from_micros(ran_us) }
}

fn failed(key: u64, reason: Reason, may_have_executed: bool) -> Action {
    Action::Fail { key: RequestKey(key), reason, may_have_executed }
}

const fn withdraw(key: u64) -> Action {
    Action::Withdraw { key: RequestKey(key) }
}

#[test]
fn a_completed_request_is_answered_and_billed_by_the_started_millisecond() {
    let mut function = function(8);
    let attempts = AttemptRecord::new(3, Idempotence::Yes);
    assert_eq!(arrive(&mut function, 0, 1, 100), [Action::Enqueue { key: RequestKey(1), attempts }]);
    arrive(&mut function, 0, 2, 100);
    assert_eq!(step(&mut function, 10, completed(1, 1001)), [Action::Answer { key: RequestKey(1) }]);
    assert_eq!(step(&mut function, 11, completed(2, 1000)), [Action::Answer { key: RequestKey(2) }]);
    let expected =
        FunctionTotals { completed: 2, in_time: 1, scored: 2, billed_ms: 3, ..FunctionTotals::default() };
    assert_eq!(function.score(), expected);
    assert_eq!(function.next_wake(), None);
}

#[test]
fn a_request_rerun_for_lost_outputs_is_counted_and_charged_once() {
    let mut function = function(8);
    arrive(&mut function, 0, 1, 100);
    step(&mut function, 2, completed(1, 1500));
    let once = function.score();
    for (key, timeout_ms) in [(2, 100), (3, 5)] {
        let accepted = Timestamp(3 * MS);
        let timeout = Duration::from_millis(timeout_ms);
        let key = RequestKey(key);
        let counted = true;
        step(&mut function, 3, Event::Arrive { key, accepted, timeout, attempts_left: 2, counted });
    }
    assert_eq!(step(&mut function, 5, completed(2, 1500)), [Action::Answer { key: RequestKey(2) }]);
    assert_eq!(function.score(), once);
    let late = [failed(3, Reason::TimedOut, false), withdraw(3)];
    assert_eq!(step(&mut function, 9, Event::Tick), late);
    assert_eq!(
        function.score(),
        FunctionTotals { expired: 1, ..once },
        "n and m already include the request"
    );
}

#[test]
fn requests_beyond_the_in_flight_bound_are_refused() {
    let mut function = function(1);
    arrive(&mut function, 0, 1, 100);
    assert_eq!(arrive(&mut function, 0, 2, 100), [failed(2, Reason::QueueFull, false)]);
    step(&mut function, 1, completed(1, 1));
    assert!(matches!(arrive(&mut function, 1, 3, 100)[..], [Action::Enqueue { .. }]));
}

#[test]
fn a_request_expires_at_its_deadline_and_its_late_end_is_dropped() {
    let mut function = function(8);
    arrive(&mut function, 0, 1, 50);
    arrive(&mut function, 0, 2, 50);
    step(&mut function, 1, Event::Dispatched { key: RequestKey(2) });
    assert_eq!(function.next_wake(), Some(Timestamp(50 * MS)));
    assert_eq!(step(&mut function, 49, Event::Tick), []);
    let expired =
        [failed(1, Reason::TimedOut, false), withdraw(1), failed(2, Reason::TimedOut, true), withdraw(2)];
    assert_eq!(step(&mut function, 50, Event::Tick), expired);
    assert_eq!(step(&mut function, 51, completed(2, 1)), []);
    let expected = FunctionTotals { expired: 2, scored: 2, ..FunctionTotals::default() };
    assert_eq!(function.score(), expected);
}

#[test]
fn a_request_without_time_left_expires_at_once() {
    let mut function = function(8);
    assert_eq!(arrive(&mut function, 5, 1, 0), [failed(1, Reason::TimedOut, false)]);
    assert_eq!((function.score().expired, function.in_flight()), (1, 0));
}

#[test]
fn a_cancelled_or_failed_request_is_not_scored() {
    let mut function = function(8);
    arrive(&mut function, 0, 1, 50);
    arrive(&mut function, 0, 2, 50);
    assert_eq!(step(&mut function, 1, Event::Cancel { key: RequestKey(1) }), [withdraw(1)]);
    let quarantined =
        Event::Failed { key: RequestKey(2), reason: Reason::Quarantined, may_have_executed: true };
    assert_eq!(step(&mut function, 1, quarantined), [failed(2, Reason::Quarantined, true)]);
    assert_eq!(step(&mut function, 2, quarantined), []);
    assert_eq!(function.score(), FunctionTotals { cancelled: 1, failed: 1, ..FunctionTotals::default() });
}

#[test]
fn a_lost_node_fails_every_request() {
    let mut function = function(8);
    arrive(&mut function, 0, 1, 50);
    arrive(&mut function, 0, 2, 50);
    step(&mut function, 1, Event::Dispatched { key: RequestKey(2) });
    let lost = [failed(1, Reason::Internal, false), failed(2, Reason::Internal, true)];
    assert_eq!(step(&mut function, 2, Event::NodeLost { reason: Reason::Internal }), lost);
    assert_eq!((function.in_flight(), function.next_wake()), (0, None));
}

#[test]
fn a_retiring_function_refuses_and_ends_with_its_last_answer() {
    let mut function = function(8);
    arrive(&mut function, 0, 1, 50);
    assert_eq!(step(&mut function, 1, Event::Retire), []);
    let refused = failed(2, Reason::FunctionNotReady, false);
    assert_eq!(arrive(&mut function, 1, 2, 50), [refused]);
    let last = [Action::Answer { key: RequestKey(1) }, Action::Retired];
    assert_eq!(step(&mut function, 2, completed(1, 1)), last);
}

#[test]
fn requests_without_an_objective_are_not_scored() {
    let config = Config { in_flight_max: 8, deadline: None, idempotent: Idempotence::No };
    let mut function = Admission::new(config);
    arrive(&mut function, 0, 1, 50);
    step(&mut function, 1, completed(1, 1));
    assert_eq!((function.score().completed, function.score().scored), (1, 0));
}
