//! Choice of GPUs for requests with inputs on GPUs (D06, D07, D19).

use super::*;
use crate::dispatch::cost::SwapSource;

/// Returns a node of three GPUs of 64 MiB at 1 GB/s, with a link of 10 GB/s between GPUs 1 and 2.
/// All GPUs hold these models, which run for 10 ms, and are idle.
fn holding(policy: &str, models: &[ModelId]) -> Node {
    let config = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let rate = BytesPerSec::gb(10);
    let peers = vec![PeerLink { a: gpu(1), b: gpu(2), rate }];
    let ways = both_ways(1, 2, rate).to_vec();
    let config = Config { peers, ways, ..Config::new(vec![config; 3], 9) };
    let mut node = node_of(&config.with_policy(policy.parse().unwrap(), 1));
    for &model in models {
        let keys = [1001, 1002, 1003];
        let went: Vec<_> = keys.iter().flat_map(|&key| node.enqueue(key, model)).collect();
        for action in went {
            let Action::Assign { gpu, key, model, .. } = action else { continue };
            node.step(Event::ModelLoaded { gpu, model, from: None });
            node.ended(gpu.0, key.0, 10);
        }
    }
    node
}

fn goes_to(actions: &[Action]) -> Option<u32> {
    let to = |action: &Action| if let Action::Assign { gpu, .. } = action { Some(gpu.0) } else { None };
    actions.iter().find_map(to)
}

#[test]
fn the_gpu_with_the_inputs_wins_among_equal_idle_gpus() {
    for policy in ["fifo", "lalb", "lalb-o3", "torpor", "unified"] {
        for data_on in 0..3 {
            let mut node = holding(policy, &[A]);
            let went = goes_to(&node.ask_with(1, A, &[(data_on, 40)]));
            assert_eq!(went, Some(data_on), "{policy}: all hold A");
        }
    }
    for policy in ["fifo", "torpor", "unified"] {
        for data_on in 0..3 {
            let mut node = holding(policy, &[]);
            let went = goes_to(&node.ask_with(1, A, &[(data_on, 40)]));
            assert_eq!(went, Some(data_on), "{policy}: no GPU holds A");
        }
    }
}

#[test]
fn a_link_from_the_inputs_decides_while_their_gpu_is_busy() {
    for policy in ["fifo", "lalb", "torpor"] {
        let mut node = holding(policy, &[A]);
        assert_eq!(goes_to(&node.ask_with(1, A, &[(2, 40)])), Some(2));
        assert_eq!(goes_to(&node.ask_with(2, A, &[(2, 40)])), Some(1), "{policy}");
        assert_eq!(goes_to(&node.ask_with(3, A, &[(2, 40)])), Some(0), "{policy}: the last idle GPU");
    }
}

#[test]
fn a_route_over_several_links_counts_by_its_rate() {
    for policy in ["fifo", "torpor", "unified"] {
        let config = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
        // No link joins 0 and 3.
        let peers =
            [(0, 1), (1, 3)].map(|(a, b)| PeerLink { a: gpu(a), b: gpu(b), rate: BytesPerSec::gb(4) });
        let ways = [both_ways(0, 1, BytesPerSec::gb(4)), both_ways(0, 3, BytesPerSec::gb(8))].concat();
        let config = Config { peers: peers.to_vec(), ways, ..Config::new(vec![config; 4], 9) };
        let mut node = node_of(&config.with_policy(policy.parse().unwrap(), 1));
        assert_eq!(goes_to(&node.ask_with(1, A, &[(0, 40)])), Some(0), "{policy}");
        assert_eq!(goes_to(&node.ask_with(2, B, &[(0, 40)])), Some(3), "{policy}");
        assert_eq!(goes_to(&node.ask_with(3, LARGE, &[(0, 40)])), Some(1), "{policy}");
    }
}

#[test]
fn fifo_prefers_a_resident_model_to_local_inputs() {
    let mut node = holding("fifo", &[]);
    assert_eq!(goes_to(&node.enqueue(1, A)), Some(0));
    node.ended(0, 1, 10);
    assert_eq!(goes_to(&node.ask_with(2, A, &[(2, 40)])), Some(0));
}

#[test]
fn a_next_request_goes_to_the_busy_gpu_that_begins_it_first() {
    let busy = |read: &[(u32, u64)]| {
        let mut node = holding("fifo", &[A]);
        for key in 1..=3 {
            node.enqueue(key, A);
            // GPU 0 finishes 4 ms before GPU 2.
            node.now = node.now + Duration::from_millis(2);
        }
        goes_to(&node.ask_with(4, A, read))
    };
    assert_eq!(busy(&[]), Some(0));
    assert_eq!(busy(&[(2, 1)]), Some(0), "the inputs arrive in 2 ms, and GPU 0 finishes in 4");
    assert_eq!(busy(&[(2, 40)]), Some(1), "the inputs arrive over a link in 4 ms, and GPU 1 finishes in 6");
    assert_eq!(busy(&[(0, 40)]), Some(0));
}

