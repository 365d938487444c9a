use millrace_types::sequences::{IDLE_DEFAULT, StatePair};
use millrace_types::workflow::{NESTING_MAX, Signature};
use millrace_types::{Dim, FunctionSpec, NodeDelta, SequenceSpec, TenantName, TensorSpec, Usage};

use super::*;
use crate::StateCommand;
use crate::commands::testing::{
    TestLog, apply, apply_workflow, chain, delete, delete_workflow, digest, key, model_of, run_function,
    run_workflow, spec, sync_all, tensor,
};
use crate::workflows::USERS_NAMED_MAX;

/// Returns a log with a function `f` that has 64 columns.
fn log() -> TestLog {
    let mut log = TestLog::with_artifacts(&["m1"]);
    log.apply(apply("f", "m1")).unwrap();
    log
}

fn workflow<'a>(log: &'a TestLog, name: &str) -> &'a WorkflowRecord {
    log.state.workflow(&key(name)).unwrap()
}

fn said(log: &mut TestLog, command: StateCommand) -> String {
    log.refused(command).to_string()
}

/// Returns a tensor with free dimensions.
fn free(name: &str) -> TensorSpec {
    let mut tensor = tensor(name, 1);
    tensor.shape[1] = Dim::Symbol("columns".into());
    tensor
}

/// Returns a step's tensor as the workflow shows it, with rows named after the step.
fn of(step: &str, name: &str, columns: u64) -> TensorSpec {
    let mut tensor = tensor(name, columns);
    tensor.shape[0] = Dim::Symbol(format!("{step}.batch"));
    tensor
}

#[test]
fn a_changed_workflow_gets_a_new_generation_and_a_repeat_does_not() {
    let mut log = log();
    let before = log.state.version();
    let one = || apply_workflow(chain("w", &[run_function("f")]));
    let two = || apply_workflow(chain("w", &[run_function("f"), run_function("f")]));
    assert_eq!(log.apply(one()), Ok(CommandEffect::Created { version: before + 1 }));
    log.tick(5);
    assert_eq!(log.apply(one()), Ok(CommandEffect::Unchanged));
    assert_eq!(workflow(&log, "w").generation.get(), 1);
    assert_eq!(log.apply(two()), Ok(CommandEffect::Changed { version: before + 2 }));
    let kept = workflow(&log, "w");
    assert_eq!((kept.generation.get(), kept.resource_version), (2, before + 2));
    assert_eq!(kept.updated_at.since(kept.created_at).as_millis(), 5);
    assert_eq!(
        kept.signature,
        Signature { inputs: vec![of("s0", "x", 64)], outputs: vec![of("s0", "y", 64)] }
    );
    assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
}

#[test]
fn the_number_of_workflows_is_bounded_for_each_tenant() {
    let mut log = log();
    let mut other = spec("f");
    other.key.tenant = TenantName::new("other").unwrap();
    let digest = digest("m1");
    log.apply(StateCommand::ApplyFunction { spec: other, digest, expected: None, voters: Vec::new() })
        .unwrap();
    for number in 0..WORKFLOWS_PER_TENANT_MAX {
        log.apply(apply_workflow(chain(&format!("w{number}"), &[run_function("f")]))).unwrap();
    }
    let says = said(&mut log, apply_workflow(chain("more", &[run_function("f")])));
    assert_eq!(says, "the cluster is at its limit of 1000 workflows of tenant default: delete some first");
    let mut elsewhere = chain("more", &[run_function("f")]);
    elsewhere.key.tenant = TenantName::new("other").unwrap();
    assert!(log.apply(apply_workflow(elsewhere)).is_ok());
    let changed = chain("w0", &[run_function("f"), run_function("f")]);
    assert!(matches!(log.apply(apply_workflow(changed)), Ok(CommandEffect::Changed { .. })));
    log.apply(delete_workflow("w1")).unwrap();
    assert!(log.apply(apply_workflow(chain("more", &[run_function("f")]))).is_ok());
}

#[test]
fn a_workflow_with_a_stale_expected_version_is_refused() {
    let mut log = log();
    let spec = || chain("w", &[run_function("f")]);
    let expecting = |expected| StateCommand::ApplyWorkflow { spec: spec(), expected: Some(expected) };
    assert!(log.apply(expecting(0)).is_ok());
    let actual = log.state.version();
    assert_eq!(log.refused(expecting(0)), CommandRefusal::Conflict { key: key("w"), expected: 0, actual });
    assert_eq!(log.apply(expecting(actual)), Ok(CommandEffect::Unchanged));
}

