use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::limits::{FUNCTIONS_MAX, LABEL_LEN_MAX, LABELS_MAX, REVISIONS_KEPT, SLICES_PER_GPU_MAX};
use millrace_types::sequences::{IDLE_DEFAULT, StatePair};
use millrace_types::{
    Bytes, DataId, Digest, Epoch, FunctionKey, FunctionName, GpuIndex, MemoryTier, ModelCopy, NodeName,
    Permille, Quota, Reason, Revision, SequenceSpec, SliceId, SloBase, SloCounts, SyncPart, Terms, Usage,
};

use super::*;
use crate::CommandEffect;
use crate::accounts::FunctionScore;
use crate::checkpoint::{IncomingSync, NodeCheckpoint, ReplicaScore};
use crate::command::UnixMillis;
use crate::commands::testing::{
    TestLog, apply, apply_workflow, chain, data, delete, digest, holding, key, model, model_of, place,
    run_function, spec, sync, sync_all, tensor, unplace,
};
use crate::record::{
    ControllerId, CountedLen, PlacementReason, PlacementRecord, RevisionRecord, SliceRecord,
};
use crate::rules::RulesVersion;
use crate::state::RetiredName;

/// Fills a state with functions of other tenants until the state takes this many bytes.
fn fill(state: &mut State, bytes: u64) {
    let spec = FunctionSpec { labels: labels(), ..spec("large") };
    let revision = RevisionRecord {
        number: Revision::FIRST,
        spec,
        digest: digest("m"),
        created_at: UnixMillis(1),
        created_by: CallerName("alice".into()),
        encoded_len: CountedLen::default(),
    };
    let revision = Arc::new(revision);
    let function = FunctionRecord {
        key: key("large"),
        resource_version: 1,
        enabled: true,
        revisions: vec![revision; 1_000],
        created_at: UnixMillis(1),
        updated_at: UnixMillis(1),
        updated_by: CallerName("alice".into()),
        requests_before: 0,
    };
    let function = Arc::new(function);
    let mut number = 0;
    while state.bytes() < bytes {
        let tenant = TenantName::new(&format!("t{number}")).unwrap();
        state.functions.insert(FunctionKey { tenant, ..key("large") }, function.clone());
        number += 1;
    }
}

fn proposal(command: StateCommand) -> Proposal {
    Proposal { stamp: UnixMillis(2_000_000), caller: CallerName("alice".into()), idempotency: None, command }
}

fn admit(state: &State, command: StateCommand) -> Result<(), CommandRefusal> {
    state.admit(&proposal(command))
}

/// Returns the maximum number of labels, each of the maximum length.
fn labels() -> BTreeMap<String, String> {
    let label = |n: usize| (format!("{n:0>LABEL_LEN_MAX$}"), "v".repeat(LABEL_LEN_MAX));
    (0..LABELS_MAX).map(label).collect()
}

fn labelled(name: &str) -> StateCommand {
    let spec = FunctionSpec { labels: labels(), ..spec(name) };
    StateCommand::ApplyFunction { spec, digest: digest("m"), expected: None, voters: Vec::new() }
}

/// Returns a state in which the tenant has room for less than a function with all labels.
fn full_tenant() -> State {
    let mut log = TestLog::with_artifacts(&["m"]);
    log.apply(apply("f", "m")).unwrap();
    let mut state = log.state;
    let function = state.functions[&key("f")].clone();
    let spec = FunctionSpec { labels: labels(), ..spec("f") };
    let revision = Arc::new(RevisionRecord { spec, ..RevisionRecord::clone(function.latest()) });
    let large =
        FunctionRecord { revisions: vec![revision; REVISIONS_KEPT], ..FunctionRecord::clone(&function) };
    let large = Arc::new(large);
    let mut number = 0;
    while state.tenant_bytes(&key("f").tenant) + encoded_len(&*large) < TENANT_BYTES_MAX as u64 {
        state.functions.insert(key(&format!("large-{number}")), large.clone());
        number += 1;
    }
    let one = Arc::new(FunctionRecord {
        revisions: large.revisions[..1].to_vec(),
        ..FunctionRecord::clone(&large)
    });
    while state.tenant_bytes(&key("f").tenant) + encoded_len(&*one) < TENANT_BYTES_MAX as u64 {
        state.functions.insert(key(&format!("one-{number}")), one.clone());
        number += 1;
    }
    state
}

