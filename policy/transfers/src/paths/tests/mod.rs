//! Fixtures of the tests of paths, and tests of invalid calls.

mod baselines;
mod contention;
mod host;
mod place;
mod properties;

use std::num::NonZeroU32;

use millrace_types::topology::Topology;
use millrace_types::{BytesPerSec, GpuIndex};

use super::running::PathFlow;
use super::*;
use crate::fixtures::{dgx_v100, machine};

const SELECTIONS: [Selection; 3] = [Selection::FaasTube, Selection::Direct, Selection::Ucx];

fn gb(n: u64) -> BytesPerSec {
    BytesPerSec::gb(n)
}

fn dgx_a100() -> Topology {
    let links = (0..8).flat_map(|b| (0..b).map(move |a| (a, b, 300)));
    machine(8, &links.collect::<Vec<_>>())
}

fn paths(topology: &Topology, selection: Selection, hops_max: Option<u32>) -> PathPlanner {
    let hops_max = hops_max.map(|hops| NonZeroU32::new(hops).unwrap());
    PathPlanner::new(topology, Config { selection, hops_max }).unwrap()
}

fn begin(paths: &mut PathPlanner, flow: u64, from: u32, to: u32) -> Vec<RouteChange> {
    paths.begin(FlowId(flow), GpuIndex(from), GpuIndex(to)).unwrap()
}

fn route(gpus: &[u32], gb_per_s: u64) -> NvlinkRoute {
    NvlinkRoute { hops: RouteHops::of(gpus.iter().map(|&gpu| GpuIndex(gpu))), rate: gb(gb_per_s) }
}

fn change(flow: u64, routes: &[NvlinkRoute]) -> RouteChange {
    RouteChange { flow: FlowId(flow), routes: routes.to_vec() }
}

fn sum(routes: &[NvlinkRoute]) -> u64 {
    routes.iter().map(|route| route.rate.0).sum()
}

fn total(paths: &PathPlanner, flow: u64) -> u64 {
    sum(&paths.routes(FlowId(flow)).unwrap())
}

/// Returns all ordered pairs of eight GPUs.
fn pairs() -> impl Iterator<Item = (u32, u32)> {
    (0..8).flat_map(|from| (0..8).filter(move |&to| to != from).map(move |to| (from, to)))
}

#[test]
fn dgx_v100_has_12_pairs_without_an_nvlink_8_with_one_and_8_with_two() {
    let paths = paths(&dgx_v100(), Selection::FaasTube, None);
    let of = |rate| {
        let has = |&(a, b): &(u32, u32)| a < b && paths.capacity(GpuIndex(a), GpuIndex(b)) == gb(rate);
        pairs().filter(has).count()
    };
    assert_eq!([of(0), of(24), of(48)], [12, 8, 8]);
}

#[test]
fn invalid_calls_are_refused_and_change_nothing() {
    let mut paths = paths(&dgx_v100(), Selection::FaasTube, None);
    let refused = |paths: &mut PathPlanner, flow, from, to| {
        paths.begin(FlowId(flow), GpuIndex(from), GpuIndex(to)).unwrap_err()
    };
    assert_eq!(refused(&mut paths, 0, 2, 8), Error::UnknownGpu(GpuIndex(8)));
    assert_eq!(refused(&mut paths, 0, 2, 2), Error::SameGpu(GpuIndex(2)));
    assert_eq!(paths.routes(FlowId(0)), None);
    for flow in 0..FLOWS_MAX as u64 {
        begin(&mut paths, flow, 0, 5);
    }
    assert_eq!(refused(&mut paths, 1, 0, 1), Error::Runs(FlowId(1)));
    assert_eq!(refused(&mut paths, 1000, 0, 1), Error::TooManyFlows);
    assert_eq!(paths.end(FlowId(1000)), []);
    let starved = (0..FLOWS_MAX as u64).filter(|&flow| total(&paths, flow) == 0).count();
    assert_eq!(starved, 0);
    assert_eq!(PathPlanner::new(&machine(65, &[]), Config::default()).unwrap_err(), Error::TooManyGpus(65));
    assert_eq!(
        PathPlanner::new(&machine(2, &[(0, 2, 24)]), Config::default()).unwrap_err(),
        Error::UnknownGpu(GpuIndex(2))
    );
    let ring: Vec<_> = (0..64).flat_map(|a| [(a, (a + 1) % 64, 24), (a, (a + 2) % 64, 24)]).collect();
    assert_eq!(
        PathPlanner::new(&machine(64, &ring), Config::default()).unwrap_err(),
        Error::TooManyLinks(256)
    );
}
