//! A cluster that carries out plans and checks each plan.

use std::collections::{BTreeMap, BTreeSet};

use millrace_nodes::placement::{
    ClusterSnapshot, DesiredReplicas, FunctionPlacement, GpuLoad, PlacedModel, PlacementChange,
    PlacementNode, PlacementPhase, PlacementPlan, PlanLimits, plan,
};
use millrace_types::{Bytes, Digest, FunctionKey, FunctionName, NodeName, NodeState, TenantName};

/// Maximum number of plans until an undisturbed cluster must be at rest.
pub(crate) const ROUNDS_MAX: usize = 200;

pub(crate) fn key(text: &str) -> FunctionKey {
    let (tenant, name) = text.split_once('/').unwrap_or(("t", text));
    FunctionKey {
        tenant: TenantName::new(tenant).expect("a tenant's name"),
        name: FunctionName::new(name).expect("a function's name"),
    }
}

pub(crate) fn name(node: &str) -> NodeName {
    NodeName::new(node).expect("a node's name")
}

/// Returns a model of `mib` MiB whose digest is derived from a text.
pub(crate) fn model(of: &str, mib: u64) -> PlacedModel {
    PlacedModel { digest: Digest::of(of.as_bytes()), host: Bytes::mib(mib) }
}

pub(crate) fn function(text: &str, replicas: u32, mib: u64) -> DesiredReplicas {
    DesiredReplicas {
        key: key(text),
        enabled: true,
        replicas,
        models: vec![model(text, mib)],
        gpu: Bytes::mib(mib),
        load: GpuLoad::default(),
        ran: true,
        keeps_state: false,
    }
}

pub(crate) fn node(text: &str, mib: u64) -> PlacementNode {
    PlacementNode {
        name: name(text),
        state: NodeState::Schedulable,
        host: Bytes::mib(mib),
        gpu: Bytes::gib(16),
        gpus: 2,
        busy: GpuLoad::default(),
    }
}

pub(crate) fn place(function: &str, node: &str) -> PlacementChange {
    PlacementChange::Place { function: key(function), node: name(node) }
}

