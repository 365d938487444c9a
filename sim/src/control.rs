//! The control plane of a simulated cluster. Nodes and functions are registered by commands on the
//! replicated state, and the leader's planner places the functions until no change is left. Raft itself is
//! absent: commands are applied as if a group had committed them.

use std::collections::BTreeMap;

use millrace_cluster_state::{
    CallerName, CommandEffect, CommandRefusal, ControllerId, ModelSummary, NodeGpu, NodeSlice,
    PlacementReason, Proposal, RulesVersion, SliceRecord, State, StateCommand, UnixMillis,
};
use millrace_nodes::placement::{
    self, ClusterSnapshot, GpuLoad, PlacementChange, PlacementPhase, PlanLimits, Unplaced,
};
use millrace_slices::pack::FitCheck;
use millrace_slices::placing::{self, NoGpu, NodeSharing, PlacedSlice, SharedNode, SliceWish};
use millrace_slices::tokens::Config;
use millrace_types::policy::GpuSharingName;
use millrace_types::{
    Bytes, ClusterId, Digest, Epoch, FunctionKey, FunctionName, FunctionSpec, NodeName, Quota,
    ResourceRequest, Revision, RevisionKey, SliceOnGpu, TenantName,
};
use millrace_worker::desired_state::{NodeSlices, PlacedSlices};

use crate::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};

/// Plans after which an unsettled placement counts as a fault of the planner.
const PLANS_MAX: usize = 10_000;

/// A reason that the control plane refused a scenario.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The state refused a command. The message states the next step.
    #[error(transparent)]
    Refused(#[from] CommandRefusal),
    /// No node can serve a function.
    #[error("function {function} cannot be placed: {why}")]
    Unplaced {
        function: FunctionKey,
        /// The reason and the next step.
        why: placement::UnplacedReason,
    },
    /// No GPU has room for a slice of a function.
    #[error("{count} slices of function {function} have no GPU: {why}")]
    NoSlice { function: FunctionKey, count: u32, why: NoGpu },
    /// The planner still proposes changes after 10,000 plans.
    #[error("the placement did not settle within {PLANS_MAX} plans: please report this scenario")]
    Unsettled,
}

/// The replicated state, with the index of the last command applied to the state.
#[derive(Debug, Default)]
pub struct SimulatedControlPlane {
    state: State,
    index: u64,
}

/// Returns the name of the function with this index in the scenario.
#[must_use]
pub fn function_key(place: usize, function: &SimulatedFunction) -> FunctionKey {
    let name = FunctionName::new(&format!("f{place}"))
        .unwrap_or_else(|_| unreachable!("an f and a number form a valid name"));
    FunctionKey { tenant: function.tenant.clone(), name }
}

/// Returns the content address of the model of the function with this index. The digest is made up, since a
/// simulated model has no bytes.
#[must_use]
pub fn digest(place: usize) -> Digest {
    Digest::of(&place.to_le_bytes())
}

fn node_name(place: usize) -> NodeName {
    NodeName::new(&format!("n{place}"))
        .unwrap_or_else(|_| unreachable!("an n and a number form a valid name"))
}

