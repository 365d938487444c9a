use std::time::Duration;

use millrace_types::{Bytes, Digest, FunctionName, NodeName, NodeState, TenantName};

use super::*;
use crate::placement::{
    self, ClusterSnapshot, DesiredReplicas, FunctionPlacement, GpuLoad, PlacedModel, PlacementNode,
    PlacementPhase, PlacementPlan, Unplaced, UnplacedReason,
};

fn secs(secs: u64) -> Timestamp {
    Timestamp(secs * 1_000_000_000)
}

fn key(name: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::new("t").unwrap(), name: FunctionName::new(name).unwrap() }
}

/// Returns functions of 100 MiB with one copy each.
fn functions(number: usize) -> Vec<DesiredReplicas> {
    let function = |number: usize| DesiredReplicas {
        key: key(&format!("f{number}")),
        enabled: true,
        replicas: 1,
        models: vec![PlacedModel { digest: Digest::of(&number.to_be_bytes()), host: Bytes::mib(100) }],
        gpu: Bytes::mib(100),
        load: GpuLoad::default(),
        keeps_state: false,
        ran: true,
    };
    (0..number).map(function).collect()
}

/// Returns nodes of 1,000 MiB and 2 GPUs.
fn nodes(number: usize) -> Vec<PlacementNode> {
    let node = |number: usize| PlacementNode {
        name: NodeName::new(&format!("n{number}")).unwrap(),
        state: NodeState::Schedulable,
        host: Bytes::mib(1000),
        gpu: Bytes::gib(16),
        gpus: 2,
        busy: GpuLoad::default(),
    };
    (0..number).map(node).collect()
}

fn view(wanted: usize, nodes_now: usize) -> ClusterSnapshot {
    ClusterSnapshot {
        functions: functions(wanted),
        nodes: nodes(nodes_now),
        placements: Vec::new(),
        flows: Vec::new(),
    }
}

/// Returns the first signal for this view, with an empty plan.
fn signal(view: &ClusterSnapshot, unplaced: &[Unplaced]) -> ScalingSignal {
    let plan = PlacementPlan { unplaced: unplaced.to_vec(), ..PlacementPlan::default() };
    ScalingMonitor::new(ScalingLimits::default())
        .observe(secs(0), ScalingInputs { view, plan: &plan, scores: &[] })
}

fn needs(nodes_needed: u32, nodes_now: u32, reasons: &[NodeNeedReason]) -> ScalingSignal {
    ScalingSignal { nodes_needed, nodes_now, reasons: reasons.to_vec() }
}

#[test]
fn a_cluster_without_functions_needs_no_node() {
    assert_eq!(signal(&view(0, 0), &[]), ScalingSignal::default());
}

#[test]
fn host_memory_for_all_copies_determines_the_nodes_needed() {
    let memory = |mib| NodeNeedReason::HostMemory { wanted: Bytes::mib(mib), node: Bytes::mib(1000) };
    assert_eq!(signal(&view(17, 1), &[]), needs(2, 1, &[memory(1700)]));
    assert_eq!(signal(&view(18, 1), &[]), needs(3, 1, &[memory(1800)]), "15% stays free");
    let mut shared = view(18, 1);
    for function in &mut shared.functions {
        function.models[0].digest = Digest::of(b"shared");
    }
    assert_eq!(signal(&shared, &[]).nodes_needed, 1, "all functions share one copy");
    let mut disabled = view(18, 1);
    disabled.functions.iter_mut().for_each(|function| function.enabled = false);
    assert_eq!(signal(&disabled, &[]), needs(1, 1, &[NodeNeedReason::Stable { nodes: 0 }]));
}

#[test]
fn replicas_need_separate_nodes() {
    let mut three = view(1, 1);
    three.functions[0].replicas = 3;
    assert_eq!(signal(&three, &[]), needs(3, 1, &[NodeNeedReason::Replicas { replicas: 3 }]));
    three.nodes.clear();
    assert_eq!(
        signal(&three, &[]),
        needs(3, 0, &[NodeNeedReason::Replicas { replicas: 3 }]),
        "with no node known"
    );
}

