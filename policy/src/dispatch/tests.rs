use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::attempts::{Attempts, Idempotent};
use crate::gpu::Eviction;
use crate::ids::FunctionIndex;
use crate::paths::Way;
use millrace_types::{BytesPerSec, Incarnation, Priority, SloCounts};

mod bound;
mod change;
mod cost;
mod glance;
mod inputs;
mod lalb;
mod likely;
mod priority;
mod properties;
mod recovery;
mod searches;
mod standings;
mod torpor;
mod unified;
mod warm;

const A: ModelId = ModelId(0);
const B: ModelId = ModelId(1);
/// Fits only GPUs of 64 MiB.
const LARGE: ModelId = ModelId(2);
/// Fits no GPU.
const HUGE: ModelId = ModelId(3);

const F: FunctionIndex = FunctionIndex(0);

const MS: u64 = 1_000_000;

/// A request that might wait for each of some models, older than all others.
pub(super) fn requests_of(view: &View<'_>, models: &[Slot]) -> Vec<(Waiting, Slot)> {
    let request = |&model: &Slot| {
        let (key, attempts) = (RequestKey(0), Attempts::new(3, Idempotent::Yes));
        let (rank, priority, arrived) = (view.models.get(model).rank?, Priority::default(), view.now);
        Some((Waiting { key, function: F, model, rank, attempts, priority, arrived }, model))
    };
    models.iter().filter_map(request).collect()
}

struct Node {
    dispatch: Dispatch,
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
    let mut node = Node { dispatch: Dispatch::new(config), now: Timestamp(MS) };
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

    fn enqueue(&mut self, key: u64, model: ModelId) -> Vec<Action> {
        self.ask(key, F.0, model)
    }

    /// A request of a function of this number.
    fn ask(&mut self, key: u64, function: u32, model: ModelId) -> Vec<Action> {
        self.ask_again(key, function, model, Attempts::new(3, Idempotent::Yes))
    }

    /// A request whose data is on GPUs, so many MiB on each.
    fn ask_with(&mut self, key: u64, model: ModelId, on: &[(u32, u64)]) -> Vec<Action> {
        let (key, attempts, priority) =
            (RequestKey(key), Attempts::new(3, Idempotent::Yes), Priority::default());
        self.step(Event::Enqueue(Request { key, function: F, model, attempts, priority, inputs: data(on) }))
    }

    fn ask_again(&mut self, key: u64, function: u32, model: ModelId, attempts: Attempts) -> Vec<Action> {
        let (key, function, priority) = (RequestKey(key), FunctionIndex(function), Priority::default());
        self.step(Event::Enqueue(Request { key, function, model, attempts, priority, inputs: Inputs::NONE }))
    }

    fn ended(&mut self, index: u32, key: u64, ran_ms: u64) -> Vec<Action> {
        let ran = Some(Duration::from_millis(ran_ms));
        self.step(Event::Ended { gpu: gpu(index), key: RequestKey(key), ran })
    }

    fn down(&mut self, index: u32, lost: &[(u64, Progress)]) -> Vec<Action> {
        let lost = lost.iter().map(|&(key, progress)| (RequestKey(key), progress)).collect();
        self.step(Event::Down { gpu: gpu(index), lost })
    }
}

/// Ways between two GPUs, in both directions.
fn both_ways(a: u32, b: u32, rate: BytesPerSec) -> [Way; 2] {
    [(a, b), (b, a)].map(|(from, to)| Way { from: gpu(from), to: gpu(to), rate })
}

/// So many MiB on each GPU.
fn data(on: &[(u32, u64)]) -> Inputs {
    Inputs::of(on.iter().map(|&(index, mib)| (gpu(index), Bytes::mib(mib))))
}

fn assign(index: u32, key: u64, model: ModelId) -> Action {
    let (gpu, key, incarnation) = (gpu(index), RequestKey(key), Incarnation(1));
    Action::Assign { gpu, key, model, incarnation, attempt: 1, from: None }
}

