//! Properties of the simulator. A run repeats exactly, in this process and in another. The order of
//! simultaneous events changes no result beyond noise. No request is lost.

#![allow(clippy::unwrap_used)]

mod decisions;

use std::collections::BTreeMap;
use std::env;
use std::process::Command;
use std::time::Duration;

use millrace_gpu::isolation::ExecutorIsolation;
use millrace_scheduling::dispatch::{POLICIES, PolicyConfig};
use millrace_sim::models::{self, TORPOR_PCIE};
use millrace_sim::scenario::{ClusterScenario, ExecutorFault, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::{RequestArrival, minutes, rates};
use millrace_sim::{RequestEnding, SimulatedRequest, SimulationOutcome, run};
use millrace_transfers::paths::HostLinks;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Quota, Reason, Slo, TenantName, Timestamp};

/// Returns two GPUs under one switch, and a third GPU with its own link.
fn topology() -> Topology {
    let gpu = |index: u32, path: &[u32]| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "modelled".to_owned(),
        memory: Bytes::gib(2),
        host_path: path.iter().copied().map(LinkId).collect(),
    };
    let link = |kind| TopologyLink { kind, rate: TORPOR_PCIE };
    Topology {
        name: "test".to_owned(),
        gpus: vec![gpu(0, &[0, 3]), gpu(1, &[1, 3]), gpu(2, &[2])],
        links: [LinkKind::Pcie, LinkKind::Pcie, LinkKind::Pcie, LinkKind::PcieUplink].map(link).to_vec(),
    }
}

/// Returns two nodes under a minute of load of 40 functions, with executors that die.
fn scenario(dispatch: PolicyConfig, seed: u64) -> ClusterScenario {
    scenario_of(40, dispatch, seed)
}

/// Returns two nodes under a minute of load of `count` functions, with executors that die.
fn scenario_of(count: usize, dispatch: PolicyConfig, seed: u64) -> ClusterScenario {
    let table = models::torpor();
    let slo = Slo { deadline: Duration::from_millis(200), percentile: 0.98 };
    let function = |place: usize| {
        let replicas = 1 + (place % 2) as u32;
        SimulatedFunction {
            replicas,
            ..SimulatedFunction::new(table[place % table.len()].clone(), Some(slo))
        }
    };
    let functions = (0..count).map(function).collect();
    let counts = rates::by_minute(&rates::torpor(), count, 1, seed as usize);
    let nodes = vec![SimulatedNode::new(topology(), dispatch); 2];
    let fault = |second: u64| ExecutorFault {
        at: Timestamp(second * 1_000_000_000),
        node: (second % 2) as usize,
        gpu: GpuIndex((second % 3) as u32),
    };
    ClusterScenario {
        faults: (5..55).step_by(10).map(fault).collect(),
        traced: true,
        timeout: Duration::from_secs(60),
        ..ClusterScenario::new(nodes, functions, minutes::arrivals(&counts, seed), seed)
    }
}

/// Checks the properties that every run has.
fn check(scenario: &ClusterScenario, outcome: &SimulationOutcome, what: &str) {
    assert_eq!(outcome.records.len(), scenario.arrivals.len(), "{what}: a request was lost");
    let early = scenario.nodes[0].dispatch.binds_early();
    let mut per_gpu: BTreeMap<(usize, GpuIndex), Vec<(Timestamp, Duration)>> = BTreeMap::new();
    for (place, record) in outcome.records.iter().enumerate() {
        assert_eq!(record.request, place, "{what}: a request was answered twice");
        match record.ending {
            RequestEnding::Answered { node, gpu, split, .. } => {
                assert!(split.total <= record.latency() + Duration::from_millis(1), "{what}: {record:?}");
                per_gpu.entry((node, gpu)).or_default().push((record.finished, split.run));
            }
            // A request may fail because two executors died while they ran the request. A policy that binds
            // functions to GPUs early may also fail a request whose GPU has no memory for the function.
            RequestEnding::Failed { reason } => assert!(
                matches!(reason, Reason::Quarantined | Reason::AttemptsExhausted)
                    || early && matches!(reason, Reason::NoGpuMemory | Reason::TimedOut),
                "{what}: {record:?}"
            ),
        }
    }
    // A GPU has one run at a time (T15), so its runs add up to at most the span.
    for ((node, gpu), runs) in &per_gpu {
        let computed: Duration = runs.iter().map(|(_, run)| *run).sum();
        assert!(computed <= outcome.span, "{what}: node {node} GPU {gpu} computed {computed:?}");
    }
    for node in &outcome.nodes {
        assert_eq!(node.queued, 0, "{what}");
        assert!(node.functions.iter().all(|function| function.in_flight == 0), "{what}");
        // Each completed or expired request counts once towards its function's objective (T17).
        let scored: u64 = node.functions.iter().map(|function| function.score.scored).sum();
        let completed: u64 = node.functions.iter().map(|it| it.score.completed + it.score.expired).sum();
        assert_eq!(scored, completed, "{what}");
    }
    let in_time: u64 = outcome.nodes.iter().flat_map(|node| &node.functions).map(|it| it.score.in_time).sum();
    let slo = Duration::from_millis(200);
    let counted = outcome.records.iter().filter(|it| it.answered() && it.latency() <= slo).count() as u64;
    assert_eq!(in_time, counted, "{what}: the nodes' count of requests in time differs from the records");
}

