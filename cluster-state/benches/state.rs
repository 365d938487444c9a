//! Costs of the replicated state at the project's design size: 1,000 functions on 100 nodes, with
//! 100,000 entries of the data index.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use millrace_cluster_state::{
    CallerName, CommandEffect, CommandOutcome, ControllerId, ModelSummary, PlacementReason, Proposal, State,
    StateCommand, UnixMillis,
};
use millrace_types::checkpoint::SYNC_ITEMS_MAX;
use millrace_types::{
    Bytes, ClusterId, DataId, Digest, Epoch, FunctionKey, FunctionName, FunctionSpec, MemoryTier, ModelCopy,
    NodeDelta, NodeName, SloCounts, SyncBatch, SyncPart, SyncPortion, TenantName, Usage,
};

const FUNCTIONS: u64 = 1_000;
const NODES: u64 = 100;
const ENTRIES: u64 = 100_000;

struct Group {
    state: State,
    index: u64,
}

impl Group {
    fn propose(&mut self, command: StateCommand) -> CommandOutcome {
        self.index += 1;
        self.state.apply(self.index, &proposal(self.index, command))
    }

    fn done(&mut self, command: StateCommand) {
        self.propose(command).expect("the bench's commands are in range");
    }
}

fn proposal(stamp: u64, command: StateCommand) -> Proposal {
    Proposal { stamp: UnixMillis(stamp), caller: CallerName("bench".into()), idempotency: None, command }
}

fn node(number: u64) -> NodeName {
    NodeName::new(&format!("node-{number}")).expect("a valid name")
}

fn function(number: u64) -> FunctionKey {
    let name = FunctionName::new(&format!("function-{number}")).expect("a valid name");
    FunctionKey { tenant: TenantName::default(), name }
}

fn digest(number: u64) -> Digest {
    Digest::of(&number.to_le_bytes())
}

fn register(number: u64) -> StateCommand {
    StateCommand::RegisterNode {
        name: node(number),
        instance: "i".into(),
        address: "10.0.0.1:7080".into(),
        gpus: vec![],
        topology: "dgx-a100".into(),
        host_memory: Bytes::gib(512),
        seen: Epoch(0),
    }
}

/// Returns the report of node `number`, without its data.
fn soft_state(number: u64) -> NodeDelta {
    let own = || (number..FUNCTIONS).step_by(NODES as usize);
    let copy = |number| ModelCopy { digest: digest(number), tier: MemoryTier::Host };
    NodeDelta {
        models: own().map(|it| (copy(it), Bytes::mib(100))).collect(),
        slo: own().map(|it| (function(it), SloCounts { m: 98, n: 100 })).collect(),
        usage: own()
            .map(|it| (function(it), Usage { gpu_ns: 1 << 30, requests: 100, idle_ms: 1 << 20 }))
            .collect(),
        ..NodeDelta::default()
    }
}

fn entries(of: u64, counters: impl Iterator<Item = u64>) -> NodeDelta {
    let id = |counter| DataId { home: node(of), epoch: Epoch(of + 1), counter };
    NodeDelta { entries: counters.map(|it| (id(it), Bytes::mib(1))).collect(), ..NodeDelta::default() }
}

fn sync(of: u64, epoch: u64, seq: u64, part: SyncPart, delta: NodeDelta) -> StateCommand {
    StateCommand::SyncNode { node: node(of), batch: SyncBatch { epoch: Epoch(epoch), seq, part, delta } }
}

/// Returns a group with the functions, and `nodes` nodes that hold the data in equal parts.
fn group(nodes: u64) -> Group {
    let mut group = Group { state: State::default(), index: 0 };
    group.done(StateCommand::InitCluster { cluster_id: ClusterId("bench".into()) });
    for number in 0..FUNCTIONS {
        let model = ModelSummary {
            weights: Bytes::mib(100),
            parameters: 25_000_000,
            launches: 50,
            inputs: vec![],
            outputs: vec![],
        };
        let digest = digest(number);
        let bytes = Bytes::mib(100);
        group.done(StateCommand::AddArtifact { digest, bytes, model, holder: ControllerId(1) });
        let spec = FunctionSpec::new(function(number));
        group.done(StateCommand::ApplyFunction { spec, digest, expected: None, voters: vec![] });
    }
    for number in 0..nodes {
        group.done(register(number));
        let first = SyncPart::Full(SyncPortion::Only);
        group.done(sync(number, number + 1, 1, first, soft_state(number)));
        let counters: Vec<u64> = (0..ENTRIES / nodes).collect();
        for (batch, counters) in counters.chunks(SYNC_ITEMS_MAX).enumerate() {
            let delta = entries(number, counters.iter().copied());
            group.done(sync(number, number + 1, batch as u64 + 2, SyncPart::Delta, delta));
        }
    }
    for number in 0..FUNCTIONS {
        let function = function(number);
        let node = node(number % nodes);
        group.done(StateCommand::Place { function, node, reason: PlacementReason::MissingReplica });
    }
    assert_eq!(group.state.index_held_len() as u64, ENTRIES);
    group
}

