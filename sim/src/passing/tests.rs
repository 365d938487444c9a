//! Properties of every simulation, and the cost of one copy in each system.

use std::time::Duration;

use millrace_memory::elastic::PoolPolicy;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Timestamp};
use proptest::prelude::*;

use super::system::{Pinning, System};
use super::{
    ArrivalProcess, CopyCounts, DataflowOutcome, DataflowSetup, ModelledWorkflow, ServedWorkflow, run,
    workflow,
};
use crate::workload::RequestArrival;

/// Returns the topology of `device/topology/dgx-v100.yaml`.
fn v100() -> Topology {
    const DOUBLE: [(u32, u32); 8] = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
    const SINGLE: [(u32, u32); 8] = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)];
    let pcie = |kind| TopologyLink { kind, rate: BytesPerSec::gb(12) };
    let mut links = vec![pcie(LinkKind::Pcie); 8];
    links.extend(vec![pcie(LinkKind::PcieUplink); 4]);
    for (pairs, gb) in [(DOUBLE, 48), (SINGLE, 24)] {
        let link = |(a, b)| LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) };
        links.extend(pairs.map(|pair| TopologyLink { kind: link(pair), rate: BytesPerSec::gb(gb) }));
    }
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "V100".to_owned(),
        memory: Bytes::gib(16),
        host_path: vec![LinkId(index), LinkId(8 + index / 2)],
    };
    Topology { name: "dgx-v100".to_owned(), gpus: (0..8).map(gpu).collect(), links }
}

const SYSTEMS: [System; 7] = [
    System::INFLESS,
    System::DEEPPLAN,
    System::STAR,
    System::FAASTUBE,
    System::MAPA,
    System::UCX,
    System::PS_OFF,
];

/// Runs a single request, at the sizes that its workflow states.
fn alone(workflow: ModelledWorkflow, system: System) -> DataflowOutcome {
    let app = ServedWorkflow { workflow, replicas: 1, is_cut: false };
    let arrivals = ArrivalProcess::Open(vec![RequestArrival { at: Timestamp::ZERO, function: 0 }]);
    run(&DataflowSetup { sizes: (1.0, 1.0), ..DataflowSetup::new(v100(), app, system, arrivals, 1) }).unwrap()
}