#[test]
fn busy_gpus_need_nodes_and_lost_nodes_do_not_count() {
    let mut busy = view(1, 2);
    busy.nodes[0].busy = GpuLoad(1900);
    busy.nodes[1].busy = GpuLoad(1000);
    let time = NodeNeedReason::GpuTime { load: GpuLoad(2900), gpus: 2 };
    assert_eq!(signal(&busy, &[]), needs(3, 2, &[time]));
    assert_eq!(time.to_string(), "requests need 2.900 GPUs, and a node has 2");
    busy.functions[0].load = GpuLoad(4000);
    assert_eq!(signal(&busy, &[]).nodes_needed, 3, "the need of functions if larger");
    busy.nodes[0].state = NodeState::Lost;
    busy.functions[0].load = GpuLoad::default();
    assert_eq!(signal(&busy, &[]), needs(1, 1, &signal(&busy, &[]).reasons));
}

#[test]
fn functions_without_a_node_ask_for_one_if_it_would_take_them() {
    let check = |why, expected: u32| {
        let unplaced = Unplaced { function: key("f0"), copies: 0, missing: 1, why };
        assert_eq!(signal(&view(1, 1), &[unplaced]).nodes_needed, expected, "{why}");
    };
    let free = Bytes::mib(10);
    let needs = Bytes::mib(500);
    check(UnplacedReason::NoNode, 2);
    check(UnplacedReason::TooFewNodes { nodes: 1 }, 2);
    check(UnplacedReason::NodesFull { nodes: 1, max: 32_000 }, 2);
    check(UnplacedReason::HostMemory { needs, free }, 2);
    check(UnplacedReason::HostMemory { needs: Bytes::gib(5), free }, 1);
    check(UnplacedReason::GpuMemory { needs, largest: free }, 1);
    check(UnplacedReason::Failing { nodes: 3 }, 1);
}

#[test]
fn unplaced_functions_ask_for_no_node_while_the_plan_has_steps() {
    let view = view(1, 1);
    let step = placement::PlacementChange::Place { function: key("f0"), node: view.nodes[0].name.clone() };
    let short = Unplaced { function: key("f1"), copies: 0, missing: 1, why: UnplacedReason::NoNode };
    let plan = PlacementPlan { steps: vec![step], unplaced: vec![short], more: false };
    let signal = ScalingMonitor::new(ScalingLimits::default())
        .observe(secs(0), ScalingInputs { view: &view, plan: &plan, scores: &[] });
    assert_eq!(signal.nodes_needed, 1);
}

#[test]
fn draining_and_cordoned_nodes_are_no_capacity() {
    let mut leaving = view(9, 3);
    leaving.nodes[0].state = NodeState::Draining;
    leaving.nodes[1].state = NodeState::Cordoned;
    let told = signal(&leaving, &[]);
    assert_eq!((told.nodes_needed, told.nodes_now), (2, 1));
}

/// Observes one view repeatedly.
struct Watch {
    scaling: ScalingMonitor,
    limits: ScalingLimits,
}

impl Watch {
    fn new() -> Self {
        let limits = ScalingLimits::default();
        Self { scaling: ScalingMonitor::new(limits), limits }
    }

    fn at(&mut self, now: u64, wanted: usize) -> u32 {
        let view = view(wanted, 1);
        let observed = ScalingInputs { view: &view, plan: &PlacementPlan::default(), scores: &[] };
        self.scaling.observe(secs(now), observed).nodes_needed
    }
}

