use millrace_core::attempts::ReturnReason;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::models::ModelSlot;
use super::queue::WaitingRequest;
use super::seats::Seat;
use super::size_rank::SizeRank;
use super::*;
use millrace_core::attempts::{AttemptRecord, Idempotence};
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex};
use millrace_memory::eviction::Eviction;
use millrace_transfers::paths::PairRate;
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Incarnation, ModelId, Priority, Reason, SloCounts};

mod blocks;
mod bound;
mod change;
mod cost;
mod eviction_ranks;
mod glance;
mod inputs;
mod lalb;
mod likely;
mod open_seats;
mod priority;
mod properties;
mod recovery;
mod searches;
mod sliced;
mod suspects;
mod torpor;
mod unified;
mod warm;

const A: ModelId = ModelId(0);
const B: ModelId = ModelId(1);
/// Model that fits only GPUs of 64 MiB.
const LARGE: ModelId = ModelId(2);
/// Model that fits no GPU.
const HUGE: ModelId = ModelId(3);

const F: FunctionIndex = FunctionIndex(0);

const MS: u64 = 1_000_000;

/// Returns a request for each of these models that could wait and is older than all others.
pub(super) fn requests_of(view: &DispatchView<'_>, models: &[ModelSlot]) -> Vec<(WaitingRequest, ModelSlot)> {
    let request = |&model: &ModelSlot| {
        let key = RequestKey(0);
        let attempts = AttemptRecord::new(3, Idempotence::Yes);
        let rank = view.models.get(model).rank?;
        let priority = Priority::default();
        let arrived = view.now;
        Some((WaitingRequest { key, function: F, model, rank, attempts, priority, arrived }, model))
    };
    models.iter().filter_map(request).collect()
}

struct Node {
    dispatch: Dispatcher,
    now: Timestamp,
}

const fn gpu(index: u32) -> GpuIndex {
    GpuIndex(index)
}

fn node(memories_mib: &[u64]) -> Node {
    node_with(PolicyConfig::Fifo, memories_mib)
}

fn node_with(policy: PolicyConfig, memories_mib: &[u64]) -> Node {
    let config = |&mib: &u64| GpuConfig::new(Bytes::mib(mib), BytesPerSec(1_000_000_000));
    let gpus: Vec<_> = memories_mib.iter().map(config).collect();
    node_of(&Config::new(gpus, 4).with_policy(policy, 1))
}

fn node_of(config: &Config) -> Node {
    let mut node = Node { dispatch: Dispatcher::new(config), now: Timestamp(MS) };
    for (model, mib) in [(A, 8), (B, 8), (LARGE, 48), (HUGE, 4096)] {
        node.step(Event::Install { model, memory: Bytes::mib(mib), weights: Bytes::mib(mib) });
    }
    for index in 0..config.gpus.len() as u32 {
        node.step(Event::Up { gpu: gpu(index), incarnation: Incarnation(1) });
    }
    node
}

impl Node {
    fn step(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.dispatch.on_event(self.now, event, &mut actions);
        actions
    }

    fn seat(&self, index: u32) -> &Seat {
        self.dispatch.fleet.seat(SeatIndex(index))
    }

    /// Returns a busy seat of the first GPUs, with its GPU and its running request.
    fn first_running(&self, gpus: u32) -> Option<(GpuIndex, RequestKey)> {
        (0..gpus).find_map(|index| Some((gpu(index), self.seat(index).running?.request.key)))
    }

    fn enqueue(&mut self, key: u64, model: ModelId) -> Vec<Action> {
        self.ask(key, F.0, model)
    }

    /// Enqueues a request of a function with this number.
    fn ask(&mut self, key: u64, function: u32, model: ModelId) -> Vec<Action> {
        self.ask_again(key, function, model, AttemptRecord::new(3, Idempotence::Yes))
    }

    /// Enqueues a request with inputs on GPUs, in MiB by GPU.
    fn ask_with(&mut self, key: u64, model: ModelId, on: &[(u32, u64)]) -> Vec<Action> {
        let key = RequestKey(key);
        let attempts = AttemptRecord::new(3, Idempotence::Yes);
        let priority = Priority::default();
        let inputs = data(on);
        self.step(Event::Enqueue(QueuedRequest { key, function: F, model, attempts, priority, inputs }))
    }

    fn ask_again(&mut self, key: u64, function: u32, model: ModelId, attempts: AttemptRecord) -> Vec<Action> {
        let key = RequestKey(key);
        let function = FunctionIndex(function);
        let priority = Priority::default();
        self.step(Event::Enqueue(QueuedRequest {
            key,
            function,
            model,
            attempts,
            priority,
            inputs: InputLocations::NONE,
        }))
    }

