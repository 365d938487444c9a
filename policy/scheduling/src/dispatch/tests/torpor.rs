use super::*;
use crate::dispatch::load_class::LoadClass;
use crate::dispatch::torpor::ALPHA_PERIOD;
use millrace_types::{Alpha, Alphas, Slo};

fn torpor(config: TorporConfig) -> PolicyConfig {
    PolicyConfig::Torpor(config)
}

/// Returns Torpor's server (T22): GPUs 0 and 1, and GPUs 2 and 3, share a switch; the NVLinks are
/// those of the artifact.
fn server(config: TorporConfig) -> Node {
    let gpu_config = GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(12));
    let peer = |(a, b, gb)| PeerLink { a: gpu(a), b: gpu(b), rate: BytesPerSec::gb(gb) };
    let links = [(0, 3, 48), (1, 2, 48), (2, 3, 48), (0, 1, 24), (0, 2, 24), (1, 3, 24)];
    let config = Config {
        switches: vec![vec![gpu(0), gpu(1)], vec![gpu(2), gpu(3)]],
        peers: links.map(peer).to_vec(),
        ..Config::new(vec![gpu_config; 4], 100).with_policy(torpor(config), 1)
    };
    node_of(&config)
}

impl Node {
    fn held_to(&mut self, function: u32, share: f64, counts: (u64, u64)) {
        let slo = Slo { deadline: Duration::from_millis(80), percentile: share };
        let function = FunctionIndex(function);
        let objective = Some(LatencyObjective::of(&slo));
        self.step(Event::Objective { function, objective });
        self.step(Event::SloCountsChanged { function, counts: counts.into() });
    }

    fn class(&mut self, model: ModelId, load_ms: u64, run_ms: u64) {
        let load = Duration::from_millis(load_ms);
        let run = Duration::from_millis(run_ms);
        self.step(Event::ProfileLoaded(ModelProfile { model, kind: 0, load, swap: None, run }));
    }

    fn loaded(&mut self, index: u32, model: ModelId) {
        self.step(Event::ModelLoaded { gpu: gpu(index), model, from: None });
    }

    /// Returns the order in which one GPU serves the waiting requests.
    fn drain(&mut self, mut running: u64) -> Vec<u64> {
        let mut order = Vec::new();
        while let [Action::Assign { key, .. }] = self.ended(0, running, 5)[..] {
            running = key.0;
            order.push(key.0);
        }
        order
    }
}

/// Returns a node on which, with p = 0.9, (0.9 n - m) / 0.1 is 40, 10, 0, -50 and 20 for functions
/// 1 to 5.
fn queue_of(config: TorporConfig) -> Node {
    let mut node = node_with(torpor(config), &[64]);
    node.dispatch.queue_max = 100;
    for (function, m) in [(1, 86), (2, 89), (3, 90), (4, 95), (5, 88)] {
        node.held_to(function, 0.9, (m, 100));
    }
    node
}

/// T21 with every function prioritised, and with alpha at its floor.
#[test]
fn prioritised_functions_go_by_largest_count_and_others_by_least() {
    let mut node = queue_of(TorporConfig::default());
    let fill = |node: &mut Node, from: u64| {
        node.ask(from, 9, A);
        for function in 1..=6 {
            node.ask(from + function, function as u32, A);
        }
        node.ask(from + 7, 1, A);
    };
    fill(&mut node, 100);
    // Function 3 just meets its objective and function 6 has none: both count the same, so age
    // decides.
    assert_eq!(node.drain(100), [101, 107, 105, 102, 103, 106, 104]);

    // Alpha halves in each period in which the share of compliant functions falls.
    for function in [3, 4] {
        node.now = node.now + ALPHA_PERIOD;
        let counts = SloCounts { m: 0, n: 100 };
        node.step(Event::SloCountsChanged { function: FunctionIndex(function), counts });
        node.now = node.now + ALPHA_PERIOD;
        node.step(Event::Tick);
    }
    // Functions 3 and 4 have a count of 1000 each, of 2070 in all; alpha is at its floor of one in
    // five.
    fill(&mut node, 200);
    assert_eq!(node.dispatch.stats().alphas, usual_alpha(200_000));
    assert_eq!(node.drain(200), [201, 207, 205, 202, 206, 203, 204]);
}

#[test]
fn torpor_fifo_orders_requests_by_age() {
    let mut node = queue_of(TorporConfig { order: TorporOrder::Arrival, ..TorporConfig::default() });
    for key in 1..=5 {
        node.ask(key, key as u32, A);
    }
    assert_eq!(node.drain(1), [2, 3, 4, 5]);
}

