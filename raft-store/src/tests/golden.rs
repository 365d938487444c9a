//! Tests that a log and a snapshot of each version of the rules, written by a build of that
//! version, still lead to the same state.
//!
//! For each version `tests/data` holds `rules-N.log` (the pairs of sled's `logs` tree, each key and
//! value behind its length), `rules-N.snapshot` (a snapshot file from the middle of that log) and
//! `rules-N.digest` (the SHA-256 of the encoded state after the last entry). Files of an older
//! version are never written again. Before the newest version is released, `BLESS=1 cargo test -p
//! millrace-raft-store --lib golden` writes its files again.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use millrace_cluster_state::operations::{OperationKind, OperationResult};
use millrace_cluster_state::{
    CLUSTER_VERSION, CallerName, ControllerId, IdempotencyKey, ModelSummary, NodeGpu, NodeSlice,
    PlacementReason, Proposal, RulesVersion, SchedulingState, SliceRecord, State, StateCommand, UnixMillis,
};
use millrace_types::policy::DispatchName;
use millrace_types::workflow::{Step, StepTarget, WorkflowOutput};
use millrace_types::{
    AskedSlices, Bytes, ClusterId, DataId, DataType, Digest, Dim, Epoch, FunctionKey, FunctionName,
    FunctionSpec, GpuIndex, MemoryTier, ModelCopy, NodeDelta, NodeName, Permille, PolicySpec, Quota, SliceId,
    SloCounts, SyncBatch, SyncPart, SyncPortion, TenantName, TensorSpec, Terms, Usage, WorkflowSpec,
};
use openraft::EntryPayload;
use openraft::RaftLogReader as _;
use openraft::storage::RaftStateMachine as _;

use super::memory::Memory;
use super::tally::{identity, position};
use crate::log::record;
use crate::log::tables::LogTables;
use crate::snapshot::directory;
use crate::snapshot::format::{self, SnapshotEncoder};
use crate::{DataDir, Entry, RaftStore, SnapshotMeta, open};

/// The versions with files.
const VERSIONS: [u64; 2] = [9, 10];
/// The version whose files this build can write.
const NEWEST: u64 = CLUSTER_VERSION;
/// The index at which the snapshot is taken.
const SNAPSHOT_AT: u64 = 17;
/// Maximum size of a file, in bytes: a fixture should be readable, and small in the repository.
const FILE_BYTES_MAX: usize = 16 << 10;

fn path(version: u64, ending: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/rules-{version}.{ending}"))
}

fn name(name: &str) -> FunctionName {
    FunctionName::new(name).unwrap()
}

fn key(of: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: name(of) }
}

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn digest(model: &str) -> Digest {
    Digest::of(model.as_bytes())
}

fn upload(model: &str, holder: u64) -> StateCommand {
    let tensor = |name: &str| TensorSpec {
        name: name.into(),
        datatype: DataType::Fp32,
        shape: vec![Dim::Symbol("batch".into()), Dim::Fixed(64)],
    };
    StateCommand::AddArtifact {
        digest: digest(model),
        bytes: Bytes(4_096),
        model: ModelSummary {
            weights: Bytes::mib(100),
            parameters: 25_000_000,
            launches: 50,
            inputs: vec![tensor("x")],
            outputs: vec![tensor("y")],
        },
        holder: ControllerId(holder),
    }
}

fn apply_function(function: &str, model: &str, timeout_s: u64) -> StateCommand {
    let mut spec = FunctionSpec::new(key(function));
    spec.timeout = Duration::from_secs(timeout_s);
    StateCommand::ApplyFunction { spec, digest: digest(model), expected: None, voters: vec![ControllerId(1)] }
}

fn terms() -> Terms {
    let share = |thousandths| Permille::new(thousandths).unwrap();
    Terms::new(share(120), share(500), share(300), share(800)).unwrap()
}

fn apply_sliced(function: &str, model: &str) -> StateCommand {
    let slices = Some(AskedSlices::fixed(terms(), 2));
    let spec = FunctionSpec { slices, ..FunctionSpec::new(key(function)) };
    StateCommand::ApplyFunction { spec, digest: digest(model), expected: None, voters: vec![ControllerId(1)] }
}

fn slice(function: &str, id: u64) -> NodeSlice {
    let slice = SliceRecord { id: SliceId(id), gpu: GpuIndex(0), terms: terms() };
    NodeSlice { function: key(function), slice }
}

fn register(name: &str) -> StateCommand {
    StateCommand::RegisterNode {
        name: node(name),
        instance: "i".into(),
        address: "127.0.0.1:7080".into(),
        gpus: vec![NodeGpu { index: GpuIndex(0), gpu_type: "emulated".into(), memory: Bytes::gib(16) }],
        topology: "test".into(),
        host_memory: Bytes::gib(64),
        seen: Epoch(0),
    }
}

fn place(function: &str, on: &str) -> StateCommand {
    StateCommand::Place { function: key(function), node: node(on), reason: PlacementReason::MissingReplica }
}

