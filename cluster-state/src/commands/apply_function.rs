//! Creates a function, or adds a revision if its spec or model differs. Every workflow that runs
//! the function has to fit the new revision.

use std::sync::Arc;

use millrace_types::workflow::RunnableSignature;
use millrace_types::{Digest, FunctionSpec};

use super::{check_expected, count_use, next_number};
use crate::context::CommandContext;
use crate::outcome::{CommandEffect, CommandOutcome, CommandRefusal};
use crate::record::{ControllerId, CountedLen, FunctionRecord, ModelKind, ModelSummary, RevisionRecord};
use crate::state::{FUNCTIONS_MAX, REVISIONS_KEPT, State};
use crate::workflows::function_run;

pub(crate) fn apply_function(
    state: &mut State,
    context: CommandContext<'_>,
    spec: &FunctionSpec,
    digest: Digest,
    expected: Option<u64>,
    voters: &[ControllerId],
) -> CommandOutcome {
    if state.workflows.contains_key(&spec.key) {
        return Err(CommandRefusal::NameTaken { key: spec.key.clone(), by: ModelKind::Workflow });
    }
    let current = state.functions.get(&spec.key);
    check_expected(&spec.key, expected, current.map(|function| function.resource_version))?;
    spec.validate().map_err(|problem| CommandRefusal::InvalidSpec { problem: problem.to_string() })?;
    if current.is_some_and(|function| same_content(function.latest(), spec, digest)) {
        return Ok(CommandEffect::Unchanged);
    }
    if current.is_none() && state.functions.len() >= FUNCTIONS_MAX {
        return Err(CommandRefusal::Full { what: "functions".into(), limit: FUNCTIONS_MAX as u64 });
    }
    let revision = Arc::new(RevisionRecord {
        number: next_number(state, &spec.key),
        spec: spec.clone(),
        digest,
        created_at: context.now,
        created_by: context.caller.clone(),
        encoded_len: CountedLen::default(),
    });
    let model = check_model(state, &revision)?;
    check_held(state, digest, voters)?;
    let keeps_state = spec.sequences.is_some();
    let fit = RunnableSignature { keeps_state, ..RunnableSignature::of_function(model.signature()) };
    let fits = state.fits_after(&spec.key, function_run(&spec.key), fit)?;

    state.store_fits(&spec.key.tenant, fits);
    count_use(state, digest, context.now, |uses| uses + 1);
    match state.functions.get(&spec.key).cloned() {
        None => Ok(create(state, context, revision)),
        Some(function) => Ok(add_revision(state, context, function, revision)),
    }
}

fn same_content(latest: &RevisionRecord, spec: &FunctionSpec, digest: Digest) -> bool {
    latest.digest == digest && latest.spec == *spec
}

/// Refuses a revision whose model is unknown, or fits no GPU of a live node. While no GPU is
/// registered, every size is accepted, because workers come and go.
fn check_model<'a>(state: &'a State, revision: &RevisionRecord) -> Result<&'a ModelSummary, CommandRefusal> {
    let artifact = state
        .artifacts
        .get(&revision.digest)
        .ok_or(CommandRefusal::ArtifactNotFound { digest: revision.digest })?;
    let asked = revision.spec.runtime;
    let is = artifact.model.runtime();
    if asked != is {
        let problem = format!(
            "runtime is {} and the file is of runtime {}: write runtime: {}, or name another file",
            asked.as_str(),
            is.as_str(),
            is.as_str()
        );
        return Err(CommandRefusal::InvalidSpec { problem });
    }
    if revision.spec.serving.batching.is_some()
        && let Some(tensor) = artifact.model.unbatchable()
    {
        let problem = format!(
            "batching needs a free first dimension of every input and output, and {:?} has none: leave batching out, or export the model with a dynamic batch size",
            tensor.name
        );
        return Err(CommandRefusal::InvalidSpec { problem });
    }
    if let Some(sequences) = &revision.spec.sequences {
        let states = sequences.states(artifact.model.ports());
        states.map_err(|problem| CommandRefusal::InvalidSpec { problem: problem.to_string() })?;
    }
    let needed = revision.gpu_memory(&artifact.model);
    match state.largest_gpu() {
        Some(largest) if needed > largest => {
            Err(CommandRefusal::ModelTooLarge { key: revision.spec.key.clone(), needed, largest })
        }
        _ => Ok(&artifact.model),
    }
}

