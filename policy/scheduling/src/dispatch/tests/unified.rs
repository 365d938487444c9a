use super::*;
use crate::dispatch::config::UNIFIED;
use millrace_core::attempts::ReturnReason;
use millrace_core::attempts::{AttemptLoss, RetryDecision};

pub(super) fn unified(overtakes_max: u32) -> PolicyConfig {
    unified_aging(overtakes_max, 1)
}

/// Returns the policy in which one departure in `aged_every` is a request at its limit.
fn unified_aging(overtakes_max: u32, aged_every: u32) -> PolicyConfig {
    let free_overtakes_max = overtakes_max.min(FREE_OVERTAKES_MAX);
    let limits = UnifiedConfig { overtakes_max, aged_every, free_overtakes_max, ..UNIFIED };
    PolicyConfig::Unified(limits)
}

/// Returns a node of GPUs without links between them. Loading A or B takes 60 ms, and running them
/// 100 ms.
fn profiled(memories_mib: &[u64]) -> Node {
    let config = |&mib: &u64| GpuConfig::new(Bytes::mib(mib), BytesPerSec(1_000_000_000));
    let gpus: Vec<_> = memories_mib.iter().map(config).collect();
    with_profiles(&Config::new(gpus, 100).with_policy(unified(UNIFIED_OVERTAKES_MAX), 1))
}

fn with_profiles(config: &Config) -> Node {
    let mut node = node_of(config);
    for model in [A, B, LARGE] {
        let load = Duration::from_millis(60);
        let run = Duration::from_millis(100);
        node.step(Event::ProfileLoaded(ModelProfile { model, kind: 0, load, swap: None, run }));
    }
    node
}

impl Node {
    fn wait_ms(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
    }

    /// Adds a function of which 90% of the requests should be answered within the deadline.
    fn bound(&mut self, function: u32, deadline_ms: u64, counts: (u64, u64)) {
        let function = FunctionIndex(function);
        let objective = LatencyObjective::from_billionths(900_000_000).unwrap();
        let objective = Some(objective.within(Duration::from_millis(deadline_ms)));
        self.step(Event::Objective { function, objective });
        self.step(Event::SloCountsChanged { function, counts: counts.into() });
    }
}

/// GPU 0 holds A and has run it for `elapsed_ms`, and GPU 1 is idle. A load is charged 5% more than
/// its time.
#[test]
fn a_request_waits_for_a_busy_holder_if_that_costs_less_than_a_load() {
    let goes_to = |elapsed_ms| {
        let mut node = profiled(&[64, 64]);
        node.ask(1, 0, A);
        node.wait_ms(elapsed_ms);
        let Action::Assign { gpu, .. } = node.ask(2, 0, A)[..][0] else { panic!("expected an assignment") };
        gpu.0
    };
    // A turn with its load takes 160 ms, and 60 ms of loading are charged as 63.
    assert_eq!(goes_to(97), 1);
    assert_eq!(goes_to(98), 0);
    assert_eq!(goes_to(200), 0, "an overdue run counts as about to end");
    assert_eq!(goes_to(321), 1, "after twice its time the run counts as hanging");
}

#[test]
fn a_request_behind_a_holder_is_recalled_once_another_holder_is_free() {
    let mut node = profiled(&[64, 64, 64]);
    node.ask(1, 0, A);
    node.ask(2, 0, A);
    node.wait_ms(100);
    assert_eq!(node.ask(3, 0, A), [assign(0, 3, A)], "sooner than GPU 2 could load A");
    node.wait_ms(1);
    let recall = Action::Recall { gpu: gpu(0), key: RequestKey(3) };
    assert_eq!(node.ended(1, 2, 100), [recall], "GPU 1 holds A too");
    let back = Event::RequestReturned { gpu: gpu(0), key: RequestKey(3), why: ReturnReason::Recalled };
    assert_eq!(node.step(back), [assign(1, 3, A)]);
}