fn sync(seq: u64, part: SyncPart) -> StateCommand {
    let copy = ModelCopy { digest: digest("m1"), tier: MemoryTier::Host };
    let data = DataId { home: node("n1"), epoch: Epoch(1), counter: seq };
    let delta = NodeDelta {
        models: vec![(copy, Bytes::mib(100))],
        slo: vec![(key("f"), SloCounts { m: 90 + seq, n: 100 + seq })],
        usage: vec![(key("f"), Usage { gpu_ns: seq << 30, requests: 100 + seq, idle_ms: seq })],
        entries: vec![(data, Bytes(9))],
        ..NodeDelta::default()
    };
    StateCommand::SyncNode { node: node("n1"), batch: SyncBatch { epoch: Epoch(1), seq, part, delta } }
}

fn workflow(of: &str) -> StateCommand {
    let step = Step {
        name: name("s"),
        run: StepTarget::Function(name("f")),
        inputs: [("x".to_owned(), "input.x".parse().unwrap())].into(),
        each: None,
        when: None,
        deadline: Some(Duration::from_millis(2_500)),
    };
    let outputs = vec![WorkflowOutput { name: "y".into(), from: "s.y".parse().unwrap() }];
    let spec = WorkflowSpec::new(key(of), vec!["x".into()], vec![step], outputs);
    StateCommand::ApplyWorkflow { spec, expected: None }
}

/// Returns every command at least once, each for an entry of its own behind the first three; some
/// are refused.
fn commands() -> Vec<StateCommand> {
    let quota = Quota { gpus_max: std::num::NonZeroU32::new(2), ..Quota::NONE };
    let policy = PolicySpec { dispatch: Some(DispatchName::Torpor), ..PolicySpec::NONE };
    vec![
        upload("m1", 1),
        upload("m1", 2),
        upload("m2", 1),
        apply_function("f", "m1", 10),
        apply_function("f", "m2", 20),
        apply_function("gone", "m1", 10),
        apply_function("none", "absent", 10),
        register("n1"),
        register("n2"),
        sync(1, SyncPart::Full(SyncPortion::Only)),
        place("f", "n1"),
        place("f", "n2"),
        StateCommand::SetQuota { tenant: TenantName::default(), quota },
        workflow("w"),
        workflow("old"),
        StateCommand::SetPolicy { spec: policy, settings: Vec::new(), expected: None },
        sync(2, SyncPart::Delta),
        StateCommand::DeleteWorkflow { key: key("old"), expected: None },
        StateCommand::DeleteFunction { key: key("f"), expected: None },
        StateCommand::DeleteFunction { key: key("gone"), expected: None },
        StateCommand::SetFunctionEnabled { key: key("f"), enabled: false },
        StateCommand::Unplace { function: key("f"), node: node("n2") },
        StateCommand::SetNodeScheduling { name: node("n1"), scheduling: SchedulingState::Draining },
        StateCommand::BeginOperation { kind: OperationKind::RemoveController { id: ControllerId(2) } },
        StateCommand::EndOperation { id: 21, end: OperationResult::Succeeded },
        StateCommand::NodeLost { name: node("n2"), epoch: Epoch(2) },
        StateCommand::RemoveNode { name: node("n2") },
        StateCommand::RemoveArtifactHolder { digest: digest("m1"), holder: ControllerId(2) },
        StateCommand::RemoveArtifact { digest: digest("m1"), unused_since: UnixMillis(9_000_000) },
        upload("m3", 1),
        StateCommand::RemoveArtifact { digest: digest("m3"), unused_since: UnixMillis(9_000_000) },
        upload("m4", 1),
        apply_sliced("s", "m4"),
        StateCommand::SetNodeScheduling { name: node("n1"), scheduling: SchedulingState::Schedulable },
        place("s", "n1"),
        StateCommand::SetSlices { node: node("n1"), slices: vec![slice("s", 1)] },
        StateCommand::SetSlices { node: node("n1"), slices: vec![slice("s", 1), slice("s", 2)] },
    ]
}

/// Returns the log of a group with a single member whose clients write [`commands`], every third of
/// them with an idempotency key.
fn story() -> Vec<Entry<State>> {
    let begin = StateCommand::InitCluster { cluster_id: ClusterId("golden".into()) };
    let switch = StateCommand::SetClusterVersion { version: RulesVersion::NEWEST };
    let propose = |index: u64, command| Proposal {
        stamp: UnixMillis(1_000_000 + index * 1_000),
        caller: CallerName("alice".into()),
        idempotency: index
            .is_multiple_of(3)
            .then(|| IdempotencyKey { client: format!("c{}", index % 2).into(), seq: index }),
        command,
    };
    let entry = |index, payload| Entry::<State> { log_id: position(1, index), payload };
    let begun = [
        entry(0, EntryPayload::Membership(openraft::Membership::new(vec![[1].into()], None))),
        entry(1, EntryPayload::Blank),
        entry(2, EntryPayload::Normal(vec![propose(2, switch), propose(2, begin)])),
    ];
    let written = (3..).zip(commands()).map(|(index, command)| {
        let proposal = propose(index, command);
        // A batch: the second proposal is a repeat if the first has an idempotency key.
        let batch = if index % 5 == 0 { vec![proposal.clone(), proposal] } else { vec![proposal] };
        entry(index, EntryPayload::Normal(batch))
    });
    begun.into_iter().chain(written).collect()
}

