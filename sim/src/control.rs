//! The control plane: nodes and functions are commands applied to the replicated state, and the
//! leader's planner says who serves what, until it has nothing more to say. Raft itself is absent:
//! commands are applied as if a group had committed them.

use std::collections::BTreeMap;

use millrace_cluster_state::{
    Applied, Caller, Command, ControllerId, ModelSummary, NodeGpu, PlacementReason, Proposal, Refusal,
    RulesVersion, State, UnixMillis,
};
use millrace_policy::placement::{self, GpuLoad, Limits, Phase, Step, Unplaced, View};
use millrace_types::{
    Bytes, ClusterId, Digest, Epoch, FunctionKey, FunctionName, FunctionSpec, NodeName, Quota, Resources,
    TenantName,
};

use crate::scenario::{Function, NodeSpec, Scenario};

/// Plans that are made before something is wrong with the planner.
const PLANS_MAX: usize = 10_000;

/// Why a cluster was not set up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The state did not take a command. Says what to do.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A function has no node.
    #[error("function {function} cannot be placed: {why}")]
    Unplaced {
        /// Which.
        function: FunctionKey,
        /// Why, and what to do.
        why: placement::Why,
    },
    /// The planner goes on and on.
    #[error("{PLANS_MAX} plans did not settle who serves what: please report this scenario")]
    Unsettled,
}

/// The replicated state and what is told to it.
#[derive(Debug, Default)]
pub struct Control {
    state: State,
    index: u64,
}

/// What a function is called that has this place.
#[must_use]
pub fn function_key(place: usize, function: &Function) -> FunctionKey {
    let name = FunctionName::new(&format!("f{place}")).unwrap_or_else(|_| unreachable!("f and a number"));
    FunctionKey { tenant: function.tenant.clone(), name }
}

/// Its model's content address.
#[must_use]
pub fn digest(place: usize) -> Digest {
    Digest::of(&place.to_le_bytes())
}

fn node_name(place: usize) -> NodeName {
    NodeName::new(&format!("n{place}")).unwrap_or_else(|_| unreachable!("n and a number"))
}

impl Control {
    /// Registers the nodes, sets the tenants' caps, applies the functions and places them. Returns who
    /// serves what: for each node its functions, by place.
    ///
    /// # Errors
    /// [`Error`]; a function that fits nowhere among them.
    pub fn set_up(scenario: &Scenario) -> Result<(Self, Vec<Vec<usize>>), Error> {
        let Scenario { nodes, functions, .. } = scenario;
        let mut control = Self::default();
        control.apply(Command::SetClusterVersion { version: RulesVersion::NEWEST })?;
        control.apply(Command::InitCluster { cluster_id: ClusterId("sim".into()) })?;
        for (place, node) in nodes.iter().enumerate() {
            control.apply(register(place, node))?;
        }
        for (tenant, &quota) in &scenario.quotas {
            control.apply(Command::SetQuota { tenant: tenant.clone(), quota })?;
        }
        for (place, function) in functions.iter().enumerate() {
            let (holder, digest) = (ControllerId(1), digest(place));
            let (bytes, model) = (Bytes(1), summary(function));
            control.apply(Command::AddArtifact { digest, bytes, model, holder })?;
            let mut spec = FunctionSpec::new(function_key(place, function));
            (spec.slo, spec.replicas, spec.serving) = (function.slo, function.replicas, function.serving);
            spec.resources = Resources { gpu_memory: Some(function.model.memory) };
            control.apply(Command::ApplyFunction { spec, digest, expected: None, voters: Vec::new() })?;
        }
        control.place()?;
        let placed = (0..nodes.len()).map(|node| control.placed_on(node, functions)).collect();
        Ok((control, placed))
    }

    /// What tenants may use, as nodes are told it.
    #[must_use]
    pub fn quotas(&self) -> BTreeMap<TenantName, Quota> {
        self.state.tenants().map(|tenant| (tenant.name.clone(), tenant.quota)).collect()
    }

    fn apply(&mut self, command: Command) -> Result<Applied, Error> {
        self.index += 1;
        let caller = Caller("sim".into());
        let proposal = Proposal { stamp: UnixMillis(self.index), caller, idempotency: None, command };
        Ok(self.state.apply(self.index, &proposal)?)
    }

    fn place(&mut self) -> Result<(), Error> {
        for _ in 0..PLANS_MAX {
            let plan = placement::plan(&view(&self.state), &Limits::default());
            if let Some(Unplaced { function, why, .. }) = plan.unplaced.into_iter().next() {
                return Err(Error::Unplaced { function, why });
            }
            if plan.steps.is_empty() {
                return Ok(());
            }
            for step in plan.steps {
                self.apply(match step {
                    Step::Place { function, node } => {
                        Command::Place { function, node, reason: PlacementReason::MissingReplica }
                    }
                    Step::Unplace { function, node } => Command::Unplace { function, node },
                })?;
            }
        }
        Err(Error::Unsettled)
    }

    fn placed_on(&self, node: usize, functions: &[Function]) -> Vec<usize> {
        let name = node_name(node);
        let here = |(place, function): (usize, &Function)| {
            let key = function_key(place, function);
            self.state.placements().any(|it| it.node == name && it.function == key).then_some(place)
        };
        functions.iter().enumerate().filter_map(here).collect()
    }
}

fn register(place: usize, node: &NodeSpec) -> Command {
    let name = node_name(place);
    let gpus = node.topology.gpus.iter().map(|gpu| NodeGpu {
        index: gpu.index,
        gpu_type: gpu.gpu_type.clone(),
        memory: gpu.memory,
    });
    Command::RegisterNode {
        instance: name.to_string(),
        address: name.to_string(),
        name,
        gpus: gpus.collect(),
        topology: node.topology.name.clone(),
        host_memory: node.host_memory,
        seen: Epoch(0),
    }
}

fn summary(function: &Function) -> ModelSummary {
    let (inputs, outputs) = (Vec::new(), Vec::new());
    ModelSummary { weights: function.model.weights, parameters: 1, launches: 1, inputs, outputs }
}

/// The cluster as the planner sees it: what is placed is taken to be ready, and no load is known.
fn view(state: &State) -> View {
    let functions = state.functions().map(|function| {
        let spec = &function.latest().spec;
        let model = |digest| state.artifact(&digest).map(|artifact| (digest, artifact.model.weights));
        let models = model(function.latest().digest);
        placement::Function {
            key: function.key.clone(),
            enabled: function.enabled,
            replicas: spec.replicas,
            models: models.map(|(digest, host)| placement::Model { digest, host }).into_iter().collect(),
            gpu: spec.resources.gpu_memory.unwrap_or(Bytes::ZERO),
            load: GpuLoad::default(),
            ran: true,
            keeps_state: false,
        }
    });
    let nodes = state.nodes().map(|node| placement::Node {
        name: node.name.clone(),
        state: node.state(),
        host: node.host_memory,
        gpu: node.largest_gpu(),
        gpus: u32::try_from(node.gpus.len()).unwrap_or(u32::MAX),
        busy: GpuLoad::default(),
    });
    let placements = state.placements().map(|placement| placement::Placement {
        function: placement.function.clone(),
        node: placement.node.clone(),
        phase: Phase::Ready,
    });
    View {
        functions: functions.collect(),
        nodes: nodes.collect(),
        placements: placements.collect(),
        flows: Vec::new(),
    }
}