#[test]
fn a_tenant_with_full_state_is_refused_new_functions_and_may_delete_old_ones() {
    let state = full_tenant();
    let refused = admit(&state, labelled("new")).unwrap_err();
    let CommandRefusal::OutOfBytes { of, bytes, limit } = &refused else { panic!("{refused:?}") };
    assert_eq!((of.as_str(), *limit), ("tenant default", TENANT_BYTES_MAX as u64));
    assert!(bytes > limit && refused.reason() == Reason::StateFull && !refused.reason().retryable());
    // An unchanged function takes no room, and a smaller state frees some.
    assert_eq!(admit(&state, apply("f", "m")), Ok(()));
    assert_eq!(admit(&state, delete("one-0")), Ok(()));
    let mut other = spec("new");
    other.key.tenant = TenantName::new("other").unwrap();
    other.labels = labels();
    let digest = digest("m");
    let other = StateCommand::ApplyFunction { spec: other, digest, expected: None, voters: Vec::new() };
    assert_eq!(admit(&state, other), Ok(()), "another tenant has room");
}

/// Under the rules without a quota, a log may contain commands that are over a bound. Such a log
/// must give the same state again.
#[test]
fn a_command_over_a_bound_is_refused_when_applied_unless_older_rules_are_in_force() {
    let mut state = full_tenant();
    let before = state.clone();
    let write = proposal(labelled("new"));
    let (outcome, after) = state.dry_run(&write);
    assert!(matches!(&outcome, Err(CommandRefusal::OutOfBytes { .. })), "{outcome:?}");
    assert!(State { clock: before.clock, ..after } == before, "a refused command changes nothing");
    let mut long = spec("long");
    let state_pair = StatePair { input: "x".repeat(TENSOR_NAME_BYTES_MAX + 1), output: "y".into() };
    long.sequences = Some(SequenceSpec { state: vec![state_pair], idle: IDLE_DEFAULT, max: 4 });
    let long =
        StateCommand::ApplyFunction { spec: long, digest: digest("m"), expected: None, voters: Vec::new() };
    let refused = state.dry_run(&proposal(long.clone())).0.unwrap_err().to_string();
    assert!(refused.contains("TENSOR_NAME_BYTES_MAX"), "{refused}");

    state.rules = RulesVersion::UNNAMED;
    assert!(matches!(state.dry_run(&write).0, Ok(CommandEffect::Created { .. })));
    let refused = state.dry_run(&proposal(long)).0.unwrap_err().to_string();
    assert!(refused.contains("which the model does not have"), "{refused}");
    assert!(state.admit(&write).is_err(), "the leader refuses the write under any rules");
}

#[test]
fn checkpoints_without_room_count_dropped_items() {
    let mut log = TestLog::with_two_nodes();
    log.apply(sync_all("n2", 2, 1, holding(&[1]))).unwrap();
    let large = NodeCheckpoint {
        entries: (0..10_000).map(|n| (data(n), Bytes(1))).collect(),
        ..NodeCheckpoint::for_epoch(Epoch(1))
    };
    let large = Arc::new(large);
    for number in 0.. {
        if !log.state.has_checkpoint_capacity(0) {
            break;
        }
        log.state.checkpoints.insert(NodeName::new(&format!("large-{number}")).unwrap(), large.clone());
    }
    let delta = |seq, counters: &[u64]| proposal(sync("n2", 2, seq, SyncPart::Delta, holding(counters)));
    let (outcome, after) = log.state.dry_run(&delta(2, &[1, 2, 3]));
    assert_eq!(outcome, Ok(CommandEffect::Synced { seq: 2 }));
    let checkpoint = after.checkpoint(&NodeName::new("n2").unwrap()).unwrap();
    assert_eq!((checkpoint.entries.len(), checkpoint.dropped), (1, 2));
    log.state.rules = RulesVersion::UNNAMED;
    let (_, after) = log.state.dry_run(&delta(2, &[1, 2, 3]));
    assert_eq!(after.checkpoint(&NodeName::new("n2").unwrap()).unwrap().entries.len(), 3);
}