pub(crate) fn unplace(function: &str, node: &str) -> PlacementChange {
    PlacementChange::Unplace { function: key(function), node: name(node) }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct World {
    pub(crate) view: ClusterSnapshot,
    pub(crate) limits: PlanLimits,
    /// Functions that a node cannot prepare.
    pub(crate) failing: BTreeSet<(FunctionKey, NodeName)>,
}

impl World {
    pub(crate) fn new(functions: Vec<DesiredReplicas>, nodes: Vec<PlacementNode>) -> Self {
        Self { view: ClusterSnapshot { functions, nodes, ..ClusterSnapshot::default() }, ..Self::default() }
    }

    pub(crate) fn plan(&self) -> PlacementPlan {
        plan(&self.view, &self.limits)
    }

    /// Plans once and carries out the plan. New placements are not ready yet.
    pub(crate) fn round(&mut self) -> PlacementPlan {
        let plan = self.plan();
        self.check(&plan);
        let serving = self.serving();
        for step in &plan.steps {
            self.apply(step);
        }
        let still = self.serving();
        for key in serving.keys().filter(|key| self.wanted(key) > 0 && !self.keeps_state(key)) {
            assert!(still.contains_key(key), "the last ready copy of {key} went: {:?}", plan.steps);
        }
        plan
    }

    /// Lets nodes prepare their placements: on live nodes every placement becomes ready, or fails.
    pub(crate) fn prepare(&mut self) {
        let alive = self.alive();
        for placement in &mut self.view.placements {
            let pair = (placement.function.clone(), placement.node.clone());
            if alive.contains(&placement.node) {
                placement.phase =
                    if self.failing.contains(&pair) { PlacementPhase::Failed } else { PlacementPhase::Ready };
            }
        }
    }

    /// Plans and prepares until no step is left. Returns all steps.
    pub(crate) fn settle(&mut self) -> Vec<PlacementChange> {
        let mut steps = Vec::new();
        for _ in 0..ROUNDS_MAX {
            self.prepare();
            let plan = self.round();
            if plan.steps.is_empty() {
                assert!(!plan.more, "steps were left out of a plan without any");
                assert_eq!(self.plan(), plan, "the same view gives the same plan");
                return steps;
            }
            steps.extend(plan.steps);
        }
        let tail = steps.iter().rev().take(8).rev().map(said).collect::<Vec<_>>();
        panic!(
            "the cluster is not at rest after {ROUNDS_MAX} plans; the last steps: {tail:?}\n{}",
            self.said()
        );
    }

    /// Returns the names of the functions placed on a node.
    pub(crate) fn on(&self, node: &str) -> Vec<String> {
        let here = self.view.placements.iter().filter(|it| it.node == name(node));
        let mut names: Vec<_> = here.map(|it| it.function.name.to_string()).collect();
        names.sort();
        names
    }

    pub(crate) fn node_mut(&mut self, text: &str) -> &mut PlacementNode {
        self.view.nodes.iter_mut().find(|node| node.name == name(text)).expect("a node of the cluster")
    }

    pub(crate) fn wanted(&self, key: &FunctionKey) -> u32 {
        let function = self.view.functions.iter().find(|function| function.key == *key);
        function.map_or(0, |function| if function.enabled { function.replicas } else { 0 })
    }

    fn keeps_state(&self, key: &FunctionKey) -> bool {
        self.view.functions.iter().any(|function| function.key == *key && function.keeps_state)
    }

    /// Returns the number of ready copies per function on nodes that are not lost.
    pub(crate) fn serving(&self) -> BTreeMap<FunctionKey, u32> {
        let alive = self.alive();
        let mut serving = BTreeMap::new();
        for placement in &self.view.placements {
            if placement.phase == PlacementPhase::Ready && alive.contains(&placement.node) {
                *serving.entry(placement.function.clone()).or_insert(0) += 1;
            }
        }
        serving
    }

    /// Returns the host memory of the models placed on a node, where each model counts once.
    pub(crate) fn used(&self, node: &NodeName) -> Bytes {
        let mut models = BTreeMap::new();
        for placement in self.view.placements.iter().filter(|it| it.node == *node) {
            let function = self.view.functions.iter().find(|it| it.key == placement.function);
            for model in function.iter().flat_map(|function| &function.models) {
                models.insert(model.digest, model.host.0);
            }
        }
        Bytes(models.values().sum())
    }

    /// Describes the cluster in the message of a failed test.
    fn said(&self) -> String {
        let nodes = self.view.nodes.iter().map(|node| {
            let here = self.view.placements.iter().filter(|it| it.node == node.name);
            let here: Vec<_> = here.map(|it| format!("{} {:?}", it.function, it.phase)).collect();
            let used = self.used(&node.name);
            format!("{} {:?}, {used} of {}, {} GPUs: {here:?}\n", node.name, node.state, node.host, node.gpus)
        });
        let functions = self.view.functions.iter().map(|function| {
            let models: Vec<_> =
                function.models.iter().map(|it| format!("{} {}", it.digest.short(), it.host)).collect();
            let key = &function.key;
            let load = function.load.0;
            format!("{key}: {} wanted, load {load}, {models:?}\n", self.wanted(key))
        });
        nodes.chain(functions).chain([format!("{:?}", self.plan())]).collect()
    }

    fn alive(&self) -> BTreeSet<NodeName> {
        let alive = self.view.nodes.iter().filter(|node| node.state != NodeState::Lost);
        alive.map(|node| node.name.clone()).collect()
    }

    /// Checks the rules that every plan keeps.
    fn check(&self, plan: &PlacementPlan) {
        assert!(plan.steps.len() <= self.limits.steps_max, "more steps than allowed");
        let mut after = self.clone();
        for step in &plan.steps {
            let PlacementChange::Place { function, node } = step else { continue };
            let has = |it: &FunctionPlacement| it.function == *function && it.node == *node;
            assert!(!after.view.placements.iter().any(has), "two copies of {function} on {node}");
            after.apply(step);
            let of = self.view.nodes.iter().find(|it| it.name == *node).expect("a node of the cluster");
            assert_eq!(of.state, NodeState::Schedulable, "{node} takes no functions");
            // No step may depend on another step having been carried out first.
            assert!(after.used(node) <= of.host, "{function} does not fit {node}");
        }
    }

    fn apply(&mut self, step: &PlacementChange) {
        let placements = &mut self.view.placements;
        match step.clone() {
            PlacementChange::Place { function, node } => {
                placements.push(FunctionPlacement { function, node, phase: PlacementPhase::Preparing });
            }
            PlacementChange::Unplace { function, node } => {
                placements.retain(|it| (&it.function, &it.node) != (&function, &node));
            }
        }
    }
}

/// Describes a step in short form.
fn said(step: &PlacementChange) -> String {
    match step {
        PlacementChange::Place { function, node } => format!("{function} on {node}"),
        PlacementChange::Unplace { function, node } => format!("{function} off {node}"),
    }
}
