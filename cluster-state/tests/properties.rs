//! Properties of whole logs: random commands over a small world, so that they collide.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::num::NonZeroU32;
use std::time::Duration;

use millrace_cluster_state::{
    Applied, Caller, Command, ControllerId, IdempotencyKey, ModelSummary, NodeGpu, Outcome, PlacementReason,
    Proposal, Refusal, Scheduling, State, UnixMillis,
};
use millrace_types::{
    Alpha, Bytes, ClusterId, DataId, Digest, Epoch, FunctionKey, FunctionName, FunctionSpec, GpuIndex,
    ModelCopy, NodeDelta, NodeName, Portion, Quota, Share, SloCounts, SyncBatch, SyncPart, TenantName, Tier,
    Usage,
};
use proptest::prelude::*;

fn key() -> impl Strategy<Value = FunctionKey> {
    (prop::sample::select(vec!["default", "acme"]), prop::sample::select(vec!["f", "g", "h"])).prop_map(
        |(tenant, name)| FunctionKey {
            tenant: TenantName::new(tenant).unwrap(),
            name: FunctionName::new(name).unwrap(),
        },
    )
}

fn digest() -> impl Strategy<Value = Digest> {
    (0u8..4).prop_map(|n| Digest::of(&[n]))
}

fn spec() -> impl Strategy<Value = FunctionSpec> {
    // A timeout of zero is refused; memory beyond 3 GiB fits no GPU here.
    (key(), 0u64..4, prop::option::of(1u64..5)).prop_map(|(key, timeout, gib)| {
        let mut spec = FunctionSpec::new(key);
        spec.timeout = Duration::from_secs(timeout);
        spec.resources.gpu_memory = gib.map(Bytes::gib);
        spec
    })
}

fn model() -> ModelSummary {
    ModelSummary { weights: Bytes::mib(1), parameters: 9, launches: 1, inputs: vec![], outputs: vec![] }
}

fn node_name() -> impl Strategy<Value = NodeName> {
    prop::sample::select(vec!["n1", "n2"]).prop_map(|name| NodeName::new(name).unwrap())
}

fn register() -> impl Strategy<Value = Command> {
    (node_name(), prop::sample::select(vec!["a", "b"]), 1u64..4).prop_map(|(name, instance, gib)| {
        Command::RegisterNode {
            name,
            instance: instance.into(),
            address: "127.0.0.1:7080".into(),
            gpus: vec![NodeGpu { index: GpuIndex(0), gpu_type: "emulated".into(), memory: Bytes::gib(gib) }],
            topology: "test".into(),
            host_memory: Bytes::gib(8),
            seen: Epoch(0),
        }
    })
}

fn data_id() -> impl Strategy<Value = DataId> {
    (node_name(), 1u64..3, 0u64..6).prop_map(|(home, epoch, counter)| DataId {
        home,
        epoch: Epoch(epoch),
        counter,
    })
}

fn copy() -> impl Strategy<Value = ModelCopy> {
    let tier = prop::sample::select(vec![Tier::Host, Tier::Gpu(GpuIndex(0))]);
    (digest(), tier).prop_map(|(digest, tier)| ModelCopy { digest, tier })
}

fn usage() -> impl Strategy<Value = Usage> {
    (0u64..9, 0u64..9, 0u64..9).prop_map(|(gpu_ns, requests, idle_ms)| Usage { gpu_ns, requests, idle_ms })
}

fn delta() -> impl Strategy<Value = NodeDelta> {
    let few = 0..3usize;
    (
        prop::collection::vec((copy(), Just(Bytes(9))), few.clone()),
        prop::collection::vec(copy(), few.clone()),
        prop::collection::vec((data_id(), Just(Bytes(5))), 0..6usize),
        prop::collection::vec(data_id(), few.clone()),
        // At times more in time than served: refused.
        prop::collection::vec(
            (key(), (0u64..9, 0u64..20).prop_map(|(m, n)| SloCounts { m, n })),
            few.clone(),
        ),
        prop::collection::vec((key(), usage()), few),
        prop::option::of((0u32..1_000_000).prop_map(|ppm| Alpha::from_ppm(ppm).unwrap())),
    )
        .prop_map(|(models, models_gone, entries, entries_gone, slo, usage, alpha)| NodeDelta {
            models,
            models_gone,
            entries,
            entries_gone,
            slo,
            usage,
            alpha,
            overflow: None,
        })
}