#[test]
fn a_workflow_is_charged_with_its_signature() {
    let mut log = TestLog::with_artifacts(&["m"]);
    log.apply(apply("f", "m")).unwrap();
    let before = log.state.clone();
    log.apply(apply_workflow(chain("w", &[run_function("f")]))).unwrap();
    let tenant = &key("f").tenant;
    let workflow = log.state.workflow(&key("w")).unwrap();
    let expected = encoded_len(&**workflow) + encoded_len(&workflow.key);
    assert_eq!(log.state.tenant_bytes(tenant) - before.tenant_bytes(tenant), expected);
    assert!(log.state.bytes() > before.bytes() && log.state.bytes() >= log.state.encode().len() as u64);
}

#[test]
fn a_full_cluster_accepts_only_commands_that_delete_or_end_something() {
    let mut log = TestLog::with_two_nodes();
    log.add_model("m", model());
    fill(&mut log.state, STATE_BYTES_MAX as u64);
    for adds in [labelled("new"), place("f", "n1")] {
        let refused = admit(&log.state, adds).unwrap_err();
        assert_eq!(refused.reason(), Reason::StateFull, "{refused}");
    }
    for ends in [
        delete("f"),
        unplace("f", "n1"),
        StateCommand::RemoveArtifact { digest: digest("m"), unused_since: UnixMillis(0) },
    ] {
        assert_eq!(admit(&log.state, ends), Ok(()));
    }
}

#[test]
fn a_command_over_the_number_of_functions_is_refused_before_it_reaches_the_log() {
    let mut log = TestLog::with_artifacts(&["m"]);
    log.apply(apply("f", "m")).unwrap();
    let function = log.state.functions[&key("f")].clone();
    for number in 0..FUNCTIONS_MAX {
        log.state.functions.insert(key(&format!("n{number}")), function.clone());
    }
    let refused = admit(&log.state, apply("new", "m")).unwrap_err();
    assert_eq!(refused.to_string(), "the cluster is at its limit of 100000 functions: delete some first");
    assert_eq!(refused.reason(), Reason::StateFull);
}

#[test]
fn a_change_of_a_known_function_needs_a_trial_once_half_of_a_bound_is_in_use() {
    let mut log = TestLog::with_artifacts(&["m"]);
    log.apply(apply("f", "m")).unwrap();
    let ample = |state: &State, name| state.has_ample_capacity(&spec(name));
    assert!(ample(&log.state, "f"));
    assert!(!ample(&log.state, "unknown"), "the number of functions is bounded too");
    fill(&mut log.state, DEFINITIONS_BYTES_MAX as u64 / 2 + STATE_BYTES_AROUND);
    assert!(!ample(&log.state, "f"));
    let mut tenant = full_tenant();
    assert!(!ample(&tenant, "f"), "the tenant uses more than half of its bytes");
    tenant.functions.remove(&key("f"));
    assert!(!ample(&tenant, "f"));
}

#[test]
fn a_repeated_write_is_admitted_by_a_full_cluster() {
    let mut log = TestLog::with_artifacts(&["m"]);
    log.apply_keyed(labelled("f"), 1).unwrap();
    fill(&mut log.state, STATE_BYTES_MAX as u64);
    let repeated = |seq| Proposal {
        idempotency: Some(IdempotencyKey { client: "c".into(), seq }),
        ..proposal(labelled("g"))
    };
    assert_eq!(log.state.admit(&repeated(1)), Ok(()));
    assert!(log.state.admit(&repeated(2)).is_err());
}

