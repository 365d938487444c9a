use millrace_types::{Bytes, BytesPerSec, Incarnation, ModelId, Reason};

use super::*;
use crate::dispatch::{GpuConfig, POLICIES, PolicyConfig};
use millrace_core::attempts::{AttemptProgress, AttemptRecord, Idempotence};

mod properties;

const MS: u64 = 1_000_000;

struct Bench {
    batcher: Batcher,
    now: Timestamp,
}

fn bench(gpus: u32, max_size: u32, max_wait_ms: u64) -> Bench {
    bench_with(PolicyConfig::Lb, gpus, max_size, max_wait_ms)
}

fn bench_with(policy: PolicyConfig, gpus: u32, max_size: u32, max_wait_ms: u64) -> Bench {
    let config = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let config = Config::new(vec![config; gpus as usize], 16).with_policy(policy, 1);
    let mut bench = Bench { batcher: Batcher::new(&config), now: Timestamp(MS) };
    for model in 0..2 {
        let model = ModelId(model);
        let memory = Bytes::mib(8);
        bench.tell(dispatch::Event::Install { model, memory, weights: memory });
        let batching = Some(BatchingOptions { max_size, max_wait: Duration::from_millis(max_wait_ms) });
        let deadline = (model.0 == 0).then_some(Duration::from_millis(20));
        bench.tell(Event::Limits { function: FunctionIndex(model.0), batching, deadline });
    }
    (0..gpus).for_each(|index| drop(bench.up(index)));
    bench
}

impl Bench {
    fn tell(&mut self, event: impl Into<Event>) -> Vec<Action> {
        let mut actions = Vec::new();
        self.batcher.on_event(self.now, event.into(), &mut actions);
        actions
    }

    fn up(&mut self, index: u32) -> Vec<Action> {
        self.tell(dispatch::Event::Up { gpu: GpuIndex(index), incarnation: Incarnation(1) })
    }

    /// Enqueues a request of `rows` rows; returns the resulting assignments.
    fn ask(&mut self, key: u64, rows: u32) -> Vec<(u64, u32)> {
        let item = BatchItem { rows, class: 7, inline: 100, descriptors: 0 };
        assigned(&self.ask_for(key, 0, item))
    }

    fn ask_for(&mut self, key: u64, function: u32, item: BatchItem) -> Vec<Action> {
        let key = RequestKey(key);
        let attempts = AttemptRecord::new(3, Idempotence::Yes);
        let function = FunctionIndex(function);
        let model = ModelId(function.0);
        let priority = Priority::default();
        let request =
            QueuedRequest { key, function, model, attempts, priority, inputs: InputLocations::NONE };
        self.tell(Event::Enqueue { request, item })
    }

    fn ended(&mut self, index: u32, key: u64, ran_ms: u64) -> Vec<(u64, u32)> {
        let ran = Some(Duration::from_millis(ran_ms));
        assigned(&self.tell(dispatch::Event::RequestEnded {
            gpu: GpuIndex(index),
            key: RequestKey(key),
            ran,
        }))
    }

    fn withdraw(&mut self, key: u64) -> Vec<Action> {
        self.tell(dispatch::Event::Withdraw { key: RequestKey(key) })
    }

    /// Asserts that the index of waiting batches agrees with a full scan.
    fn check(&self) {
        for (&function, it) in &self.batcher.functions {
            let waits = |batch: &Batch| batch.first.function == function && batch.stage == BatchStage::Queued;
            let all = self.batcher.batches.iter().filter(|(_, batch)| waits(batch));
            assert_eq!(it.waiting, all.map(|(&key, batch)| (batch.kind(), key)).collect());
        }
    }

    fn members(&self, key: u64) -> Vec<u64> {
        self.batcher.members(RequestKey(key)).into_iter().map(|key| key.0).collect()
    }
}

