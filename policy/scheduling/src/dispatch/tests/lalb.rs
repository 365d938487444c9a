use super::*;

const LALB: PolicyConfig = PolicyConfig::Lalb { overtakes_max: 0 };
const O3: PolicyConfig = PolicyConfig::Lalb { overtakes_max: OVERTAKES_MAX };

pub(super) fn limit(policy: PolicyConfig) -> Option<u64> {
    match policy {
        PolicyConfig::Lalb { overtakes_max } | PolicyConfig::Unified(UnifiedConfig { overtakes_max, .. }) => {
            Some(overtakes_max.into())
        }
        _ => None,
    }
}

/// Without out-of-order dispatch, no request leaves the queue while an older one stays that fits
/// the same GPU (L11).
pub(super) fn check_order(
    policy: PolicyConfig,
    before: &BTreeMap<RequestKey, WaitingRequest>,
    after: &Dispatcher,
) {
    if limit(policy) != Some(0) {
        return;
    }
    for (key, gpu) in left(before, after) {
        let stays = shared_queue(after).into_values();
        let rank = after.fleet.get(gpu).rank;
        let passed = stays.filter(|old| old.key < key && old.rank <= rank && before.contains_key(&old.key));
        assert_eq!(passed.map(|old| old.key).collect::<Vec<_>>(), [], "{key} went before them");
    }
}

/// Returns the requests that left the shared queue, with their GPUs.
fn left(before: &BTreeMap<RequestKey, WaitingRequest>, after: &Dispatcher) -> Vec<(RequestKey, GpuIndex)> {
    let to = |&key: &RequestKey| match *after.places.get(&key)? {
        RequestLocation::On(seat) => Some((key, after.fleet.gpu_of(seat))),
        RequestLocation::Queued { reserved, .. } => Some((key, reserved?)),
    };
    before.keys().filter_map(to).collect()
}

/// Number of times that each request was overtaken: it stayed in the shared queue while a younger
/// one left.
#[derive(Debug, Default)]
pub(super) struct Overtaken(BTreeMap<RequestKey, u64>);

impl Overtaken {
    /// Counts the departures since `before`; returns the maximum over all requests.
    pub(super) fn count(&mut self, before: &BTreeMap<RequestKey, WaitingRequest>, after: &Dispatcher) -> u64 {
        let leavers = left(before, after);
        for &key in shared_queue(after).keys().filter(|key| before.contains_key(key)) {
            *self.0.entry(key).or_default() += leavers.iter().filter(|(left, _)| *left > key).count() as u64;
        }
        self.0.values().max().copied().unwrap_or(0)
    }
}

/// Returns a node on which loading A or B takes 60 ms, and running them 100 ms.
fn profiled(policy: PolicyConfig, memories_mib: &[u64]) -> Node {
    let mut node = node_with(policy, memories_mib);
    let load = Duration::from_millis(60);
    let run = Duration::from_millis(100);
    for model in [A, B] {
        node.step(Event::ProfileLoaded(ModelProfile { model, kind: 0, load, swap: None, run }));
    }
    node
}

impl Node {
    fn after_ms(&mut self, ms: u64) {
        self.now = self.now + Duration::from_millis(ms);
    }

    fn to(&mut self, key: u64, model: ModelId) -> Option<GpuIndex> {
        self.enqueue(key, model);
        match *self.dispatch.places.get(&RequestKey(key))? {
            RequestLocation::On(seat) => Some(self.dispatch.fleet.gpu_of(seat)),
            RequestLocation::Queued { reserved, .. } => reserved,
        }
    }
}

/// L12: GPU 0 holds A and has run a request for `elapsed_ms`, and GPU 1 is idle. Returns the GPU of
/// the next request for A.
fn goes_to(elapsed_ms: u64) -> GpuIndex {
    let mut node = profiled(LALB, &[64, 64]);
    node.enqueue(1, A);
    node.ended(0, 1, 100);
    node.enqueue(2, A);
    node.after_ms(elapsed_ms);
    node.to(3, A).unwrap()
}

#[test]
fn a_busy_holder_gets_a_request_only_if_strictly_sooner_than_a_load() {
    assert_eq!(goes_to(40), gpu(1), "60 ms of waiting and 60 of loading: a miss");
    assert_eq!(goes_to(41), gpu(0), "59 ms: a move");
    assert_eq!(goes_to(130), gpu(0), "an overdue run counts as about to end");
    assert_eq!(goes_to(201), gpu(1), "after twice its time the run counts as hanging");
}