    fn ended(&mut self, index: u32, key: u64, ran_ms: u64) -> Vec<Action> {
        let ran = Some(Duration::from_millis(ran_ms));
        self.step(Event::RequestEnded { gpu: gpu(index), key: RequestKey(key), ran })
    }

    fn down(&mut self, index: u32, lost: &[(u64, AttemptProgress)]) -> Vec<Action> {
        let lost = lost.iter().map(|&(key, progress)| (RequestKey(key), progress)).collect();
        self.step(Event::Down { gpu: gpu(index), lost })
    }
}

/// Returns the routes between two GPUs, in both directions.
fn both_ways(a: u32, b: u32, rate: BytesPerSec) -> [PairRate; 2] {
    [(a, b), (b, a)].map(|(from, to)| PairRate { from: gpu(from), to: gpu(to), rate })
}

/// Returns inputs on GPUs, in MiB by GPU.
fn data(on: &[(u32, u64)]) -> InputLocations {
    InputLocations::of(on.iter().map(|&(index, mib)| (gpu(index), Bytes::mib(mib))))
}

fn assign(index: u32, key: u64, model: ModelId) -> Action {
    let gpu = gpu(index);
    let key = RequestKey(key);
    let incarnation = Incarnation(1);
    Action::Assign { gpu, seat: SeatIndex(index), key, model, incarnation, attempt: 1, from: None }
}

/// Returns the same assignment, with the model copied from GPU `from`.
fn assign_from(from: u32, index: u32, key: u64, model: ModelId) -> Action {
    let to = gpu(index);
    let key = RequestKey(key);
    let incarnation = Incarnation(1);
    let seat = SeatIndex(index);
    Action::Assign { gpu: to, seat, key, model, incarnation, attempt: 1, from: Some(gpu(from)) }
}

fn again(index: u32, key: u64, model: ModelId, attempt: u32) -> Action {
    let gpu = gpu(index);
    let key = RequestKey(key);
    let incarnation = Incarnation(1);
    Action::Assign { gpu, seat: SeatIndex(index), key, model, incarnation, attempt, from: None }
}

fn fail(key: u64, reason: Reason, may_have_executed: bool) -> Action {
    Action::Fail { key: RequestKey(key), reason, may_have_executed }
}

#[test]
fn fifo_prefers_an_idle_holder_then_the_emptiest_idle_gpu() {
    let mut node = node(&[64, 64]);
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.ended(0, 1, 5), []);
    assert_eq!(node.enqueue(2, B), [assign(1, 2, B)], "the other GPU is emptier");
    assert_eq!(node.ended(1, 2, 5), []);
    assert_eq!(node.enqueue(3, B), [assign(1, 3, B)]);
    assert_eq!(node.enqueue(4, B), [assign(0, 4, B)], "an idle GPU before a busy holder");
}

#[test]
fn a_busy_gpu_gets_one_next_request_and_the_rest_wait() {
    let mut node = node(&[64]);
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, B), [assign(0, 2, B)]);
    assert_eq!(node.enqueue(3, A), []);
    assert_eq!(node.dispatch.queued(), 1);
    assert_eq!(node.ended(0, 1, 5), [assign(0, 3, A)]);
}

/// Returns a node with one GPU that holds A and B, knows their run time, and runs request 0 of A.
fn warm(run: Duration) -> Node {
    let mut node = node(&[64]);
    for (key, model) in [(1001, A), (1002, B)] {
        node.enqueue(key, model);
        node.step(Event::RequestEnded { gpu: gpu(0), key: RequestKey(key), ran: Some(run) });
    }
    assert_eq!(node.enqueue(0, A), [assign(0, 0, A)]);
    node
}

#[test]
fn short_hits_queue_on_a_busy_gpu_up_to_a_bound() {
    let mut node = warm(Duration::from_micros(3));
    for key in 1..=AHEAD_MAX as u64 {
        let model = if key % 2 == 0 { A } else { B };
        assert_eq!(node.enqueue(key, model), [assign(0, key, model)]);
    }
    assert_eq!(node.enqueue(100, A), [], "no more than {AHEAD_MAX}");
    assert_eq!(node.enqueue(101, A), []);
    assert_eq!(node.ended(0, 0, 0), [assign(0, 100, A)], "one leaves, and the oldest follows");
}

#[test]
fn a_second_next_request_must_begin_sooner_than_a_recall_takes() {
    let mut node = warm(RECALL_COST.mul_f64(0.4));
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, A), [assign(0, 2, A)], "request 2 begins after two runs of 0.4");
    assert_eq!(node.enqueue(3, A), [], "request 3 would begin after three");

    let mut node = warm(Duration::from_micros(3));
    assert_eq!(node.enqueue(1, LARGE), [assign(0, 1, LARGE)], "the first next request is not limited");
    assert_eq!(node.enqueue(2, A), [], "the end of LARGE is unknown");
    let mut node = warm(Duration::from_micros(3));
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, LARGE), [], "LARGE is not resident");
}