impl SimulatedControlPlane {
    /// Registers the nodes, sets the tenants' caps, applies the functions and places the functions on nodes.
    /// Returns the control plane, and for each node the indexes of the functions that the node serves.
    ///
    /// # Errors
    /// Returns [`Error`] if a command is refused, a function fits no node, or the placement does not settle.
    pub fn set_up(scenario: &ClusterScenario) -> Result<(Self, Vec<Vec<usize>>), Error> {
        let ClusterScenario { nodes, functions, .. } = scenario;
        let mut control = Self::default();
        control.apply(StateCommand::SetClusterVersion { version: RulesVersion::NEWEST })?;
        control.apply(StateCommand::InitCluster { cluster_id: ClusterId("sim".into()) })?;
        for (place, node) in nodes.iter().enumerate() {
            control.apply(register(place, node))?;
        }
        for (tenant, &quota) in &scenario.quotas {
            control.apply(StateCommand::SetQuota { tenant: tenant.clone(), quota })?;
        }
        for (place, function) in functions.iter().enumerate() {
            let digest = digest(place);
            let model = summary(function);
            let holder = ControllerId(1);
            control.apply(StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder })?;
            let mut spec = FunctionSpec::new(function_key(place, function));
            (spec.slo, spec.replicas, spec.serving) = (function.slo, function.replicas, function.serving);
            spec.resources = ResourceRequest { gpu_memory: Some(function.model.memory) };
            spec.slices = function.slices;
            control.apply(StateCommand::ApplyFunction {
                spec,
                digest,
                expected: None,
                voters: Vec::new(),
            })?;
        }
        control.place()?;
        control.place_slices(scenario)?;
        let placed = (0..nodes.len()).map(|node| control.placed_on(node, functions)).collect();
        Ok((control, placed))
    }

    /// Returns the caps of all tenants, as a controller sends the caps to the nodes.
    #[must_use]
    pub fn quotas(&self) -> BTreeMap<TenantName, Quota> {
        self.state.tenants().map(|tenant| (tenant.name.clone(), tenant.quota)).collect()
    }

    /// Returns the slices of a node's GPUs, as a controller sends the slices to the node.
    #[must_use]
    pub fn slices(&self, node: usize) -> NodeSlices {
        let mut slices = NodeSlices::new();
        for (function, slice) in self.state.slices_on(&node_name(node)) {
            let key = RevisionKey { function: function.clone(), revision: Revision::FIRST };
            let placed = PlacedSlices { terms: slice.terms, on: Vec::new() };
            slices.entry(key).or_insert(placed).on.push(SliceOnGpu::unmeasured(slice.id, slice.gpu));
        }
        slices
    }

    /// Places the slices that functions ask for, as the leader does.
    fn place_slices(&mut self, scenario: &ClusterScenario) -> Result<(), Error> {
        let ClusterScenario { nodes, functions, .. } = scenario;
        let wish = |(place, function): (usize, &SimulatedFunction)| {
            let asked = function.slices?;
            let key = function_key(place, function);
            let nodes = self.state.placements_of(&key).map(|placement| placement.node.clone()).collect();
            Some(SliceWish {
                function: key,
                terms: asked.terms,
                count: asked.min,
                memory: function.model.memory,
                nodes,
            })
        };
        let wishes: Vec<_> = functions.iter().enumerate().filter_map(wish).collect();
        let node = |(place, node): (usize, &SimulatedNode)| SharedNode {
            name: node_name(place),
            sharing: match node.gpu_sharing {
                GpuSharingName::Off => NodeSharing::SharesNot,
                GpuSharingName::Slices => NodeSharing::Shares,
            },
            gpus: node.topology.gpus.iter().map(|gpu| (gpu.index, gpu.memory)).collect(),
        };
        let nodes: Vec<_> = nodes.iter().enumerate().map(node).collect();
        let mut fit = FitCheck::new(Config::SLICES);
        let plan = placing::place(&wishes, &nodes, &[], self.state.slices_given(), &mut fit);
        if let Some(placing::MissingSlices { function, count, why }) = plan.missing.into_iter().next() {
            return Err(Error::NoSlice { function, count, why });
        }
        let mut by_node: BTreeMap<NodeName, Vec<NodeSlice>> = BTreeMap::new();
        for PlacedSlice { id, function, node, gpu, terms } in plan.slices {
            let slice = SliceRecord { id, gpu, terms };
            by_node.entry(node).or_default().push(NodeSlice { function, slice });
        }
        for (node, slices) in by_node {
            self.apply(StateCommand::SetSlices { node, slices })?;
        }
        Ok(())
    }

    fn apply(&mut self, command: StateCommand) -> Result<CommandEffect, Error> {
        self.index += 1;
        let caller = CallerName("sim".into());
        let proposal = Proposal { stamp: UnixMillis(self.index), caller, idempotency: None, command };
        Ok(self.state.apply(self.index, &proposal)?)
    }

    fn place(&mut self) -> Result<(), Error> {
        for _ in 0..PLANS_MAX {
            let plan = placement::plan(&view(&self.state), &PlanLimits::default());
            if let Some(Unplaced { function, why, .. }) = plan.unplaced.into_iter().next() {
                return Err(Error::Unplaced { function, why });
            }
            if plan.steps.is_empty() {
                return Ok(());
            }
            for step in plan.steps {
                self.apply(match step {
                    PlacementChange::Place { function, node } => {
                        StateCommand::Place { function, node, reason: PlacementReason::MissingReplica }
                    }
                    PlacementChange::Unplace { function, node } => StateCommand::Unplace { function, node },
                })?;
            }
        }
        Err(Error::Unsettled)
    }

    fn placed_on(&self, node: usize, functions: &[SimulatedFunction]) -> Vec<usize> {
        let name = node_name(node);
        let here = |(place, function): (usize, &SimulatedFunction)| {
            let key = function_key(place, function);
            self.state.placements().any(|it| it.node == name && it.function == key).then_some(place)
        };
        functions.iter().enumerate().filter_map(here).collect()
    }
}

fn register(place: usize, node: &SimulatedNode) -> StateCommand {
    let name = node_name(place);
    let gpus = node.topology.gpus.iter().map(|gpu| NodeGpu {
        index: gpu.index,
        gpu_type: gpu.gpu_type.clone(),
        memory: gpu.memory,
    });
    StateCommand::RegisterNode {
        instance: name.to_string(),
        address: name.to_string(),
        name,
        gpus: gpus.collect(),
        topology: node.topology.name.clone(),
        host_memory: node.host_memory,
        seen: Epoch(0),
    }
}

fn summary(function: &SimulatedFunction) -> ModelSummary {
    ModelSummary {
        weights: function.model.weights,
        parameters: 1,
        launches: 1,
        inputs: Vec::new(),
        outputs: Vec::new(),
    }
}

/// Returns the cluster as the planner sees the cluster. Every placement counts as ready, and every load as
/// zero.
fn view(state: &State) -> ClusterSnapshot {
    let functions = state.functions().map(|function| {
        let spec = &function.latest().spec;
        let model = |digest| state.artifact(&digest).map(|artifact| (digest, artifact.model.weights));
        let models = model(function.latest().digest);
        placement::DesiredReplicas {
            key: function.key.clone(),
            enabled: function.enabled,
            replicas: spec.replicas,
            models: models
                .map(|(digest, host)| placement::PlacedModel { digest, host })
                .into_iter()
                .collect(),
            gpu: spec.resources.gpu_memory.unwrap_or(Bytes::ZERO),
            load: GpuLoad::default(),
            ran: true,
            keeps_state: false,
        }
    });
    let nodes = state.nodes().map(|node| placement::PlacementNode {
        name: node.name.clone(),
        state: node.state(),
        host: node.host_memory,
        gpu: node.largest_gpu(),
        gpus: u32::try_from(node.gpus.len()).unwrap_or(u32::MAX),
        busy: GpuLoad::default(),
    });
    let placements = state.placements().map(|placement| placement::FunctionPlacement {
        function: placement.function.clone(),
        node: placement.node.clone(),
        phase: PlacementPhase::Ready,
    });
    ClusterSnapshot {
        functions: functions.collect(),
        nodes: nodes.collect(),
        placements: placements.collect(),
        flows: Vec::new(),
    }
}