#[test]
fn names_and_specs_over_their_bounds_are_refused() {
    let check = |command: StateCommand| {
        check_sizes(&CallerName("alice".into()), None, &command).map_err(|it| it.to_string())
    };
    let add = |model| StateCommand::AddArtifact {
        digest: Digest::of(b"m"),
        bytes: Bytes(1),
        model,
        holder: ControllerId(1),
    };
    let name = |bytes| "n".repeat(bytes);
    let named = |bytes| add(model_of(tensor(&name(bytes), 4), tensor("y", 4)));
    assert_eq!(check(named(TENSOR_NAME_BYTES_MAX)), Ok(()));
    let refused = check(named(TENSOR_NAME_BYTES_MAX + 1)).unwrap_err();
    assert!(refused.ends_with("has 257 bytes, and TENSOR_NAME_BYTES_MAX is 256: shorten it"), "{refused}");
    assert!(refused.len() < 200, "{refused}");
    let mut wide = model();
    wide.outputs = vec![tensor("y", 4); TENSORS_MAX + 1];
    assert!(check(add(wide)).unwrap_err().contains("TENSORS_MAX is 1024"));
    let mut deep = model();
    deep.inputs[0].shape = vec![Dim::Fixed(1); RANK_MAX + 1];
    assert!(check(add(deep)).unwrap_err().contains("RANK_MAX is 32"));
    let mut free = model();
    free.inputs[0].shape = vec![Dim::Symbol(name(DIM_NAME_BYTES_MAX + 1))];
    assert!(check(add(free)).unwrap_err().contains("DIM_NAME_BYTES_MAX is 320"));

    let keeping = |input: String, output: String| {
        let state = vec![StatePair { input, output }];
        let spec =
            FunctionSpec { sequences: Some(SequenceSpec { state, idle: IDLE_DEFAULT, max: 4 }), ..spec("f") };
        StateCommand::ApplyFunction { spec, digest: digest("m"), expected: None, voters: Vec::new() }
    };
    assert_eq!(check(keeping(name(256), name(256))), Ok(()));
    assert!(check(keeping(name(257), name(1))).is_err() && check(keeping(name(1), name(257))).is_err());

    let mut workflow = chain("w", &[run_function("f")]);
    workflow.steps[0].inputs = [(name(257), "input.x".parse().unwrap())].into();
    assert!(check(apply_workflow(workflow)).unwrap_err().contains("TENSOR_NAME_BYTES_MAX"));
    assert_eq!(check(labelled("f")), Ok(()));

    let failed =
        |bytes| StateCommand::EndOperation { id: 1, end: OperationResult::Failed { why: name(bytes) } };
    assert!(check(failed(REFUSAL_BYTES_MAX)).is_ok() && check(failed(REFUSAL_BYTES_MAX + 1)).is_err());
    let key = IdempotencyKey { client: name(129).into(), seq: 1 };
    let caller = CallerName("alice".into());
    assert!(check_sizes(&caller, Some(&key), &delete("f")).is_err());
    let quota = StateCommand::SetQuota { tenant: TenantName::default(), quota: Quota::NONE };
    assert!(check_sizes(&CallerName(name(257).into()), None, &quota).is_err());
}

#[test]
fn a_long_refusal_is_shortened_before_it_is_stored() {
    let refusal = CommandRefusal::InvalidSpec { problem: "ä".repeat(100_000) }.shortened();
    let CommandRefusal::InvalidSpec { problem } = &refusal else { panic!("{refusal}") };
    assert!(problem.len() <= REFUSAL_BYTES_MAX && problem.ends_with("ä…"));
    let short = CommandRefusal::InvalidSpec { problem: "why".into() };
    assert_eq!(short.clone().shortened(), short);
}