/// A MiB crosses both host links, at 1 GB/s, in 2 ms.
#[test]
fn unified_weighs_data_against_loads_and_waits() {
    let on = |holds: &[u32], read: &[(u32, u64)], busy_for_ms: Option<u64>| {
        let mut node = holding("unified", &[]);
        let load = Duration::from_millis(20);
        let run = Duration::from_millis(30);
        node.step(Event::ProfileLoaded(ModelProfile { model: A, kind: 0, load, swap: None, run }));
        for &index in holds {
            node.ask_with(1000, A, &[(index, 60)]);
            node.step(Event::ModelLoaded { gpu: gpu(index), model: A, from: None });
            node.ended(index, 1000, 30);
        }
        if let Some(ms) = busy_for_ms {
            assert_eq!(goes_to(&node.ask_with(1, A, &[(0, 60)])), Some(0));
            node.now = node.now + Duration::from_millis(30 - ms);
        }
        goes_to(&node.ask_with(2, A, read))
    };
    assert_eq!(on(&[0], &[(2, 5)], None), Some(0), "10 ms of transfer are less than 20 of loading");
    assert_eq!(on(&[0], &[(2, 40)], None), Some(2), "84 ms are more");
    assert_eq!(on(&[0, 1], &[(0, 40)], Some(20)), Some(0), "20 ms of waiting are less than the transfer");
    assert_eq!(on(&[0, 1], &[(0, 5)], Some(20)), Some(1), "20 ms of waiting are more than 10 of transfer");
}

#[test]
fn a_gpu_without_the_inputs_recalls_no_request_that_begins_sooner_near_them() {
    let ask = |read: &[(u32, u64)]| {
        let mut node = holding("fifo", &[A]);
        (1..=3).for_each(|key| drop(node.enqueue(key, A)));
        let to = goes_to(&node.ask_with(4, A, read));
        node.now = node.now + Duration::from_millis(2);
        let actions = node.ended(1, 2, 10);
        (to, actions.iter().any(|action| matches!(action, Action::Recall { .. })))
    };
    assert_eq!(ask(&[]), (Some(0), true));
    assert_eq!(ask(&[(0, 40)]), (Some(0), false), "8 ms until its turn, 84 ms until the inputs arrive");
}

#[test]
fn moved_inputs_count_at_their_new_location() {
    let asked_back = |before: &[(u32, u64)], by_now: &[(u32, u64)]| {
        let mut node = holding("fifo", &[A]);
        (1..=3).for_each(|key| drop(node.enqueue(key, A)));
        assert_eq!(goes_to(&node.ask_with(4, A, before)), Some(0));
        assert_eq!(node.step(Event::InputsMoved { key: RequestKey(4), inputs: data(by_now) }), []);
        node.now = node.now + Duration::from_millis(2);
        let actions = node.ended(1, 2, 10);
        actions.iter().any(|action| matches!(action, Action::Recall { .. }))
    };
    assert!(asked_back(&[(0, 40)], &[]), "the inputs were evicted to the host");
    assert!(!asked_back(&[], &[(0, 40)]), "the inputs returned");
}

#[test]
fn torpor_prefers_undisturbed_loads_to_local_inputs() {
    let config = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let switches = vec![vec![gpu(0), gpu(1)], vec![gpu(2), gpu(3)]];
    let config = Config { switches, ..Config::new(vec![config; 4], 9) };
    let mut node = node_of(&config.with_policy("torpor".parse().unwrap(), 1));
    assert_eq!(goes_to(&node.enqueue(1, A)), Some(0));
    assert_eq!(goes_to(&node.ask_with(2, B, &[(1, 9), (3, 2)])), Some(3), "GPU 0 loads beside GPU 1");
}

#[test]
fn a_turn_with_moved_inputs_is_no_sample_of_a_swap() {
    let mut node = holding("fifo", &[]);
    let swap = |node: &Node| {
        let slot = node.dispatch.models.slot(A).unwrap();
        node.dispatch.fleet.get(gpu(1)).nominal(&node.dispatch.models, slot, SwapSource::Host)
            == node.dispatch.fleet.swap_time(&node.dispatch.models, gpu(1), slot)
    };
    assert_eq!(goes_to(&node.ask_with(1, A, &[(0, 5), (2, 1)])), Some(0));
    node.now = node.now + Duration::from_millis(50);
    node.ended(0, 1, 10);
    assert!(swap(&node));
    // A turn without inputs is a sample.
    assert_eq!(goes_to(&node.ask_with(2, B, &[])), Some(1));
    node.now = node.now + Duration::from_millis(50);
    node.ended(1, 2, 10);
    let slot = node.dispatch.models.slot(B).unwrap();
    assert_eq!(node.dispatch.fleet.swap_time(&node.dispatch.models, gpu(2), slot), Duration::from_millis(40));
}

#[test]
fn inputs_of_all_requests_in_a_batch_count() {
    let mut node = holding("lb", &[]);
    let rows =
        |rows, read: &[(u32, u64)]| Event::BatchChanged { key: RequestKey(1), rows, inputs: data(read) };
    node.step(rows(2, &[(1, 3)]));
    node.ask_with(1, A, &[(2, 1)]);
    assert_eq!(node.dispatch.inputs[&RequestKey(1)], data(&[(1, 3)]));
    node.step(rows(1, &[(2, 1)]));
    assert_eq!(node.dispatch.inputs[&RequestKey(1)], data(&[(2, 1)]));
    node.ended(0, 1, 10);
    node.step(rows(1, &[(2, 1)]));
    node.step(Event::InputsMoved { key: RequestKey(1), inputs: data(&[(2, 1)]) });
    assert!(node.dispatch.inputs.is_empty(), "the request has left");
}