#[test]
fn signal_rises_at_once_and_falls_after_a_lasting_lower_need() {
    let mut watch = Watch::new();
    let stable = watch.limits.stable.as_secs();
    assert_eq!(watch.at(0, 8), 1);
    assert_eq!(watch.at(1, 30), 4);
    assert_eq!(watch.at(2, 8), 4);
    assert_eq!(watch.at(3, 15), 4, "the largest need since then counts");
    assert_eq!(watch.at(4, 8), 4);
    assert_eq!(watch.at(1 + stable, 8), 4);
    assert_eq!(watch.at(2 + stable, 8), 2);
    assert_eq!(watch.at(1 + 2 * stable, 8), 2);
    assert_eq!(watch.at(2 + 2 * stable, 8), 1);
}

#[test]
fn a_returning_need_restarts_the_wait() {
    let mut watch = Watch::new();
    let stable = watch.limits.stable.as_secs();
    assert_eq!(watch.at(0, 30), 4);
    assert_eq!(watch.at(1, 8), 4);
    assert_eq!(watch.at(stable, 30), 4);
    assert_eq!(watch.at(stable + 1, 8), 4);
    assert_eq!(watch.at(2 * stable, 8), 4);
    assert_eq!(watch.at(2 * stable + 1, 8), 1);
}

#[test]
fn a_new_leader_asks_at_first_for_no_fewer_nodes_than_exist() {
    let mut scaling = ScalingMonitor::new(ScalingLimits::default());
    let view = view(1, 3);
    let plan = PlacementPlan::default();
    let observed = ScalingInputs { view: &view, plan: &plan, scores: &[] };
    assert_eq!(scaling.observe(secs(100), observed), needs(3, 3, &[NodeNeedReason::Stable { nodes: 1 }]));
    assert_eq!(scaling.observe(secs(400), observed).nodes_needed, 1);
}

/// Returns the nodes needed for a busy node with one function, with these requests in time out of
/// 100 in each period.
fn objective(busy: u64, in_time: [u64; 3]) -> Vec<u32> {
    let mut view = view(1, 1);
    view.nodes[0].busy = GpuLoad(busy);
    view.placements = vec![FunctionPlacement {
        function: key("f0"),
        node: view.nodes[0].name.clone(),
        phase: PlacementPhase::Ready,
    }];
    let mut scaling =
        ScalingMonitor::new(ScalingLimits { stable: Duration::ZERO, ..ScalingLimits::default() });
    let mut counts = SloCounts::default();
    let windows = (1..).zip(in_time).map(|(window, m)| {
        counts = counts.plus(SloCounts { m, n: 100 });
        let scores = [ObjectiveScore { function: key("f0"), percentile: 0.98, counts }];
        let observed = ScalingInputs { view: &view, plan: &PlacementPlan::default(), scores: &scores };
        scaling.observe(secs(30 * window), observed).nodes_needed
    });
    windows.collect()
}

#[test]
fn a_missed_objective_asks_for_a_node_while_gpus_are_busy() {
    assert_eq!(objective(1000, [0, 98, 99]), [1, 1, 1], "the first window is not over");
    assert_eq!(objective(1000, [98, 97, 98]), [1, 2, 1]);
    assert_eq!(objective(500, [98, 50, 50]), [1, 1, 1], "more nodes would not help");
}

#[test]
fn few_requests_do_not_judge_an_objective() {
    let view = view(1, 1);
    let plan = PlacementPlan::default();
    let limits = ScalingLimits { slo_gpu_share: 0, ..ScalingLimits::default() };
    let mut scaling = ScalingMonitor::new(limits);
    let mut at = |now, n| {
        let scores = [ObjectiveScore { function: key("f0"), percentile: 0.9, counts: SloCounts { m: 0, n } }];
        scaling.observe(secs(now), ScalingInputs { view: &view, plan: &plan, scores: &scores }).reasons
    };
    at(0, 0);
    assert!(!at(30, 19).contains(&NodeNeedReason::Slo { functions: 1 }));
    assert_eq!(at(60, 39), [NodeNeedReason::Slo { functions: 1 }]);
    assert_eq!(at(70, 39), [NodeNeedReason::Slo { functions: 1 }], "until the next window is over");
}