#[test]
fn each_refusal_names_the_fault_in_the_workflow() {
    let mut log = log();
    log.add_model("narrow", model_of(tensor("x", 8), tensor("y", 8)));
    log.apply(apply("narrow", "narrow")).unwrap();
    let mut elsewhere = chain("w", &[run_function("f")]);
    elsewhere.key.tenant = TenantName::new("other").unwrap();
    let mut useless = chain("w", &[run_function("f")]);
    useless.inputs.push("z".into());
    let checks = [
        (useless, "input \"z\" is read by no step"),
        (chain("w", &[run_function("g")]), "runs function \"g\", which does not exist: apply it first"),
        (chain("w", &[run_workflow("f")]), "runs workflow \"f\", which does not exist"),
        (elsewhere, "runs function \"f\", which does not exist"),
        (
            chain("w", &[run_function("f"), run_function("narrow")]),
            "s0.y has shape [s0.batch, 64], but input",
        ),
    ];
    for (spec, says) in checks {
        let refused = log.refused(apply_workflow(spec));
        assert!(matches!(refused, CommandRefusal::InvalidSpec { .. }), "{refused:?}");
        assert!(refused.to_string().contains(says), "{says:?}: {refused}");
    }
}

#[test]
fn a_name_of_a_function_is_refused_for_a_workflow_and_vice_versa() {
    let mut log = log();
    let taken = log.refused(apply_workflow(chain("f", &[run_function("f")])));
    assert_eq!(taken, CommandRefusal::NameTaken { key: key("f"), by: ModelKind::Function });
    log.apply(apply_workflow(chain("w", &[run_function("f")]))).unwrap();
    let taken = log.refused(apply("w", "m1"));
    assert_eq!(taken, CommandRefusal::NameTaken { key: key("w"), by: ModelKind::Workflow });
    assert!(taken.to_string().contains("is a workflow already: choose another name"), "{taken}");
}

#[test]
fn workflows_that_run_each_other_are_refused_with_the_path() {
    let mut log = log();
    log.apply(apply_workflow(chain("a", &[run_function("f")]))).unwrap();
    log.apply(apply_workflow(chain("b", &[run_function("f"), run_workflow("a")]))).unwrap();
    log.apply(apply_workflow(chain("c", &[run_workflow("b")]))).unwrap();
    let looped = apply_workflow(chain("a", &[run_function("f"), run_workflow("c")]));
    let says = said(&mut log, looped);
    assert!(says.contains("workflows run each other: a -> c -> b -> a: take"), "{says}");
}

/// Applies workflow `n0`, which runs a function, and further workflows that each run the one
/// before.
fn nest(log: &mut TestLog, deep: usize) {
    log.apply(apply_workflow(chain("n0", &[run_function("f")]))).unwrap();
    for level in 1..=deep {
        let inner = run_workflow(&format!("n{}", level - 1));
        log.apply(apply_workflow(chain(&format!("n{level}"), &[inner]))).unwrap();
    }
}

#[test]
fn the_nesting_of_workflows_is_bounded() {
    let mut log = log();
    nest(&mut log, NESTING_MAX);
    let depths: Vec<_> = log.state.workflows().map(|it| it.nesting).collect();
    assert_eq!(depths, [0, 1, 2, 3, 4]);
    let says = said(&mut log, apply_workflow(chain("top", &[run_workflow("n4")])));
    assert!(
        says.contains(
            "workflow \"n4\" nests workflows 4 deep: inside another workflow the depth would exceed 4"
        ),
        "{says}"
    );
    // A change at the bottom is refused too, because the change deepens the workflows above.
    log.apply(apply_workflow(chain("base", &[run_function("f")]))).unwrap();
    let deeper = log.refused(apply_workflow(chain("n0", &[run_workflow("base")])));
    let CommandRefusal::BreaksWorkflow { key: of, workflow: above, .. } = &deeper else {
        panic!("{deeper:?}")
    };
    assert_eq!((of, above), (&key("n0"), &key("n4")));
    // With a level less the change is accepted.
    log.apply(delete_workflow("n4")).unwrap();
    assert!(log.apply(apply_workflow(chain("n0", &[run_workflow("base")]))).is_ok());
    assert_eq!(workflow(&log, "n3").nesting, 4);
}

#[test]
fn a_revision_that_a_workflow_cannot_run_is_refused_with_the_edge() {
    let mut log = log();
    log.add_model("renamed", model_of(tensor("x", 64), tensor("z", 64)));
    log.add_model("narrow", model_of(tensor("x", 8), tensor("y", 8)));
    log.apply(apply("g", "m1")).unwrap();
    log.apply(apply_workflow(chain("w", &[run_function("f"), run_function("g")]))).unwrap();

    let says = said(&mut log, apply("f", "renamed"));
    assert!(
        says.starts_with("workflow default/w runs default/f, directly or through other workflows"),
        "{says}"
    );
    assert!(says.contains("has no output \"y\": it has z"), "{says}");
    assert!(
        says.ends_with("apply the change under another name, and let the workflow run that name"),
        "{says}"
    );
    let says = said(&mut log, apply("g", "narrow"));
    assert!(
        says.contains("s0.y has shape [s0.batch, 64], but input \"x\" of step \"s1\" takes [batch, 8]"),
        "{says}"
    );
    log.apply(delete_workflow("w")).unwrap();
    assert!(log.apply(apply("f", "renamed")).is_ok());
}

