//! Random workflows of these functions and models. Some of them do not fit each other.

use millrace_cluster_state::{CallerName, ControllerId, ModelSummary, Proposal, StateCommand, UnixMillis};
use millrace_types::workflow::{Step, StepTarget, WorkflowOutput};
use millrace_types::{
    Bytes, ClusterId, DataType, Digest, Dim, FunctionKey, FunctionSpec, TenantName, TensorSpec, WorkflowSpec,
};
use proptest::prelude::*;

use crate::commands::{digest, digest_of, key, key_of, name};

/// Enough workflows that a chain of them exceeds the nesting limit.
const WORKFLOWS: [&str; 6] = ["s", "t", "u", "v", "w", "x"];

/// Returns the key of a workflow, and sometimes the key of a function.
fn workflow_key() -> impl Strategy<Value = FunctionKey> {
    key_of(&["s", "t", "u", "v", "w", "x", "h"])
}

/// Returns the model of a digest. Of the four models, two are alike, the third has another number of
/// columns, and the fourth has another output name.
pub(crate) fn model(digest: Digest) -> ModelSummary {
    let columns = if digest == digest_of(2) { 8 } else { 4 };
    let output = if digest == digest_of(3) { "z" } else { "y" };
    let tensor = |name: &str| TensorSpec {
        name: name.into(),
        datatype: DataType::Fp32,
        shape: vec![Dim::Symbol("batch".into()), Dim::Fixed(columns)],
    };
    let inputs = vec![tensor("x")];
    let outputs = vec![tensor(output)];
    ModelSummary { weights: Bytes::mib(1), parameters: 9, launches: 1, inputs, outputs }
}

/// Returns the function or workflow that a step runs. `None` stands for the workflow whose name
/// comes before, so that workflows nest deep.
fn run() -> impl Strategy<Value = Option<StepTarget>> {
    prop_oneof![
        3 => prop::sample::select(vec!["f", "g", "h"]).prop_map(|it| Some(StepTarget::Function(name(it)))),
        1 => prop::sample::select(WORKFLOWS.to_vec()).prop_map(|it| Some(StepTarget::Workflow(name(it)))),
        3 => Just(None),
    ]
}

fn run_before(key: &FunctionKey) -> StepTarget {
    let at = WORKFLOWS.iter().position(|it| *it == key.name.as_str()).unwrap_or(0);
    match at.checked_sub(1) {
        Some(before) => StepTarget::Workflow(name(WORKFLOWS[before])),
        None => StepTarget::Function(name("f")),
    }
}

/// Returns a workflow of up to three steps, each with the output of the step before as its input.
fn workflow() -> impl Strategy<Value = WorkflowSpec> {
    let output = prop_oneof![8 => Just("y"), 1 => Just("z")];
    (workflow_key(), prop::collection::vec((run(), output), 1..4)).prop_map(|(key, runs)| {
        let runs = runs.into_iter().map(|(run, output)| (run.unwrap_or_else(|| run_before(&key)), output));
        chain(key.clone(), runs)
    })
}

fn chain(key: FunctionKey, runs: impl Iterator<Item = (StepTarget, &'static str)>) -> WorkflowSpec {
    let mut from = "input.x".to_owned();
    let mut steps = Vec::new();
    for (number, (run, output)) in runs.enumerate() {
        let inputs = [("x".to_owned(), from.parse().unwrap())].into();
        steps.push(Step {
            name: name(&format!("s{number}")),
            run,
            inputs,
            each: None,
            when: None,
            deadline: None,
        });
        from = format!("s{number}.{output}");
    }
    let outputs = vec![WorkflowOutput { name: "y".into(), from: from.parse().unwrap() }];
    WorkflowSpec::new(key, vec!["x".into()], steps, outputs)
}

pub(crate) fn workflow_command() -> impl Strategy<Value = StateCommand> {
    let expected = || prop::option::weighted(0.2, 0u64..30);
    prop_oneof![
        4 => (workflow(), expected()).prop_map(|(spec, expected)| StateCommand::ApplyWorkflow { spec, expected }),
        1 => (workflow_key(), expected())
            .prop_map(|(key, expected)| StateCommand::DeleteWorkflow { key, expected }),
    ]
}

/// Returns a log that begins with functions and nested workflows of one tenant, and then applies
/// and deletes them.
pub(crate) fn log_of_workflows() -> impl Strategy<Value = Vec<Proposal>> {
    let propose = |command| Proposal {
        stamp: UnixMillis(1),
        caller: CallerName("alice".into()),
        idempotency: None,
        command,
    };
    let function = |it: &str, digest| {
        let key = FunctionKey { tenant: TenantName::default(), name: name(it) };
        let spec = FunctionSpec::new(key);
        StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() }
    };
    let mut begin = vec![StateCommand::InitCluster { cluster_id: ClusterId("one".into()) }];
    for digest in (0..4).map(digest_of) {
        let bytes = Bytes(10);
        let holder = ControllerId(1);
        begin.push(StateCommand::AddArtifact { digest, bytes, model: model(digest), holder });
    }
    begin.extend(["f", "g", "h"].map(|it| function(it, digest_of(0))));
    // These workflows are nested from the start, because random commands seldom nest them deep.
    begin.extend(WORKFLOWS[..4].iter().map(|it| {
        let key = FunctionKey { tenant: TenantName::default(), name: name(it) };
        let run = run_before(&key);
        StateCommand::ApplyWorkflow { spec: chain(key, std::iter::once((run, "y"))), expected: None }
    }));
    let of_default = |mut command: StateCommand| {
        match &mut command {
            StateCommand::ApplyFunction { spec, .. } => spec.key.tenant = TenantName::default(),
            StateCommand::ApplyWorkflow { spec, .. } => spec.key.tenant = TenantName::default(),
            StateCommand::DeleteFunction { key, .. } | StateCommand::DeleteWorkflow { key, .. } => {
                key.tenant = TenantName::default();
            }
            _ => {}
        }
        command
    };
    let change = prop_oneof![
        6 => workflow_command(),
        3 => (prop::sample::select(vec!["f", "g", "h"]), digest()).prop_map(move |(it, digest)| function(it, digest)),
        1 => key().prop_map(|key| StateCommand::DeleteFunction { key, expected: None }),
    ];
    prop::collection::vec(change, 0..60).prop_map(move |changes| {
        begin.iter().cloned().chain(changes.into_iter().map(of_default)).map(propose).collect()
    })
}