/// T22 as a decision table: the activity of each GPU, and the GPU for a request that no GPU holds.
#[test]
fn a_load_goes_to_the_gpu_with_the_least_loading_neighbour() {
    let place = |doing: [Option<(u64, bool)>; 4]| {
        let mut node = server(TorporConfig::default());
        // Every GPU becomes busy in turn with a model of its own from the host; then the GPUs that
        // should be idle are freed.
        for index in 0..4 {
            let model = ModelId(30 + index);
            node.step(Event::Install { model, memory: Bytes::mib(8), weights: Bytes::mib(8) });
            let (load_ms, loaded) = doing[index as usize].unwrap_or((1, true));
            node.class(model, load_ms, 100);
            force(&mut node, index, u64::from(index) + 1, model);
            if loaded {
                node.loaded(index, model);
            }
        }
        for index in 0..4 {
            if doing[index as usize].is_none() {
                node.ended(index, u64::from(index) + 1, 5);
            }
        }
        let Action::Assign { gpu, .. } = node.ask(50, 0, A)[..][0] else { panic!("expected an assignment") };
        gpu.0
    };
    // Load time in ms for a run of 100 ms, and whether the load is over.
    let light = Some((1, false));
    let medium = Some((60, false));
    let heavy = Some((200, false));
    let runs = Some((200, true));
    assert_eq!(place([heavy, None, runs, None]), 3, "a neighbour that only runs before one that loads");
    assert_eq!(place([heavy, None, light, None]), 3, "a light load before a heavy one");
    assert_eq!(place([medium, None, heavy, None]), 1);
    assert_eq!(place([light, None, medium, None]), 1);
    assert_eq!(place([heavy, None, heavy, heavy]), 1, "no other GPU is idle");
}

/// Makes a GPU run a model under any policy, because only this GPU is idle.
fn force(node: &mut Node, index: u32, key: u64, model: ModelId) {
    let down: Vec<u32> = (0..4).filter(|&other| other != index).collect();
    let idle: Vec<u32> =
        down.into_iter().filter(|&other| node.dispatch.fleet.is_idle(SeatIndex(other))).collect();
    for &other in &idle {
        node.step(Event::Down { gpu: gpu(other), lost: Vec::new() });
    }
    assert_eq!(node.ask(key, 0, model), [assign(index, key, model)]);
    for other in idle {
        node.step(Event::Up { gpu: gpu(other), incarnation: Incarnation(1) });
    }
}

/// T22: the hit first, then the fastest NVLink from a busy holder, then the host.
#[test]
fn a_model_is_copied_over_the_fastest_nvlink_from_a_busy_holder() {
    let mut node = server(TorporConfig::default());
    force(&mut node, 0, 1, A);
    node.loaded(0, A);
    assert_eq!(node.ask(2, 0, A), [assign_from(0, 3, 2, A)], "0-3 is a fast pair");
    let copied = node.seat(3);
    assert_eq!(copied.loading(), LoadClass::FromPeer);
    assert_eq!(copied.running.unwrap().swap, BytesPerSec::gb(48).time_for(Bytes::mib(8)));
    node.loaded(3, A);
    assert_eq!(node.ask(3, 0, A), [assign_from(3, 2, 3, A)], "3-2 is fast, 0-1 is not");
    node.ended(3, 2, 5);
    assert_eq!(node.ask(4, 0, A), [assign(3, 4, A)], "the idle holder");
    assert_eq!(node.dispatch.stats().hits, 1);
    assert_eq!(node.dispatch.stats().false_misses, 2);
}

#[test]
fn a_holder_with_a_copy_in_transit_is_no_source() {
    let mut node = server(TorporConfig::default());
    force(&mut node, 0, 1, A);
    assert_eq!(node.ask(2, 0, A), [assign(2, 2, A)], "from the host, away from the load of GPU 0");
    node.loaded(0, A);
    assert_eq!(node.ask(3, 0, A), [assign_from(0, 3, 3, A)]);
    assert_eq!(node.ask(4, 0, A), [assign_from(0, 1, 4, A)], "a slow pair: GPU 3 does not have A yet");
}

#[test]
fn a_peer_no_faster_than_the_host_is_no_source() {
    let gpu_config = GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(12));
    let peers = vec![PeerLink { a: gpu(0), b: gpu(1), rate: BytesPerSec::gb(12) }];
    let policy = torpor(TorporConfig::default());
    let mut node = node_of(&Config { peers, ..Config::new(vec![gpu_config; 2], 9).with_policy(policy, 1) });
    assert_eq!(node.ask(1, 0, A), [assign(0, 1, A)]);
    assert_eq!(node.ask(2, 0, A), [assign(1, 2, A)]);
    assert_eq!(node.seat(1).running.unwrap().swap, BytesPerSec::gb(12).time_for(Bytes::mib(8)));
}

#[test]
fn random_choices_repeat_for_a_seed_and_cover_all_gpus() {
    let draws = |seed| {
        let gpus = vec![GpuConfig::new(Bytes::mib(64), BytesPerSec::gb(12)); 4];
        let mut node = node_of(&Config::new(gpus, 9).with_policy("random".parse().unwrap(), seed));
        let mut draws = Vec::new();
        for key in 1..=40 {
            let Action::Assign { gpu, .. } = node.ask(key, 0, B)[..][0] else {
                panic!("expected an assignment")
            };
            draws.push(gpu.0);
            node.ended(gpu.0, key, 1);
            node.step(Event::ModelsEvicted { gpu, models: vec![B] });
        }
        draws
    };
    assert_eq!(draws(5), draws(5));
    assert_ne!(draws(5), draws(6));
    assert_eq!(draws(5).into_iter().collect::<BTreeSet<_>>(), (0..4).collect());
}

