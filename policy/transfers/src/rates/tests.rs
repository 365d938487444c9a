//! Exact cases, most of them on the links of a DGX-V100.

mod batches;

use millrace_types::GpuIndex;
use millrace_types::topology::{LinkKind, TopologyGpu, TopologyLink};

use super::*;
use crate::fixtures::dgx_v100;

pub(super) const MB: u64 = 1_000_000;
pub(super) const GB: u64 = 1_000_000_000;

/// Returns GPUs with a PCIe link each and, if any are given, uplinks of the pairs 0 and 1, 2 and 3,
/// and so on; rates in bytes per second. The links come first, then the uplinks.
pub(super) fn machine(links: &[u64], uplinks: &[u64]) -> Topology {
    let link = |kind| move |&rate: &u64| TopologyLink { kind, rate: BytesPerSec(rate) };
    let gpu = |index: usize| {
        let uplink = (!uplinks.is_empty()).then_some(links.len() + index / 2);
        let host_path = std::iter::once(index).chain(uplink).map(|link| LinkId(link as u32));
        TopologyGpu {
            index: GpuIndex(index as u32),
            gpu_type: "test".to_owned(),
            memory: Bytes::gib(16),
            host_path: host_path.collect(),
        }
    };
    Topology {
        name: "test".to_owned(),
        gpus: (0..links.len()).map(gpu).collect(),
        links: links
            .iter()
            .map(link(LinkKind::Pcie))
            .chain(uplinks.iter().map(link(LinkKind::PcieUplink)))
            .collect(),
    }
}

fn one_link() -> Topology {
    machine(&[12 * GB], &[])
}

fn faastube(topology: &Topology) -> RateAllocator {
    RateAllocator::new(topology, Config::default()).unwrap()
}

impl RateAllocator {
    /// Returns the rate of a flow over all of its links.
    pub(super) fn rate(&self, flow: FlowId) -> Option<BytesPerSec> {
        let parts = |state: &FlowState| state.parts.iter().map(|part| part.rate).sum();
        self.flows.get(&flow).map(|state| BytesPerSec(parts(state)))
    }
}

/// Returns the next batch of a link that has room for whole batches.
pub(super) fn next_batch(rates: &mut RateAllocator, link: LinkId) -> Option<RatedBatch> {
    rates.next_rated(link, |_, _| BATCH)
}

/// Returns a flow with an inference of 10 ms and `slack_ms` milliseconds besides.
fn wanted_in(id: u64, megabytes: u64, links: &[u32], slack_ms: u64) -> RatedFlow {
    let infer = Duration::from_millis(10);
    let objective = Some(TransferObjective { slo: infer + Duration::from_millis(slack_ms), infer });
    RatedFlow { objective, ..best_effort(id, megabytes, links) }
}

pub(super) fn best_effort(id: u64, megabytes: u64, links: &[u32]) -> RatedFlow {
    let links = links.iter().copied().map(LinkId).collect();
    RatedFlow { id: FlowId(id), bytes: Bytes(megabytes * MB), links, objective: None }
}

pub(super) fn gb(tenths: u64) -> BytesPerSec {
    BytesPerSec(tenths * GB / 10)
}

fn at_ms(ms: u64) -> Timestamp {
    Timestamp::ZERO + Duration::from_millis(ms)
}

/// Begins flows at once, and compares each flow's guarantee and its rates in tenths of GB/s by
/// link.
fn check(
    topology: &Topology,
    sharing: TransferSharing,
    flows: &[RatedFlow],
    expected: &[(&[(u32, u64)], RateGuarantee)],
) {
    let mut rates = RateAllocator::new(topology, Config { sharing }).unwrap();
    let mut told: BTreeMap<FlowId, (Vec<(LinkId, BytesPerSec)>, RateGuarantee)> = BTreeMap::new();
    for flow in flows {
        told.insert(flow.id, (Vec::new(), RateGuarantee::Unpromised));
        let change = rates.begin(Timestamp::ZERO, flow).unwrap();
        for allocation in change.allocations {
            told.get_mut(&allocation.flow).unwrap().0 = allocation.rates;
        }
        for (flow, guarantee) in change.guarantees {
            told.get_mut(&flow).unwrap().1 = guarantee;
        }
    }
    let parts = |parts: &[(u32, u64)]| parts.iter().map(|&(link, rate)| (LinkId(link), gb(rate))).collect();
    let expected = expected.iter().map(|&(rates, guarantee)| (parts(rates), guarantee));
    let expected: BTreeMap<_, _> = flows.iter().map(|flow| flow.id).zip(expected).collect();
    assert_eq!(told, expected);
}