/// The same, with its model copied from GPU `from`.
fn assign_from(from: u32, index: u32, key: u64, model: ModelId) -> Action {
    let (to, key, incarnation) = (gpu(index), RequestKey(key), Incarnation(1));
    Action::Assign { gpu: to, key, model, incarnation, attempt: 1, from: Some(gpu(from)) }
}

fn again(index: u32, key: u64, model: ModelId, attempt: u32) -> Action {
    let (gpu, key, incarnation) = (gpu(index), RequestKey(key), Incarnation(1));
    Action::Assign { gpu, key, model, incarnation, attempt, from: None }
}

fn fail(key: u64, reason: Reason, may_have_executed: bool) -> Action {
    Action::Fail { key: RequestKey(key), reason, may_have_executed }
}

#[test]
fn an_idle_gpu_that_holds_the_model_comes_first_then_the_emptiest() {
    let mut node = node(&[64, 64]);
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.ended(0, 1, 5), []);
    assert_eq!(node.enqueue(2, B), [assign(1, 2, B)], "the other GPU is emptier");
    assert_eq!(node.ended(1, 2, 5), []);
    assert_eq!(node.enqueue(3, B), [assign(1, 3, B)]);
    assert_eq!(node.enqueue(4, B), [assign(0, 4, B)], "any idle GPU before a busy holder");
}

#[test]
fn one_runs_and_one_is_handed_ahead_and_the_rest_wait() {
    let mut node = node(&[64]);
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, B), [assign(0, 2, B)]);
    assert_eq!(node.enqueue(3, A), []);
    assert_eq!(node.dispatch.queued(), 1);
    assert_eq!(node.ended(0, 1, 5), [assign(0, 3, A)]);
}

/// A node whose one GPU holds A and B, runs request 0 of A, and knows how long each runs.
fn warm(run: Duration) -> Node {
    let mut node = node(&[64]);
    for (key, model) in [(1001, A), (1002, B)] {
        node.enqueue(key, model);
        node.step(Event::Ended { gpu: gpu(0), key: RequestKey(key), ran: Some(run) });
    }
    assert_eq!(node.enqueue(0, A), [assign(0, 0, A)]);
    node
}

#[test]
fn short_runs_of_resident_models_go_ahead_together_up_to_a_bound() {
    let mut node = warm(Duration::from_micros(3));
    for key in 1..=AHEAD_MAX as u64 {
        let model = if key % 2 == 0 { A } else { B };
        assert_eq!(node.enqueue(key, model), [assign(0, key, model)]);
    }
    assert_eq!(node.enqueue(100, A), [], "no more than {AHEAD_MAX}");
    assert_eq!(node.enqueue(101, A), []);
    assert_eq!(node.ended(0, 0, 0), [assign(0, 100, A)], "one leaves, the oldest follows");
}

#[test]
fn no_second_request_goes_ahead_where_it_could_still_be_asked_back() {
    let mut node = warm(RECALL_COST.mul_f64(0.4));
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, A), [assign(0, 2, A)], "it begins after two runs of 0.4");
    assert_eq!(node.enqueue(3, A), [], "and the next after three");

    let mut node = warm(Duration::from_micros(3));
    assert_eq!(node.enqueue(1, LARGE), [assign(0, 1, LARGE)], "the first, whatever it takes");
    assert_eq!(node.enqueue(2, A), [], "who knows when LARGE is done");
    let mut node = warm(Duration::from_micros(3));
    assert_eq!(node.enqueue(1, A), [assign(0, 1, A)]);
    assert_eq!(node.enqueue(2, LARGE), [], "it is not here");
}