fn sync() -> impl Strategy<Value = Command> {
    let part = prop_oneof![
        3 => Just(SyncPart::Delta),
        2 => Just(SyncPart::Full(Portion::Only)),
        1 => Just(SyncPart::Full(Portion::First)),
        1 => Just(SyncPart::Full(Portion::Middle)),
        1 => Just(SyncPart::Full(Portion::Last)),
    ];
    (node_name(), 1u64..5, 1u64..8, part, delta()).prop_map(|(node, epoch, seq, part, delta)| {
        Command::SyncNode { node, batch: SyncBatch { epoch: Epoch(epoch), seq, part, delta } }
    })
}

fn scheduling() -> impl Strategy<Value = Scheduling> {
    prop::sample::select(vec![Scheduling::Schedulable, Scheduling::Cordoned, Scheduling::Draining])
}

fn voters() -> impl Strategy<Value = Vec<ControllerId>> {
    prop_oneof![4 => Just(Vec::new()), 1 => Just(vec![ControllerId(1), ControllerId(2), ControllerId(3)])]
}

fn set_quota() -> impl Strategy<Value = Command> {
    (key(), 0u32..3, 0u32..3).prop_map(|(key, gpus_max, share)| {
        let (gpus_max, memory_share) = (NonZeroU32::new(gpus_max), Share::from_ppm(share * 300_000).ok());
        Command::SetQuota { tenant: key.tenant, quota: Quota { gpus_max, memory_share, gpu_share: None } }
    })
}

fn command() -> impl Strategy<Value = Command> {
    let expected = || prop::option::weighted(0.3, 0u64..30);
    prop_oneof![
        1 => prop::sample::select(vec!["one", "two"])
            .prop_map(|id| Command::InitCluster { cluster_id: ClusterId(id.into()) }),
        8 => (spec(), digest(), expected(), voters())
            .prop_map(|(spec, digest, expected, voters)| Command::ApplyFunction { spec, digest, expected, voters }),
        2 => (key(), expected()).prop_map(|(key, expected)| Command::DeleteFunction { key, expected }),
        2 => (key(), any::<bool>()).prop_map(|(key, enabled)| Command::SetFunctionEnabled { key, enabled }),
        4 => (digest(), 10u64..12, 0u64..3).prop_map(|(digest, bytes, holder)| Command::AddArtifact {
            digest, bytes: Bytes(bytes), model: model(), holder: ControllerId(holder),
        }),
        2 => (digest(), 0u64..200).prop_map(|(digest, at)| Command::RemoveArtifact {
            digest, unused_since: UnixMillis(at),
        }),
        4 => register(),
        2 => set_quota(),
        12 => sync(),
        5 => (key(), node_name()).prop_map(|(function, node)| Command::Place {
            function, node, reason: PlacementReason::Rebalance,
        }),
        2 => (key(), node_name()).prop_map(|(function, node)| Command::Unplace { function, node }),
        1 => (node_name(), scheduling())
            .prop_map(|(name, scheduling)| Command::SetNodeScheduling { name, scheduling }),
        1 => node_name().prop_map(|name| Command::RemoveNode { name }),
        1 => (digest(), 0u64..3).prop_map(|(digest, holder)| Command::RemoveArtifactHolder {
            digest, holder: ControllerId(holder),
        }),
        2 => (node_name(), 0u64..6).prop_map(|(name, epoch)| Command::NodeLost { name, epoch: Epoch(epoch) }),
    ]
}

fn proposal() -> impl Strategy<Value = Proposal> {
    let idempotency = (prop::sample::select(vec!["c", "d"]), 0u64..20)
        .prop_map(|(client, seq)| IdempotencyKey { client: client.into(), seq });
    // Mostly milliseconds, at times beyond a session's life.
    let stamp = prop_oneof![9 => 0u64..200, 1 => 3_600_000u64..7_400_000];
    (stamp, prop::sample::select(vec!["alice", "bob"]), prop::option::of(idempotency), command()).prop_map(
        |(stamp, caller, idempotency, command)| Proposal {
            stamp: UnixMillis(stamp),
            caller: Caller(caller.into()),
            idempotency,
            command,
        },
    )
}

/// A log that begins as a cluster's does, and then holds anything.
fn log() -> impl Strategy<Value = Vec<Proposal>> {
    let init = Proposal {
        stamp: UnixMillis(1),
        caller: Caller("controller".into()),
        idempotency: None,
        command: Command::InitCluster { cluster_id: ClusterId("one".into()) },
    };
    (any::<bool>(), prop::collection::vec(proposal(), 0..80)).prop_map(move |(begin, mut log)| {
        if begin {
            log.insert(0, init.clone());
        }
        log
    })
}

