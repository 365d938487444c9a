//! A log for the tests of commands: proposes, and compares the state around a refusal.

use millrace_types::{
    Bytes, ClusterId, DataType, Digest, Dim, FunctionKey, FunctionName, FunctionSpec, GpuIndex, NodeName,
    TenantName, TensorSpec,
};

use crate::command::{Caller, Command, Proposal, UnixMillis};
use crate::outcome::{Outcome, Refusal};
use crate::record::{ControllerId, ModelSummary, NodeGpu};
use crate::state::State;

pub(crate) struct Log {
    pub(crate) state: State,
    stamp: u64,
    index: u64,
}

impl Log {
    pub(crate) fn empty() -> Self {
        Self { state: State::default(), stamp: 1_000_000, index: 0 }
    }

    pub(crate) fn new() -> Self {
        let mut log = Self::empty();
        log.apply(Command::InitCluster { cluster_id: ClusterId("test".into()) }).unwrap();
        log
    }

    pub(crate) fn with_artifacts(names: &[&str]) -> Self {
        let mut log = Self::new();
        for name in names {
            let holder = ControllerId(1);
            log.apply(Command::AddArtifact {
                digest: digest(name),
                bytes: Bytes(100),
                model: model(),
                holder,
            })
            .unwrap();
        }
        log
    }

    pub(crate) fn tick(&mut self, ms: u64) {
        self.stamp += ms;
    }

    pub(crate) fn apply(&mut self, command: Command) -> Outcome {
        self.index += 1;
        let proposal = self.proposal(command);
        self.state.apply(self.index, &proposal)
    }

    /// The refusal of a command, after checking that it left everything but the index alone.
    pub(crate) fn refused(&mut self, command: Command) -> Refusal {
        let before = self.state.clone();
        let refusal = self.apply(command).expect_err("refused");
        let after = State { applied_index: before.applied_index, clock: before.clock, ..self.state.clone() };
        assert_eq!(before, after, "{refusal}");
        refusal
    }

    pub(crate) fn register(&mut self, name: &str, instance: &str, gpu_memory: Bytes) -> Outcome {
        self.apply(Command::RegisterNode {
            name: node_name(name),
            instance: instance.into(),
            address: "127.0.0.1:7080".into(),
            gpus: vec![NodeGpu { index: GpuIndex(0), gpu_type: "emulated".into(), memory: gpu_memory }],
            topology: "test".into(),
            host_memory: Bytes::gib(8),
        })
    }

    fn proposal(&self, command: Command) -> Proposal {
        Proposal { stamp: UnixMillis(self.stamp), caller: Caller("alice".into()), idempotency: None, command }
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

pub(crate) fn model() -> ModelSummary {
    let tensor = |name: &str| TensorSpec {
        name: name.into(),
        datatype: DataType::Fp32,
        shape: vec![Dim::Symbol("batch".into()), Dim::Fixed(64)],
    };
    ModelSummary {
        weights: Bytes::mib(1),
        parameters: 262_144,
        launches: 3,
        inputs: vec![tensor("x")],
        outputs: vec![tensor("y")],
    }
}

pub(crate) fn apply(name: &str, model: &str) -> Command {
    Command::ApplyFunction { spec: spec(name), digest: digest(model), expected: None }
}

pub(crate) fn apply_expecting(name: &str, model: &str, expected: u64) -> Command {
    Command::ApplyFunction { spec: spec(name), digest: digest(model), expected: Some(expected) }
}

pub(crate) fn delete(name: &str) -> Command {
    Command::DeleteFunction { key: key(name), expected: None }
}