#[test]
fn what_waits_behind_a_run_that_hangs_is_asked_back_last_first() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    node.enqueue(2, A);
    for (index, key) in [(0, 1), (1, 2)] {
        let ran = Some(Duration::from_micros(3));
        node.step(Event::Ended { gpu: gpu(index), key: RequestKey(key), ran });
    }
    for key in 3..=7 {
        node.enqueue(key, A);
    }
    // GPU 0 has 3, 5 and 7, GPU 1 has 4 and 6, or the other way round.
    for key in [4, 6] {
        node.step(Event::Ended { gpu: gpu(1), key: RequestKey(key), ran: None });
        node.step(Event::Ended { gpu: gpu(0), key: RequestKey(key), ran: None });
    }
    let left: Vec<u64> = [3, 5, 7].into_iter().filter(|&key| node.dispatch.holds(RequestKey(key))).collect();
    assert_eq!(left, [3, 5, 7]);
    node.now = node.dispatch.next_wake().unwrap();
    let [Action::Recall { gpu: from, key: RequestKey(7) }] = node.step(Event::Tick)[..] else {
        panic!("the last is asked back")
    };
    assert_eq!(node.step(Event::Tick), [], "one for each idle GPU at a time");
    let back = Event::Returned { gpu: from, key: RequestKey(7), why: Return::Recalled };
    assert_eq!(node.step(back), [assign(1 - from.0, 7, A)]);
}

#[test]
fn ahead_goes_to_a_holder_first_then_to_whoever_is_free_first() {
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
    assert_eq!(node.enqueue(5, A), [assign(0, 5, A)], "GPU 0 holds it, though GPU 1 is free sooner");
    assert_eq!(node.enqueue(6, LARGE), [assign(1, 6, LARGE)]);

    let mut node = busy();
    assert_eq!(node.enqueue(5, LARGE), [assign(1, 5, LARGE)], "nobody holds it and GPU 1 is free sooner");
}

#[test]
fn a_full_queue_refuses_and_a_model_that_never_fits_is_told_so() {
    let mut node = node(&[64]);
    (1..=6).for_each(|key| drop(node.enqueue(key, A)));
    assert_eq!(node.enqueue(7, A), [fail(7, Reason::QueueFull, false)]);
    assert_eq!(node.enqueue(8, HUGE), [fail(8, Reason::NoGpuMemory, false)]);
    assert_eq!(node.enqueue(9, ModelId(77)), [fail(9, Reason::FunctionNotReady, false)]);
}

#[test]
fn a_request_that_only_fits_a_larger_gpu_holds_nobody_up() {
    let mut node = node(&[16, 64]);
    node.enqueue(1, LARGE);
    node.enqueue(2, LARGE);
    assert_eq!(node.enqueue(3, LARGE), [], "the large GPU runs one and has the next");
    assert_eq!(node.enqueue(4, A), [assign(0, 4, A)]);
    assert_eq!(node.ended(1, 1, 5), [assign(1, 3, LARGE)]);
}

#[test]
fn a_withdrawn_request_leaves_the_queue_at_once_and_a_gpu_when_it_ends() {
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
fn an_idle_gpu_asks_for_a_neighbours_next_request() {
    let mut node = node(&[64, 64]);
    for key in 1..=3 {
        node.enqueue(key, A);
    }
    // GPU 0 has 1 and 3, GPU 1 has 2. How long A runs is not known.
    let recall = Action::Recall { gpu: gpu(0), key: RequestKey(3) };
    assert_eq!(node.step(Event::Ended { gpu: gpu(1), key: RequestKey(2), ran: None }), [recall]);
    let returned = Event::Returned { gpu: gpu(0), key: RequestKey(3), why: Return::Recalled };
    assert_eq!(node.step(returned), [assign(1, 3, A)]);
}

#[test]
fn a_recall_that_came_too_late_changes_nothing() {
    let mut node = node(&[64, 64]);
    for key in 1..=3 {
        node.enqueue(key, A);
    }
    node.step(Event::Ended { gpu: gpu(1), key: RequestKey(2), ran: None });
    assert_eq!(node.ended(0, 1, 5), [], "it has begun");
    assert_eq!(node.ended(0, 3, 5), []);
    assert_eq!(node.dispatch.in_flight(), 0);
}

#[test]
fn what_is_soon_served_where_it_is_is_not_recalled_until_it_is_late() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    node.ended(0, 1, 5);
    node.enqueue(2, A);
    node.enqueue(3, B);
    node.enqueue(4, A);
    // GPU 0 runs 2 for 5 ms and then 4; bringing A to GPU 1 would take 8 ms.
    assert_eq!(node.ended(1, 3, 1), []);
    let late = node.dispatch.next_wake().unwrap();
    assert_eq!(late, Timestamp(6 * MS) + RECALL_COST);
    node.now = late;
    assert_eq!(node.step(Event::Tick), [Action::Recall { gpu: gpu(0), key: RequestKey(4) }]);
    assert_eq!(node.dispatch.next_wake(), None);
}

