use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::clock::Sleeper;

const PATIENCE: Duration = Duration::from_secs(60);

/// Moves when the test says so; a wait takes its time in the runtime, which is paused.
#[derive(Debug, Default)]
struct Moved(AtomicU64);

impl Clock for Moved {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.load(Ordering::Relaxed))
    }

    fn wake_at(&self, at: Timestamp, _: Sleeper) -> Timestamp {
        at
    }

    fn sleep_for(&self, span: Duration) -> Duration {
        span
    }
}

fn gate() -> (Gate, Digest) {
    gate_with(Arc::default())
}

fn gate_with(clock: Arc<Moved>) -> (Gate, Digest) {
    (Gate::new(clock), Digest::of(b"model"))
}

fn reason(outcome: Result<Held, Failure>) -> Reason {
    outcome.map(|_| ()).unwrap_err().reason
}

#[tokio::test(start_paused = true)]
async fn a_model_that_is_here_is_held_at_once_and_stays_as_long() {
    let (gate, model) = gate();
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::FunctionNotReady);
    assert!(!gate.arrived(model), "it had never left");
    let held = gate.enter(model, PATIENCE).await.unwrap();
    assert_eq!((held.waited(), gate.unused(), gate.try_leave(model)), (Duration::ZERO, vec![], false));
    drop(held);
    assert_eq!(gate.unused().len(), 1);
    assert!(gate.try_leave(model) && !gate.try_leave(model));
}

#[tokio::test(start_paused = true)]
async fn a_request_for_one_that_is_away_wakes_the_tier_and_has_it_as_soon_as_it_comes() {
    let clock = Arc::new(Moved::default());
    let (gate, model) = gate_with(Arc::clone(&clock));
    gate.arrived(model);
    assert!(gate.try_leave(model));
    let asks = tokio::spawn({
        let gate = gate.clone();
        async move { gate.enter(model, PATIENCE).await }
    });
    gate.wanted().await;
    assert_eq!(gate.asked(), [model]);
    clock.0.store(30_000_000, Ordering::Relaxed);
    assert!(gate.arrived(model), "a cold start");
    // Before the request has gone on, it counts.
    assert!(!gate.try_leave(model));
    let held = asks.await.unwrap().unwrap();
    assert_eq!(held.waited(), Duration::from_millis(30));
    assert_eq!(gate.asked(), []);
    drop(held);
    assert!(gate.try_leave(model));
}

#[tokio::test(start_paused = true)]
async fn waits_end_with_a_reason_and_leave_nothing() {
    let (gate, model) = gate();
    gate.arrived(model);
    gate.try_leave(model);
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::TimedOut);
    let ask = || {
        let gate = gate.clone();
        tokio::spawn(async move { gate.enter(model, PATIENCE).await })
    };
    let (refused, later) = (ask(), ask());
    gate.wanted().await;
    tokio::task::yield_now().await;
    gate.refuse(model, "the file is damaged".to_owned());
    assert_eq!(reason(refused.await.unwrap()), Reason::FunctionNotReady);
    assert_eq!(reason(later.await.unwrap()), Reason::FunctionNotReady);
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::FunctionNotReady);
    gate.arrived(model);
    assert!(gate.try_leave(model), "nobody who gave up is counted");
    let closed = ask();
    gate.wanted().await;
    gate.close();
    assert_eq!(reason(closed.await.unwrap()), Reason::ShuttingDown);
    assert_eq!(gate.state().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn one_that_goes_and_comes_again_counts_those_that_had_it_before() {
    let (gate, model) = gate();
    gate.arrived(model);
    let held = gate.enter(model, PATIENCE).await.unwrap();
    gate.forget(model);
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::FunctionNotReady);
    gate.arrived(model);
    assert!(!gate.try_leave(model));
    gate.forget(model);
    drop(held);
    assert!(gate.state().models.is_empty());
}

#[tokio::test(start_paused = true)]
async fn no_more_wait_than_may() {
    let (gate, model) = gate();
    gate.arrived(model);
    gate.try_leave(model);
    let waits: Vec<_> = (0..WAITING_MAX).map(|_| gate.begin(model).unwrap().unwrap()).collect();
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::QueueFull);
    drop(waits);
    assert!(gate.begin(model).unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn the_tier_hears_of_one_that_falls_idle_where_it_wants_room() {
    let (gate, model) = gate();
    gate.arrived(model);
    drop(gate.enter(model, PATIENCE).await.unwrap());
    let held = gate.enter(model, PATIENCE).await.unwrap();
    assert_eq!(gate.unused(), []);
    drop(held);
    gate.wanted().await;
    assert_eq!(gate.unused().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_hint_wakes_the_tier_once_and_only_where_nobody_waits() {
    let (gate, model) = gate();
    assert_eq!(gate.hint(model), Hinted::Busy, "it is not served here");
    gate.arrived(model);
    assert_eq!((gate.hint(model), gate.take_hint()), (Hinted::Here, None));
    assert!(gate.try_leave(model));
    assert_eq!(gate.hint(model), Hinted::Asked);
    gate.wanted().await;
    assert_eq!(gate.hint(model), Hinted::Busy, "the first was not heard yet");
    assert_eq!((gate.take_hint(), gate.take_hint(), gate.asked()), (Some(model), None, vec![]));
    assert!(!gate.arrived(model), "no request has met a cold start");

    let other = Digest::of(b"other");
    gate.arrived(other);
    assert!(gate.try_leave(model) && gate.try_leave(other));
    let asks = tokio::spawn({
        let gate = gate.clone();
        async move { gate.enter(other, PATIENCE).await }
    });
    gate.wanted().await;
    assert_eq!(gate.hint(model), Hinted::Busy, "a request waits");
    assert!(gate.arrived(other));
    asks.await.unwrap().unwrap();
    gate.close();
    assert_eq!(gate.hint(model), Hinted::Busy);
}
