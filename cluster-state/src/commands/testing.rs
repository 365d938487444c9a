//! A log for the tests of commands: it proposes commands, and compares the states before and after
//! a refusal.

use millrace_types::workflow::{Step, StepTarget, WorkflowOutput};
use millrace_types::{
    Alpha, Alphas, Bytes, ClusterId, DataId, DataType, Digest, Dim, Epoch, FunctionKey, FunctionName,
    FunctionSpec, GpuIndex, NodeDelta, NodeName, Priority, SloCounts, SyncBatch, SyncPart, SyncPortion,
    TenantName, TensorSpec, WorkflowSpec,
};

use crate::caller::{CallerName, IdempotencyKey};
use crate::command::{Proposal, StateCommand};
use crate::outcome::{CommandOutcome, CommandRefusal};
use crate::record::{ControllerId, ModelSummary, NodeGpu, PlacementReason, SchedulingState};
use crate::rules::RulesVersion;
use crate::state::State;
use crate::time::UnixMillis;

pub(crate) struct TestLog {
    pub(crate) state: State,
    stamp: u64,
    index: u64,
}

impl TestLog {
    /// Returns a log under the newest rules, as in a cluster that this build begins.
    pub(crate) fn empty() -> Self {
        Self { state: State { rules: RulesVersion::NEWEST, ..State::default() }, stamp: 1_000_000, index: 0 }
    }

    pub(crate) fn new() -> Self {
        Self::of_rules(RulesVersion::NEWEST)
    }

    pub(crate) fn of_rules(rules: RulesVersion) -> Self {
        let mut log = Self::empty();
        log.state.rules = rules;
        log.apply(StateCommand::InitCluster { cluster_id: ClusterId("test".into()) }).unwrap();
        log
    }

    pub(crate) fn with_artifacts(names: &[&str]) -> Self {
        let mut log = Self::new();
        for name in names {
            log.add_model(name, model());
        }
        log
    }

    /// Returns a log with a function, "f", and two nodes: "n1" of epoch 1 and "n2" of epoch 2.
    pub(crate) fn with_two_nodes() -> Self {
        let mut log = Self::with_artifacts(&["m1"]);
        log.apply(apply("f", "m1")).unwrap();
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        log.register("n2", "b", Bytes::gib(1)).unwrap();
        log
    }

    pub(crate) fn add_model(&mut self, name: &str, model: ModelSummary) {
        let digest = digest(name);
        let bytes = Bytes(100);
        let holder = ControllerId(1);
        self.apply(StateCommand::AddArtifact { digest, bytes, model, holder }).unwrap();
    }

    pub(crate) fn tick(&mut self, ms: u64) {
        self.stamp += ms;
    }

    pub(crate) fn apply(&mut self, command: StateCommand) -> CommandOutcome {
        self.index += 1;
        let proposal = self.proposal(command);
        self.state.apply(self.index, &proposal)
    }

    /// Returns the refusal of a command, and checks that it changed nothing but the index and the
    /// clock.
    pub(crate) fn refused(&mut self, command: StateCommand) -> CommandRefusal {
        let before = self.state.clone();
        let refusal = self.apply(command).expect_err("refused");
        let after = State { applied_index: before.applied_index, clock: before.clock, ..self.state.clone() };
        assert_eq!(before, after, "{refusal}");
        refusal
    }

    pub(crate) fn register(&mut self, name: &str, instance: &str, gpu_memory: Bytes) -> CommandOutcome {
        self.apply(StateCommand::RegisterNode {
            name: node_name(name),
            instance: instance.into(),
            address: "127.0.0.1:7080".into(),
            gpus: vec![NodeGpu { index: GpuIndex(0), gpu_type: "emulated".into(), memory: gpu_memory }],
            topology: "test".into(),
            host_memory: Bytes::gib(8),
            seen: Epoch(0),
        })
    }

    /// Records that another controller holds a model file.
    pub(crate) fn hold(&mut self, name: &str, holder: u64) {
        let holder = ControllerId(holder);
        self.apply(StateCommand::AddArtifact {
            digest: digest(name),
            bytes: Bytes(100),
            model: model(),
            holder,
        })
        .unwrap();
    }

    pub(crate) fn apply_keyed(&mut self, command: StateCommand, seq: u64) -> CommandOutcome {
        self.index += 1;
        let idempotency = Some(IdempotencyKey { client: "c".into(), seq });
        let proposal = Proposal { idempotency, ..self.proposal(command) };
        self.state.apply(self.index, &proposal)
    }

    pub(crate) fn proposal(&self, command: StateCommand) -> Proposal {
        Proposal {
            stamp: UnixMillis(self.stamp),
            caller: CallerName("alice".into()),
            idempotency: None,
            command,
        }
    }
}

pub(crate) fn key(name: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: FunctionName::new(name).unwrap() }
}

