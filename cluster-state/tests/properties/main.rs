//! Properties that hold for every log.

#![allow(clippy::unwrap_used, reason = "a test")]

mod commands;
mod workflows;

use std::collections::BTreeMap;
use std::ops::Bound;

use commands::{command, digest, log, spec, sync};
use millrace_cluster_state::operations::{OPERATIONS_MAX, OperationKind};
use millrace_cluster_state::{
    CallerName, CommandEffect, CommandOutcome, CommandRefusal, ControllerId, IdempotencyKey, Proposal,
    RulesVersion, State, StateCommand,
};
use millrace_types::workflow::{NESTING_MAX, Signature, StepTarget};
use millrace_types::{
    ClusterId, Digest, FunctionKey, FunctionSpec, Revision, TenantName, Usage, WorkflowSpec,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use workflows::log_of_workflows;

/// Returns the index of a log entry: two commands share an entry, and thus an index.
fn index_of(position: usize) -> u64 {
    position as u64 / 2 + 1
}

fn replay(state: &mut State, from: usize, log: &[Proposal]) -> Vec<CommandOutcome> {
    log.iter().enumerate().map(|(n, proposal)| state.apply(index_of(from + n), proposal)).collect()
}

/// Returns the parts of a state that only an accepted command changes.
fn contents(state: &State) -> impl PartialEq + std::fmt::Debug + use<> {
    (
        state.version(),
        state.cluster().cloned(),
        (state.functions().cloned().collect::<Vec<_>>(), state.workflows().cloned().collect::<Vec<_>>()),
        state.artifacts().cloned().collect::<Vec<_>>(),
        state.nodes().cloned().collect::<Vec<_>>(),
        state.placements().cloned().collect::<Vec<_>>(),
        (
            state.synced(),
            state.checkpoints().map(|(name, it)| (name.clone(), it.clone())).collect::<Vec<_>>(),
        ),
        (state.index_held_len(), state.index_lost_len()),
        state.usages().map(|(key, usage)| (key.clone(), *usage)).collect::<Vec<_>>(),
    )
}

/// The properties of workflows test nesting only if the logs reach its limit.
#[test]
fn generated_logs_reach_and_exceed_the_nesting_limit() {
    let mut runner = TestRunner::deterministic();
    let mut deepest = 0;
    let mut too_deep = 0;
    for _ in 0..256 {
        let log = log_of_workflows().new_tree(&mut runner).unwrap().current();
        let mut state = State::default();
        for outcome in replay(&mut state, 0, &log) {
            let refused = outcome.map_or_else(|refusal| refusal.to_string(), |_| String::new());
            too_deep += u32::from(refused.contains("inside another workflow the depth would exceed"));
        }
        deepest = state.workflows().map(|it| it.nesting).max().unwrap_or(0).max(deepest);
    }
    assert!(deepest as usize == NESTING_MAX && too_deep > 0, "{deepest} deep, {too_deep} too deep");
}

/// The leader admits exactly the writes that find room when they are applied. Most states have the
/// maximum number of running changes of the group, or one less; no other bound is near.
#[test]
fn the_leader_admits_exactly_the_writes_that_find_room() {
    let mut runner = TestRunner::deterministic();
    let propose =
        |stamp, command| Proposal { stamp, caller: CallerName("alice".into()), idempotency: None, command };
    let begin =
        || StateCommand::BeginOperation { kind: OperationKind::PromoteController { id: ControllerId(2) } };
    let cases = (log(), 0..3_usize, prop_oneof![command(), Just(begin())]);
    let mut refused = 0;
    for _ in 0..256 {
        let (log, short, next) = cases.new_tree(&mut runner).unwrap().current();
        let mut state = State::default();
        let rules = [
            StateCommand::InitCluster { cluster_id: ClusterId("one".into()) },
            StateCommand::SetClusterVersion { version: RulesVersion::NEWEST },
        ];
        for (index, command) in (1..).zip(rules) {
            state.apply(index, &propose(state.clock(), command)).unwrap();
        }
        replay(&mut state, 3, &log);
        let index = index_of(log.len()) + 3;
        for _ in 0..OPERATIONS_MAX - short {
            // The log may contain running changes itself.
            let _refused = state.apply(index, &propose(state.clock(), begin()));
        }
        let next = propose(state.clock(), next);
        let admitted = state.admit(&next);
        let applied = state.apply(index + 1, &next);
        let found_no_room = matches!(
            applied,
            Err(CommandRefusal::Full { .. }
                | CommandRefusal::OutOfBytes { .. }
                | CommandRefusal::ChangesUnderWay { .. })
        );
        assert_eq!(admitted.is_err(), found_no_room, "{next:?}: {admitted:?}, {applied:?}");
        refused += u32::from(found_no_room);
    }
    assert!((20..236).contains(&refused), "{refused} of 256 are refused");
}

proptest! {
    #[test]
    fn every_log_keeps_the_invariants(log in log()) {
        let mut state = State::default();
        for (n, proposal) in log.iter().enumerate() {
            let before = state.clone();
            let outcome = state.apply(index_of(n), proposal);
            prop_assert_eq!(state.check_invariants(), Ok(()));
            prop_assert!(state.clock() >= before.clock().max(proposal.stamp));
            prop_assert!(state.version() <= before.version() + 1);
            if !matches!(outcome, Ok(applied) if applied.changed()) {
                prop_assert_eq!(contents(&before), contents(&state));
            }
        }
    }

    /// After any sequence of commands, each workflow can be run: its functions and workflows exist,
    /// and its edges fit. A new check gives the stored signature.
    #[test]
    fn every_stored_workflow_always_fits_the_models_that_it_runs(log in log_of_workflows()) {
        let mut state = State::default();
        for (n, proposal) in log.iter().enumerate() {
            let before = state.clone();
            let outcome = state.apply(index_of(n), proposal);
            for workflow in state.workflows() {
                let runs = workflow.spec.runs().into_iter();
                let known: BTreeMap<StepTarget, Signature> = runs
                    .filter_map(|run| Some((run.clone(), state.signature(&workflow.key.tenant, run)?)))
                    .collect();
                let fresh = workflow.spec.check(|run| known.get(run));
                prop_assert_eq!(fresh.as_ref(), Ok(&workflow.signature));
                prop_assert!(state.function(&workflow.key).is_none());
            }
            if outcome.is_err() {
                prop_assert_eq!(contents(&before), contents(&state));
            }
        }
        prop_assert_eq!(State::decode(&state.encode()).unwrap(), state);
    }

    /// The number of a name grows, whether a function or a workflow has the name, and however often
    /// the name was deleted.
    #[test]
    fn a_number_never_means_two_models_of_one_name(log in log_of_workflows()) {
        let mut state = State::default();
        let mut last: BTreeMap<FunctionKey, Revision> = BTreeMap::new();
        for (n, proposal) in log.iter().enumerate() {
            let outcome = state.apply(index_of(n), proposal);
            let (StateCommand::ApplyFunction { spec: FunctionSpec { key, .. }, .. }
            | StateCommand::ApplyWorkflow { spec: WorkflowSpec { key, .. }, .. }) = &proposal.command else {
                continue;
            };
            let function = state.function(key).map(|it| it.generation());
            let number = function.or_else(|| state.workflow(key).map(|it| it.generation));
            match outcome {
                Ok(CommandEffect::Created { .. } | CommandEffect::Changed { .. }) => {
                    let expected = last.get(key).map_or(Revision::FIRST, |last| last.next());
                    prop_assert_eq!(number, Some(expected));
                    last.insert(key.clone(), expected);
                }
                _ => prop_assert!(number.is_none_or(|number| last.get(key) == Some(&number))),
            }
        }
    }

    #[test]
    fn the_same_log_gives_the_same_answers_and_the_same_bytes(log in log()) {
        let mut a = State::default();
        let mut b = State::default();
        prop_assert_eq!(replay(&mut a, 0, &log), replay(&mut b, 0, &log));
        prop_assert_eq!(a.encode(), b.encode());
    }

    #[test]
    fn a_snapshot_and_the_rest_of_the_log_equal_the_whole_log(log in log(), cut in any::<prop::sample::Index>()) {
        let cut = cut.index(log.len() + 1);
        let mut whole = State::default();
        let answers = replay(&mut whole, 0, &log);

        let mut head = State::default();
        replay(&mut head, 0, &log[..cut]);
        let mut restored = State::decode(&head.encode()).unwrap();
        prop_assert_eq!(&restored, &head);
        let tail = replay(&mut restored, cut, &log[cut..]);
        prop_assert_eq!(&answers[cut..], &tail[..]);
        prop_assert_eq!(whole.encode(), restored.encode());
    }

    #[test]
    fn a_repeated_idempotency_key_is_answered_the_same_and_changes_nothing(log in log(), seq in 100u64..200) {
        let mut state = State::default();
        for (n, proposal) in log.iter().enumerate() {
            let key = IdempotencyKey { client: "repeats".into(), seq: seq + n as u64 };
            let proposal = Proposal { idempotency: Some(key), ..proposal.clone() };
            let first = state.apply(n as u64, &proposal);
            let before = contents(&state);
            let second = state.apply(n as u64, &proposal);
            prop_assert_eq!(first, second);
            prop_assert_eq!(before, contents(&state));
        }
    }

    #[test]
    fn an_epoch_is_never_assigned_twice(log in log()) {
        let mut state = State::default();
        let mut given = std::collections::BTreeSet::new();
        for (n, proposal) in log.iter().enumerate() {
            let unkeyed = Proposal { idempotency: None, ..proposal.clone() };
            if let Ok(millrace_cluster_state::CommandEffect::Registered { epoch }) = state.apply(n as u64, &unkeyed) {
                prop_assert!(given.insert(epoch));
            }
        }
    }

    #[test]
    fn a_dry_run_gives_the_answer_of_the_write_and_changes_nothing(log in log(), next in command()) {
        let mut state = State::default();
        replay(&mut state, 0, &log);
        let next = Proposal {
            stamp: state.clock(),
            caller: CallerName("alice".into()),
            idempotency: None,
            command: next,
        };
        let before = state.clone();
        let (answer, after) = state.dry_run(&next);
        prop_assert_eq!(&before, &state);
        prop_assert_eq!(answer, state.apply(index_of(log.len()), &next));
        prop_assert_eq!(contents(&after), contents(&state));
    }

    #[test]
    fn the_second_write_that_expects_one_version_is_refused(log in log(), a in spec(), b in digest()) {
        let mut state = State::default();
        replay(&mut state, 0, &log);
        let seen = state.function(&a.key).map_or(0, |function| function.resource_version);
        let write = |digest| Proposal {
            stamp: state.clock(),
            caller: CallerName("alice".into()),
            idempotency: None,
            command: StateCommand::ApplyFunction { spec: a.clone(), digest, expected: Some(seen), voters: Vec::new() },
        };
        let first = write(b);
        let second = write(Digest::of(b"other"));
        // Both commands are in the same log entry, and share an index.
        let index = index_of(log.len());
        let mut state = state;
        if matches!(state.apply(index, &first), Ok(applied) if applied.changed()) {
            let refused = state.apply(index, &second);
            prop_assert!(matches!(refused, Err(CommandRefusal::Conflict { .. })), "{:?}", refused);
        }
    }

    /// Late, repeated and missing batches leave a node's checkpoint as the worker reported it.
    #[test]
    fn a_batch_that_does_not_follow_changes_nothing(log in log(), next in sync()) {
        let mut state = State::default();
        replay(&mut state, 0, &log);
        let propose = |state: &mut State| {
            let caller = CallerName("worker".into());
            let proposal =
                Proposal { stamp: state.clock(), caller, idempotency: None, command: next.clone() };
            state.apply(index_of(log.len()), &proposal)
        };
        let StateCommand::SyncNode { node, batch } = &next else { unreachable!("the strategy gives these only") };
        let last = state.checkpoint(node).map_or(0, |checkpoint| checkpoint.seq);
        let before = contents(&state);
        match propose(&mut state) {
            Ok(CommandEffect::Synced { seq }) => {
                prop_assert!(seq == batch.seq && seq > last);
                let before = contents(&state);
                prop_assert_eq!(propose(&mut state), Ok(CommandEffect::SyncRepeated { last: seq }));
                prop_assert_eq!(before, contents(&state));
            }
            other => {
                let stale = batch.seq <= last;
                prop_assert!(!stale || !matches!(other, Ok(CommandEffect::ResyncWanted { .. })), "{:?}", other);
                prop_assert_eq!(before, contents(&state));
            }
        }
    }

    /// The byte count of a changing state equals the count of its records after decoding, and is at
    /// least the size of its snapshot.
    #[test]
    fn counted_bytes_equal_a_recount_and_bound_the_snapshot(log in prop_oneof![log(), log_of_workflows()]) {
        let mut state = State::default();
        for (n, proposal) in log.iter().enumerate() {
            let before = state.clone();
            let outcome = state.apply(index_of(n), proposal);
            let encoded = state.encode();
            let recounted = State::decode(&encoded).unwrap();
            prop_assert_eq!(state.bytes(), recounted.bytes());
            prop_assert_eq!(state.definition_bytes(), recounted.definition_bytes());
            for tenant in ["default", "acme"].map(|name| TenantName::new(name).unwrap()) {
                prop_assert_eq!(state.tenant_bytes(&tenant), recounted.tenant_bytes(&tenant));
                prop_assert!(state.tenant_bytes(&tenant) <= state.definition_bytes());
            }
            prop_assert!(state.bytes() >= encoded.len() as u64, "{} of {}", state.bytes(), encoded.len());
            if matches!(outcome, Ok(CommandEffect::Deleted { .. })) {
                prop_assert!(state.definition_bytes() <= before.definition_bytes());
            }
        }
    }

    /// The totals of functions never shrink, even if nodes are lost. A deleted function loses its
    /// score.
    #[test]
    fn scores_and_bills_only_grow(log in log()) {
        let mut state = State::default();
        for (n, proposal) in log.iter().enumerate() {
            let before = state.clone();
            let outcome = state.apply(index_of(n), proposal);
            let charged =
                |state: &State| state.bills(Bound::Unbounded).fold(Usage::NONE, |sum, (_, usage)| sum.plus(usage));
            let used = charged(&before);
            prop_assert_eq!(charged(&state).merge(used), charged(&state));
            if matches!(outcome, Ok(CommandEffect::Deleted { .. })) {
                continue;
            }
            for function in state.functions() {
                let then = before.score(&function.key).total;
                let now = state.score(&function.key).total;
                prop_assert_eq!(now.merge(then), now);
            }
        }
    }
}