#[test]
fn workflows_above_a_changed_function_get_its_new_signature() {
    let mut log = log();
    log.add_model("narrow", model_of(tensor("x", 8), tensor("y", 16)));
    nest(&mut log, 2);
    let before: Vec<_> = log.state.workflows().map(|it| (it.resource_version, it.updated_at)).collect();
    log.tick(5);
    log.apply(apply("f", "narrow")).unwrap();
    let sizes = |tensors: &[TensorSpec]| tensors.iter().map(|it| it.shape[1].wire()).collect::<Vec<_>>();
    let narrow = |it: &Signature| (sizes(&it.inputs), sizes(&it.outputs)) == (vec![8], vec![16]);
    assert!(log.state.workflows().all(|it| narrow(&it.signature)));
    // No owner changed these workflows.
    let after: Vec<_> = log.state.workflows().map(|it| (it.resource_version, it.updated_at)).collect();
    assert_eq!(before, after);
}

/// Workflow `a` passes the output of `f` to workflow `z`, which runs `f` too. `a` would not fit the
/// old signature of `z`.
#[test]
fn workflows_that_change_together_are_checked_with_their_new_signatures() {
    let mut log = log();
    log.add_model("narrow", model_of(tensor("x", 8), tensor("y", 8)));
    log.apply(apply_workflow(chain("z", &[run_function("f"), run_function("f")]))).unwrap();
    log.apply(apply_workflow(chain("a", &[run_function("f"), run_workflow("z")]))).unwrap();
    log.apply(apply("f", "narrow")).unwrap();
    assert_eq!(workflow(&log, "a").signature.inputs, [of("s0", "x", 8)]);
}

#[test]
fn a_workflow_change_that_breaks_another_workflow_is_refused() {
    let mut log = log();
    log.add_model("free", model_of(free("x"), free("y")));
    log.add_model("narrow", model_of(tensor("x", 8), tensor("y", 8)));
    for (function, model) in [("any", "free"), ("narrow", "narrow")] {
        log.apply(apply(function, model)).unwrap();
    }
    log.apply(apply_workflow(chain("inner", &[run_function("any")]))).unwrap();
    log.apply(apply_workflow(chain("middle", &[run_workflow("inner")]))).unwrap();
    log.apply(apply_workflow(chain("outer", &[run_workflow("middle"), run_function("f")]))).unwrap();
    let refused = log.refused(apply_workflow(chain("inner", &[run_function("narrow")])));
    let CommandRefusal::BreaksWorkflow { key: of, workflow, problem } = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((of, workflow), (key("inner"), key("outer")), "through the middle, which it fits");
    assert!(
        problem.starts_with("s0.y has shape [s0.s0.s0.batch, 8], but input \"x\" of step \"s1\""),
        "{problem}"
    );
}

#[test]
fn deleting_a_function_that_workflows_run_is_refused_with_some_of_their_names() {
    let mut log = log();
    let names: Vec<_> = (0..USERS_NAMED_MAX + 2).map(|number| format!("w{number}")).collect();
    for name in &names {
        log.apply(apply_workflow(chain(name, &[run_function("f")]))).unwrap();
    }
    let mut expected: Vec<_> = names.iter().map(|name| key(name).name).collect();
    expected.sort();
    expected.truncate(USERS_NAMED_MAX);
    let refused = log.refused(delete("f"));
    assert_eq!(refused, CommandRefusal::InUse { key: key("f"), by: expected, more: 2 });
    assert!(refused.to_string().contains("is run by workflows w0, w1, "), "{refused}");
    assert!(
        refused.to_string().ends_with(" and 2 more: change or delete these workflows first"),
        "{refused}"
    );
    for name in &names {
        log.apply(delete_workflow(name)).unwrap();
    }
    assert!(log.apply(delete("f")).is_ok());
}

