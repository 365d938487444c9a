//! Random commands over a small set of names, so that they collide.

use std::num::NonZeroU32;
use std::time::Duration;

use millrace_cluster_state::operations::{OperationKind, OperationResult};
use millrace_cluster_state::{
    CallerName, ControllerId, IdempotencyKey, NodeGpu, NodeSlice, PlacementReason, Proposal, RulesVersion,
    SchedulingState, SliceRecord, StateCommand, UnixMillis,
};
use millrace_types::policy::{DispatchName, Setting};
use millrace_types::profile::{ProfilePoint, TrialSetting};
use millrace_types::{
    Alpha, AskedSlices, Bytes, ClusterId, DataId, Digest, Epoch, FunctionKey, FunctionName, FunctionSpec,
    GpuIndex, MemoryTier, ModelCopy, NodeDelta, NodeName, Permille, PolicySpec, Priority, Quota,
    ResourceShare, SliceId, SloCounts, SyncBatch, SyncPart, SyncPortion, TenantName, Terms, Usage,
};
use proptest::prelude::*;

use crate::workflows::{model, workflow_command};

pub(crate) fn name(name: &str) -> FunctionName {
    FunctionName::new(name).unwrap()
}

pub(crate) fn key_of(names: &[&'static str]) -> impl Strategy<Value = FunctionKey> + use<> {
    (prop::sample::select(vec!["default", "acme"]), prop::sample::select(names.to_vec()))
        .prop_map(|(tenant, of)| FunctionKey { tenant: TenantName::new(tenant).unwrap(), name: name(of) })
}

pub(crate) fn key() -> impl Strategy<Value = FunctionKey> {
    key_of(&["f", "g", "h"])
}

pub(crate) fn digest() -> impl Strategy<Value = Digest> {
    (0u8..4).prop_map(digest_of)
}

pub(crate) fn digest_of(number: u8) -> Digest {
    Digest::of(&[number])
}

pub(crate) fn spec() -> impl Strategy<Value = FunctionSpec> {
    // A timeout of zero is refused, and a memory beyond 3 GiB fits no GPU of this test.
    let slices = prop::option::weighted(0.2, (1u16..=1000, 0u32..3));
    (key(), 0u64..4, prop::option::of(1u64..5), slices).prop_map(|(key, timeout, gib, slices)| {
        let mut spec = FunctionSpec::new(key);
        spec.slices = slices.map(|(sms, min)| AskedSlices::fixed(terms(sms), min));
        spec.timeout = Duration::from_secs(timeout);
        spec.resources.gpu_memory = gib.map(Bytes::gib);
        spec
    })
}

fn terms(sms: u16) -> Terms {
    let sms = Permille::new(sms).unwrap();
    Terms::new(sms, sms, Permille::ZERO, Permille::ALL).unwrap()
}

fn node_name() -> impl Strategy<Value = NodeName> {
    prop::sample::select(vec!["n1", "n2"]).prop_map(|name| NodeName::new(name).unwrap())
}

fn register() -> impl Strategy<Value = StateCommand> {
    (node_name(), prop::sample::select(vec!["a", "b"]), 1u64..4).prop_map(|(name, instance, gib)| {
        StateCommand::RegisterNode {
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
    let tier = prop::sample::select(vec![MemoryTier::Host, MemoryTier::Gpu(GpuIndex(0))]);
    (digest(), tier).prop_map(|(digest, tier)| ModelCopy { digest, tier })
}

fn usage() -> impl Strategy<Value = Usage> {
    (0u64..9, 0u64..9, 0u64..9).prop_map(|(gpu_ns, requests, idle_ms)| Usage { gpu_ns, requests, idle_ms })
}

fn priority() -> impl Strategy<Value = Priority> {
    (1u64..=8).prop_map(|level| Priority::new(level).unwrap())
}

fn alpha() -> impl Strategy<Value = Alpha> {
    (0u32..1_000_000).prop_map(|ppm| Alpha::from_ppm(ppm).unwrap())
}

fn delta() -> impl Strategy<Value = NodeDelta> {
    let few = 0..3usize;
    (
        prop::collection::vec((copy(), Just(Bytes(9))), few.clone()),
        prop::collection::vec(copy(), few.clone()),
        prop::collection::vec((data_id(), Just(Bytes(5))), 0..6usize),
        prop::collection::vec(data_id(), few.clone()),
        // Some counts have more requests in time than requests served, and are refused.
        prop::collection::vec(
            (key(), (0u64..9, 0u64..20).prop_map(|(m, n)| SloCounts { m, n })),
            few.clone(),
        ),
        prop::collection::vec((key(), usage()), few),
        prop::option::of(prop::collection::btree_map(priority(), alpha(), 0..3)),
    )
        .prop_map(|(models, models_gone, entries, entries_gone, slo, usage, alphas)| NodeDelta {
            models,
            models_gone,
            entries,
            entries_gone,
            slo,
            usage,
            alphas,
            overflow: None,
        })
}

pub(crate) fn sync() -> impl Strategy<Value = StateCommand> {
    let part = prop_oneof![
        3 => Just(SyncPart::Delta),
        2 => Just(SyncPart::Full(SyncPortion::Only)),
        1 => Just(SyncPart::Full(SyncPortion::First)),
        1 => Just(SyncPart::Full(SyncPortion::Middle)),
        1 => Just(SyncPart::Full(SyncPortion::Last)),
    ];
    (node_name(), 1u64..5, 1u64..8, part, delta()).prop_map(|(node, epoch, seq, part, delta)| {
        StateCommand::SyncNode { node, batch: SyncBatch { epoch: Epoch(epoch), seq, part, delta } }
    })
}

fn scheduling() -> impl Strategy<Value = SchedulingState> {
    prop::sample::select(vec![
        SchedulingState::Schedulable,
        SchedulingState::Cordoned,
        SchedulingState::Draining,
    ])
}

fn voters() -> impl Strategy<Value = Vec<ControllerId>> {
    prop_oneof![4 => Just(Vec::new()), 1 => Just(vec![ControllerId(1), ControllerId(2), ControllerId(3)])]
}

fn set_quota() -> impl Strategy<Value = StateCommand> {
    (key(), 0u32..3, 0u32..3).prop_map(|(key, gpus_max, share)| {
        let gpus_max = NonZeroU32::new(gpus_max);
        let memory_share = ResourceShare::from_ppm(share * 300_000).ok();
        StateCommand::SetQuota {
            tenant: key.tenant,
            quota: Quota { gpus_max, memory_share, gpu_share: None },
        }
    })
}

fn set_policy() -> impl Strategy<Value = StateCommand> {
    // A limit is refused unless the policy reads it.
    let dispatch = prop::option::of(prop::sample::select(vec![DispatchName::LalbO3, DispatchName::Torpor]));
    let settings = prop::collection::vec(prop::sample::select(Setting::ALL), 0..3);
    (dispatch, prop::option::of(1u32..3), settings, prop::option::weighted(0.3, 0u64..30)).prop_map(
        |(dispatch, overtakes_max, settings, expected)| {
            let spec = PolicySpec { dispatch, overtakes_max, ..PolicySpec::NONE };
            StateCommand::SetPolicy { spec, settings, expected }
        },
    )
}

fn set_slices() -> impl Strategy<Value = StateCommand> {
    let slice = (key(), 1u64..20, 0u32..2, 1u16..=1000).prop_map(|(function, id, gpu, sms)| {
        let slice = SliceRecord { id: SliceId(id), gpu: GpuIndex(gpu), terms: terms(sms) };
        NodeSlice { function, slice }
    });
    (node_name(), prop::collection::vec(slice, 0..4))
        .prop_map(|(node, slices)| StateCommand::SetSlices { node, slices })
}

pub(crate) fn command() -> impl Strategy<Value = StateCommand> {
    let expected = || prop::option::weighted(0.3, 0u64..30);
    prop_oneof![
        1 => prop::sample::select(vec!["one", "two"])
            .prop_map(|id| StateCommand::InitCluster { cluster_id: ClusterId(id.into()) }),
        8 => (spec(), digest(), expected(), voters())
            .prop_map(|(spec, digest, expected, voters)| StateCommand::ApplyFunction { spec, digest, expected, voters }),
        2 => (key(), expected()).prop_map(|(key, expected)| StateCommand::DeleteFunction { key, expected }),
        2 => (key(), any::<bool>()).prop_map(|(key, enabled)| StateCommand::SetFunctionEnabled { key, enabled }),
        4 => (digest(), 10u64..12, 0u64..3).prop_map(|(digest, bytes, holder)| StateCommand::AddArtifact {
            digest, bytes: Bytes(bytes), model: model(digest), holder: ControllerId(holder),
        }),
        2 => (digest(), 0u64..200).prop_map(|(digest, at)| StateCommand::RemoveArtifact {
            digest, unused_since: UnixMillis(at),
        }),
        1 => (9u64..=10)
            .prop_map(|version| StateCommand::SetClusterVersion { version: RulesVersion(version) }),
        4 => register(),
        2 => set_quota(),
        4 => workflow_command(),
        2 => set_policy(),
        2 => (0u64..3, any::<bool>()).prop_map(|(id, joins)| {
            let id = ControllerId(id);
            let kind = if joins { OperationKind::PromoteController { id } } else { OperationKind::RemoveController { id } };
            StateCommand::BeginOperation { kind }
        }),
        3 => (key(), digest(), any::<bool>()).prop_map(|(function, digest, grid)| StateCommand::BeginOperation {
            kind: OperationKind::ProfileFunction { function, digest, grid },
        }),
        3 => (0u64..40, prop::sample::select(vec!["A", "B"]), prop::sample::select(vec![1, 4, 16])).prop_map(
            |(operation, gpu_type, units)| StateCommand::RecordTrial {
                operation,
                gpu_type: gpu_type.into(),
                point: ProfilePoint::new(TrialSetting::whole_time(units).expect("a width of the grid")),
            },
        ),
        3 => (0u64..40, prop::sample::select(vec![OperationResult::Succeeded, OperationResult::Cancelled]))
            .prop_map(|(id, end)| StateCommand::EndOperation { id, end }),
        12 => sync(),
        5 => (key(), node_name()).prop_map(|(function, node)| StateCommand::Place {
            function, node, reason: PlacementReason::Rebalance,
        }),
        2 => (key(), node_name()).prop_map(|(function, node)| StateCommand::Unplace { function, node }),
        4 => set_slices(),
        1 => (node_name(), scheduling())
            .prop_map(|(name, scheduling)| StateCommand::SetNodeScheduling { name, scheduling }),
        1 => node_name().prop_map(|name| StateCommand::RemoveNode { name }),
        1 => (digest(), 0u64..3).prop_map(|(digest, holder)| StateCommand::RemoveArtifactHolder {
            digest, holder: ControllerId(holder),
        }),
        2 => (node_name(), 0u64..6).prop_map(|(name, epoch)| StateCommand::NodeLost { name, epoch: Epoch(epoch) }),
    ]
}

fn proposal() -> impl Strategy<Value = Proposal> {
    let idempotency = (prop::sample::select(vec!["c", "d"]), 0u64..20)
        .prop_map(|(client, seq)| IdempotencyKey { client: client.into(), seq });
    // Most stamps are milliseconds apart; some are beyond the life of a session.
    let stamp = prop_oneof![9 => 0u64..200, 1 => 3_600_000u64..7_400_000];
    (stamp, prop::sample::select(vec!["alice", "bob"]), prop::option::of(idempotency), command()).prop_map(
        |(stamp, caller, idempotency, command)| Proposal {
            stamp: UnixMillis(stamp),
            caller: CallerName(caller.into()),
            idempotency,
            command,
        },
    )
}

/// Returns a log that begins like a cluster's log or with nothing, followed by random commands.
pub(crate) fn log() -> impl Strategy<Value = Vec<Proposal>> {
    let init = Proposal {
        stamp: UnixMillis(1),
        caller: CallerName("controller".into()),
        idempotency: None,
        command: StateCommand::InitCluster { cluster_id: ClusterId("one".into()) },
    };
    (any::<bool>(), prop::collection::vec(proposal(), 0..80)).prop_map(move |(begin, mut log)| {
        if begin {
            log.insert(0, init.clone());
        }
        log
    })
}