#[test]
fn artifact_regroups_every_two_seconds() {
    let mut node = queue_of(TorporConfig { alpha: AlphaRule::Artifact, ..TorporConfig::default() });
    node.step(Event::Tick);
    node.now = node.dispatch.next_wake().unwrap();
    node.step(Event::Tick);
    node.ask(1, 9, A);
    node.ask(2, 3, A);
    node.ask(3, 4, A);
    let late = SloCounts { m: 0, n: 1000 };
    node.step(Event::SloCountsChanged { function: FunctionIndex(4), counts: late });
    assert_eq!(node.drain(1), [2, 3], "in the old order");
    node.ask(4, 9, A);
    node.ask(5, 3, A);
    node.ask(6, 4, A);
    node.now = node.dispatch.next_wake().unwrap();
    node.step(Event::Tick);
    assert_eq!(node.drain(4), [6, 5], "function 4 now has the largest count");
}

#[test]
fn a_removed_function_no_longer_counts() {
    let mut node = queue_of(TorporConfig::default());
    for function in 1..=5 {
        node.step(Event::FunctionRemoved { function: FunctionIndex(function) });
    }
    node.now = node.now + ALPHA_PERIOD;
    node.step(Event::Tick);
    assert_eq!(node.dispatch.next_wake(), None, "no function has an objective");
    assert_eq!(node.dispatch.stats().alphas, Alphas::new());
}

/// Returns the alpha of the default priority alone.
fn usual_alpha(ppm: u32) -> Alphas {
    Alphas::from([(Priority::default(), Alpha::from_ppm(ppm).unwrap())])
}

/// T16 with T20: a node that starts again prioritises the same functions as before.
#[test]
fn a_node_that_starts_again_prioritises_the_same_functions() {
    let order = |node: &mut Node| {
        node.ask(100, 9, A);
        (1..=5).for_each(|function| drop(node.ask(100 + u64::from(function), function, A)));
        node.drain(100)
    };
    let period = |node: &mut Node| {
        node.now = node.now + ALPHA_PERIOD;
        node.step(Event::Tick);
    };
    let mut undisturbed = queue_of(TorporConfig::default());
    for function in [3, 4] {
        undisturbed.now = undisturbed.now + ALPHA_PERIOD;
        undisturbed.held_to(function, 0.9, (0, 100));
        period(&mut undisturbed);
    }
    let committed = undisturbed.dispatch.stats().alphas;
    assert_eq!(committed, usual_alpha(200_000));
    let expected = order(&mut undisturbed);

    for alphas_come_first in [true, false] {
        let mut again = node_with(torpor(TorporConfig::default()), &[64]);
        again.dispatch.queue_max = 100;
        if alphas_come_first {
            again.step(Event::AlphasCommitted(committed.clone()));
        }
        for (function, m) in [(1, 86), (2, 89), (3, 0), (4, 0), (5, 88)] {
            again.held_to(function, 0.9, (m, 100));
        }
        if !alphas_come_first {
            again.step(Event::AlphasCommitted(committed.clone()));
        }
        for _ in 0..2 {
            period(&mut again);
            assert_eq!(again.dispatch.stats().alphas, committed);
        }
        assert_eq!(order(&mut again), expected);
    }
}

/// A worker that starts receives its alphas and its policy in any order. Alphas of long ago do not
/// hold for a policy that an operator sets later.
#[test]
fn a_policy_begins_with_the_committed_alphas_only_if_it_is_set_soon() {
    for (after, ppm) in [(Duration::ZERO, 250_000), (ALPHA_PERIOD, 1_000_000)] {
        let mut node = node_with(PolicyConfig::Fifo, &[64]);
        node.step(Event::AlphasCommitted(usual_alpha(250_000)));
        node.now = node.now + after;
        node.step(Event::PolicyChanged {
            policy: torpor(TorporConfig::default()),
            eviction: Eviction::Lru,
            functions: Vec::new(),
        });
        node.held_to(1, 0.9, (90, 100));
        assert_eq!(node.dispatch.stats().alphas, usual_alpha(ppm), "after {after:?}");
    }
}

/// docs/develop/mechanisms.md, T21.
#[test]
fn late_requests_keep_their_turn() {
    let mut node = queue_of(TorporConfig::default());
    node.ask(1, 9, A);
    // Function 1 has the largest count. The deadline of 80 ms passes for the first of its requests.
    node.ask(2, 1, A);
    node.now = node.now + Duration::from_millis(40);
    node.ask(3, 5, A);
    node.ask(4, 1, A);
    node.now = node.now + Duration::from_millis(41);
    assert_eq!(node.drain(1), [2, 4, 3]);
}

#[test]
fn stats_report_the_copies_of_the_most_requested_model() {
    let mut node = server(TorporConfig::default());
    for (key, model) in [(1, B), (2, A), (3, A)] {
        node.ask(key, 0, model);
    }
    assert_eq!(node.dispatch.stats().top_copies, 2);
}
