//! Tests of host transfers over several PCIe links (D05).

use super::*;

fn host(paths: &mut PathPlanner, gpu: u32, direction: HostDirection) -> HostPlan {
    paths.begin_host(FlowId(99), GpuIndex(gpu), direction).unwrap()
}

#[test]
fn each_gpu_of_dgx_v100_reaches_all_four_pcie_links_within_two_nvlinks() {
    let topology = dgx_v100();
    for gpu in 0..8 {
        for direction in HostDirection::BOTH {
            let mut paths = paths(&topology, Selection::FaasTube, None);
            let far = host(&mut paths, gpu, direction).routes;
            assert_eq!(far.len(), 4, "{gpu}: {far:?}");
            let near = far.iter().filter(|route| route.forward.links().count() <= 1).count();
            assert!(near >= 3, "{gpu}: {far:?}");
            let mut switches: Vec<_> = far.iter().map(|route| route.via.0 / 2).collect();
            switches.sort_unstable();
            assert_eq!(switches, [0, 1, 2, 3], "the link of each switch once");
            assert!(far.iter().all(|route| route.rate == gb(12)), "{far:?}");
            for route in &far {
                let ends = match direction {
                    HostDirection::ToGpu => (route.via, GpuIndex(gpu)),
                    HostDirection::FromGpu => (GpuIndex(gpu), route.via),
                };
                assert_eq!((route.forward.first(), route.forward.last()), ends);
            }
        }
    }
}

#[test]
fn a_switch_joins_a_gpu_to_the_pcie_links_of_all_others() {
    let mut paths = paths(&dgx_a100(), Selection::FaasTube, None);
    assert_eq!(host(&mut paths, 5, HostDirection::FromGpu).routes.len(), 4);
}

#[test]
fn without_nvlinks_a_gpu_has_a_single_host_route() {
    for selection in SELECTIONS {
        let mut paths = paths(&machine(4, &[]), selection, None);
        let own = GpuIndex(2);
        let routes = vec![HostRoute { via: own, forward: RouteHops::of([own]), rate: gb(12) }];
        let plan = paths.begin_host(FlowId(99), own, HostDirection::ToGpu).unwrap();
        assert_eq!(plan, HostPlan { routes, changes: vec![] });
    }
}

#[test]
fn forwarding_uses_rate_of_the_matrix_and_yields_to_owners() {
    let mut paths = paths(&machine(4, &[(0, 2, 24)]), Selection::FaasTube, None);
    let plan = host(&mut paths, 0, HostDirection::ToGpu);
    assert_eq!(plan.routes.iter().map(|route| route.via.0).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(paths.rate_left(GpuIndex(2), GpuIndex(0)), gb(12));
    // The other direction is not affected.
    assert_eq!(begin(&mut paths, 1, 0, 2), [change(1, &[route(&[0, 2], 24)])]);
    let lost = [change(99, &[]), change(2, &[route(&[2, 0], 24)])];
    assert_eq!(begin(&mut paths, 2, 2, 0), lost);
    paths.end(FlowId(99));
    let plan = host(&mut paths, 0, HostDirection::ToGpu);
    assert_eq!(plan.routes.len(), 1, "no link that a transfer owns");
}

#[test]
fn baselines_share_an_nvlink_between_transfers_and_forwarding() {
    let mut paths = paths(&machine(4, &[(0, 2, 24)]), Selection::Direct, None);
    begin(&mut paths, 1, 2, 0);
    let plan = host(&mut paths, 0, HostDirection::ToGpu);
    assert_eq!(plan.routes.iter().map(|route| route.rate).collect::<Vec<_>>(), [gb(12), gb(12)]);
    assert_eq!(plan.changes, [change(1, &[route(&[2, 0], 12)])]);
    assert_eq!(paths.end(FlowId(99)), [change(1, &[route(&[2, 0], 24)])]);
}

#[test]
fn forwarding_ways_avoid_the_own_switch_and_the_shortest_are_first() {
    for gpu in 0..8 {
        let paths = paths(&dgx_v100(), Selection::FaasTube, None);
        let ways = paths.forwards(HostDirection::ToGpu, GpuIndex(gpu));
        assert!(ways.iter().all(|way| way.last().0 == gpu && way.first().0 / 2 != gpu / 2), "{ways:?}");
        let links: Vec<_> = ways.iter().map(|way| way.links().count()).collect();
        assert!(links.is_sorted() && links.contains(&1) && links.last() == Some(&2), "{links:?}");
        // The link of each other switch is reached over at most two NVLinks.
        let switches: std::collections::BTreeSet<_> = ways.iter().map(|way| way.first().0 / 2).collect();
        assert_eq!(switches.len(), 3);
        // The ways to the host are the same, reversed.
        let back = paths.forwards(HostDirection::FromGpu, GpuIndex(gpu));
        let turned = |way: &RouteHops| RouteHops::of(way.as_slice().iter().rev().copied());
        let sorted = |mut ways: Vec<RouteHops>| {
            ways.sort_unstable();
            ways
        };
        assert_eq!(sorted(back.iter().map(turned).collect()), sorted(ways));
    }
    let line = paths(&machine(8, &[(0, 2, 24), (2, 4, 24), (4, 6, 24)]), Selection::FaasTube, None);
    let hops = |gpus: &[u32]| RouteHops::of(gpus.iter().map(|&gpu| GpuIndex(gpu)));
    let to = |gpu: u32| line.forwards(HostDirection::ToGpu, GpuIndex(gpu));
    assert_eq!(to(0), [hops(&[2, 0]), hops(&[4, 2, 0])]);
    assert_eq!(to(1), []);
    assert_eq!(to(8), [], "there is none");
    assert_eq!(line.forwards(HostDirection::FromGpu, GpuIndex(0)), [hops(&[0, 2]), hops(&[0, 2, 4])]);
}