#[test]
fn the_last_request_behind_a_hanging_run_is_recalled_first() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    node.enqueue(2, A);
    for (index, key) in [(0, 1), (1, 2)] {
        let ran = Some(Duration::from_micros(3));
        node.step(Event::RequestEnded { gpu: gpu(index), key: RequestKey(key), ran });
    }
    for key in 3..=7 {
        node.enqueue(key, A);
    }
    // GPU 0 has 3, 5 and 7, and GPU 1 has 4 and 6, or the other way round.
    for key in [4, 6] {
        node.step(Event::RequestEnded { gpu: gpu(1), key: RequestKey(key), ran: None });
        node.step(Event::RequestEnded { gpu: gpu(0), key: RequestKey(key), ran: None });
    }
    let left: Vec<u64> = [3, 5, 7].into_iter().filter(|&key| node.dispatch.holds(RequestKey(key))).collect();
    assert_eq!(left, [3, 5, 7]);
    node.now = node.dispatch.next_wake().unwrap();
    let [Action::Recall { gpu: from, key: RequestKey(7) }] = node.step(Event::Tick)[..] else {
        panic!("expected a recall of the last request")
    };
    assert_eq!(node.step(Event::Tick), [], "one recall for each idle GPU at a time");
    let back = Event::RequestReturned { gpu: from, key: RequestKey(7), why: ReturnReason::Recalled };
    assert_eq!(node.step(back), [assign(1 - from.0, 7, A)]);
}

#[test]
fn next_requests_go_to_a_busy_holder_then_to_the_gpu_that_is_free_first() {
    let busy = || {
        let mut node = node(&[64, 64]);
        node.enqueue(1, A);
        node.enqueue(2, B);
        node.ended(0, 1, 30);
        node.ended(1, 2, 10);
        node.enqueue(3, A);
        node.enqueue(4, B);
        node
    };
    let mut node = busy();
    assert_eq!(node.enqueue(5, A), [assign(0, 5, A)], "GPU 0 holds A, though GPU 1 is free sooner");
    assert_eq!(node.enqueue(6, LARGE), [assign(1, 6, LARGE)]);

    let mut node = busy();
    assert_eq!(node.enqueue(5, LARGE), [assign(1, 5, LARGE)], "no GPU holds LARGE, and GPU 1 is free sooner");
}

#[test]
fn requests_beyond_the_queue_bound_or_without_a_fitting_gpu_are_refused() {
    let mut node = node(&[64]);
    (1..=6).for_each(|key| drop(node.enqueue(key, A)));
    assert_eq!(node.enqueue(7, A), [fail(7, Reason::QueueFull, false)]);
    assert_eq!(node.enqueue(8, HUGE), [fail(8, Reason::NoGpuMemory, false)]);
    assert_eq!(node.enqueue(9, ModelId(77)), [fail(9, Reason::FunctionNotReady, false)]);
}

#[test]
fn a_request_for_a_larger_gpu_does_not_delay_smaller_requests() {
    let mut node = node(&[16, 64]);
    node.enqueue(1, LARGE);
    node.enqueue(2, LARGE);
    assert_eq!(node.enqueue(3, LARGE), [], "the large GPU has a running and a next request");
    assert_eq!(node.enqueue(4, A), [assign(0, 4, A)]);
    assert_eq!(node.ended(1, 1, 5), [assign(1, 3, LARGE)]);
}

#[test]
fn a_withdrawn_request_leaves_the_queue_at_once_and_a_gpu_after_its_end() {
    let mut node = node(&[64]);
    (1..=3).for_each(|key| drop(node.enqueue(key, A)));
    assert_eq!(node.step(Event::Withdraw { key: RequestKey(3) }), []);
    assert_eq!(node.dispatch.queued(), 0);
    let cancel = Action::Cancel { gpu: gpu(0), key: RequestKey(1) };
    assert_eq!(node.step(Event::Withdraw { key: RequestKey(1) }), [cancel]);
    assert_eq!(node.dispatch.in_flight(), 2);
    node.ended(0, 1, 5);
    node.ended(0, 2, 5);
    assert_eq!(node.dispatch.in_flight(), 0);
}

#[test]
fn an_idle_gpu_recalls_the_next_request_of_a_busy_gpu() {
    let mut node = node(&[64, 64]);
    for key in 1..=3 {
        node.enqueue(key, A);
    }
    // GPU 0 has 1 and 3, and GPU 1 has 2. The run time of A is unknown.
    let recall = Action::Recall { gpu: gpu(0), key: RequestKey(3) };
    assert_eq!(node.step(Event::RequestEnded { gpu: gpu(1), key: RequestKey(2), ran: None }), [recall]);
    let returned = Event::RequestReturned { gpu: gpu(0), key: RequestKey(3), why: ReturnReason::Recalled };
    assert_eq!(node.step(returned), [assign(1, 3, A)]);
}