fn admitted(tenths: u64) -> RateGuarantee {
    RateGuarantee::Admitted { least: gb(tenths) }
}

fn crowded(tenths: u64) -> RateGuarantee {
    RateGuarantee::Crowded { least: gb(tenths) }
}

const FREE: RateGuarantee = RateGuarantee::Unpromised;
const FAASTUBE: TransferSharing = TransferSharing::FaasTube;

#[test]
fn the_tightest_flow_gets_the_idle_rate_and_others_get_the_least_rate() {
    // The flows need 1, 2 and 3 of 12 GB/s.
    let flows = [wanted_in(1, 30, &[0], 30), wanted_in(2, 40, &[0], 20), wanted_in(3, 90, &[0], 30)];
    let expected: [(&[_], _); 3] =
        [(&[(0, 10)], admitted(10)), (&[(0, 80)], admitted(20)), (&[(0, 30)], admitted(30))];
    check(&one_link(), FAASTUBE, &flows, &expected);
}

#[test]
fn ties_go_to_the_lower_id_regardless_of_arrival() {
    let flows = [wanted_in(7, 30, &[0], 30), wanted_in(5, 30, &[0], 30)];
    check(&one_link(), FAASTUBE, &flows, &[(&[(0, 10)], admitted(10)), (&[(0, 110)], admitted(10))]);
}

#[test]
fn a_lone_flow_fills_all_links() {
    let flow = wanted_in(1, 12, &[4, 0, 2, 6], 1);
    let rates: [(u32, u64); 4] = [(4, 120), (0, 120), (2, 120), (6, 120)];
    check(&dgx_v100(), FAASTUBE, &[flow], &[(&rates, admitted(120))]);
}

#[test]
fn flows_of_both_gpus_count_at_a_shared_uplink() {
    // GPUs 0 and 1 share 12 GB/s; GPU 2 has its own link.
    let flows = [wanted_in(1, 20, &[0], 2), wanted_in(2, 80, &[1], 20), wanted_in(3, 80, &[2], 20)];
    let expected: [(&[_], _); 3] =
        [(&[(0, 80)], admitted(100)), (&[(1, 40)], admitted(40)), (&[(2, 120)], admitted(40))];
    // 10 and 4 GB/s do not fit under one uplink: the tighter flow is admitted, and the other gets
    // the rest.
    let mut crowding = expected;
    crowding[0] = (&[(0, 100)], admitted(100));
    crowding[1] = (&[(1, 20)], crowded(40));
    check(&dgx_v100(), FAASTUBE, &flows, &crowding);
}

#[test]
fn a_flow_is_moved_to_another_link_to_admit_a_flow_with_a_single_link() {
    // The first flow enters by link 0 until the second flow needs all of that link.
    let flows = [wanted_in(1, 12, &[0, 2], 2), wanted_in(2, 120, &[0], 10)];
    check(&dgx_v100(), FAASTUBE, &flows, &[(&[(2, 120)], admitted(60)), (&[(0, 120)], admitted(120))]);
    // The first flow is also moved if it enters by a sibling link under the full uplink.
    let flows = [wanted_in(1, 12, &[0, 2], 2), wanted_in(2, 120, &[1], 10)];
    check(&dgx_v100(), FAASTUBE, &flows, &[(&[(2, 120)], admitted(60)), (&[(1, 120)], admitted(120))]);
}

#[test]
fn the_tightest_flows_are_admitted_until_the_link_is_full_and_crowded_flows_share_the_rest() {
    // The flows need 6, 5, 4 and 4 of 12 GB/s: 1 GB/s is left for the last two.
    let flows = [
        wanted_in(1, 40, &[0], 10),
        wanted_in(2, 10, &[0], 2),
        wanted_in(3, 40, &[0], 10),
        wanted_in(4, 24, &[0], 4),
        best_effort(5, 10, &[0]),
    ];
    let expected: [(&[_], _); 5] = [
        (&[(0, 5)], crowded(40)),
        (&[(0, 50)], admitted(50)),
        (&[(0, 5)], crowded(40)),
        (&[(0, 60)], admitted(60)),
        (&[], FREE),
    ];
    check(&one_link(), FAASTUBE, &flows, &expected);
}

#[test]
fn best_effort_flows_share_links_that_no_objective_can_use() {
    let flows = [wanted_in(1, 30, &[0], 30), best_effort(2, 10, &[0, 2]), best_effort(3, 10, &[2])];
    let expected: [(&[_], _); 3] = [(&[(0, 120)], admitted(10)), (&[(2, 60)], FREE), (&[(2, 60)], FREE)];
    check(&dgx_v100(), FAASTUBE, &flows, &expected);
}