/// Refuses a revision unless a majority of the voters, or the object store, holds its file. The
/// loss of the other controllers then loses no model.
fn check_held(state: &State, digest: Digest, voters: &[ControllerId]) -> Result<(), CommandRefusal> {
    let holds =
        |voter: &ControllerId| state.artifacts.get(&digest).is_some_and(|it| it.holders.contains(voter));
    if voters.is_empty() || holds(&ControllerId::OBJECT_STORE) {
        return Ok(());
    }
    let missing: Vec<_> = voters.iter().filter(|voter| !holds(voter)).copied().collect();
    let needed = voters.len() / 2 + 1;
    let held = voters.len() - missing.len();
    if held >= needed {
        return Ok(());
    }
    let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
    Err(CommandRefusal::ArtifactNotHeld { digest, held: count(held), needed: count(needed), missing })
}

fn create(state: &mut State, context: CommandContext<'_>, revision: Arc<RevisionRecord>) -> CommandEffect {
    let version = state.next_version();
    let key = revision.spec.key.clone();
    let function = FunctionRecord {
        key: key.clone(),
        resource_version: version,
        enabled: true,
        revisions: vec![revision],
        created_at: context.now,
        updated_at: context.now,
        updated_by: context.caller.clone(),
        requests_before: state.usage(&key).requests,
    };
    state.retired.remove(&key);
    state.functions.insert(key, Arc::new(function));
    CommandEffect::Created { version }
}