#[test]
fn a_recall_after_the_start_of_the_run_changes_nothing() {
    let mut node = node(&[64, 64]);
    for key in 1..=3 {
        node.enqueue(key, A);
    }
    node.step(Event::RequestEnded { gpu: gpu(1), key: RequestKey(2), ran: None });
    assert_eq!(node.ended(0, 1, 5), [], "request 3 has begun");
    assert_eq!(node.ended(0, 3, 5), []);
    assert_eq!(node.dispatch.in_flight(), 0);
}

#[test]
fn a_request_that_begins_soon_is_recalled_only_once_the_running_one_is_overdue() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    node.ended(0, 1, 5);
    node.enqueue(2, A);
    node.enqueue(3, B);
    node.enqueue(4, A);
    // GPU 0 runs 2 for 5 ms and then 4; loading A onto GPU 1 would take 8 ms.
    assert_eq!(node.ended(1, 3, 1), []);
    let late = node.dispatch.next_wake().unwrap();
    assert_eq!(late, Timestamp(6 * MS) + RECALL_COST);
    node.now = late;
    assert_eq!(node.step(Event::Tick), [Action::Recall { gpu: gpu(0), key: RequestKey(4) }]);
    assert_eq!(node.dispatch.next_wake(), None);
}

#[test]
fn requests_of_a_lost_gpu_go_first_in_their_old_order() {
    let mut node = node(&[64, 64]);
    for key in 1..=6 {
        node.enqueue(key, A);
    }
    // GPU 0 has 1 and 3, GPU 1 has 2 and 4; 5 and 6 wait.
    assert_eq!(node.down(0, &[(1, AttemptProgress::Preparing), (3, AttemptProgress::Waiting)]), []);
    // Request 1 is a suspect, so it waits for a GPU without other requests.
    assert_eq!(node.ended(1, 2, 5), []);
    assert_eq!(node.ended(1, 4, 5), [again(1, 1, A, 2)]);
    assert_eq!(node.ended(1, 1, 5), [assign(1, 3, A), assign(1, 5, A)]);
}

#[test]
fn a_request_running_in_two_dying_executors_is_quarantined() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    assert_eq!(node.down(0, &[(1, AttemptProgress::Begun)]), [again(1, 1, A, 2)]);
    assert_eq!(node.enqueue(2, A), [], "no request is assigned behind a suspect");
    assert_eq!(node.down(1, &[(1, AttemptProgress::Begun)]), [fail(1, Reason::Quarantined, true)]);
    assert_eq!(node.step(Event::Up { gpu: gpu(0), incarnation: Incarnation(1) }), [assign(0, 2, A)]);
}

#[test]
fn a_request_in_transit_to_a_dying_gpu_loses_no_attempt() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    assert_eq!(node.down(0, &[]), [assign(1, 1, A)]);
}

#[test]
fn a_reset_gpu_counts_as_having_begun_its_running_request() {
    let mut node = node(&[64]);
    node.ask_again(1, F.0, A, AttemptRecord::new(3, Idempotence::No));
    node.enqueue(2, A);
    assert_eq!(node.step(Event::Reset { gpu: gpu(0) }), [fail(1, Reason::ExecutorLost, true)]);
    assert_eq!(node.step(Event::Up { gpu: gpu(0), incarnation: Incarnation(1) }), [again(0, 2, A, 2)]);
}

#[test]
fn a_request_that_a_gpu_cannot_run_is_retried_until_its_attempts_are_exhausted() {
    let mut node = node(&[64]);
    node.enqueue(1, A);
    let returned = || Event::RequestReturned {
        gpu: gpu(0),
        key: RequestKey(1),
        why: ReturnReason::Failed(AttemptProgress::Preparing),
    };
    assert_eq!(node.step(returned()), [again(0, 1, A, 2)]);
    assert_eq!(node.step(returned()), [again(0, 1, A, 3)]);
    assert_eq!(node.step(returned()), [fail(1, Reason::AttemptsExhausted, false)]);
}

/// Returns the requests that wait in the shared queue.
fn shared_queue(dispatch: &Dispatcher) -> BTreeMap<RequestKey, WaitingRequest> {
    let waits = |(&key, place): (&RequestKey, &RequestLocation)| match *place {
        RequestLocation::Queued { request, reserved: None } => Some((key, request)),
        _ => None,
    };
    dispatch.places.iter().filter_map(waits).collect()
}