#[test]
fn infeasible_flows_are_reported_and_get_the_remaining_rate() {
    let beyond = Infeasible::BeyondLinks { least: BytesPerSec(12 * GB + 1000), links: gb(120) };
    let too_much = RatedFlow { bytes: Bytes(12 * MB + 1), ..wanted_in(1, 12, &[0], 1) };
    check(
        &one_link(),
        FAASTUBE,
        std::slice::from_ref(&too_much),
        &[(&[(0, 120)], RateGuarantee::Infeasible(beyond))],
    );
    let just_fits = wanted_in(2, 12, &[0], 1);
    let both: [(&[_], _); 2] = [(&[], RateGuarantee::Infeasible(beyond)), (&[(0, 120)], admitted(120))];
    check(&one_link(), FAASTUBE, &[too_much, just_fits], &both);
    let late = |slo| RatedFlow {
        objective: Some(TransferObjective {
            slo: Duration::from_millis(slo),
            infer: Duration::from_millis(10),
        }),
        ..best_effort(3, 1, &[0])
    };
    for slo in [0, 9, 10] {
        for sharing in [FAASTUBE, TransferSharing::Fair, TransferSharing::Fifo] {
            let guarantee = RateGuarantee::Infeasible(Infeasible::NoSlack);
            check(&one_link(), sharing, &[late(slo)], &[(&[(0, 120)], guarantee)]);
        }
    }
    check(&one_link(), FAASTUBE, &[late(11)], &[(&[(0, 120)], admitted(10))]);
}

#[test]
fn fair_and_fifo_ignore_objectives() {
    let flows = [wanted_in(1, 30, &[0, 2], 30), wanted_in(2, 30, &[0], 3), best_effort(3, 1, &[1])];
    // Three flows share the uplink of links 0 and 1.
    let fair: [(&[_], _); 3] = [(&[(0, 40), (2, 120)], FREE), (&[(0, 40)], FREE), (&[(1, 40)], FREE)];
    check(&dgx_v100(), TransferSharing::Fair, &flows, &fair);
    let fifo: [(&[_], _); 3] = [(&[(0, 120), (2, 120)], FREE), (&[], FREE), (&[], FREE)];
    check(&dgx_v100(), TransferSharing::Fifo, &flows, &fifo);
}

#[test]
fn a_flow_that_falls_behind_needs_the_remaining_bytes_in_the_remaining_time() {
    let mut rates = faastube(&one_link());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 300, &[0], 150)).unwrap();
    rates.begin(Timestamp::ZERO, &wanted_in(2, 60, &[0], 30)).unwrap();
    let window = Duration::from_millis(10);
    let mut measured = |ms, tenths| rates.measured(at_ms(ms), FlowId(1), Bytes(tenths * MB / 10), window);
    // 20 MB are due in each window. The flow is slow, but less than a batch of 10.5 MB short.
    assert_eq!(measured(10, 100), Ok(RateChange::default()));
    // The flow is a batch short, but at 96% of its rate.
    assert_eq!(measured(20, 192), Ok(RateChange::default()));
    let change = measured(30, 189).unwrap();
    let least = BytesPerSec(251_900_000 * 1000 / 120 + 1);
    let rate =
        |flow, rate| RateAllocation { flow: FlowId(flow), rates: vec![(LinkId(0), BytesPerSec(rate))] };
    let expected = RateChange {
        allocations: vec![rate(1, least.0), rate(2, 12 * GB - least.0)],
        guarantees: vec![(FlowId(1), RateGuarantee::Admitted { least })],
    };
    assert_eq!(change, expected);
    // A flow that is ahead keeps its rate.
    let ahead = measured(40, 2000);
    assert_eq!((ahead, rates.rate(FlowId(1))), (Ok(RateChange::default()), Some(least)));
}

#[test]
fn a_flow_that_cannot_catch_up_is_late_for_good_and_ranks_after_flows_in_time() {
    let mut rates = faastube(&one_link());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 60, &[0], 10)).unwrap();
    let second = rates.begin(Timestamp::ZERO, &wanted_in(2, 200, &[0], 40)).unwrap();
    assert_eq!(second.guarantees, [(FlowId(2), admitted(50))]);
    let late = RateGuarantee::Late { least: gb(60) };
    let change = rates.measured(at_ms(8), FlowId(1), Bytes::ZERO, Duration::from_millis(8)).unwrap();
    assert_eq!(change.guarantees, [(FlowId(1), late)]);
    assert_eq!((rates.rate(FlowId(1)), rates.rate(FlowId(2))), (Some(gb(60)), Some(gb(60))));
    // A flow that can be in time takes its rate from the late flow.
    rates.begin(at_ms(8), &wanted_in(3, 30, &[0], 10)).unwrap();
    assert_eq!((rates.rate(FlowId(1)), rates.rate(FlowId(3))), (Some(gb(40)), Some(gb(30))));
    let again = rates.measured(at_ms(16), FlowId(1), Bytes::ZERO, Duration::from_millis(8));
    assert_eq!((again, rates.guarantee(FlowId(1))), (Ok(RateChange::default()), Some(late)));
}