#[test]
fn a_model_is_copied_from_a_peer_if_faster_than_the_host_and_waiting() {
    let gpu_config = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let peers = vec![PeerLink { a: gpu(0), b: gpu(2), rate: BytesPerSec::gb(48) }];
    let policy = unified(UNIFIED_OVERTAKES_MAX);
    let config = Config { peers, ..Config::new(vec![gpu_config; 3], 9).with_policy(policy, 1) };
    let mut node = with_profiles(&config);
    assert_eq!(node.ask(1, 0, A), [assign(0, 1, A)]);
    node.step(Event::ModelLoaded { gpu: gpu(0), model: A, from: None });
    let from = |action: Action, holder| match action {
        Action::Assign { gpu, seat, key, model, incarnation, attempt, .. } => {
            Action::Assign { gpu, seat, key, model, incarnation, attempt, from: Some(holder) }
        }
        other => other,
    };
    assert_eq!(node.ask(2, 0, A), [from(assign(2, 2, A), gpu(0))]);
    let copied = node.seat(2).running.unwrap();
    assert_eq!(copied.swap, BytesPerSec::gb(48).time_for(Bytes::mib(8)));
}

#[test]
fn a_load_avoids_gpus_with_a_loading_neighbour() {
    let gpu_config = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let switches = vec![vec![gpu(0), gpu(1)], vec![gpu(2)]];
    let policy = unified(UNIFIED_OVERTAKES_MAX);
    let config = Config { switches, ..Config::new(vec![gpu_config; 3], 9).with_policy(policy, 1) };
    let mut node = with_profiles(&config);
    assert_eq!(node.ask(1, 0, A), [assign(0, 1, A)]);
    assert_eq!(node.ask(2, 0, B), [assign(2, 2, B)]);
    assert_eq!(node.ask(3, 0, LARGE), [assign(1, 3, LARGE)], "no other GPU is left");
}

/// Returns the order in which one GPU, which runs A for function 9 at first, serves the waiting
/// requests.
fn queue(waiting: &[(u32, ModelId)], bound: impl Fn(&mut Node), waits_ms: u64) -> Vec<u64> {
    let mut node = profiled(&[64]);
    bound(&mut node);
    for (key, model) in [(1001, A), (1002, B)] {
        node.ask(key, 9, model);
        node.wait_ms(160);
        node.ended(0, key, 100);
    }
    node.ask(1000, 9, A);
    for (key, &(function, model)) in (1..).zip(waiting) {
        node.ask(key, function, model);
    }
    node.wait_ms(waits_ms);
    let mut order = Vec::new();
    let mut running = 1000;
    while let [Action::Assign { key, .. }, ..] = node.ended(0, running, 100)[..] {
        running = key.0;
        order.push(key.0);
    }
    order
}

#[test]
fn endangered_functions_go_first_and_hopeless_functions_last() {
    let bound = |node: &mut Node| {
        // (0.9 n - m) / 0.1, and one more late request adds 9: the counts are -100, -5, 9 and 10.
        for (function, counts) in [(1, (100, 100)), (2, (95, 105)), (3, (90, 101)), (4, (89, 100))] {
            node.bound(function, 5_000, counts);
        }
    };
    let waiting = [(4, A), (9, A), (1, A), (2, A), (3, A)];
    assert_eq!(queue(&waiting, bound, 100), [4, 5, 3, 2, 1]);
}

#[test]
fn least_slack_goes_first_within_a_class() {
    let bound = |node: &mut Node| {
        node.bound(1, 5_000, (0, 0));
        node.bound(2, 3_000, (0, 0));
    };
    assert_eq!(queue(&[(1, A), (1, A), (2, A)], bound, 100), [3, 1, 2]);
}

/// docs/develop/mechanisms.md, T21.
#[test]
fn a_request_that_cannot_be_in_time_goes_behind_all_that_can() {
    let bound = |node: &mut Node| node.bound(1, 250, (0, 0));
    // Request 1 has 250 ms; 150 ms are over, and its run takes 100 ms.
    assert_eq!(queue(&[(1, A), (9, A)], bound, 150), [1, 2]);
    assert_eq!(queue(&[(1, A), (9, A)], bound, 151), [2, 1]);
}

#[test]
fn a_hit_goes_before_the_most_urgent_request_if_that_can_wait() {
    let order = |deadline_ms| queue(&[(1, LARGE), (9, A)], |node| node.bound(1, deadline_ms, (0, 0)), 100);
    // LARGE takes 60 ms to load and 100 ms to run, after 100 ms of waiting and 100 ms of the hit.
    assert_eq!(order(360), [2, 1]);
    assert_eq!(order(359), [1, 2]);
    assert_eq!(order(200), [2, 1], "late in any case");
}