fn add_revision(
    state: &mut State,
    context: CommandContext<'_>,
    mut function: Arc<FunctionRecord>,
    revision: Arc<RevisionRecord>,
) -> CommandEffect {
    let version = state.next_version();
    let changed = Arc::make_mut(&mut function);
    changed.revisions.push(revision);
    let excess = changed.revisions.len().saturating_sub(REVISIONS_KEPT);
    let dropped: Vec<_> = changed.revisions.drain(..excess).collect();
    changed.resource_version = version;
    changed.updated_at = context.now;
    changed.updated_by = context.caller.clone();
    state.functions.insert(changed.key.clone(), function);
    for old in dropped {
        count_use(state, old.digest, context.now, |uses| uses - 1);
    }
    CommandEffect::Changed { version }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::sequences::{IDLE_DEFAULT, StatePair};
    use millrace_types::{BatchingOptions, Bytes, Dim, NodeDelta, Runtime, SequenceSpec, Slo, Usage};

    use super::*;
    use crate::StateCommand;
    use crate::commands::testing::{
        TestLog, apply, apply_expecting, delete, digest, key, model, spec, sync_all,
    };
    use crate::record::ControllerId;

    #[test]
    fn a_changed_function_gets_a_new_revision_and_a_repeat_does_not() {
        let mut log = TestLog::with_artifacts(&["m1", "m2"]);
        let before = log.state.version();
        assert_eq!(log.apply(apply("f", "m1")), Ok(CommandEffect::Created { version: before + 1 }));
        assert_eq!(log.apply(apply("f", "m1")), Ok(CommandEffect::Unchanged));
        assert_eq!(log.apply(apply("f", "m2")), Ok(CommandEffect::Changed { version: before + 2 }));
        let mut slower = spec("f");
        slower.timeout = Duration::from_secs(5);
        let slower = StateCommand::ApplyFunction {
            spec: slower,
            digest: digest("m2"),
            expected: None,
            voters: Vec::new(),
        };
        assert_eq!(log.apply(slower), Ok(CommandEffect::Changed { version: before + 3 }));
        let function = log.state.function(&key("f")).unwrap();
        let numbers: Vec<u64> = function.revisions.iter().map(|it| it.number.get()).collect();
        assert_eq!((numbers, function.resource_version), (vec![1, 2, 3], before + 3));
    }

    #[test]
    fn a_function_with_another_runtime_than_its_file_is_refused() {
        let mut log = TestLog::with_artifacts(&["model"]);
        let program = ModelSummary { weights: Bytes::ZERO, launches: 0, ..model() };
        let holder = ControllerId(1);
        let bytes = Bytes(100);
        let added = StateCommand::AddArtifact { digest: digest("program"), bytes, model: program, holder };
        log.apply(added).unwrap();
        let apply = |runtime, file| {
            let spec = FunctionSpec { runtime, ..spec("f") };
            StateCommand::ApplyFunction { spec, digest: digest(file), expected: None, voters: Vec::new() }
        };
        for (runtime, file, says) in
            [(Runtime::Process, "model", "runtime: onnx"), (Runtime::Onnx, "program", "runtime: process")]
        {
            match log.apply(apply(runtime, file)) {
                Err(CommandRefusal::InvalidSpec { problem }) => assert!(problem.contains(says), "{problem}"),
                other => panic!("{other:?}"),
            }
        }
        assert!(log.apply(apply(Runtime::Process, "program")).is_ok());
    }

    #[test]
    fn batching_is_refused_for_a_model_with_a_fixed_first_dimension() {
        let mut log = TestLog::with_artifacts(&["free"]);
        let mut fixed = model();
        fixed.outputs[0].shape[0] = Dim::Fixed(1);
        let holder = ControllerId(1);
        let bytes = Bytes(100);
        log.apply(StateCommand::AddArtifact { digest: digest("fixed"), bytes, model: fixed, holder })
            .unwrap();
        let batched = |model: &str| {
            let mut spec = spec("f");
            spec.serving.batching = Some(BatchingOptions { max_size: 8, max_wait: Duration::ZERO });
            StateCommand::ApplyFunction { spec, digest: digest(model), expected: None, voters: Vec::new() }
        };
        let refused = log.refused(batched("fixed")).to_string();
        assert!(refused.contains("\"y\" has none: leave batching out"), "{refused}");
        assert!(matches!(log.apply(batched("free")), Ok(CommandEffect::Created { .. })));
    }

    #[test]
    fn sequences_are_refused_if_the_model_lacks_their_state() {
        let mut log = TestLog::with_artifacts(&["free"]);
        let mut fixed = model();
        fixed.inputs[0].shape[0] = Dim::Fixed(1);
        fixed.outputs[0].shape[0] = Dim::Fixed(1);
        log.add_model("fixed", fixed);
        let keeping = |input: &str, model: &str| {
            let state = vec![StatePair { input: input.into(), output: "y".into() }];
            let sequences = Some(SequenceSpec { state, idle: IDLE_DEFAULT, max: 4 });
            let spec = FunctionSpec { sequences, ..spec("f") };
            StateCommand::ApplyFunction { spec, digest: digest(model), expected: None, voters: Vec::new() }
        };
        for (input, model, says) in
            [("x", "free", "without free dimensions"), ("h", "fixed", "which the model does not have")]
        {
            let refused = log.refused(keeping(input, model)).to_string();
            assert!(refused.contains(says), "{refused}");
        }
        assert!(matches!(log.apply(keeping("x", "fixed")), Ok(CommandEffect::Created { .. })));
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
    }

    #[test]
    fn a_refused_function_changes_nothing() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.apply(apply("f", "m1")).unwrap();
        let version = log.state.version();

        assert_eq!(
            log.refused(apply("g", "none")),
            CommandRefusal::ArtifactNotFound { digest: digest("none") }
        );
        let stale = CommandRefusal::Conflict { key: key("f"), expected: version - 1, actual: version };
        assert_eq!(log.refused(apply_expecting("f", "m1", version - 1)), stale);
        let absent = CommandRefusal::Conflict { key: key("g"), expected: 3, actual: 0 };
        assert_eq!(log.refused(apply_expecting("g", "m1", 3)), absent);

        let mut bad = spec("f");
        bad.slo = Some(Slo { deadline: Duration::ZERO, percentile: 0.9 });
        let bad = StateCommand::ApplyFunction {
            spec: bad,
            digest: digest("m1"),
            expected: None,
            voters: Vec::new(),
        };
        assert!(matches!(log.refused(bad), CommandRefusal::InvalidSpec { .. }));
    }

    #[test]
    fn a_function_that_expects_absence_is_created_once() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        assert!(log.apply(apply_expecting("f", "m1", 0)).is_ok());
        assert!(matches!(log.refused(apply_expecting("f", "m1", 0)), CommandRefusal::Conflict { .. }));
    }

    #[test]
    fn a_model_larger_than_every_gpu_is_refused_with_both_sizes() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.register("n1", "a", Bytes::mib(64)).unwrap();
        let mut huge = spec("f");
        huge.resources.gpu_memory = Some(Bytes::gib(1));
        let huge = StateCommand::ApplyFunction {
            spec: huge,
            digest: digest("m1"),
            expected: None,
            voters: Vec::new(),
        };
        let refused = log.refused(huge.clone());
        assert_eq!(refused.to_string().matches("1.0 GiB").count(), 1, "{refused}");
        assert_eq!(refused.to_string().matches("64.0 MiB").count(), 1, "{refused}");
        log.register("n2", "b", Bytes::gib(2)).unwrap();
        assert!(log.apply(huge).is_ok());
    }

    #[test]
    fn only_the_newest_revisions_are_kept_and_their_artifacts_released() {
        let mut log = TestLog::with_artifacts(&["m1", "m2"]);
        log.apply(apply("f", "m1")).unwrap();
        log.apply(apply("f", "m2")).unwrap();
        for n in 0..REVISIONS_KEPT as u64 {
            let mut next = spec("f");
            next.timeout = Duration::from_secs(n + 1);
            log.apply(StateCommand::ApplyFunction {
                spec: next,
                digest: digest("m2"),
                expected: None,
                voters: Vec::new(),
            })
            .unwrap();
        }
        let function = log.state.function(&key("f")).unwrap();
        assert_eq!(function.revisions.len(), REVISIONS_KEPT);
        assert_eq!(function.generation().get(), REVISIONS_KEPT as u64 + 2);
        assert_eq!(log.state.artifact(&digest("m1")).unwrap().uses, 0);
        assert_eq!(log.state.artifact(&digest("m2")).unwrap().uses, REVISIONS_KEPT as u64);
    }

    #[test]
    fn a_function_is_refused_until_a_majority_of_voters_holds_its_file() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        let voters = || (1..=3).map(ControllerId).collect();
        let apply = || StateCommand::ApplyFunction {
            spec: spec("f"),
            digest: digest("m1"),
            expected: None,
            voters: voters(),
        };
        let refused = log.refused(apply());
        let missing = vec![ControllerId(2), ControllerId(3)];
        assert_eq!(
            refused,
            CommandRefusal::ArtifactNotHeld { digest: digest("m1"), held: 1, needed: 2, missing }
        );
        assert!(refused.to_string().contains("copied to controller 2, controller 3"), "{refused}");
        log.hold("m1", 9);
        assert!(matches!(log.refused(apply()), CommandRefusal::ArtifactNotHeld { .. }), "9 has no vote");
        log.hold("m1", 3);
        assert!(log.apply(apply()).is_ok());
    }

    #[test]
    fn a_file_in_the_object_store_needs_no_majority() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        let voters = || (1..=5).map(ControllerId).collect();
        let apply = || StateCommand::ApplyFunction {
            spec: spec("f"),
            digest: digest("m1"),
            expected: None,
            voters: voters(),
        };
        assert!(matches!(log.refused(apply()), CommandRefusal::ArtifactNotHeld { held: 1, needed: 3, .. }));
        log.hold("m1", ControllerId::OBJECT_STORE.0);
        assert!(log.state.artifact(&digest("m1")).unwrap().in_store());
        assert!(log.apply(apply()).is_ok());
        // The object store is a holder like any other: the last holder stays, and every
        // snapshot contains the object store.
        log.apply(StateCommand::RemoveArtifactHolder { digest: digest("m1"), holder: ControllerId(1) })
            .unwrap();
        let last = log.refused(StateCommand::RemoveArtifactHolder {
            digest: digest("m1"),
            holder: ControllerId::OBJECT_STORE,
        });
        assert!(last.to_string().starts_with("the object store is the last"), "{last}");
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
    }

    #[test]
    fn a_repeated_write_with_other_voters_gets_the_first_answer() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.hold("m1", 2);
        let apply = |voters: &[u64]| StateCommand::ApplyFunction {
            spec: spec("f"),
            digest: digest("m1"),
            expected: None,
            voters: voters.iter().copied().map(ControllerId).collect(),
        };
        let first = log.apply_keyed(apply(&[1]), 1);
        assert_eq!(log.apply_keyed(apply(&[1, 2, 3]), 1), first, "the group grew between the two");
    }

    #[test]
    fn revision_numbers_continue_when_a_deleted_name_returns() {
        let mut log = TestLog::with_artifacts(&["m1", "m2"]);
        log.apply(apply("f", "m1")).unwrap();
        log.apply(delete("f")).unwrap();
        log.apply(apply("f", "m2")).unwrap();
        let numbers: Vec<u64> =
            log.state.function(&key("f")).unwrap().revisions.iter().map(|it| it.number.get()).collect();
        assert_eq!(numbers, vec![2]);
    }

    #[test]
    fn runs_of_a_deleted_function_do_not_count_for_its_successor() {
        let mut log = TestLog::with_artifacts(&["m1"]);
        log.register("n1", "a", Bytes::gib(1)).unwrap();
        let ran = |log: &TestLog| log.state.has_answered_requests(log.state.function(&key("f")).unwrap());
        // Cumulative, as in the nodes' reports.
        let used = |requests| NodeDelta {
            usage: vec![(key("f"), Usage { gpu_ns: 1, requests, idle_ms: 0 })],
            ..NodeDelta::default()
        };
        log.apply(apply("f", "m1")).unwrap();
        assert!(!ran(&log));
        log.apply(sync_all("n1", 1, 1, used(3))).unwrap();
        assert!(ran(&log));
        log.apply(delete("f")).unwrap();
        log.apply(apply("f", "m1")).unwrap();
        assert!(!ran(&log), "it is another function");
        assert_eq!(log.state.usage(&key("f")).requests, 3, "and one bill");
        log.apply(apply("f", "m1")).unwrap();
        log.apply(sync_all("n1", 1, 2, used(4))).unwrap();
        assert!(ran(&log));
        assert_eq!(State::decode(&log.state.encode()).unwrap(), log.state);
    }
}