fn snapshots(c: &mut Criterion) {
    let group = group(NODES);
    let bytes = group.state.encode();
    println!("encoded: {} bytes", bytes.len());
    c.bench_function("clone", |b| b.iter(|| black_box(&group.state).clone()));
    c.bench_function("encode", |b| b.iter(|| black_box(&group.state).encode()));
    c.bench_function("digest", |b| b.iter(|| black_box(&group.state).digest()));
    c.bench_function("decode", |b| b.iter(|| State::decode(black_box(&bytes))));
}

/// Measures commands while a reader holds the state before them, as in production after each log
/// entry.
fn commands(c: &mut Criterion) {
    let Group { state, index } = group(NODES);
    let mut apply = |name: &str, command: &StateCommand| {
        let proposal = proposal(index + 1, command.clone());
        let run = |mut state: State| {
            let applied = state.apply(index + 1, &proposal);
            (state, applied.is_ok())
        };
        c.bench_function(name, |b| b.iter_batched(|| state.clone(), run, BatchSize::LargeInput));
    };
    let seq = ENTRIES / NODES / SYNC_ITEMS_MAX as u64 + 2;
    let hundred = entries(7, 50_000..50_100);
    apply(
        "sync 1 changed score",
        &sync(
            7,
            8,
            seq,
            SyncPart::Delta,
            NodeDelta { slo: vec![(function(7), SloCounts { m: 99, n: 101 })], ..NodeDelta::default() },
        ),
    );
    apply("sync 100 new entries", &sync(7, 8, seq, SyncPart::Delta, hundred));
    let thousand = entries(7, 50_000..50_000 + SYNC_ITEMS_MAX as u64);
    apply("sync 1,000 new entries", &sync(7, 8, seq, SyncPart::Delta, thousand));
    let again = entries(7, 0..SYNC_ITEMS_MAX as u64);
    apply("full sync of 1,000 known entries", &sync(7, 8, seq, SyncPart::Full(SyncPortion::Only), again));
    apply("lose a node of 1,000 entries", &StateCommand::NodeLost { name: node(7), epoch: Epoch(8) });
    let id = DataId { home: node(7), epoch: Epoch(8), counter: 500 };
    c.bench_function("locate", |b| b.iter(|| state.locate(black_box(&id))));
}

fn one_large_node(c: &mut Criterion) {
    let Group { mut state, index } = group(1);
    let lost = proposal(index + 1, StateCommand::NodeLost { name: node(0), epoch: Epoch(1) });
    let run = |mut state: State| {
        let applied = state.apply(index + 1, &lost);
        (state, applied.is_ok())
    };
    c.bench_function("lose a node of 100,000 entries", |b| {
        b.iter_batched(|| state.clone(), run, BatchSize::LargeInput);
    });
    // Measure the last portion of a full sync that named every entry again, without a change.
    let mut seq = ENTRIES / SYNC_ITEMS_MAX as u64 + 1;
    let counters: Vec<u64> = (0..ENTRIES).collect();
    for (batch, counters) in counters.chunks(SYNC_ITEMS_MAX).enumerate() {
        seq += 1;
        let part = SyncPart::Full(if batch == 0 { SyncPortion::First } else { SyncPortion::Middle });
        let sync = proposal(index, sync(0, 1, seq, part, entries(0, counters.iter().copied())));
        assert_eq!(state.apply(index, &sync), Ok(CommandEffect::Synced { seq }));
    }
    let last = proposal(index, sync(0, 1, seq + 1, SyncPart::Full(SyncPortion::Last), NodeDelta::default()));
    let run = |mut state: State| {
        let applied = state.apply(index, &last);
        (state, applied.is_ok())
    };
    c.bench_function("end a full sync of 100,000 entries", |b| {
        b.iter_batched(|| state.clone(), run, BatchSize::LargeInput);
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    targets = snapshots, commands, one_large_node
}
criterion_main!(benches);