#[test]
fn a_late_request_is_overtaken_up_to_the_limit_and_no_more() {
    for limit in [0, 1, 3] {
        let mut node = node_with(unified(limit), &[64]);
        node.bound(1, 1, (0, 0));
        node.enqueue(1, A);
        node.wait_ms(10);
        node.ended(0, 1, 10);
        node.enqueue(2, A);
        node.ask(3, 1, A);
        node.wait_ms(5);
        let mut running = 2;
        for overtaken in 0..=u64::from(limit) {
            let key = 4 + overtaken;
            node.enqueue(key, A);
            let next = if overtaken < u64::from(limit) { key } else { 3 };
            assert_eq!(node.ended(0, running, 10), [assign(0, next, A)], "{overtaken} times of {limit}");
            running = next;
        }
        assert_eq!(node.dispatch.stats().overtaken_max, u64::from(limit));
    }
}

#[test]
fn one_departure_in_aged_every_is_a_request_at_its_limit() {
    let mut node = node_with(unified_aging(1, 3), &[64]);
    node.bound(1, 1, (0, 0));
    node.enqueue(2, A);
    node.ask(3, 1, A);
    node.ask(4, 1, A);
    node.wait_ms(5);
    let mut running = 2;
    for (younger, next) in (5..).zip([5, 6, 3, 7, 8, 4, 9]) {
        node.enqueue(younger, A);
        assert_eq!(node.ended(0, running, 10), [assign(0, next, A)]);
        running = next;
    }
    assert_eq!(node.dispatch.stats().overtaken_max, 4);
}

/// Returns the request that goes first of three: two of functions with these scores, and one
/// without a deadline, in order of arrival.
fn first_of(scores: [u64; 2], together: bool) -> u64 {
    let mut node = node_with(PolicyConfig::Unified(UNIFIED), &[64]);
    let objective = LatencyObjective::from_billionths(900_000_000).unwrap();
    let objective = objective.within(Duration::from_secs(5)).together(together);
    for (function, m) in (1..).zip(scores).chain([(4, 90), (5, 90)]) {
        let function = FunctionIndex(function);
        node.step(Event::Objective { function, objective: Some(objective) });
        node.step(Event::SloCountsChanged { function, counts: SloCounts { m, n: 90 } });
    }
    node.enqueue(9, A);
    for (key, function) in [(1, 1), (2, 2), (3, 0)] {
        node.ask(10 + key, function, A);
        node.wait_ms(1);
    }
    let [Action::Assign { key, .. }] = node.ended(0, 9, 10)[..] else { panic!("expected one assignment") };
    key.0 - 10
}

#[test]
fn functions_with_batching_keep_their_turns_until_half_of_them_are_hopeless() {
    assert_eq!(first_of([0, 90], false), 2, "the first function is hopeless");
    assert_eq!(first_of([0, 90], true), 1, "one of four functions is hopeless");
    assert_eq!(first_of([90, 0], true), 1);
    assert_eq!(first_of([0, 0], true), 3, "half of the functions are hopeless, so all give way");
    assert_eq!(first_of([0, 0], false), 3);
}

#[test]
fn a_model_is_loaded_during_another_run_only_for_requests_without_a_deadline() {
    let mut node = profiled(&[64]);
    node.bound(1, 5_000, (0, 0));
    node.ask(1, 0, A);
    assert_eq!(node.ask(2, 1, B), [], "a more urgent request may still overtake request 2");
    assert_eq!(node.ask(3, 0, LARGE), [assign(0, 3, LARGE)]);
}

#[test]
fn short_hits_are_assigned_to_a_busy_gpu_up_to_the_bound() {
    let mut node = node_with(unified(UNIFIED_OVERTAKES_MAX), &[64]);
    node.enqueue(1000, A);
    let ran = Some(Duration::from_micros(3));
    node.step(Event::RequestEnded { gpu: gpu(0), key: RequestKey(1000), ran });
    assert_eq!(node.enqueue(0, A), [assign(0, 0, A)]);
    for key in 1..=AHEAD_MAX as u64 {
        assert_eq!(node.enqueue(key, A), [assign(0, key, A)]);
    }
    assert_eq!(node.enqueue(100, A), [], "no more than {AHEAD_MAX}");
    assert_eq!(node.ended(0, 0, 0), [assign(0, 100, A)]);
}