fn holds(setup: &DataflowSetup, outcome: &DataflowOutcome, requests: usize) {
    let name = setup.system.name;
    assert_eq!(outcome.records.len(), requests, "{name}: a request did not end");
    assert!((outcome.delivered - outcome.sent as f64).abs() < 1.0, "{name}: bytes were lost: {outcome:?}");
    assert!(outcome.fullest <= 1.0 + 1e-9, "{name}: a link carried {} of its rate", outcome.fullest);
    assert!(outcome.is_clean, "{name}: a link is still in use, or a store is not empty");
    for record in &outcome.records {
        let latency = record.latency().as_secs_f64();
        assert!(record.split.total() <= latency + 1e-6, "{name}: {record:?} took {latency}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_within_the_rates_of_links_and_leaves_no_object(
        system in prop::sample::select(SYSTEMS.to_vec()),
        pool in prop::sample::select(millrace_memory::elastic::POOLS.to_vec()),
        apps in prop::sample::subsequence(workflow::all(), 1..=2),
        gaps in prop::collection::vec(0u64..60, 1..40),
        cap_mib in 128u64..1024,
        nodes in 1usize..=2,
        seed in 0u64..1000,
    ) {
        let pool: PoolPolicy = if system == System::STAR { pool.1 } else { system.pool };
        let mut at = Timestamp::ZERO;
        let count = apps.len() as u32;
        let arrivals: Vec<_> = gaps.iter().zip(0u32..).map(|(&gap, number)| {
            at = at + Duration::from_millis(gap);
            RequestArrival { at, function: number % count }
        }).collect();
        let requests = arrivals.len();
        let app = |workflow| ServedWorkflow { workflow, replicas: 1, is_cut: nodes > 1 };
        let apps: Vec<ServedWorkflow> = apps.into_iter().map(app).collect();
        let first = apps[0].clone();
        let setup = DataflowSetup {
            nodes,
            apps,
            store_cap: Bytes::mib(cap_mib),
            is_audited: true,
            ..DataflowSetup::new(v100(), first, System { pool, ..system }, ArrivalProcess::Open(arrivals), seed)
        };
        let outcome = run(&setup).unwrap();
        holds(&setup, &outcome, requests);
        prop_assert_eq!(run(&setup).unwrap(), outcome, "the same seed gave another run");
    }
}

#[test]
fn a_closed_loop_ends_after_all_its_requests() {
    for system in SYSTEMS {
        let app = ServedWorkflow { workflow: workflow::video(), replicas: 2, is_cut: false };
        let arrivals = ArrivalProcess::Closed { outstanding: 12, total: 100 };
        let setup =
            DataflowSetup { is_audited: true, ..DataflowSetup::new(v100(), app, system, arrivals, 3) };
        let outcome = run(&setup).unwrap();
        holds(&setup, &outcome, 100);
        assert!(outcome.fullest > 0.9, "{}: no link was ever full", system.name);
    }
}

#[test]
fn driving_takes_four_copies_with_faastube_and_six_with_infless() {
    let ways = |system| alone(workflow::driving(), system).methods;
    // One load, one response, and a copy for each of the two edges.
    assert_eq!(ways(System::FAASTUBE), CopyCounts { host_gpu: 2, inter: 2, ..CopyCounts::default() });
    // Each edge takes two copies, through the host.
    assert_eq!(ways(System::INFLESS), CopyCounts { host_gpu: 6, ..CopyCounts::default() });
}

#[test]
fn every_system_serves_all_requests_without_nvlink() {
    let mut topology = v100();
    topology.links.retain(|link| !matches!(link.kind, LinkKind::NvLink { .. }));
    for system in SYSTEMS {
        let app = ServedWorkflow { workflow: workflow::traffic(), replicas: 2, is_cut: false };
        let arrivals = ArrivalProcess::Closed { outstanding: 12, total: 60 };
        let setup = DataflowSetup {
            is_audited: true,
            ..DataflowSetup::new(topology.clone(), app, system, arrivals, 5)
        };
        holds(&setup, &run(&setup).unwrap(), 60);
    }
}

/// Returns a workflow of two functions that hardly compute. The first loads 100 MB from the host, and
/// passes 100 MB to the second.
fn pair() -> ModelledWorkflow {
    let mut workflow = workflow::yelp();
    workflow.functions[0].loads = Bytes(100_000_000);
    workflow.functions[0].outputs[0].size = Bytes(100_000_000);
    workflow.functions[1].response = Bytes::ZERO;
    workflow.functions.iter_mut().for_each(|function| function.compute = Duration::from_nanos(1));
    workflow
}

#[test]
fn one_copy_through_the_host_is_as_slow_as_in_the_paper() {
    let split = alone(pair(), System::INFLESS).records[0].split;
    // Pinning 100 MB takes 70 ms and copying 8.3 ms: once for the first function, twice for the second.
    assert!((split.host - 0.0786).abs() < 1e-3, "{split:?}");
    assert!((split.functions - 0.1573).abs() < 1e-3, "{split:?}");
}

#[test]
fn four_links_carry_four_times_as_much_from_a_pinned_ring() {
    let split = alone(pair(), System::FAASTUBE).records[0].split;
    // 100 MB at 48 GB/s, and the time of one forwarded chunk.
    assert!((split.host - 0.002_28).abs() < 1e-4, "{split:?}");
    // The copy uses at least two NVLinks instead of host memory.
    assert!(split.functions < 0.0025, "{split:?}");
    let whole = System { pinning: Pinning::Whole, ..System::DEEPPLAN };
    assert!(alone(pair(), whole).records[0].split.host > 0.07);
}

#[test]
fn a_pool_with_a_floor_saves_native_allocations() {
    let calls = |system| alone(pair(), system).calls;
    assert_eq!(calls(System::STAR).allocations, 1);
    assert_eq!(calls(System::FAASTUBE).allocations, 0, "the floor was not allocated in advance");
}

#[test]
fn a_workflow_on_two_nodes_crosses_the_network_once() {
    let app = ServedWorkflow { workflow: workflow::driving(), replicas: 1, is_cut: true };
    let arrivals = ArrivalProcess::Open(vec![RequestArrival { at: Timestamp::ZERO, function: 0 }]);
    let on_two = |system| {
        let setup = DataflowSetup {
            nodes: 2,
            ..DataflowSetup::new(v100(), app.clone(), system, arrivals.clone(), 1)
        };
        run(&DataflowSetup { sizes: (1.0, 1.0), ..setup }).unwrap()
    };
    for system in [System::INFLESS, System::FAASTUBE] {
        assert_eq!(on_two(system).methods.inter_node, 1, "{}", system.name);
    }
    // The three stages run in pipeline, so the copy lasts as long as its network stage (D08).
    let both = on_two(System::FAASTUBE).records[0].split.functions;
    let network = 55e6 / 3.125e9;
    assert!(both > network && both < network + 0.005, "{both} and {network}");
}