fn fingerprint(dispatch: PolicyConfig, seed: u64) -> String {
    fingerprint_of(&scenario(dispatch, seed))
}

fn fingerprint_of(scenario: &ClusterScenario) -> String {
    let outcome = run(scenario).unwrap();
    let (events, hash) = outcome.events();
    format!("{events} events, {hash:016x}")
}

const CHILD: &str = "MILLRACE_SIM_TEST_CHILD";

#[test]
fn a_run_repeats_with_the_same_seed_in_this_process_and_in_another() {
    if env::var_os(CHILD).is_some() {
        println!("fingerprint {}", fingerprint(PolicyConfig::default(), 11));
        return;
    }
    let here = fingerprint(PolicyConfig::default(), 11);
    assert_eq!(here, fingerprint(PolicyConfig::default(), 11));
    assert_ne!(here, fingerprint(PolicyConfig::default(), 12), "another seed gave the same run");
    let name = "a_run_repeats_with_the_same_seed_in_this_process_and_in_another";
    let mut child = Command::new(env::current_exe().unwrap());
    let output = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains(&format!("fingerprint {here}")), "{here} here, but in the child: {said}");
}

#[test]
fn every_policy_answers_every_request_in_any_order_of_simultaneous_events() {
    for (name, dispatch) in POLICIES {
        let mut latencies = Vec::new();
        for ties in [0, 5, 0xdead_beef] {
            let scenario = ClusterScenario { ties, ..scenario(dispatch, 3) };
            let outcome = run(&scenario).unwrap();
            check(&scenario, &outcome, &format!("{name}, ties {ties}"));
            latencies.push(outcome.summary(&scenario.functions).p50.as_secs_f64());
        }
        // The order of simultaneous events moves the median latency by at most 20% and 1 ms. The order decides
        // which node first brings a model to a GPU, and the router keeps to that node.
        let (least, most) = latencies.iter().fold((f64::MAX, 0.0_f64), |(a, b), &it| (a.min(it), b.max(it)));
        // With early binding, that order decides once which functions get memory, so medians may differ.
        assert!(dispatch.binds_early() || most <= least * 1.2 + 1e-3, "{name}: {latencies:?}");
    }
}

#[test]
fn runs_take_three_times_as_long_on_a_gpu_type_of_pace_300() {
    let mut scenario = scenario(PolicyConfig::default(), 5);
    scenario.faults.clear();
    for gpu in &mut scenario.nodes[1].topology.gpus {
        gpu.gpu_type = "slow".to_owned();
    }
    scenario.pace.insert("slow".to_owned(), 300);
    let outcome = run(&scenario).unwrap();
    check(&scenario, &outcome, "two types");
    for record in &outcome.records {
        let RequestEnding::Answered { node, split, .. } = record.ending else { continue };
        let takes = scenario.functions[record.function as usize].model.run;
        let expected = if node == 1 { takes * 3 } else { takes };
        assert!(split.run.abs_diff(expected) <= Duration::from_millis(1), "{record:?} of {expected:?}");
    }
    // The router learns both run times, and prefers the faster node for functions that both nodes serve.
    let asked = |node: usize| {
        let either = |record: &&SimulatedRequest| scenario.functions[record.function as usize].replicas == 2;
        let there = |it: &&SimulatedRequest| matches!(it.ending, RequestEnding::Answered { node: on, .. } if on == node);
        outcome.records.iter().filter(either).filter(there).count()
    };
    assert!(asked(0) > 3 * asked(1), "{} on the fast node, {} on the slow one", asked(0), asked(1));
}

#[test]
fn a_function_that_fits_no_gpu_is_refused_with_advice() {
    let mut scenario = scenario(PolicyConfig::default(), 1);
    scenario.functions[7].model.memory = Bytes::gib(4);
    let refused = run(&scenario).unwrap_err().to_string();
    assert!(refused.contains("default/f7") && refused.contains("larger"), "{refused}");
}