/// Reports reach the dispatcher later than runs of microseconds end.
#[test]
fn a_short_run_counts_as_hanging_only_a_recall_later_than_twice_its_time() {
    let behind = |waited: Duration| {
        let mut node = node_with(unified(UNIFIED_OVERTAKES_MAX), &[64]);
        node.enqueue(1000, A);
        let ran = Duration::from_micros(3);
        node.step(Event::RequestEnded { gpu: gpu(0), key: RequestKey(1000), ran: Some(ran) });
        assert_eq!(node.enqueue(0, A), [assign(0, 0, A)]);
        node.now = node.now + waited;
        node.enqueue(1, A)
    };
    let hangs_after = 2 * Duration::from_micros(3) + RECALL_COST;
    assert_eq!(behind(hangs_after), [assign(0, 1, A)]);
    assert_eq!(behind(hangs_after + Duration::from_nanos(1)), []);
}

#[test]
fn a_hit_is_not_assigned_to_a_busy_gpu_if_an_urgent_request_cannot_wait() {
    let asked = |deadline_ms| {
        let mut node = profiled(&[64]);
        let load = Duration::from_millis(60);
        let run = Duration::from_micros(3);
        node.step(Event::ProfileLoaded(ModelProfile { model: A, kind: 0, load, swap: None, run }));
        node.bound(1, deadline_ms, (0, 0));
        node.ask(1000, 0, A);
        node.step(Event::RequestEnded { gpu: gpu(0), key: RequestKey(1000), ran: Some(run) });
        assert_eq!(node.ask(1, 0, A), [assign(0, 1, A)]);
        assert_eq!(node.ask(2, 1, LARGE), [], "request 2 has a deadline");
        node.ask(3, 0, A)
    };
    // LARGE takes 60 ms to load and 100 ms to run.
    assert_eq!(asked(160), []);
    assert_eq!(asked(161), [assign(0, 3, A)]);
}

proptest! {
    /// L14 against an independent count, with functions that are sometimes late or without a
    /// deadline, all of them scored.
    #[test]
    fn no_request_is_overtaken_more_than_the_limit(
        limit in 0..5u32,
        every in 1..4u32,
        steps in prop::collection::vec((0..12u32, 0..8u32), 1..300)
    ) {
        let config = Config::new(vec![GpuConfig::new(Bytes::mib(16), BytesPerSec::gb(1)); 3], 1000);
        let mut node = node_of(&config.with_policy(unified_aging(limit, every), 1));
        for model in (0..8).map(ModelId) {
            node.step(Event::Install { model, memory: Bytes::mib(8), weights: Bytes::mib(8) });
        }
        for function in 0..6 {
            node.bound(function, 5 + 10 * u64::from(function), (0, 0));
        }
        let mut scores = [SloCounts::default(); 8];
        let mut overtaken = lalb::Overtaken::default();
        let mut waited = 0;
        for (key, (what, model)) in (1..).zip(steps) {
            node.wait_ms(3);
            let before = shared_queue(&node.dispatch);
            waited = waited.max(before.len() as u64);
            let most_allowed = u64::from(limit) + u64::from(every - 1) * waited;
            match node.first_running(3).filter(|_| what < 5) {
                Some((gpu, key)) => {
                    let ran = Some(Duration::from_millis(u64::from(model) + 1));
                    node.step(Event::RequestEnded { gpu, key, ran });
                    node.step(Event::ModelsEvicted { gpu, models: vec![ModelId(model)] });
                    let score = &mut scores[model as usize];
                    *score = score.plus(SloCounts { m: u64::from(what % 2), n: 1 });
                    let counts = *score;
                    node.step(Event::SloCountsChanged { function: FunctionIndex(model), counts });
                }
                None => drop(node.ask(key, model, ModelId(model))),
            }
            let most = overtaken.count(&before, &node.dispatch);
            prop_assert!(most <= most_allowed, "{overtaken:?}");
            prop_assert!(node.dispatch.stats().overtaken_max <= most_allowed);
        }
    }
}

#[test]
fn a_suspect_is_not_assigned_to_a_busy_holder() {
    let fresh = AttemptRecord::new(3, Idempotence::Yes);
    let RetryDecision::Again(suspect) = fresh.after(AttemptLoss::Failed(AttemptProgress::Preparing)) else {
        panic!("expected a retry")
    };
    let ask = |attempts| {
        let mut node = profiled(&[64]);
        node.ask(1, 0, A);
        // Request 1 counts as about to end.
        node.wait_ms(160);
        node.ask_again(2, F.0, A, attempts)
    };
    assert_eq!(ask(fresh), [assign(0, 2, A)]);
    assert_eq!(ask(suspect), [], "a suspect runs alone");
}
