use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::clock::Sleeper;

const PATIENCE: Duration = Duration::from_secs(60);

/// A clock that tests set. Waits last their time in the runtime, which is paused.
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

fn gate() -> (HostMemoryGate, Digest) {
    gate_with(Arc::default())
}

fn gate_with(clock: Arc<Moved>) -> (HostMemoryGate, Digest) {
    (HostMemoryGate::new(clock), Digest::of(b"model"))
}

fn reason(outcome: Result<HostPermit, Failure>) -> Reason {
    outcome.map(|_| ()).unwrap_err().reason
}

#[tokio::test(start_paused = true)]
async fn a_model_in_host_memory_is_reserved_at_once_and_stays_until_the_release() {
    let (gate, model) = gate();
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::FunctionNotReady);
    assert!(!gate.record_loaded(model), "a first load is no cold start");
    let held = gate.enter(model, PATIENCE).await.unwrap();
    assert_eq!((held.waited(), gate.idle_models(), gate.try_evict(model)), (Duration::ZERO, vec![], false));
    drop(held);
    assert_eq!(gate.idle_models().len(), 1);
    assert!(gate.try_evict(model) && !gate.try_evict(model));
}

#[tokio::test(start_paused = true)]
async fn a_request_for_an_evicted_model_wakes_the_tier_and_continues_once_the_model_arrives() {
    let clock = Arc::new(Moved::default());
    let (gate, model) = gate_with(Arc::clone(&clock));
    gate.record_loaded(model);
    assert!(gate.try_evict(model));
    let asks = tokio::spawn({
        let gate = gate.clone();
        async move { gate.enter(model, PATIENCE).await }
    });
    gate.wanted().await;
    assert_eq!(gate.awaited_models(), [model]);
    clock.0.store(30_000_000, Ordering::Relaxed);
    assert!(gate.record_loaded(model), "this is a cold start");
    // The waiting request counts as a user before it continues.
    assert!(!gate.try_evict(model));
    let held = asks.await.unwrap().unwrap();
    assert_eq!(held.waited(), Duration::from_millis(30));
    assert_eq!(gate.awaited_models(), []);
    drop(held);
    assert!(gate.try_evict(model));
}

#[tokio::test(start_paused = true)]
async fn waits_end_with_a_reason_and_leave_nothing() {
    let (gate, model) = gate();
    gate.record_loaded(model);
    gate.try_evict(model);
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::TimedOut);
    let ask = || {
        let gate = gate.clone();
        tokio::spawn(async move { gate.enter(model, PATIENCE).await })
    };
    let refused = ask();
    let later = ask();
    gate.wanted().await;
    tokio::task::yield_now().await;
    gate.refuse(model, "the file is damaged".to_owned());
    assert_eq!(reason(refused.await.unwrap()), Reason::FunctionNotReady);
    assert_eq!(reason(later.await.unwrap()), Reason::FunctionNotReady);
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::FunctionNotReady);
    gate.record_loaded(model);
    assert!(gate.try_evict(model), "requests that gave up are not counted");
    let closed = ask();
    gate.wanted().await;
    gate.close();
    assert_eq!(reason(closed.await.unwrap()), Reason::ShuttingDown);
    assert_eq!(gate.state().waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn a_model_that_is_served_again_still_counts_its_earlier_users() {
    let (gate, model) = gate();
    gate.record_loaded(model);
    let held = gate.enter(model, PATIENCE).await.unwrap();
    gate.forget(model);
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::FunctionNotReady);
    gate.record_loaded(model);
    assert!(!gate.try_evict(model));
    gate.forget(model);
    drop(held);
    assert!(gate.state().models.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_request_over_waiting_max_is_refused() {
    let (gate, model) = gate();
    gate.record_loaded(model);
    gate.try_evict(model);
    let waits: Vec<_> = (0..WAITING_MAX).map(|_| gate.begin(model).unwrap().unwrap()).collect();
    assert_eq!(reason(gate.enter(model, PATIENCE).await), Reason::QueueFull);
    drop(waits);
    assert!(gate.begin(model).unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn the_tier_is_woken_by_a_model_that_becomes_idle_if_it_needs_room() {
    let (gate, model) = gate();
    gate.record_loaded(model);
    drop(gate.enter(model, PATIENCE).await.unwrap());
    let held = gate.enter(model, PATIENCE).await.unwrap();
    assert_eq!(gate.idle_models(), []);
    drop(held);
    gate.wanted().await;
    assert_eq!(gate.idle_models().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_hint_wakes_the_tier_once_and_only_if_no_request_waits() {
    let (gate, model) = gate();
    assert_eq!(gate.hint(model), HintOutcome::Busy, "this worker does not serve the model");
    gate.record_loaded(model);
    assert_eq!((gate.hint(model), gate.take_hint()), (HintOutcome::Here, None));
    assert!(gate.try_evict(model));
    assert_eq!(gate.hint(model), HintOutcome::Asked);
    gate.wanted().await;
    assert_eq!(gate.hint(model), HintOutcome::Busy, "the tier has not taken the first hint");
    assert_eq!((gate.take_hint(), gate.take_hint(), gate.awaited_models()), (Some(model), None, vec![]));
    assert!(!gate.record_loaded(model), "no request waited, so this is no cold start");

    let other = Digest::of(b"other");
    gate.record_loaded(other);
    assert!(gate.try_evict(model) && gate.try_evict(other));
    let asks = tokio::spawn({
        let gate = gate.clone();
        async move { gate.enter(other, PATIENCE).await }
    });
    gate.wanted().await;
    assert_eq!(gate.hint(model), HintOutcome::Busy, "a request waits");
    assert!(gate.record_loaded(other));
    asks.await.unwrap().unwrap();
    gate.close();
    assert_eq!(gate.hint(model), HintOutcome::Busy);
}
