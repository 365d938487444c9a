//! Commands, and the resulting states, for tests.

use millrace_cluster_state::{
    CallerName, ControllerId, ModelSummary, Proposal, State, StateCommand, UnixMillis,
};
use millrace_types::workflow::{Step, StepTarget, WorkflowOutput, WorkflowSpec};
use millrace_types::{
    Bytes, ClusterId, DataType, Digest, Dim, FunctionKey, FunctionName, FunctionSpec, TenantName, TensorSpec,
};

fn name(name: &str) -> FunctionName {
    FunctionName::new(name).unwrap()
}

pub(crate) fn key(of: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: name(of) }
}

/// Returns workflow `w`, a chain of the given steps, each with the called function.
pub(crate) fn chain(steps: &[(&str, &str)]) -> WorkflowSpec {
    let mut from = "input.x".to_owned();
    let step = |(step, function): &(&str, &str)| {
        let inputs = [("x".to_owned(), from.parse().unwrap())].into();
        from = format!("{step}.y");
        let run = StepTarget::Function(name(function));
        Step { name: name(step), run, inputs, each: None, when: None, deadline: None }
    };
    let steps = steps.iter().map(step).collect();
    let outputs = vec![WorkflowOutput { name: "y".into(), from: from.parse().unwrap() }];
    WorkflowSpec::new(key("w"), vec!["x".into()], steps, outputs)
}

/// Returns the commands that create these functions, with input `x` and output `y`.
pub(crate) fn functions(names: &[&str]) -> Vec<StateCommand> {
    let tensor = |name: &str| TensorSpec {
        name: name.into(),
        datatype: DataType::Fp32,
        shape: vec![Dim::Symbol("batch".into()), Dim::Fixed(64)],
    };
    let inputs = vec![tensor("x")];
    let outputs = vec![tensor("y")];
    let model = ModelSummary { weights: Bytes(1), parameters: 1, launches: 1, inputs, outputs };
    let digest = Digest::of(b"model");
    let holder = ControllerId(1);
    let artifact = StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder };
    let function = |name: &&str| {
        let spec = FunctionSpec::new(key(name));
        StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() }
    };
    std::iter::once(artifact).chain(names.iter().map(function)).collect()
}

/// Returns a model without inputs and outputs.
pub(crate) fn bare_model() -> ModelSummary {
    ModelSummary { weights: Bytes(1), parameters: 1, launches: 1, inputs: Vec::new(), outputs: Vec::new() }
}

/// Returns the state of a cluster that has only these functions.
pub(crate) fn state(names: &[&str]) -> State {
    let mut state = State::default();
    apply(&mut state, StateCommand::InitCluster { cluster_id: ClusterId("test".into()) });
    functions(names).into_iter().for_each(|command| apply(&mut state, command));
    state
}

/// Applies a command to a state.
///
/// # Panics
/// The state refuses the command.
pub(crate) fn apply(state: &mut State, command: StateCommand) {
    let caller = CallerName("test".into());
    let proposal = Proposal { stamp: UnixMillis(1), caller, idempotency: None, command };
    state.apply(1, &proposal).unwrap();
}