#[test]
fn slower_links_raise_the_mean_latency() {
    let mut slow = scenario(PolicyConfig::default(), 2);
    slow.faults.clear();
    let fast = run(&slow).unwrap().summary(&slow.functions);
    for link in slow.nodes.iter_mut().flat_map(|node| &mut node.topology.links) {
        link.rate = BytesPerSec(link.rate.0 / 4);
    }
    let slow = run(&slow).unwrap().summary(&slow.functions);
    assert!(slow.mean > fast.mean, "{slow:?} and {fast:?}");
}

/// Returns the GPUs of [`topology`], with an NVLink from the third GPU to each of the others.
fn joined() -> Topology {
    let mut topology = topology();
    let nvlink = |a: u32, b: u32| TopologyLink {
        kind: LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) },
        rate: BytesPerSec::gb(24),
    };
    topology.links.extend([nvlink(0, 2), nvlink(1, 2)]);
    topology
}

/// D05, in several orders of simultaneous events, with executors that die.
#[test]
fn models_are_copied_over_neighbours_links_and_no_request_is_lost() {
    let over = |host_links: HostLinks, ties: u64| {
        // Fifo copies no model from another GPU, so NVLinks carry only forwarded host transfers.
        let mut scenario = ClusterScenario { ties, ..scenario(PolicyConfig::Fifo, 4) };
        for node in &mut scenario.nodes {
            node.topology = joined();
            node.host_links = host_links;
        }
        scenario
    };
    let nvlinks =
        |outcome: &SimulationOutcome| outcome.link_loads().iter().map(|it| it[4] + it[5]).sum::<f64>();
    assert_eq!(nvlinks(&run(&over(HostLinks::Own, 0)).unwrap()), 0.0);
    for ties in [0, 5, 0xdead_beef] {
        let scenario = over(HostLinks::All, ties);
        let all = run(&scenario).unwrap();
        check(&scenario, &all, &format!("ties {ties}"));
        assert!(nvlinks(&all) > 0.0, "{:?}", all.link_loads());
        assert_eq!(run(&scenario).unwrap().events(), all.events());
    }
    // Without NVLinks no GPU can forward, so both settings give the same run.
    let alone = |host_links| {
        let mut scenario = scenario(PolicyConfig::default(), 4);
        scenario.nodes.iter_mut().for_each(|node| node.host_links = host_links);
        fingerprint_of(&scenario)
    };
    assert_eq!(alone(HostLinks::Own), alone(HostLinks::All));
}

#[test]
fn the_warm_up_is_not_counted() {
    let arrivals =
        (0..3u64).map(|second| RequestArrival { at: Timestamp(second * 1_000_000_000), function: 0 });
    let functions = vec![SimulatedFunction::new(models::torpor()[0].clone(), None)];
    let nodes = vec![SimulatedNode::new(topology(), PolicyConfig::default())];
    let scenario =
        ClusterScenario { warmed: true, ..ClusterScenario::new(nodes, functions, arrivals.collect(), 1) };
    let outcome = run(&scenario).unwrap();
    let summary = outcome.summary(&scenario.functions);
    assert_eq!((summary.requests, summary.miss_ratio), (3, 0.0), "the only miss was in the warm-up");
    let computed: f64 = outcome.gpu_loads().iter().sum::<f64>() * outcome.span.as_secs_f64();
    let expected = 3.0 * scenario.functions[0].model.run.as_secs_f64();
    assert!((computed - expected).abs() < 1e-3, "{computed} of {expected}");
}

/// Returns a scenario with four functions of each of two tenants. Each function gets ten requests a second
/// for five seconds, more than one GPU can compute.
fn two_tenants(quotas: BTreeMap<TenantName, Quota>) -> ClusterScenario {
    let [quiet, noisy] = ["quiet", "noisy"].map(|name| TenantName::new(name).unwrap());
    let model = models::torpor().swap_remove(7);
    let function = |place: u32| {
        let tenant = if place < 4 { quiet.clone() } else { noisy.clone() };
        SimulatedFunction { tenant, ..SimulatedFunction::new(model.clone(), None) }
    };
    let arrivals = (0..50u64).flat_map(|tenth| {
        (0..8).map(move |function| RequestArrival { at: Timestamp(tenth * 100_000_000), function })
    });
    let mut topology = topology();
    topology.gpus.iter_mut().for_each(|gpu| gpu.memory = Bytes::gib(16));
    let nodes = vec![SimulatedNode::new(topology, PolicyConfig::default())];
    let scenario = ClusterScenario::new(nodes, (0..8).map(function).collect(), arrivals.collect(), 1);
    ClusterScenario { quotas, ..scenario }
}