#[test]
fn the_busy_holder_that_finishes_first_gets_the_request() {
    let mut node = profiled(LALB, &[64, 64, 64]);
    for key in [1, 2] {
        assert_eq!(node.to(key, A), Some(gpu(key as u32 - 1)));
        node.after_ms(50);
    }
    for index in [0, 1] {
        node.ended(index, u64::from(index) + 1, 100);
    }
    for key in [3, 4] {
        node.to(key, A);
        node.after_ms(15);
    }
    // Idle GPU 2 lacks A. Of the holders, GPU 0 has run for 75 ms and GPU 1 for 60.
    node.after_ms(45);
    assert_eq!(node.to(5, A), Some(gpu(0)));
    assert_eq!(node.to(6, A), Some(gpu(1)), "GPU 0 has a waiting request");
    assert_eq!(node.to(7, A), Some(gpu(2)), "both holders have one: a miss, and a replica (L13)");
}

/// L10; the model stays pinned while requests wait for it.
#[test]
fn a_gpus_own_queue_comes_before_the_shared_one_and_pins_its_model() {
    let mut node = profiled(LALB, &[64, 64]);
    node.to(1, A);
    // From now on a load takes so long that waiting is always better.
    let load = Duration::from_secs(9);
    let run = Duration::from_millis(100);
    node.step(Event::ProfileLoaded(ModelProfile { model: A, kind: 0, load, swap: None, run }));
    assert_eq!(node.enqueue(2, A), [assign(0, 2, A)], "assigned behind the running request");
    let pin = Action::Pin { gpu: gpu(0), model: A };
    assert_eq!(node.enqueue(3, A), [pin], "request 3 waits for GPU 0");
    assert_eq!(node.enqueue(4, A), []);
    assert_eq!(node.dispatch.queued(), 2);
    assert_eq!(node.enqueue(5, B), [assign(1, 5, B)]);
    assert_eq!(node.enqueue(6, LARGE), []);
    assert_eq!(node.ended(0, 1, 100), [assign(0, 3, A)]);
    assert_eq!(node.step(Event::Withdraw { key: RequestKey(4) }), [Action::Unpin { gpu: gpu(0), model: A }]);
    assert_eq!(node.ended(0, 2, 100), []);
    assert_eq!(node.ended(0, 3, 100), [assign(0, 6, LARGE)], "the shared queue after the own queue");
}

#[test]
fn own_queue_of_a_lost_gpu_rejoins_the_shared_queue() {
    let mut node = profiled(O3, &[64, 64]);
    node.to(1, A);
    // From now on a load takes so long that waiting is always better.
    let load = Duration::from_secs(9);
    let run = Duration::from_millis(100);
    node.step(Event::ProfileLoaded(ModelProfile { model: A, kind: 0, load, swap: None, run }));
    (2..=3).for_each(|key| drop(node.enqueue(key, A)));
    let unpin = Action::Unpin { gpu: gpu(0), model: A };
    assert_eq!(
        node.down(0, &[(1, AttemptProgress::Begun)]),
        [unpin, again(1, 1, A, 2)],
        "a suspect runs alone"
    );
    assert_eq!(node.ended(1, 1, 100), [assign(1, 2, A)], "in the old order");
}

/// L11: any queued model that the idle GPU holds is a hit.
#[test]
fn an_idle_gpu_takes_a_younger_hit_only_with_out_of_order_dispatch() {
    for (policy, expected) in [(O3, assign(0, 4, A)), (LALB, assign(0, 3, B))] {
        let mut node = profiled(policy, &[64]);
        node.enqueue(1, A);
        node.enqueue(3, B);
        node.enqueue(4, A);
        let given = node.ended(0, 1, 100);
        assert_eq!(given, [expected], "{policy}");
    }
}

/// Algorithm 2, lines 4 to 6: a request goes to another idle GPU that holds its model.
#[test]
fn a_request_goes_to_the_idle_gpu_that_holds_its_model() {
    let mut node = profiled(LALB, &[64, 64]);
    node.enqueue(1, A);
    node.enqueue(2, B);
    node.ended(0, 1, 100);
    node.ended(1, 2, 100);
    assert_eq!(node.to(3, B), Some(gpu(1)));
    assert_eq!(node.to(4, A), Some(gpu(0)));
}