/// A node may report the usage of a deleted function late, when a workflow already has its name.
#[test]
fn usage_of_a_deleted_function_is_billed_after_a_workflow_took_its_name() {
    let mut log = log();
    log.apply(apply("g", "m1")).unwrap();
    log.register("n1", "a", millrace_types::Bytes::gib(1)).unwrap();
    let used = |requests| {
        let usage = vec![(key("g"), Usage { requests, gpu_ns: 0, idle_ms: 0 })];
        NodeDelta { usage, ..NodeDelta::default() }
    };
    log.apply(sync_all("n1", 1, 1, used(3))).unwrap();
    log.apply(delete("g")).unwrap();
    log.apply(apply_workflow(chain("g", &[run_function("f")]))).unwrap();
    assert_eq!(workflow(&log, "g").generation.get(), 2, "a number means one model");
    log.apply(sync_all("n1", 1, 2, used(5))).unwrap();
    assert_eq!(log.state.usage(&key("g")).requests, 5);
    log.apply(delete_workflow("g")).unwrap();
    log.apply(apply("g", "m1")).unwrap();
    assert_eq!(log.state.function(&key("g")).unwrap().generation().get(), 3);
}

#[test]
fn the_number_of_workflows_is_bounded() {
    let mut log = log();
    log.apply(apply_workflow(chain("w", &[run_function("f")]))).unwrap();
    let first = log.state.version();
    let record = workflow(&log, "w").clone();
    log.state.version += WORKFLOWS_MAX as u64;
    for number in 1..WORKFLOWS_MAX {
        let mut another = record.clone();
        another.key = key(&format!("w{number}"));
        another.spec.key = another.key.clone();
        another.resource_version = first + number as u64;
        log.state.workflows.insert(another.key.clone(), Arc::new(another));
    }
    let more = apply_workflow(chain("more", &[run_function("f")]));
    assert_eq!(
        log.refused(more),
        CommandRefusal::Full { what: "workflows".into(), limit: WORKFLOWS_MAX as u64 }
    );
    let known = apply_workflow(chain("w1", &[run_function("f"), run_function("f")]));
    assert!(matches!(log.apply(known), Ok(CommandEffect::Changed { .. })));
}

#[test]
fn listings_contain_one_tenant_and_continue_from_a_bound() {
    use std::ops::Bound;
    let mut log = log();
    let other = TenantName::new("other").unwrap();
    let StateCommand::ApplyFunction { mut spec, digest, expected, voters } = apply("f", "m1") else {
        panic!()
    };
    spec.key.tenant = other.clone();
    log.apply(StateCommand::ApplyFunction { spec, digest, expected, voters }).unwrap();
    for name in ["a", "b", "c"] {
        log.apply(apply_workflow(chain(name, &[run_function("f")]))).unwrap();
    }
    let mut theirs = chain("a", &[run_function("f")]);
    theirs.key.tenant = other.clone();
    log.apply(apply_workflow(theirs)).unwrap();

    let names = |tenant| log.state.workflows_of(tenant).map(|it| it.key.name.to_string()).collect::<Vec<_>>();
    assert_eq!(
        (names(&TenantName::default()), names(&other)),
        (vec!["a".into(), "b".into(), "c".into()], vec!["a".into()])
    );
    let rest = log.state.workflows_from(Bound::Excluded(&key("b"))).map(|it| it.key.to_string());
    assert_eq!(rest.collect::<Vec<_>>(), ["default/c", "other/a"]);
    assert_eq!(log.state.workflows().count(), 4);
    // The other tenant's workflow runs a function of its own, so this tenant's function has three
    // users.
    let CommandRefusal::InUse { by, .. } = log.refused(delete("f")) else { panic!() };
    assert_eq!(by.len(), 3);
}

#[test]
fn a_function_with_sequences_is_refused_as_a_step() {
    let mut log = log();
    let mut fixed = model_of(tensor("x", 64), tensor("y", 64));
    fixed.inputs[0].shape[0] = Dim::Fixed(1);
    fixed.outputs[0].shape[0] = Dim::Fixed(1);
    log.add_model("fixed", fixed);
    let keeping = |name: &str| {
        let state = vec![StatePair { input: "x".into(), output: "y".into() }];
        let sequences = Some(SequenceSpec { state, idle: IDLE_DEFAULT, max: 4 });
        let spec = FunctionSpec { sequences, ..spec(name) };
        StateCommand::ApplyFunction { spec, digest: digest("fixed"), expected: None, voters: Vec::new() }
    };
    log.apply(keeping("counter")).unwrap();
    let step = said(&mut log, apply_workflow(chain("w", &[run_function("counter")])));
    assert!(step.contains("a step belongs to no sequence"), "{step}");
    log.apply(apply("plain", "fixed")).unwrap();
    log.apply(apply_workflow(chain("w", &[run_function("plain")]))).unwrap();
    let becoming = said(&mut log, keeping("plain"));
    assert!(becoming.contains("workflow default/w runs default/plain"), "{becoming}");
    assert!(becoming.contains("a step belongs to no sequence"), "{becoming}");
    log.state.check_invariants().unwrap();
}