#[test]
fn what_a_lost_gpu_had_goes_first_in_its_old_order() {
    let mut node = node(&[64, 64]);
    for key in 1..=6 {
        node.enqueue(key, A);
    }
    // GPU 0 has 1 and 3, GPU 1 has 2 and 4; 5 and 6 wait.
    assert_eq!(node.down(0, &[(1, Progress::Preparing), (3, Progress::Waiting)]), []);
    // 1 is a suspect: it waits for a GPU of its own.
    assert_eq!(node.ended(1, 2, 5), []);
    assert_eq!(node.ended(1, 4, 5), [again(1, 1, A, 2)]);
    assert_eq!(node.ended(1, 1, 5), [assign(1, 3, A), assign(1, 5, A)]);
}

#[test]
fn a_request_running_in_two_dying_executors_is_quarantined() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    assert_eq!(node.down(0, &[(1, Progress::Begun)]), [again(1, 1, A, 2)]);
    assert_eq!(node.enqueue(2, A), [], "nobody is handed ahead behind a suspect");
    assert_eq!(node.down(1, &[(1, Progress::Begun)]), [fail(1, Reason::Quarantined, true)]);
    assert_eq!(node.step(Event::Up { gpu: gpu(0), incarnation: Incarnation(1) }), [assign(0, 2, A)]);
}

#[test]
fn a_request_still_on_its_way_to_a_dying_gpu_loses_no_attempt() {
    let mut node = node(&[64, 64]);
    node.enqueue(1, A);
    assert_eq!(node.down(0, &[]), [assign(1, 1, A)]);
}

#[test]
fn a_gpu_that_cannot_tell_is_taken_to_have_run_what_it_had() {
    let mut node = node(&[64]);
    node.ask_again(1, F.0, A, Attempts::new(3, Idempotent::No));
    node.enqueue(2, A);
    assert_eq!(node.step(Event::Reset { gpu: gpu(0) }), [fail(1, Reason::ExecutorLost, true)]);
    assert_eq!(node.step(Event::Up { gpu: gpu(0), incarnation: Incarnation(1) }), [again(0, 2, A, 2)]);
}

#[test]
fn a_request_that_a_gpu_cannot_run_is_tried_elsewhere_and_not_for_ever() {
    let mut node = node(&[64]);
    node.enqueue(1, A);
    let returned =
        || Event::Returned { gpu: gpu(0), key: RequestKey(1), why: Return::Failed(Progress::Preparing) };
    assert_eq!(node.step(returned()), [again(0, 1, A, 2)]);
    assert_eq!(node.step(returned()), [again(0, 1, A, 3)]);
    assert_eq!(node.step(returned()), [fail(1, Reason::AttemptsExhausted, false)]);
}

/// The requests that wait for no GPU in particular.
fn shared_queue(dispatch: &Dispatch) -> BTreeMap<RequestKey, Waiting> {
    let waits = |(&key, place): (&RequestKey, &Place)| match *place {
        Place::Queued { request, reserved: None } => Some((key, request)),
        _ => None,
    };
    dispatch.places.iter().filter_map(waits).collect()
}