fn assigned(actions: &[Action]) -> Vec<(u64, u32)> {
    let of = |action: &Action| match *action {
        Action::Assign { gpu, key, .. } => Some((key.0, gpu.0)),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

#[test]
fn requests_join_a_waiting_batch_until_it_is_full_or_assigned() {
    let mut bench = bench(1, 4, 0);
    assert_eq!(bench.ask(1, 1), [(1, 0)], "an idle GPU gets the request at once");
    for (key, rows) in [(2, 1), (3, 2), (4, 2), (5, 1)] {
        assert_eq!(bench.ask(key, rows), []);
    }
    assert_eq!(bench.batcher.queued(), 4);
    assert_eq!((bench.members(2), bench.members(4)), (vec![2, 3], vec![4, 5]), "4 would make 5 rows with 2");
    assert_eq!(bench.ended(0, 1, 1), [(2, 0)]);
    assert_eq!((bench.members(2), bench.members(4)), (vec![2, 3, 5], vec![4]), "one row was left");
    assert_eq!(bench.ask(6, 2), [], "batch 4 has two rows left");
    assert_eq!(bench.ended(0, 2, 1), [(4, 0)]);
    assert_eq!(bench.members(4), [4, 6]);
    assert_eq!(bench.ask(7, 1), [], "an assigned batch is closed");
    assert_eq!(bench.ended(0, 4, 1), [(7, 0)]);
    bench.ended(0, 7, 1);
    assert_eq!(bench.batcher.totals(), BatchCounts { batches: 2, requests: 5 });
    assert!(bench.batcher.batches.is_empty() && bench.batcher.batch_of.is_empty());
}

#[test]
fn moved_inputs_update_the_location_of_the_whole_batch() {
    let mut bench = bench(1, 4, 0);
    let on_gpu = |mib| InputLocations::of([(GpuIndex(0), Bytes::mib(mib))]);
    let moves = |bench: &mut Bench, key, inputs| {
        assert_eq!(bench.tell(dispatch::Event::InputsMoved { key: RequestKey(key), inputs }), []);
        bench.batcher.dispatch().inputs_of(RequestKey(2))
    };
    for key in 1..=3 {
        bench.ask(key, 1);
    }
    assert_eq!(bench.members(2), [2, 3]);
    assert_eq!(moves(&mut bench, 3, on_gpu(1)), on_gpu(1));
    assert_eq!(moves(&mut bench, 2, on_gpu(4)), on_gpu(5));
    assert_eq!(moves(&mut bench, 3, InputLocations::NONE), on_gpu(4));
    assert_eq!(moves(&mut bench, 1, on_gpu(7)), on_gpu(4), "request 1 runs alone");
    bench.withdraw(2);
    assert_eq!(
        moves(&mut bench, 3, on_gpu(2)),
        on_gpu(2),
        "the queue knows the batch by a withdrawn request"
    );
}

#[test]
fn only_requests_of_one_class_join_and_only_up_to_the_message_bounds() {
    let mut bench = bench(1, 8, 0);
    bench.ask(1, 1);
    let item = BatchItem { rows: 1, class: 7, inline: 0, descriptors: 40 };
    bench.ask_for(2, 0, item);
    bench.ask_for(3, 0, BatchItem { class: 8, ..item });
    bench.ask_for(4, 1, item);
    bench.ask_for(5, 0, item);
    bench.ask_for(6, 0, BatchItem { rows: 9, ..item });
    for key in 2..=6 {
        assert_eq!(bench.members(key), [key], "another class, function, 80 descriptors, 9 rows");
    }
    bench.ask_for(7, 0, BatchItem { descriptors: 1, inline: INLINE_MAX, ..item });
    bench.ask_for(8, 0, BatchItem { descriptors: 1, inline: 1, ..item });
    assert_eq!((bench.members(5), bench.members(8)), (vec![5, 7], vec![8]));
}

#[test]
fn a_request_is_held_back_only_while_its_function_is_at_work() {
    let mut bench = bench(3, 3, 5);
    assert_eq!(bench.ask(1, 1), [(1, 0)], "no batch is at work");
    assert_eq!(bench.ask(2, 1), []);
    assert_eq!(bench.batcher.next_wake(), Some(bench.now + Duration::from_millis(5)));
    assert_eq!(bench.ask(3, 1), [], "two GPUs are idle");
    assert_eq!(bench.ask(4, 1), [(2, 1)], "full");
    assert_eq!(bench.ask(5, 1), []);
    bench.now = bench.now + Duration::from_millis(5);
    assert_eq!(assigned(&bench.tell(dispatch::Event::Tick)), [(5, 2)], "the wait is over");
    assert_eq!(bench.ask(6, 1), []);
    assert_eq!(bench.ended(0, 1, 1), []);
    assert_eq!(bench.ended(1, 2, 1), []);
    assert_eq!(bench.ended(2, 5, 1), [(6, 0)], "no batch is at work any more");
    bench.ended(0, 6, 1);
    assert_eq!((bench.batcher.next_wake(), bench.batcher.queued()), (None, 0));
}

#[test]
fn a_function_batched_again_counts_its_earlier_batches_at_work() {
    let mut bench = bench(1, 4, 0);
    bench.ask(1, 1);
    let function = FunctionIndex(0);
    bench.tell(Event::Limits { function, batching: None, deadline: None });
    assert_eq!(bench.ask(2, 1), []);
    let batching = Some(BatchingOptions { max_size: 4, max_wait: Duration::from_millis(5) });
    bench.tell(Event::Limits { function, batching, deadline: None });
    assert_eq!(bench.ask(3, 1), [], "held back while the first request is at work");
    assert_eq!(bench.ended(0, 1, 1), [(2, 0)]);
    assert_eq!(bench.ended(0, 2, 1), [(3, 0)], "released after the first request ended");
}

/// Returns a bench on which runs take 8 ms plus 4 ms for each row; the deadline is 20 ms.
fn learned() -> Bench {
    let mut bench = bench(1, 8, 0);
    for (key, rows, ran) in [(1, 1, 12), (2, 2, 16), (3, 3, 20)] {
        bench.ask(key, rows);
        bench.ended(0, key, ran);
    }
    bench
}

#[test]
fn a_batch_does_not_grow_past_the_deadline_of_its_oldest_request() {
    let mut bench = learned();
    bench.ask(4, 1);
    for key in 5..9 {
        bench.ask(key, 1);
    }
    assert_eq!(bench.members(5), [5, 6, 7], "four rows would take 24 ms");
    assert_eq!(bench.members(8), [8]);
    assert_eq!(bench.ended(0, 4, 12), [(5, 0)]);
    assert_eq!(bench.members(5), [5, 6, 7], "the assigned batch is not filled either");
    let held_out = bench.batcher.dispatch().stats().held_out.unwrap();
    assert!(held_out < 0.01, "{held_out}");
}

#[test]
fn an_assigned_batch_is_filled_from_waiting_batches() {
    let mut bench = learned();
    bench.ask(4, 1);
    for key in 5..10 {
        bench.ask(key, 1);
    }
    assert_eq!((bench.members(5), bench.members(8)), (vec![5, 6, 7], vec![8, 9]));
    bench.now = bench.now + Duration::from_millis(30);
    bench.ask(10, 1);
    assert_eq!(bench.members(8), [8, 9, 10], "the batch is late anyway");
    assert_eq!(bench.ended(0, 4, 12), [(5, 0)]);
    assert_eq!(bench.members(5), [5, 6, 7, 9, 10, 8]);
    assert_eq!((bench.batcher.queued(), bench.batcher.dispatch().queued()), (0, 0));
    assert_eq!(bench.withdraw(8), []);
    bench.tell(Event::Split { key: RequestKey(5) });
    assert_eq!(bench.ended(0, 5, 32), [(5, 0)], "each remaining member runs alone");
    assert_eq!((bench.batcher.queued(), bench.members(10)), (4, vec![10]));
    let predicted = bench.batcher.dispatch().predicted_run(ModelId(0), 6).unwrap();
    assert!(predicted.abs_diff(Duration::from_millis(32)) < Duration::from_micros(10), "{predicted:?}");
}

#[test]
fn filling_a_batch_makes_no_taken_request_late() {
    let mut bench = learned();
    let ask = |bench: &mut Bench, key, descriptors| {
        let item = BatchItem { rows: 1, class: 7, inline: 100, descriptors };
        assert_eq!(assigned(&bench.ask_for(key, 0, item)), []);
    };
    assert_eq!(bench.ask(4, 1), [(4, 0)]);
    // Descriptors keep three batches apart until the requests with descriptors leave.
    ask(&mut bench, 5, 60);
    ask(&mut bench, 6, 0);
    bench.now = bench.now + Duration::from_millis(26);
    ask(&mut bench, 7, 60);
    ask(&mut bench, 8, 0);
    bench.now = bench.now + Duration::from_millis(4);
    ask(&mut bench, 9, 10);
    bench.withdraw(5);
    bench.withdraw(7);
    assert_eq!([5, 7, 9].map(|key| bench.members(key)), [vec![6], vec![8], vec![9]]);
    assert_eq!(bench.ended(0, 4, 12), [(5, 0)]);
    assert_eq!(bench.members(5), [6, 8], "with request 9, a run of 20 ms would miss the deadline of 8");
    assert_eq!(bench.members(9), [9]);
}

#[test]
fn a_withdrawn_request_does_not_affect_its_batch() {
    let mut bench = bench(1, 4, 0);
    bench.ask(1, 1);
    for key in 2..5 {
        bench.ask(key, 1);
    }
    assert_eq!(bench.withdraw(2), []);
    assert!(!bench.batcher.holds(RequestKey(2)) && bench.batcher.holds(RequestKey(3)));
    assert_eq!(bench.ended(0, 1, 1), [(2, 0)], "the queue knows the batch by its first request");
    assert_eq!(bench.members(2), [3, 4]);
    assert_eq!(bench.withdraw(3), []);
    let cancel = Action::Cancel { gpu: GpuIndex(0), key: RequestKey(2) };
    assert_eq!(bench.withdraw(4), [cancel], "no member is left");
    bench.ended(0, 2, 1);
    assert_eq!((bench.batcher.queued(), bench.batcher.batches.len()), (0, 0));
}

#[test]
fn after_a_failure_each_request_runs_alone_with_its_own_record() {
    let mut bench = bench(1, 4, 0);
    bench.ask(1, 1);
    for key in 2..5 {
        bench.ask(key, 1);
    }
    bench.ended(0, 1, 1);
    bench.withdraw(2);
    bench.tell(Event::Split { key: RequestKey(2) });
    let attempt = |actions: &[Action]| {
        let of = |action: &Action| match *action {
            Action::Assign { key, attempt, .. } => Some((key.0, attempt)),
            _ => None,
        };
        actions.iter().find_map(of)
    };
    let ended = |key| dispatch::Event::RequestEnded { gpu: GpuIndex(0), key: RequestKey(key), ran: None };
    assert_eq!(attempt(&bench.tell(ended(2))), Some((3, 2)));
    assert_eq!(bench.ask(5, 1), [], "no request joins a suspect");
    assert_eq!(attempt(&bench.tell(ended(3))), Some((4, 2)));
    assert_eq!((bench.members(4), bench.members(5)), (vec![4], vec![5]));
}

#[test]
fn a_poison_request_costs_other_members_only_an_attempt() {
    let mut bench = bench(1, 4, 0);
    bench.ask(1, 1);
    for key in 2..5 {
        bench.ask(key, 1);
    }
    bench.ended(0, 1, 1);
    let down = |key| {
        let lost = vec![(RequestKey(key), AttemptProgress::Begun)];
        dispatch::Event::Down { gpu: GpuIndex(0), lost }
    };
    assert_eq!(bench.tell(down(2)), []);
    assert_eq!(bench.batcher.queued(), 3);
    assert_eq!(assigned(&bench.up(0)), [(2, 0)]);
    let quarantined =
        Action::Fail { key: RequestKey(2), reason: Reason::Quarantined, may_have_executed: true };
    assert_eq!(bench.tell(down(2)), [quarantined]);
    assert_eq!(assigned(&bench.up(0)), [(3, 0)]);
    assert_eq!(bench.ended(0, 3, 1), [(4, 0)]);
    bench.ended(0, 4, 1);
    assert_eq!(bench.batcher.queued(), 0);
}
