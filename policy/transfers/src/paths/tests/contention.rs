//! Tests of Algorithm 1, step by step.

use super::*;

/// Returns the most that a network carries from one GPU to another, by augmenting paths of any
/// width.
fn max_flow(topology: &Topology, from: usize, to: usize) -> u64 {
    let gpus = topology.gpus.len();
    let mut left = matrix::rates(topology).unwrap();
    let mut flow = 0;
    loop {
        let mut before = vec![None; gpus];
        let mut reached = vec![from];
        let mut next = 0;
        while next < reached.len() {
            let gpu = reached[next];
            next += 1;
            for other in 0..gpus {
                if left[gpu * gpus + other] > 0 && before[other].is_none() && other != from {
                    before[other] = Some(gpu);
                    reached.push(other);
                }
            }
        }
        if before[to].is_none() {
            return flow;
        }
        let back = |gpu: &usize| before[*gpu];
        let way: Vec<_> = std::iter::successors(Some(to), back).collect();
        let width = way.windows(2).map(|link| left[link[1] * gpus + link[0]]).min().unwrap();
        for link in way.windows(2) {
            left[link[1] * gpus + link[0]] -= width;
            left[link[0] * gpus + link[1]] += width;
        }
        flow += width;
    }
}

#[test]
fn a_lone_transfer_gets_the_maximum_flow_if_routes_may_be_long() {
    let topology = dgx_v100();
    for (from, to) in pairs() {
        let mut paths = paths(&topology, Selection::FaasTube, None);
        begin(&mut paths, 0, from, to);
        assert_eq!(total(&paths, 0), max_flow(&topology, from as usize, to as usize), "{from} to {to}");
    }
}

#[test]
fn a_lone_transfer_gets_most_of_the_maximum_flow_over_routes_of_the_default_length() {
    // The figures of `HOPS_DEFAULT`.
    let topology = dgx_v100();
    let most: u64 = pairs().map(|(from, to)| max_flow(&topology, from as usize, to as usize)).sum();
    let share = |hops| {
        let of = |(from, to)| {
            let mut paths = paths(&topology, Selection::FaasTube, hops);
            begin(&mut paths, 0, from, to);
            total(&paths, 0)
        };
        pairs().map(of).sum::<u64>() * 100 / most
    };
    assert_eq!([1, 2, 3, 4, 5].map(|hops| share(Some(hops))), [14, 47, 83, 95, 100]);
}

#[test]
fn a_new_transfer_takes_the_own_link_first_and_detours_after() {
    let mut paths = paths(&dgx_v100(), Selection::FaasTube, Some(2));
    let routes = [route(&[0, 3], 48), route(&[0, 1, 3], 24), route(&[0, 2, 3], 24)];
    assert_eq!(begin(&mut paths, 1, 0, 3), [change(1, &routes)]);
    assert_eq!(
        [paths.rate_left(GpuIndex(0), GpuIndex(3)), paths.rate_left(GpuIndex(2), GpuIndex(3))],
        [gb(0), gb(24)]
    );
    assert_eq!(paths.rate_left(GpuIndex(3), GpuIndex(0)), gb(48), "the other direction is free");
    assert_eq!(paths.end(FlowId(1)), []);
}

#[test]
fn pairs_without_an_nvlink_use_routes_over_other_gpus() {
    let mut paths = paths(&dgx_v100(), Selection::FaasTube, Some(2));
    let routes = [route(&[0, 1, 5], 24), route(&[0, 4, 5], 24)];
    assert_eq!(begin(&mut paths, 1, 0, 5), [change(1, &routes)]);
}

#[test]
fn a_link_is_freed_for_the_owner_and_lent_again_afterwards() {
    // Two paths lead from 0 to 2, through 1 and through 3.
    let square = machine(4, &[(0, 1, 24), (1, 2, 24), (0, 3, 48), (3, 2, 24)]);
    let mut paths = paths(&square, Selection::FaasTube, Some(2));
    let both = [route(&[0, 1, 2], 24), route(&[0, 3, 2], 24)];
    assert_eq!(begin(&mut paths, 1, 0, 2), [change(1, &both)]);
    let evicted = [change(1, &both[1..]), change(2, &[route(&[1, 2], 24)])];
    assert_eq!(begin(&mut paths, 2, 1, 2), evicted);
    assert_eq!(paths.end(FlowId(2)), [change(1, &both)]);
}