/// Names and numbers have their maximum length, so the counted bytes must bound every record.
#[test]
fn no_record_takes_more_bytes_than_are_counted() {
    let text = |n: usize| format!("{n:x>63}");
    let node = |n: usize| NodeName::new(&text(n)).unwrap();
    let key = |n: usize| FunctionKey {
        tenant: TenantName::new(&text(n)).unwrap(),
        name: FunctionName::new(&text(n)).unwrap(),
    };
    let data = |n: usize| DataId { home: node(n), epoch: Epoch(u64::MAX), counter: u64::MAX };
    let copy = |n: usize| ModelCopy { digest: digest(&text(n)), tier: MemoryTier::Gpu(GpuIndex(u32::MAX)) };
    let size = Bytes(u64::MAX);
    let usage = Usage { gpu_ns: u64::MAX, requests: u64::MAX, idle_ms: u64::MAX };
    let counts = SloCounts { m: u64::MAX, n: u64::MAX };
    let base = SloBase { m: i64::MIN, n: i64::MIN };
    let incoming = IncomingSync {
        models: (0..200).map(|n| (copy(n), size)).collect(),
        entries: (0..200).map(|n| (data(n), size)).collect(),
        dropped: u64::MAX,
    };
    let checkpoint = NodeCheckpoint {
        models: incoming.models.clone(),
        entries: incoming.entries.clone(),
        incoming: Some(incoming),
        scores: (0..200).map(|n| (key(n), ReplicaScore { counts, base })).collect(),
        usage: (0..200).map(|n| (key(n), usage)).collect(),
        ..NodeCheckpoint::for_epoch(Epoch(u64::MAX))
    };
    let mut state = State::default();
    state.checkpoints.insert(node(0), Arc::new(checkpoint));
    let all = Permille::ALL;
    let terms = Terms::new(all, all, all, all).unwrap();
    let slice = SliceRecord { id: SliceId(u64::MAX), gpu: GpuIndex(u32::MAX), terms };
    for n in 0..1_000 {
        let placement = PlacementRecord {
            function: key(n),
            node: node(n),
            reason: PlacementReason::MissingReplica,
            resource_version: u64::MAX,
            placed_at: UnixMillis(u64::MAX),
            slices: vec![slice; SLICES_PER_GPU_MAX],
        };
        state.placements.insert(Arc::new(placement));
        state.scores.insert(key(n), FunctionScore { total: counts, unclaimed: counts });
        state.bills.charge(&key(n), usage);
        state.retired.insert(key(n), RetiredName { last: Revision::FIRST, version: u64::MAX });
        state.index.add_holder(&data(n), &node(n));
        state.index.record_loss(&data(n), size, &node(n), u64::MAX);
        let session = IdempotencyKey { client: text(n).into(), seq: u64::MAX };
        let refusal = CommandRefusal::InvalidSpec { problem: "x".repeat(REFUSAL_BYTES_MAX) };
        let caller = CallerName("c".repeat(CALLER_BYTES_MAX).into());
        state.sessions.store_answer(&caller, &session, digest("c"), Err(refusal), UnixMillis(u64::MAX));
    }
    let counted = state.bytes() - STATE_BYTES_AROUND;
    let encoded = state.encode().len() as u64;
    assert!(counted >= encoded, "{counted} bytes are counted and {encoded} are encoded");
}

/// The bytes of these records are counted without an encoding of the whole record.
#[test]
fn a_function_and_an_artifact_count_with_at_least_their_encoded_bytes_and_little_more() {
    let mut log = TestLog::with_artifacts(&["m", "n"]);
    for revision in 0..=REVISIONS_KEPT {
        log.apply(apply("f", if revision % 2 == 0 { "m" } else { "n" })).unwrap();
        log.apply(labelled("g")).unwrap();
        let counts = log.state.functions.iter().map(|(_, it)| (it.bytes(), encoded_len(&**it)));
        let artifacts = log.state.artifacts.iter().map(|(_, it)| (it.bytes(), encoded_len(&**it)));
        for (counted, encoded) in counts.chain(artifacts) {
            assert!((encoded..encoded + 64).contains(&counted), "{counted} for {encoded} bytes");
        }
    }
    let function = log.state.functions.get(&key("f")).unwrap();
    assert_eq!(function.revisions.len(), REVISIONS_KEPT);
    let largest = FunctionRecord {
        resource_version: u64::MAX,
        created_at: UnixMillis(u64::MAX),
        updated_at: UnixMillis(u64::MAX),
        requests_before: u64::MAX,
        ..FunctionRecord::clone(function)
    };
    assert!(largest.bytes() >= encoded_len(&largest));
    let artifact = log.state.artifacts.get(&digest("m")).unwrap();
    let largest = Artifact {
        bytes: Bytes(u64::MAX),
        uses: u64::MAX,
        touched_at: UnixMillis(u64::MAX),
        ..Artifact::clone(artifact)
    };
    assert!(largest.bytes() >= encoded_len(&largest), "{} {}", largest.bytes(), encoded_len(&largest));
}

/// `docs/operate/limits.md` states these sizes. A tenant may also have as many functions as a cluster.
#[test]
fn a_plain_function_takes_about_600_bytes_and_a_revision_400() {
    let mut log = TestLog::with_artifacts(&["m", "n"]);
    log.apply(apply("f-000042", "m")).unwrap();
    let one = log.state.tenant_bytes(&key("f").tenant);
    log.apply(apply("f-000042", "n")).unwrap();
    let revision = log.state.tenant_bytes(&key("f").tenant) - one;
    assert!((500..=650).contains(&one) && (300..=420).contains(&revision), "{one} and {revision} bytes");
    assert!(one * FUNCTIONS_MAX as u64 <= TENANT_BYTES_MAX as u64, "{one} bytes each");
}