#[test]
fn a_crowded_flow_is_admitted_at_the_rate_needed_when_room_appears() {
    let mut rates = faastube(&one_link());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 100, &[0], 10)).unwrap();
    let begun = rates.begin(Timestamp::ZERO, &wanted_in(2, 120, &[0], 30)).unwrap();
    assert_eq!(begun.guarantees, [(FlowId(2), crowded(40))]);
    let change = rates.end(at_ms(10), FlowId(1)).unwrap();
    assert_eq!(change.guarantees, [(FlowId(2), admitted(60))]);
}

#[test]
fn invalid_flows_are_refused() {
    let mut rates = faastube(&one_link());
    let mut begin = |flow: &RatedFlow| rates.begin(Timestamp::ZERO, flow).map(|_| ());
    assert_eq!(begin(&best_effort(1, 1, &[0])), Ok(()));
    assert_eq!(begin(&best_effort(1, 1, &[0])), Err(Error::Begun(FlowId(1))));
    assert_eq!(begin(&best_effort(2, 0, &[0])), Err(Error::Empty(FlowId(2))));
    assert_eq!(begin(&best_effort(2, 1, &[])), Err(Error::NoLink(FlowId(2))));
    assert_eq!(begin(&best_effort(2, 1, &[0, 1])), Err(Error::NoLink(FlowId(2))));
    assert_eq!(rates.end(Timestamp::ZERO, FlowId(2)), Err(Error::Unknown(FlowId(2))));
    let measured = rates.measured(Timestamp::ZERO, FlowId(2), Bytes::ZERO, Duration::ZERO);
    assert_eq!(measured, Err(Error::Unknown(FlowId(2))));
}

#[test]
fn sharings_have_names() {
    let names = [TransferSharing::FaasTube, TransferSharing::Fair, TransferSharing::Fifo]
        .map(|sharing| sharing.to_string());
    assert_eq!(names, ["faastube", "fair", "fifo"]);
}

#[test]
fn late_flows_rank_after_flows_that_may_still_be_in_time() {
    let mut rates = faastube(&one_link());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 60, &[0], 10)).unwrap();
    rates.measured(at_ms(8), FlowId(1), Bytes::ZERO, Duration::from_millis(8)).unwrap();
    assert_eq!(rates.guarantee(FlowId(1)), Some(RateGuarantee::Late { least: gb(60) }));
    rates.begin(at_ms(8), &wanted_in(2, 40, &[0], 10)).unwrap();
    rates.begin(at_ms(8), &wanted_in(3, 200, &[0], 20)).unwrap();
    // 4 and 10 GB/s do not fit: 8 GB/s are left for the second flow before the late flow gets any.
    assert_eq!(rates.guarantee(FlowId(3)), Some(crowded(100)));
    let given = [1, 2, 3].map(|flow| rates.rate(FlowId(flow)).unwrap());
    assert_eq!(given, [gb(0), gb(40), gb(80)]);
}

#[test]
fn host_paths_with_unknown_links_forks_or_loops_are_refused() {
    let with = |paths: [&[u32]; 2]| {
        let mut topology = machine(&[12 * GB; 2], &[12 * GB]);
        for (gpu, path) in topology.gpus.iter_mut().zip(paths) {
            gpu.host_path = path.iter().copied().map(LinkId).collect();
        }
        RateAllocator::new(&topology, Config::default()).map(|_| ())
    };
    assert_eq!(with([&[0, 2], &[1, 2]]), Ok(()));
    assert_eq!(with([&[0, 3], &[1, 2]]), Err(Error::UnknownLink(LinkId(3))));
    assert_eq!(with([&[7], &[1, 2]]), Err(Error::UnknownLink(LinkId(7))));
    assert_eq!(with([&[0, 1], &[0, 2]]), Err(Error::Apart(LinkId(0))));
    assert_eq!(with([&[0, 0], &[1, 2]]), Err(Error::Circle(LinkId(0))));
    assert_eq!(with([&[0, 2, 1], &[1, 0]]), Err(Error::Circle(LinkId(0))));
}