/// Returns the most runs of the noisy tenant that overlap by more than a millisecond.
fn noisy_at_once(outcome: &SimulationOutcome) -> i32 {
    let mut changes = Vec::new();
    for record in outcome.records.iter().filter(|record| record.function >= 4) {
        let RequestEnding::Answered { split, .. } = record.ending else { panic!("{record:?}") };
        let ran = Timestamp(record.finished.0 - split.run.as_nanos() as u64);
        changes.extend([(ran, 1), (Timestamp(record.finished.0 - 1_000_000), -1)]);
    }
    changes.sort_unstable();
    let running = changes.iter().scan(0, |running, (_, change)| {
        *running += change;
        Some(*running)
    });
    running.max().unwrap()
}

#[test]
fn a_cap_of_one_gpu_limits_the_noisy_tenant_and_speeds_up_the_quiet_one() {
    let noisy = TenantName::new("noisy").unwrap();
    let one = Quota { gpus_max: std::num::NonZeroU32::new(1), ..Quota::NONE };
    let free = two_tenants(BTreeMap::new());
    let capped = two_tenants([(noisy.clone(), one)].into());
    let without = run(&free).unwrap();
    let with = run(&capped).unwrap();
    assert!(noisy_at_once(&without) > 1, "without a cap the noisy tenant uses one GPU only");
    assert_eq!(noisy_at_once(&with), 1);
    let mean = |outcome: &SimulationOutcome, tenant: &str| {
        let tenants = outcome.by_tenant(&free.functions);
        tenants.iter().find(|it| it.tenant.to_string() == tenant).unwrap().mean
    };
    assert!(mean(&with, "quiet") < mean(&without, "quiet"));
    assert!(mean(&with, "noisy") > mean(&without, "noisy"));
}

#[test]
fn functions_are_billed_for_runs_requests_and_idle_time() {
    let mut scenario = scenario(PolicyConfig::default(), 9);
    scenario.faults.clear();
    let outcome = run(&scenario).unwrap();
    let mut busy = vec![(0, 0); scenario.functions.len()];
    for record in outcome.records.iter() {
        let RequestEnding::Answered { split, .. } = record.ending else { panic!("{record:?}") };
        let (gpu_ns, requests) = &mut busy[record.function as usize];
        *gpu_ns += split.run.as_nanos().div_ceil(1_000_000) * 1_000_000;
        *requests += 1;
    }
    let usage = outcome.usage(&scenario.functions);
    for ((usage, function), busy) in usage.iter().zip(&scenario.functions).zip(&busy) {
        assert_eq!((u128::from(usage.gpu_ns), usage.requests), *busy);
        // Idle time counts once for each node that keeps the function, and never while a GPU holds the model.
        let there = outcome.span * function.replicas;
        assert!(usage.idle() + usage.busy() <= there + Duration::from_millis(busy.1 + 2), "{usage:?}");
        assert!(usage.idle() > there.mul_f64(0.7), "{usage:?} of {there:?}");
    }
}

/// One GPU has memory for one of two models, which are requested in turn, so that each request is a miss.
#[test]
fn a_process_per_model_costs_its_start_only_when_the_process_starts() {
    let mean_of = |isolation: ExecutorIsolation| {
        let model = models::torpor().swap_remove(7);
        let arrivals = (0..20u64).map(|second| {
            let function = (second % 2) as u32;
            RequestArrival { at: Timestamp(second * 2_000_000_000), function }
        });
        let mut topology = topology();
        topology.gpus.truncate(1);
        let nodes =
            vec![SimulatedNode { isolation, ..SimulatedNode::new(topology, PolicyConfig::default()) }];
        let functions = vec![SimulatedFunction::new(model, None); 2];
        let process_start = Duration::from_secs(1);
        let scenario = ClusterScenario::new(nodes, functions, arrivals.collect(), 1);
        let scenario = ClusterScenario { process_start, warmed: true, ..scenario };
        let outcome = run(&scenario).unwrap();
        assert_eq!(outcome.summary(&scenario.functions).miss_ratio, 1.0, "{isolation}");
        outcome.summary(&scenario.functions).mean
    };
    let [shared, kept, resident] =
        [ExecutorIsolation::Gpu, ExecutorIsolation::Model, ExecutorIsolation::Resident].map(mean_of);
    let same = shared.abs_diff(kept) < Duration::from_millis(1);
    assert!(same, "a process that the warm-up started was started again: {shared:?}, {kept:?}");
    assert!(
        resident > Duration::from_secs(1) && shared < Duration::from_millis(200),
        "{shared:?}, {resident:?}"
    );
}