fn render(entries: &[Entry<State>]) -> Vec<u8> {
    let mut file = Vec::new();
    for entry in entries {
        let body = rmp_serde::to_vec_named(entry).unwrap();
        for (key, value) in record::encode(entry.log_id.index, &body).unwrap() {
            for bytes in [key, value] {
                file.extend(u32::try_from(bytes.len()).unwrap().to_be_bytes());
                file.extend(bytes);
            }
        }
    }
    file
}

/// Parses the pairs of a log's file.
fn parse(mut file: &[u8]) -> Vec<record::SledPair> {
    let mut next = || {
        let (len, rest) = file.split_first_chunk::<4>()?;
        let (bytes, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        file = rest;
        Some(bytes.to_vec())
    };
    std::iter::from_fn(|| Some((next()?, next().expect("a value for each key")))).collect()
}

fn open_state(dir: &Path) -> RaftStore<State> {
    open(DataDir::open(dir).unwrap(), &identity()).unwrap()
}

/// Puts a log, and perhaps a snapshot, into a data directory, opens the directory and applies the
/// entries behind the snapshot.
async fn replay(log: &[u8], snapshot: Option<&[u8]>) -> State {
    let dir = tempfile::tempdir().unwrap();
    drop(open_state(dir.path()));
    let tables = LogTables::open(&dir.path().join("log")).unwrap();
    for (key, value) in parse(log) {
        tables.logs.insert(key, value).unwrap();
    }
    tables.db.flush().unwrap();
    drop(tables);
    if let Some(snapshot) = snapshot {
        let checked = format::check(&Memory::from(snapshot.to_vec())).unwrap().unwrap();
        let name = format!("{}.snapshot", directory::id(checked.meta.last_log_id));
        fs::write(dir.path().join("snapshots").join(name), snapshot).unwrap();
    }
    let RaftStore { mut log, mut machine } = open_state(dir.path());
    let from = machine.last().map_or(0, |last| last.index + 1);
    assert_eq!(from, if snapshot.is_some() { SNAPSHOT_AT + 1 } else { 0 });
    machine.apply(log.try_get_log_entries(from..).await.unwrap()).await.unwrap();
    machine.reader().latest().state.clone()
}

#[tokio::test]
async fn logs_and_snapshots_of_each_version_of_the_rules_lead_to_their_state() {
    for version in VERSIONS {
        let [log, snapshot, expected] =
            ["log", "snapshot", "digest"].map(|ending| fs::read(path(version, ending)).unwrap());
        let expected = String::from_utf8(expected).unwrap();
        for (from, snapshot) in [("its log", None), ("its snapshot", Some(&snapshot[..]))] {
            let state = replay(&log, snapshot).await;
            let digest = Digest::of(&state.encode()).to_string();
            assert_eq!(state.rules(), RulesVersion(version));
            assert_eq!(digest, expected.trim(), "version {version}, from {from}: {state:#?}");
        }
    }
}

#[tokio::test]
async fn this_build_writes_the_files_of_the_newest_rules() {
    let entries = story();
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut machine, .. } = open_state(dir.path());
    let (before, after) = entries.split_at(SNAPSHOT_AT as usize + 1);
    let mut outcomes = machine.apply(before.to_vec()).await.unwrap();
    let applied = machine.reader().latest();
    let meta = SnapshotMeta {
        last_log_id: applied.last,
        last_membership: applied.membership.clone(),
        snapshot_id: directory::id(applied.last),
    };
    let mut snapshot = Memory::default();
    let write = |out: &mut dyn Write| applied.state.write_to(out);
    SnapshotEncoder::of(&meta, &write).unwrap().write_to(&mut snapshot).unwrap();
    outcomes.extend(machine.apply(after.to_vec()).await.unwrap());
    let state = machine.reader().latest().state.encode();
    let digest = format!("{}\n", Digest::of(&state));
    let files = [("log", render(&entries)), ("snapshot", snapshot.bytes), ("digest", digest.into_bytes())];
    for (ending, bytes) in files {
        assert!(bytes.len() <= FILE_BYTES_MAX, "{ending}: {} bytes", bytes.len());
        let path = path(NEWEST, ending);
        if std::env::var_os("BLESS").is_some() {
            fs::write(&path, &bytes).unwrap();
        }
        let written_before = fs::read(&path).unwrap_or_default();
        assert!(bytes == written_before, "{} differs; outcomes: {outcomes:#?}", path.display());
    }
}
