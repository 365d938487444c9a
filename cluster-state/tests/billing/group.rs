//! The controller group of the billing tests, and names.

use std::ops::Bound;

use millrace_cluster_state::{
    CallerName, CommandEffect, CommandOutcome, ControllerId, ModelSummary, Proposal, State, StateCommand,
    UnixMillis,
};
use millrace_types::{
    Bytes, ClusterId, Digest, Epoch, FunctionKey, FunctionName, FunctionSpec, NodeName, TenantName, Usage,
};

pub(crate) const NODES: usize = 2;

pub(crate) fn named(name: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: FunctionName::new(name).unwrap() }
}

pub(crate) fn node(at: usize) -> NodeName {
    NodeName::new(&format!("n{at}")).unwrap()
}

/// Controllers that never fail to commit.
pub(crate) struct Group {
    pub(crate) state: State,
    index: u64,
}

impl Group {
    pub(crate) fn new(functions: &[&str]) -> Self {
        let mut group = Self { state: State::default(), index: 0 };
        group.propose(StateCommand::InitCluster { cluster_id: ClusterId("test".into()) }).unwrap();
        let digest = Digest::of(b"model");
        let holder = ControllerId(1);
        let model =
            ModelSummary { weights: Bytes(1), parameters: 1, launches: 1, inputs: vec![], outputs: vec![] };
        group.propose(StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder }).unwrap();
        for name in functions {
            let spec = FunctionSpec::new(named(name));
            group
                .propose(StateCommand::ApplyFunction { spec, digest, expected: None, voters: vec![] })
                .unwrap();
        }
        group
    }

    pub(crate) fn propose(&mut self, command: StateCommand) -> CommandOutcome {
        self.index += 1;
        let caller = CallerName("test".into());
        let proposal = Proposal { stamp: UnixMillis(self.index), caller, idempotency: None, command };
        self.state.apply(self.index, &proposal)
    }

    /// Registers a node again, after the loss of an earlier registration of its name.
    pub(crate) fn register(&mut self, at: usize, seen: Epoch) -> Epoch {
        self.lose(at);
        let register = StateCommand::RegisterNode {
            name: node(at),
            instance: format!("i{}", self.index),
            address: "127.0.0.1:1".into(),
            gpus: vec![],
            topology: "test".into(),
            host_memory: Bytes::gib(8),
            seen,
        };
        match self.propose(register).unwrap() {
            CommandEffect::Registered { epoch } => epoch,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn lose(&mut self, at: usize) {
        if let Some(epoch) = self.state.node(&node(at)).map(|node| node.epoch) {
            self.propose(StateCommand::NodeLost { name: node(at), epoch }).unwrap();
        }
    }

    pub(crate) fn charged(&self) -> Usage {
        self.state.bills(Bound::Unbounded).fold(Usage::NONE, |sum, (_, usage)| sum.plus(usage))
    }
}
