//! What is kept of workflows from one look to the next, with states that their commands made.

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{Caller, Command, ControllerId, ModelSummary, Proposal, State, UnixMillis};
use millrace_policy::workflow::StepIndex;
use millrace_types::workflow::{Output, Run, Step, WorkflowSpec};
use millrace_types::{
    Bytes, ClusterId, DataType, Digest, Dim, FunctionKey, FunctionName, FunctionSpec, TenantName, TensorSpec,
};

use super::{Way, Workflows};
use crate::fleet::Fleet;
use crate::leader::Outlook;
use crate::serving::catalog::Sight;

fn name(name: &str) -> FunctionName {
    FunctionName::new(name).unwrap()
}

fn key(of: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: name(of) }
}

/// Workflow `w` runs function `f` in these steps, one after the other.
fn chain(steps: &[&str]) -> WorkflowSpec {
    let mut from = "input.x".to_owned();
    let step = |of: &&str| {
        let inputs = [("x".to_owned(), from.parse().unwrap())].into();
        from = format!("{of}.y");
        Step { name: name(of), run: Run::Function(name("f")), inputs, each: None, when: None, deadline: None }
    };
    let steps = steps.iter().map(step).collect();
    let outputs = vec![Output { name: "y".into(), from: from.parse().unwrap() }];
    WorkflowSpec::new(key("w"), vec!["x".into()], steps, outputs)
}

/// A cluster that was told of nothing but a workflow and what it runs.
fn state(workflow: WorkflowSpec) -> State {
    let tensor = |name: &str| TensorSpec {
        name: name.into(),
        datatype: DataType::Fp32,
        shape: vec![Dim::Symbol("batch".into()), Dim::Fixed(64)],
    };
    let (inputs, outputs) = (vec![tensor("x")], vec![tensor("y")]);
    let model = ModelSummary { weights: Bytes(1), parameters: 1, launches: 1, inputs, outputs };
    let (digest, holder) = (Digest::of(b"f"), ControllerId(1));
    let commands = [
        Command::InitCluster { cluster_id: ClusterId("test".into()) },
        Command::AddArtifact { digest, bytes: Bytes(1), model, holder },
        Command::ApplyFunction {
            spec: FunctionSpec::new(key("f")),
            digest,
            expected: None,
            voters: Vec::new(),
        },
        Command::ApplyWorkflow { spec: workflow, expected: None },
    ];
    let mut state = State::default();
    for command in commands {
        let caller = Caller("test".into());
        let proposal = Proposal { stamp: UnixMillis(1), caller, idempotency: None, command };
        state.apply(1, &proposal).unwrap();
    }
    state
}

#[test]
fn paces_are_kept_for_the_steps_that_they_are_of() {
    let (fleet, outlook, workflows) = (Fleet::new(), Outlook::of_a_follower(), Workflows::default());
    let way = |steps: &[&str]| -> Way {
        let state = state(chain(steps));
        let sight = Sight { state: &state, fleet: &fleet, outlook: &outlook };
        workflows.entry(&sight, &key("w")).unwrap().way.clone().unwrap()
    };
    let first = way(&["a", "b"]);
    assert!(Arc::ptr_eq(&way(&["a", "b"]).paces, &first.paces));
    // All of them are of generation 1, as where the name was forgotten between them.
    for steps in [&["a", "c"][..], &["a", "c", "d"], &["a"]] {
        let next = way(steps);
        assert!(!Arc::ptr_eq(&next.paces, &first.paces), "{steps:?}");
        let left = Some(Duration::from_secs(9));
        assert!(next.paces.shares(&next.plan).within(&next.plan, StepIndex(0), left).is_some(), "{steps:?}");
    }
}
