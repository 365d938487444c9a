//! Tests of the baselines MAPA and UCX (D31, H21).

use super::*;

#[test]
fn mapa_uses_the_direct_link_or_none() {
    let mut paths = paths(&dgx_v100(), Selection::Direct, None);
    assert_eq!(begin(&mut paths, 1, 0, 3), [change(1, &[route(&[0, 3], 48)])]);
    assert_eq!(begin(&mut paths, 2, 0, 5), [change(2, &[])]);
    let shared = [change(1, &[route(&[0, 3], 24)]), change(3, &[route(&[0, 3], 24)])];
    assert_eq!(begin(&mut paths, 3, 0, 3), shared);
    assert_eq!(paths.end(FlowId(1)), [change(3, &[route(&[0, 3], 48)])]);
}

#[test]
fn ucx_uses_the_same_paths_beside_other_flows() {
    let mut paths = paths(&dgx_v100(), Selection::Ucx, None);
    let alone = [route(&[0, 3], 48), route(&[0, 1, 3], 24), route(&[0, 2, 3], 24)];
    assert_eq!(begin(&mut paths, 1, 0, 3), [change(1, &alone)]);
    // The second flow shares 0-2 with the first, and the other routes of the first flow wait for
    // that route.
    let half = alone.map(|route| NvlinkRoute { rate: BytesPerSec(route.rate.0 / 2), ..route });
    let all = begin(&mut paths, 2, 0, 2);
    assert_eq!(all[0], change(1, &half));
    assert_eq!(all[1].routes.iter().map(|route| route.hops.len()).collect::<Vec<_>>(), [2, 3, 3]);
    assert_eq!(paths.end(FlowId(2)), [change(1, &alone)]);
}

#[test]
fn contention_makes_ucx_slower_than_direct_links_and_faastube_faster() {
    // Each of four GPUs that are all joined sends to each other.
    let topology = dgx_v100();
    let slowest = |selection| {
        let mut paths = paths(&topology, selection, None);
        let edges = pairs().filter(|(from, to)| from.max(to) < &4);
        let flows =
            edges.enumerate().map(|(flow, (from, to))| begin(&mut paths, flow as u64, from, to)).count();
        (0..flows).map(|flow| total(&paths, flow as u64)).min().unwrap()
    };
    let [faastube, direct, ucx] = SELECTIONS.map(slowest);
    assert!(ucx < direct && direct <= faastube, "{ucx} {direct} {faastube}");
}