#[test]
fn owners_of_a_link_share_the_rate_equally() {
    let mut paths = paths(&machine(2, &[(0, 1, 48)]), Selection::FaasTube, None);
    begin(&mut paths, 1, 0, 1);
    let share = |flow, rate| change(flow, &[route(&[0, 1], rate)]);
    assert_eq!(begin(&mut paths, 2, 0, 1), [share(1, 24), share(2, 24)]);
    assert_eq!(begin(&mut paths, 3, 0, 1), [share(1, 16), share(2, 16), share(3, 16)]);
    assert_eq!(paths.end(FlowId(3)), [share(1, 24), share(2, 24)]);
    assert_eq!(paths.end(FlowId(1)), [change(2, &[route(&[0, 1], 48)])]);
}

#[test]
fn a_flow_without_another_route_keeps_a_fair_share_of_an_owned_link() {
    let line = machine(3, &[(0, 1, 24), (1, 2, 24)]);
    for order in [[(1, 0, 2), (2, 0, 1)], [(2, 0, 1), (1, 0, 2)]] {
        let mut paths = paths(&line, Selection::FaasTube, None);
        for (flow, from, to) in order {
            begin(&mut paths, flow, from, to);
        }
        for flow in [1, 2] {
            assert!(
                total(&paths, flow).abs_diff(gb(12).0) < 24_000_000,
                "{order:?}: {}",
                total(&paths, flow)
            );
        }
    }
}

#[test]
fn a_busy_route_moves_to_an_equally_fast_path() {
    // 0 reaches 2 by 1 or by 3; 5 only by 1.
    let links = [(0, 4, 24), (4, 1, 24), (1, 2, 24), (4, 3, 24), (3, 2, 24), (5, 1, 24)];
    let mut paths = paths(&machine(6, &links), Selection::FaasTube, Some(3));
    assert_eq!(begin(&mut paths, 1, 0, 2), [change(1, &[route(&[0, 4, 1, 2], 24)])]);
    let moved = [change(1, &[route(&[0, 4, 3, 2], 24)]), change(2, &[route(&[5, 1, 2], 24)])];
    assert_eq!(begin(&mut paths, 2, 5, 2), moved);
}

/// 0 and 3 reach 2 only by 1.
fn shared_link() -> Topology {
    machine(4, &[(0, 1, 24), (3, 1, 24), (1, 2, 24)])
}

#[test]
fn a_busy_path_is_split_evenly() {
    let mut paths = paths(&shared_link(), Selection::FaasTube, None);
    begin(&mut paths, 1, 0, 2);
    begin(&mut paths, 2, 3, 2);
    for flow in [1, 2] {
        assert!(total(&paths, flow).abs_diff(gb(12).0) < 24_000_000, "{}", total(&paths, flow));
    }
    assert_eq!(paths.end(FlowId(2)), [change(1, &[route(&[0, 1, 2], 24)])]);
}

#[test]
fn a_switch_carries_no_more_over_several_paths() {
    let topology = dgx_a100();
    for selection in SELECTIONS {
        for (from, to) in pairs() {
            let mut paths = paths(&topology, selection, None);
            assert_eq!(begin(&mut paths, 1, from, to), [change(1, &[route(&[from, to], 300)])]);
        }
    }
}

#[test]
fn flows_that_cross_a_port_of_a_switch_share_the_port() {
    let topology = dgx_a100();
    for selection in SELECTIONS {
        let mut paths = paths(&topology, selection, None);
        begin(&mut paths, 1, 0, 1);
        begin(&mut paths, 2, 0, 2);
        begin(&mut paths, 3, 3, 4);
        for (flow, expected) in [(1, 150), (2, 150), (3, 300)] {
            assert!(total(&paths, flow).abs_diff(gb(expected).0) < 300_000_000, "{selection:?}, {flow}");
        }
    }
}

#[test]
fn flows_between_gpus_without_nvlinks_have_no_routes() {
    for selection in SELECTIONS {
        let mut paths = paths(&machine(4, &[]), selection, None);
        assert_eq!(begin(&mut paths, 1, 0, 3), [change(1, &[])]);
    }
}
