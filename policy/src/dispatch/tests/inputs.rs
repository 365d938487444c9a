//! Where requests go whose data is on GPUs (D06, D07, D19).

use super::*;
use crate::dispatch::cost::Source;

/// Three GPUs of 64 MiB at 1 GB/s, of which 1 and 2 are joined at 10 GB/s. All hold these models, which
/// run for 10 ms, and are idle.
fn holding(policy: &str, models: &[ModelId]) -> Node {
    let config = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let rate = BytesPerSec::gb(10);
    let (peers, ways) = (vec![PeerLink { a: gpu(1), b: gpu(2), rate }], both_ways(1, 2, rate).to_vec());
    let config = Config { peers, ways, ..Config::new(vec![config; 3], 9) };
    let mut node = node_of(&config.with_policy(policy.parse().unwrap(), 1));
    for &model in models {
        let keys = [1001, 1002, 1003];
        let went: Vec<_> = keys.iter().flat_map(|&key| node.enqueue(key, model)).collect();
        for action in went {
            let Action::Assign { gpu, key, model, .. } = action else { continue };
            node.step(Event::Loaded { gpu, model, from: None });
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
fn of_idle_gpus_that_hold_the_model_or_do_not_the_one_with_the_data_runs_it() {
    for policy in ["fifo", "lalb", "lalb-o3", "torpor", "unified"] {
        for data_on in 0..3 {
            let mut node = holding(policy, &[A]);
            let went = goes_to(&node.ask_with(1, A, &[(data_on, 40)]));
            assert_eq!(went, Some(data_on), "{policy}: all hold it");
        }
    }
    for policy in ["fifo", "torpor", "unified"] {
        for data_on in 0..3 {
            let mut node = holding(policy, &[]);
            let went = goes_to(&node.ask_with(1, A, &[(data_on, 40)]));
            assert_eq!(went, Some(data_on), "{policy}: nobody holds it");
        }
    }
}

#[test]
fn where_the_gpu_with_the_data_is_busy_a_link_from_it_decides() {
    for policy in ["fifo", "lalb", "torpor"] {
        let mut node = holding(policy, &[A]);
        assert_eq!(goes_to(&node.ask_with(1, A, &[(2, 40)])), Some(2));
        assert_eq!(goes_to(&node.ask_with(2, A, &[(2, 40)])), Some(1), "{policy}");
        assert_eq!(goes_to(&node.ask_with(3, A, &[(2, 40)])), Some(0), "{policy}: the last that is idle");
    }
}

#[test]
fn a_way_over_several_links_is_as_good_as_its_rate() {
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
fn a_model_that_is_there_is_worth_more_to_fifo_than_data() {
    let mut node = holding("fifo", &[]);
    assert_eq!(goes_to(&node.enqueue(1, A)), Some(0));
    node.ended(0, 1, 10);
    assert_eq!(goes_to(&node.ask_with(2, A, &[(2, 40)])), Some(0));
}

#[test]
fn where_none_is_idle_a_request_goes_ahead_to_where_it_begins_first() {
    let busy = |read: &[(u32, u64)]| {
        let mut node = holding("fifo", &[A]);
        for key in 1..=3 {
            node.enqueue(key, A);
            // GPU 0 is through 4 ms before GPU 2.
            node.now = node.now + Duration::from_millis(2);
        }
        goes_to(&node.ask_with(4, A, read))
    };
    assert_eq!(busy(&[]), Some(0));
    assert_eq!(busy(&[(2, 1)]), Some(0), "it is there in 2 ms, and GPU 0 is through in 4");
    assert_eq!(busy(&[(2, 40)]), Some(1), "a link brings it in 4 ms, and GPU 1 is through in 6");
    assert_eq!(busy(&[(0, 40)]), Some(0));
}

/// MiB at 1 GB/s and back: 2 ms each over the host.
#[test]
fn unified_weighs_data_against_loads_and_waits() {
    let on = |holds: &[u32], read: &[(u32, u64)], busy_for_ms: Option<u64>| {
        let mut node = holding("unified", &[]);
        let (load, run) = (Duration::from_millis(20), Duration::from_millis(30));
        node.step(Event::Learned(Learned { model: A, kind: 0, load, swap: None, run }));
        for &index in holds {
            node.ask_with(1000, A, &[(index, 60)]);
            node.step(Event::Loaded { gpu: gpu(index), model: A, from: None });
            node.ended(index, 1000, 30);
        }
        if let Some(ms) = busy_for_ms {
            assert_eq!(goes_to(&node.ask_with(1, A, &[(0, 60)])), Some(0));
            node.now = node.now + Duration::from_millis(30 - ms);
        }
        goes_to(&node.ask_with(2, A, read))
    };
    assert_eq!(on(&[0], &[(2, 5)], None), Some(0), "10 ms of moving are less than 20 of loading");
    assert_eq!(on(&[0], &[(2, 40)], None), Some(2), "84 ms are more");
    assert_eq!(on(&[0, 1], &[(0, 40)], Some(20)), Some(0), "waiting 20 ms is less than moving");
    assert_eq!(on(&[0, 1], &[(0, 5)], Some(20)), Some(1), "and more than 10");
}

#[test]
fn what_was_handed_to_where_its_data_is_is_not_asked_back_by_a_gpu_without() {
    let ask = |read: &[(u32, u64)]| {
        let mut node = holding("fifo", &[A]);
        (1..=3).for_each(|key| drop(node.enqueue(key, A)));
        let to = goes_to(&node.ask_with(4, A, read));
        node.now = node.now + Duration::from_millis(2);
        let actions = node.ended(1, 2, 10);
        (to, actions.iter().any(|action| matches!(action, Action::Recall { .. })))
    };
    assert_eq!(ask(&[]), (Some(0), true));
    assert_eq!(ask(&[(0, 40)]), (Some(0), false), "it begins in 8 ms, and would be there in 84");
}

#[test]
fn data_that_moves_while_its_reader_waits_counts_where_it_is_now() {
    let asked_back = |before: &[(u32, u64)], by_now: &[(u32, u64)]| {
        let mut node = holding("fifo", &[A]);
        (1..=3).for_each(|key| drop(node.enqueue(key, A)));
        assert_eq!(goes_to(&node.ask_with(4, A, before)), Some(0));
        assert_eq!(node.step(Event::Moved { key: RequestKey(4), inputs: data(by_now) }), []);
        node.now = node.now + Duration::from_millis(2);
        let actions = node.ended(1, 2, 10);
        actions.iter().any(|action| matches!(action, Action::Recall { .. }))
    };
    assert!(asked_back(&[(0, 40)], &[]), "it made room and is on the host");
    assert!(!asked_back(&[], &[(0, 40)]), "it came back");
}

#[test]
fn torpor_asks_first_where_a_load_disturbs_least() {
    let config = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let switches = vec![vec![gpu(0), gpu(1)], vec![gpu(2), gpu(3)]];
    let config = Config { switches, ..Config::new(vec![config; 4], 9) };
    let mut node = node_of(&config.with_policy("torpor".parse().unwrap(), 1));
    assert_eq!(goes_to(&node.enqueue(1, A)), Some(0));
    assert_eq!(goes_to(&node.ask_with(2, B, &[(1, 9), (3, 2)])), Some(3), "GPU 0 loads beside GPU 1");
}

#[test]
fn a_turn_that_waited_for_data_teaches_nothing_of_loads() {
    let mut node = holding("fifo", &[]);
    let swap = |node: &Node| {
        let slot = node.dispatch.models.slot(A).unwrap();
        node.dispatch.fleet.get(gpu(1)).nominal(&node.dispatch.models, slot, Source::Host)
            == node.dispatch.fleet.swap_time(&node.dispatch.models, gpu(1), slot)
    };
    assert_eq!(goes_to(&node.ask_with(1, A, &[(0, 5), (2, 1)])), Some(0));
    node.now = node.now + Duration::from_millis(50);
    node.ended(0, 1, 10);
    assert!(swap(&node));
    // Without data it does.
    assert_eq!(goes_to(&node.ask_with(2, B, &[])), Some(1));
    node.now = node.now + Duration::from_millis(50);
    node.ended(1, 2, 10);
    let slot = node.dispatch.models.slot(B).unwrap();
    assert_eq!(node.dispatch.fleet.swap_time(&node.dispatch.models, gpu(2), slot), Duration::from_millis(40));
}

#[test]
fn the_data_of_all_that_run_as_one_counts() {
    let mut node = holding("lb", &[]);
    let rows = |rows, read: &[(u32, u64)]| Event::Rows { key: RequestKey(1), rows, inputs: data(read) };
    node.step(rows(2, &[(1, 3)]));
    node.ask_with(1, A, &[(2, 1)]);
    assert_eq!(node.dispatch.inputs[&RequestKey(1)], data(&[(1, 3)]));
    node.step(rows(1, &[(2, 1)]));
    assert_eq!(node.dispatch.inputs[&RequestKey(1)], data(&[(2, 1)]));
    node.ended(0, 1, 10);
    node.step(rows(1, &[(2, 1)]));
    node.step(Event::Moved { key: RequestKey(1), inputs: data(&[(2, 1)]) });
    assert!(node.dispatch.inputs.is_empty(), "it has gone");
}