/// Two commands to a log entry: they share an index.
fn index_of(position: usize) -> u64 {
    position as u64 / 2 + 1
}

fn replay(state: &mut State, from: usize, log: &[Proposal]) -> Vec<Outcome> {
    log.iter().enumerate().map(|(n, proposal)| state.apply(index_of(from + n), proposal)).collect()
}

/// All of a state but what advances even when a command is refused.
fn contents(state: &State) -> impl PartialEq + std::fmt::Debug + use<> {
    (
        state.version(),
        state.cluster().cloned(),
        state.functions().cloned().collect::<Vec<_>>(),
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

    #[test]
    fn the_same_log_gives_the_same_answers_and_the_same_bytes(log in log()) {
        let (mut a, mut b) = (State::default(), State::default());
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
    fn an_epoch_is_never_given_twice(log in log()) {
        let mut state = State::default();
        let mut given = std::collections::BTreeSet::new();
        for (n, proposal) in log.iter().enumerate() {
            let unkeyed = Proposal { idempotency: None, ..proposal.clone() };
            if let Ok(millrace_cluster_state::Applied::Registered { epoch }) = state.apply(n as u64, &unkeyed) {
                prop_assert!(given.insert(epoch));
            }
        }
    }

    #[test]
    fn a_dry_run_answers_as_the_write_would_and_changes_nothing(log in log(), next in command()) {
        let mut state = State::default();
        replay(&mut state, 0, &log);
        let next = Proposal {
            stamp: state.clock(),
            caller: Caller("alice".into()),
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
    fn two_writers_who_saw_the_same_version_cannot_both_win(log in log(), a in spec(), b in digest()) {
        let mut state = State::default();
        replay(&mut state, 0, &log);
        let seen = state.function(&a.key).map_or(0, |function| function.resource_version);
        let write = |digest| Proposal {
            stamp: state.clock(),
            caller: Caller("alice".into()),
            idempotency: None,
            command: Command::ApplyFunction { spec: a.clone(), digest, expected: Some(seen), voters: Vec::new() },
        };
        let (first, second) = (write(b), write(Digest::of(b"other")));
        // The same log entry: the same index.
        let index = index_of(log.len());
        let mut state = state;
        if matches!(state.apply(index, &first), Ok(applied) if applied.changed()) {
            let refused = state.apply(index, &second);
            prop_assert!(matches!(refused, Err(Refusal::Conflict { .. })), "{:?}", refused);
        }
    }

    /// Late, repeated and missing batches leave a node's checkpoint as its worker tells it.
    #[test]
    fn a_batch_that_does_not_follow_changes_nothing(log in log(), next in sync()) {
        let mut state = State::default();
        replay(&mut state, 0, &log);
        let propose = |state: &mut State| {
            let caller = Caller("worker".into());
            let proposal =
                Proposal { stamp: state.clock(), caller, idempotency: None, command: next.clone() };
            state.apply(index_of(log.len()), &proposal)
        };
        let Command::SyncNode { node, batch } = &next else { unreachable!("the strategy gives these only") };
        let last = state.checkpoint(node).map_or(0, |checkpoint| checkpoint.seq);
        let before = contents(&state);
        match propose(&mut state) {
            Ok(Applied::Synced { seq }) => {
                prop_assert!(seq == batch.seq && seq > last);
                let before = contents(&state);
                prop_assert_eq!(propose(&mut state), Ok(Applied::SyncRepeated { last: seq }));
                prop_assert_eq!(before, contents(&state));
            }
            other => {
                let stale = batch.seq <= last;
                prop_assert!(!stale || !matches!(other, Ok(Applied::ResyncWanted { .. })), "{:?}", other);
                prop_assert_eq!(before, contents(&state));
            }
        }
    }

    /// What functions counted and used never shrinks, whoever is lost; a function that is deleted
    /// takes its score with it.
    #[test]
    fn totals_only_grow(log in log()) {
        let mut state = State::default();
        for (n, proposal) in log.iter().enumerate() {
            let before = state.clone();
            let outcome = state.apply(index_of(n), proposal);
            let used = before.usage_in_all();
            prop_assert_eq!(state.usage_in_all().merge(used), state.usage_in_all());
            if matches!(outcome, Ok(Applied::Deleted { .. })) {
                continue;
            }
            for function in state.functions() {
                let (then, now) = (before.score(&function.key).total, state.score(&function.key).total);
                prop_assert_eq!(now.merge(then), now);
            }
        }
    }
}