pub(crate) fn node_name(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

pub(crate) fn spec(name: &str) -> FunctionSpec {
    FunctionSpec::new(key(name))
}

pub(crate) fn digest(name: &str) -> Digest {
    Digest::of(name.as_bytes())
}

/// Returns a tensor with a free number of rows.
pub(crate) fn tensor(name: &str, columns: u64) -> TensorSpec {
    let shape = vec![Dim::Symbol("batch".into()), Dim::Fixed(columns)];
    TensorSpec { name: name.into(), datatype: DataType::Fp32, shape }
}

pub(crate) fn model() -> ModelSummary {
    model_of(tensor("x", 64), tensor("y", 64))
}

pub(crate) fn model_of(input: TensorSpec, output: TensorSpec) -> ModelSummary {
    ModelSummary {
        weights: Bytes::mib(1),
        parameters: 262_144,
        launches: 3,
        inputs: vec![input],
        outputs: vec![output],
    }
}

pub(crate) fn apply(name: &str, model: &str) -> StateCommand {
    StateCommand::ApplyFunction {
        spec: spec(name),
        digest: digest(model),
        expected: None,
        voters: Vec::new(),
    }
}

pub(crate) fn apply_expecting(name: &str, model: &str, expected: u64) -> StateCommand {
    let spec = spec(name);
    let digest = digest(model);
    StateCommand::ApplyFunction { spec, digest, expected: Some(expected), voters: Vec::new() }
}

pub(crate) fn delete(name: &str) -> StateCommand {
    StateCommand::DeleteFunction { key: key(name), expected: None }
}

pub(crate) fn run_function(name: &str) -> StepTarget {
    StepTarget::Function(key(name).name)
}

pub(crate) fn run_workflow(name: &str) -> StepTarget {
    StepTarget::Workflow(key(name).name)
}

/// Returns a workflow that passes `x` through these runs in order, and returns `y`.
pub(crate) fn chain(name: &str, runs: &[StepTarget]) -> WorkflowSpec {
    let mut from = "input.x".to_owned();
    let mut steps = Vec::new();
    for (number, run) in runs.iter().enumerate() {
        let step = format!("s{number}");
        let inputs = [("x".to_owned(), from.parse().unwrap())].into();
        from = format!("{step}.y");
        steps.push(Step {
            name: key(&step).name,
            run: run.clone(),
            inputs,
            each: None,
            when: None,
            deadline: None,
        });
    }
    let outputs = vec![WorkflowOutput { name: "y".into(), from: from.parse().unwrap() }];
    WorkflowSpec::new(key(name), vec!["x".into()], steps, outputs)
}

pub(crate) fn apply_workflow(spec: WorkflowSpec) -> StateCommand {
    StateCommand::ApplyWorkflow { spec, expected: None }
}

pub(crate) fn delete_workflow(name: &str) -> StateCommand {
    StateCommand::DeleteWorkflow { key: key(name), expected: None }
}

pub(crate) fn place(function: &str, node: &str) -> StateCommand {
    let reason = PlacementReason::MissingReplica;
    StateCommand::Place { function: key(function), node: node_name(node), reason }
}

pub(crate) fn unplace(function: &str, node: &str) -> StateCommand {
    StateCommand::Unplace { function: key(function), node: node_name(node) }
}

pub(crate) fn schedule(node: &str, scheduling: SchedulingState) -> StateCommand {
    StateCommand::SetNodeScheduling { name: node_name(node), scheduling }
}

pub(crate) fn sync(node: &str, epoch: u64, seq: u64, part: SyncPart, delta: NodeDelta) -> StateCommand {
    StateCommand::SyncNode {
        node: node_name(node),
        batch: SyncBatch { epoch: Epoch(epoch), seq, part, delta },
    }
}

/// Returns a full sync in a single batch.
pub(crate) fn sync_all(node: &str, epoch: u64, seq: u64, delta: NodeDelta) -> StateCommand {
    sync(node, epoch, seq, SyncPart::Full(SyncPortion::Only), delta)
}

/// Returns the alpha of the default priority alone.
pub(crate) fn alphas(ppm: u32) -> Alphas {
    Alphas::from([(Priority::default(), Alpha::from_ppm(ppm).unwrap())])
}

pub(crate) fn counts(m: u64, n: u64) -> SloCounts {
    SloCounts { m, n }
}

pub(crate) fn scored(function: &str, m: u64, n: u64) -> NodeDelta {
    NodeDelta { slo: vec![(key(function), counts(m, n))], ..NodeDelta::default() }
}

/// Returns the id of data that `n1` made in its first epoch.
pub(crate) fn data(counter: u64) -> DataId {
    DataId { home: node_name("n1"), epoch: Epoch(1), counter }
}

pub(crate) fn holding(counters: &[u64]) -> NodeDelta {
    let entries = counters.iter().map(|&counter| (data(counter), Bytes(100))).collect();
    NodeDelta { entries, ..NodeDelta::default() }
}