/// L14: the oldest request is overtaken up to its limit and then goes first.
#[test]
fn a_request_is_overtaken_up_to_the_limit_and_no_more() {
    for limit in [0, 1, 2, 3] {
        let mut node = profiled(PolicyConfig::Lalb { overtakes_max: limit }, &[64]);
        let first = 1;
        node.enqueue(first, A);
        node.enqueue(2, B);
        let mut running = first;
        for overtaken in 0..=u64::from(limit) {
            let hit = 3 + overtaken;
            node.enqueue(hit, A);
            let next = if overtaken < u64::from(limit) { assign(0, hit, A) } else { assign(0, 2, B) };
            assert_eq!(node.ended(0, running, 100), [next], "overtaken {overtaken} times of {limit}");
            running = hit;
        }
        let stats = node.dispatch.stats();
        assert_eq!((stats.overtaken_max, stats.overtakings), (limit.into(), limit.into()));
    }
}

/// Addition of the paper's counter: a search without a hit increases the count of every request.
#[test]
fn visits_also_count_fruitless_searches() {
    let mut node = profiled(O3, &[64, 64]);
    node.enqueue(1, LARGE);
    node.enqueue(2, LARGE);
    (3..=5).for_each(|key| drop(node.enqueue(key, [A, B][key as usize % 2])));
    node.ended(0, 1, 100);
    node.ended(1, 2, 100);
    let stats = node.dispatch.stats();
    assert_eq!((stats.overtaken_max, stats.visits_max), (0, 2));
}

proptest! {
    /// L14 against an independent count.
    #[test]
    fn no_request_is_overtaken_more_than_the_limit(
        limit in 0..5u32,
        steps in prop::collection::vec((0..12u32, 0..8u32), 1..300)
    ) {
        let config = Config::new(vec![GpuConfig::new(Bytes::mib(16), BytesPerSec::gb(1)); 3], 1000);
        let mut node = node_of(&config.with_policy(PolicyConfig::Lalb { overtakes_max: limit }, 1));
        for model in (0..8).map(ModelId) {
            node.step(Event::Install { model, memory: Bytes::mib(8), weights: Bytes::mib(8) });
        }
        let mut overtaken = Overtaken::default();
        for (key, (what, model)) in (1..).zip(steps) {
            node.now = node.now + Duration::from_millis(3);
            let before = shared_queue(&node.dispatch);
            match node.first_running(3).filter(|_| what < 5) {
                Some((gpu, key)) => {
                    node.step(Event::RequestEnded { gpu, key, ran: Some(Duration::from_millis(u64::from(model) + 1)) });
                    node.step(Event::ModelsEvicted { gpu, models: vec![ModelId(model)] });
                }
                None => drop(node.enqueue(key, ModelId(model))),
            }
            let most = overtaken.count(&before, &node.dispatch);
            prop_assert!(most <= limit.into(), "{overtaken:?}");
        }
        prop_assert!(node.dispatch.stats().overtaken_max <= limit.into());
    }
}

/// L23: a scheduler of 1,000 GPUs assigns each request once.
#[test]
fn a_thousand_gpus_serve_every_request_once() {
    const GPUS: usize = 1_000;
    const MODELS: u64 = 200;
    const REQUESTS: u64 = 5_000;
    let model = |number: u64| ModelId(10 + (number % MODELS) as u32);
    for policy in [PolicyConfig::Lalb { overtakes_max: 25 }, PolicyConfig::Torpor(TorporConfig::default())] {
        let gpus = vec![GpuConfig::new(Bytes::mib(512), BytesPerSec::gb(12)); GPUS];
        let mut node = node_of(&Config::new(gpus, REQUESTS as u32).with_policy(policy, 1));
        for number in 0..MODELS {
            let memory = Bytes::mib(2);
            node.step(Event::Install { model: model(number), memory, weights: memory });
        }
        let mut assigned = BTreeSet::new();
        let mut running = std::collections::VecDeque::new();
        let mut note = |actions: Vec<Action>, running: &mut std::collections::VecDeque<(u32, u64)>| {
            for action in actions {
                if let Action::Assign { gpu, key, .. } = action {
                    assert!(assigned.insert(key), "{policy:?}: {key:?} was assigned twice");
                    running.push_back((gpu.0, key.0));
                }
            }
        };
        for key in 1..=REQUESTS {
            note(node.ask(key, F.0, model(key * 7)), &mut running);
        }
        assert_eq!(running.len(), GPUS, "{policy:?}: every GPU has a request");
        while let Some((gpu, key)) = running.pop_front() {
            node.now = node.now + Duration::from_millis(5);
            note(node.ended(gpu, key, 5), &mut running);
        }
        assert_eq!((assigned.len() as u64, node.dispatch.queued()), (REQUESTS, 0), "{policy:?}");
    }
}
