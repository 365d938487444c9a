//! The desired state of each worker: for every enabled function placed there the newest revision and
//! the revision before (`REVISIONS_SERVED`), and the caps of the tenants. The revision before serves
//! until the newest is ready, and serves clients that name that revision.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use millrace_cluster_state::{
    FunctionRecord, NodeRecord, NodeStatus, REVISIONS_SERVED, RevisionRecord, SchedulingState, SliceRecord,
    State, TenantRecord,
};
use millrace_nodes::lease::NodeRegistration;
use millrace_proto::convert::{
    duration_wire, placed_sequences_wire, placed_slices_wire, policy_spec_wire, serving_wire,
};
use millrace_proto::parts::{DesiredHead, DesiredItem, ITEMS_MAX, PartMessage as _};
use millrace_proto::worker as wire;
use millrace_slices::profiling::MeasuredCurve;
use millrace_types::node::FUNCTIONS_PER_NODE_MAX;
use millrace_types::{
    ComputeCurve, Digest, Epoch, GpuIndex, NodeName, ResourceShare, Runtime, SliceOnGpu, SloBase,
};

// A worker accepts at least as many items as placement allows: the served revisions of each function,
// and the tenant's caps.
const _: () = assert!((REVISIONS_SERVED + 1) * FUNCTIONS_PER_NODE_MAX <= ITEMS_MAX);

/// The desired state of every live node, as computed by the leader of a term.
#[derive(Debug, Default)]
pub(crate) struct DesiredStates {
    term: u64,
    nodes: BTreeMap<NodeName, (Epoch, Arc<NodeDesired>)>,
}

/// The functions and caps of one node, with the stamp of the source state.
#[derive(Debug, Default)]
pub(crate) struct NodeDesired {
    pub(crate) head: DesiredHead,
    /// Functions and caps, ordered by key.
    pub(crate) items: Arc<Vec<DesiredItem>>,
}

impl DesiredStates {
    /// Computes the desired state of all nodes. A node without changed items since `last` keeps the
    /// same allocation with the same stamp, and needs no new message.
    pub(crate) fn of_state(state: &State, term: u64, last: Option<&Self>) -> Self {
        let last = last.filter(|last| last.term == term);
        let live = state.nodes().filter(|node| node.status == NodeStatus::Live);
        let nodes = live.map(|node| {
            let next = node_desired(state, node, term);
            let known = last
                .and_then(|last| last.of(&NodeRegistration { node: node.name.clone(), epoch: node.epoch }));
            let same = known.filter(|known| {
                known.items == next.items
                    && known.head.scheduling == next.head.scheduling
                    && known.head.policy == next.head.policy
                    && known.head.alphas_ppm == next.head.alphas_ppm
            });
            (node.name.clone(), (node.epoch, same.unwrap_or_else(|| Arc::new(next))))
        });
        Self { term, nodes: nodes.collect() }
    }

    /// Returns the desired state of a node's registration.
    pub(crate) fn of(&self, member: &NodeRegistration) -> Option<Arc<NodeDesired>> {
        let (epoch, desired) = self.nodes.get(&member.node)?;
        (*epoch == member.epoch).then(|| desired.clone())
    }
}

fn node_desired(state: &State, node: &NodeRecord, term: u64) -> NodeDesired {
    let placed = state.placements_on(&node.name).filter_map(|key| state.function(key));
    let functions = placed.filter(|function| function.enabled).flat_map(|function| {
        let base = state.slo_base(&function.key, &node.name);
        function.served().iter().map(move |revision| {
            let slices = slices(state, function, revision, node);
            wire::DesiredFunction { slices, ..desired_function(state, function, revision, base) }
        })
    });
    let quotas = quotas(state, node).into_iter().map(DesiredItem::Quota);
    let mut items: Vec<_> = functions.map(DesiredItem::Function).chain(quotas).collect();
    // Sort by key, because the differences between two sets depend on the order.
    items.sort_by(|a, b| wire::DesiredState::key(a).cmp(&wire::DesiredState::key(b)));
    let head = DesiredHead {
        term,
        index: state.applied_index(),
        scheduling: scheduling(node.scheduling),
        policy: state.policy().map(|it| wire::Policy {
            generation: it.generation,
            // A worker refuses a desired state with a retired name.
            spec: Some(policy_spec_wire(&it.spec.carried_out())),
        }),
        alphas_ppm: node.alphas.iter().map(|(level, alpha)| (level.get().into(), alpha.ppm())).collect(),
    };
    NodeDesired { head, items: Arc::new(items) }
}

/// Returns the slices of a revision on a node: of the newest revision, if the revision asks for slices. The
/// revision before computes on any SMs.
fn slices(
    state: &State,
    function: &FunctionRecord,
    revision: &RevisionRecord,
    node: &NodeRecord,
) -> Option<wire::PlacedSlices> {
    let asked = revision.spec.slices.filter(|_| revision.number == function.latest().number)?;
    let placement = state.placements_of(&function.key).find(|placement| placement.node == node.name)?;
    let own = || placement.slices.iter();
    let curve =
        |gpu| measured_curve(state, &revision.digest, node, gpu).unwrap_or(ComputeCurve::PROPORTIONAL);
    // Until the leader has set new terms, the slices have the old terms.
    let terms = own().next().map_or(asked.terms, |slice| slice.terms);
    let placed = |slice: &SliceRecord| SliceOnGpu { id: slice.id, gpu: slice.gpu, curve: curve(slice.gpu) };
    Some(placed_slices_wire(terms, own().map(placed)))
}

/// Returns the speed of a model on the type of a node's GPU; `None` if too few widths were measured there.
fn measured_curve(state: &State, model: &Digest, node: &NodeRecord, gpu: GpuIndex) -> Option<ComputeCurve> {
    let gpu_type = &node.gpus.iter().find(|known| known.index == gpu)?.gpu_type;
    let artifact = state.artifact(model)?;
    let profile = artifact.profiles.iter().find(|profile| profile.gpu_type == *gpu_type)?;
    MeasuredCurve::new(&profile.points).fitted()
}

/// Returns the caps of the tenants with a function on the node. Placements are ordered, so the
/// functions of a tenant are adjacent.
fn quotas(state: &State, node: &NodeRecord) -> Vec<wire::TenantQuota> {
    let mut tenants: Vec<_> = state.placements_on(&node.name).map(|function| &function.tenant).collect();
    tenants.dedup();
    let capped = tenants.into_iter().filter_map(|tenant| state.tenant(tenant));
    let quota = |tenant: &Arc<TenantRecord>| wire::TenantQuota {
        tenant: tenant.name.to_string(),
        gpus_max: tenant.quota.gpus_max.map_or(0, NonZeroU32::get),
        gpu_share_ppm: tenant.quota.gpu_share.map_or(0, ResourceShare::ppm),
        memory_share_ppm: tenant.quota.memory_share.map_or(0, ResourceShare::ppm),
    };
    capped.map(quota).collect()
}

fn scheduling(scheduling: SchedulingState) -> wire::NodeScheduling {
    match scheduling {
        SchedulingState::Schedulable => wire::NodeScheduling::Schedulable,
        SchedulingState::Cordoned => wire::NodeScheduling::Cordoned,
        SchedulingState::Draining => wire::NodeScheduling::Draining,
    }
}

fn desired_function(
    state: &State,
    function: &FunctionRecord,
    revision: &RevisionRecord,
    base: SloBase,
) -> wire::DesiredFunction {
    let slo = revision.spec.slo;
    let mut wire = wire::DesiredFunction {
        tenant: function.key.tenant.to_string(),
        name: function.key.name.to_string(),
        revision: revision.number.get(),
        digest: revision.digest.to_string(),
        artifact_bytes: state.artifact(&revision.digest).map_or(0, |artifact| artifact.bytes.get()),
        idempotent: revision.spec.idempotent,
        slo_deadline: slo.map(|slo| duration_wire(slo.deadline)),
        slo_percentile: slo.map_or(0.0, |slo| slo.percentile),
        gpu_memory_bytes: revision.spec.resources.gpu_memory.map_or(0, |memory| memory.get()),
        slo_base_m: base.m,
        slo_base_n: base.n,
        created_at_ms: function.created_at.0,
        processes: match revision.spec.runtime {
            Runtime::Onnx => 0,
            Runtime::Process => revision.spec.processes,
        },
        sequences: revision.spec.sequences.as_ref().map(placed_sequences_wire),
        ..Default::default()
    };
    serving_wire(&revision.spec.serving, &mut wire);
    wire
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::operations::OperationKind;
    use millrace_cluster_state::{
        CallerName, ControllerId, NodeGpu, NodeSlice, PlacementReason, Proposal, RulesVersion, StateCommand,
        UnixMillis,
    };
    use millrace_proto::parts::{ItemSet, PART_BYTES_MAX, PartAssembler, PartSender};
    use millrace_types::policy::{DispatchName, EvictionName};
    use millrace_types::profile::{ProfilePoint, TrialSetting};
    use millrace_types::{
        AskedSlices, Bytes, ClusterId, FunctionKey, FunctionName, FunctionSpec, Permille, PolicySpec,
        SliceId, Slo, TenantName, Terms,
    };
    use prost::Message as _;

    use super::*;
    use crate::fixtures::bare_model;

    /// Functions of the cluster, each with two revisions.
    const FUNCTIONS: usize = 100_000;

    fn apply(state: &mut State, command: StateCommand) {
        let caller = CallerName("test".into());
        let proposal = Proposal { stamp: UnixMillis(1), caller, idempotency: None, command };
        state.apply(1, &proposal).expect("the command is in range");
    }

    /// Returns a state with a node that has two revisions of one function.
    fn cluster() -> (State, NodeName, FunctionKey) {
        let mut state = State::default();
        apply(&mut state, StateCommand::InitCluster { cluster_id: ClusterId("test".into()) });
        let node = NodeName::new("n1").unwrap();
        apply(
            &mut state,
            StateCommand::RegisterNode {
                name: node.clone(),
                instance: "first".into(),
                address: "127.0.0.1:1".into(),
                gpus: vec![NodeGpu { index: GpuIndex(0), gpu_type: "T".into(), memory: Bytes::gib(1) }],
                topology: String::new(),
                host_memory: Bytes::gib(1),
                seen: Epoch::default(),
            },
        );
        let name = FunctionName::new("function-000000").unwrap();
        let function = FunctionKey { tenant: TenantName::default(), name };
        for revision in 1..=2u64 {
            let digest = Digest::of(&revision.to_le_bytes());
            let model = bare_model();
            let artifact =
                StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder: ControllerId(1) };
            apply(&mut state, artifact);
            let mut spec = FunctionSpec::new(function.clone());
            spec.slo = Some(Slo { deadline: std::time::Duration::from_millis(100), percentile: 0.99 });
            apply(
                &mut state,
                StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() },
            );
        }
        let reason = PlacementReason::MissingReplica;
        apply(&mut state, StateCommand::Place { function: function.clone(), node: node.clone(), reason });
        (state, node, function)
    }

    fn of_node(
        state: &State,
        node: &NodeName,
        last: Option<&DesiredStates>,
    ) -> (DesiredStates, Arc<NodeDesired>) {
        let desired = DesiredStates::of_state(state, 1, last);
        let (_, of_node) = desired.nodes[node].clone();
        (desired, of_node)
    }

    /// Returns the given items repeated under each function number.
    fn multiplied(items: &[DesiredItem], functions: std::ops::Range<usize>) -> NodeDesired {
        let named = functions.flat_map(|number| {
            items.iter().map(move |item| match item {
                DesiredItem::Function(it) => DesiredItem::Function(wire::DesiredFunction {
                    name: format!("function-{number:06}"),
                    ..it.clone()
                }),
                DesiredItem::Quota(_) => panic!("no tenant has caps"),
            })
        });
        NodeDesired { head: DesiredHead::default(), items: Arc::new(named.collect()) }
    }

    #[test]
    fn nodes_are_told_of_the_default_preset_in_place_of_a_retired_policy() {
        let (mut state, node, _) = cluster();
        let spec = PolicySpec {
            dispatch: Some(DispatchName::Simpleswap),
            eviction: Some(EvictionName::Replicas),
            ..PolicySpec::NONE
        };
        apply(&mut state, StateCommand::SetPolicy { spec, settings: Vec::new(), expected: None });
        let (_, of_node) = of_node(&state, &node, None);
        let told = of_node.head.policy.clone().unwrap();
        assert_eq!(told, wire::Policy { generation: 1, spec: Some(policy_spec_wire(&PolicySpec::NONE)) });
    }

    /// Records a trial on this many SM units, which took this long.
    fn record_trial(state: &mut State, operation: u64, units: u8, ms: u64) {
        let setting = TrialSetting::whole_time(units).unwrap();
        let p50 = std::time::Duration::from_millis(ms);
        let point = ProfilePoint { runs: 200, p50, ..ProfilePoint::new(setting) };
        apply(state, StateCommand::RecordTrial { operation, gpu_type: "T".into(), point });
    }

    #[test]
    fn the_slices_of_a_node_carry_the_measured_curve_of_their_model() {
        let (mut state, node, function) = cluster();
        apply(&mut state, StateCommand::SetClusterVersion { version: RulesVersion::NEWEST });
        let digest = state.function(&function).unwrap().latest().digest;
        let mut spec = FunctionSpec::new(function.clone());
        let share = |thousandths| Permille::new(thousandths).unwrap();
        let terms = Terms::new(share(60), Permille::ALL, Permille::ZERO, Permille::ALL).unwrap();
        spec.slices = Some(AskedSlices { terms, min: 1, max: None });
        apply(&mut state, StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() });
        let slice = SliceRecord { id: SliceId(7), gpu: GpuIndex(0), terms };
        let slices = vec![NodeSlice { function: function.clone(), slice }];
        apply(&mut state, StateCommand::SetSlices { node: node.clone(), slices });
        let curves = |state: &State| {
            let (_, of_node) = of_node(state, &node, None);
            let sliced = of_node.items.iter().filter_map(|item| match item {
                DesiredItem::Function(function) => function.slices.clone(),
                DesiredItem::Quota(_) => None,
            });
            sliced.flat_map(|slices| slices.on).map(|slice| slice.curve).collect::<Vec<_>>()
        };
        assert_eq!(curves(&state), [None], "the model was not measured");

        let kind = OperationKind::ProfileFunction { function, digest, grid: false };
        apply(&mut state, StateCommand::BeginOperation { kind });
        let operation = state.version();
        // As fast on a quarter of the SMs as on all, and proportional below.
        for (units, ms) in [(16, 10), (1, 40)] {
            record_trial(&mut state, operation, units, ms);
            assert_eq!(curves(&state), [None], "too few widths were measured");
        }
        record_trial(&mut state, operation, 4, 10);
        let curve = curves(&state)[0].unwrap();
        assert!((240..=260).contains(&curve.saturation_permille), "{curve:?}");
        assert!((980..=1000).contains(&curve.exponent_permille), "{curve:?}");
    }

    #[test]
    fn an_unchanged_desired_state_keeps_its_allocation() {
        let (mut state, node, function) = cluster();
        let (desired, first) = of_node(&state, &node, None);
        assert_eq!(first.items.len(), REVISIONS_SERVED);
        let (desired, again) = of_node(&state, &node, Some(&desired));
        assert!(Arc::ptr_eq(&first, &again));
        apply(&mut state, StateCommand::Unplace { function, node: node.clone() });
        let (_, none) = of_node(&state, &node, Some(&desired));
        assert!(none.items.is_empty());
    }

    #[test]
    fn one_hundred_thousand_functions_reach_their_nodes_in_messages_below_the_limit() {
        let (state, node, _) = cluster();
        let (_, one) = of_node(&state, &node, None);
        let mut told = 0;
        for first in (0..FUNCTIONS).step_by(FUNCTIONS_PER_NODE_MAX) {
            let functions = first..(first + FUNCTIONS_PER_NODE_MAX).min(FUNCTIONS);
            let desired = multiplied(&one.items, functions);
            let mut parts = PartAssembler::<wire::DesiredState>::default();
            let mut worker = ItemSet::default();
            let mut sender = PartSender::<wire::DesiredState>::default();
            let messages = sender.next(&desired.head, &desired.items);
            for message in messages {
                assert!(message.encoded_len() <= PART_BYTES_MAX, "{}", message.encoded_len());
                if let Some(update) = parts.take(message).unwrap() {
                    worker.apply(update).unwrap();
                }
            }
            assert_eq!(worker.items(), desired.items.as_slice());
            told += worker.items().len();
        }
        assert_eq!(told, REVISIONS_SERVED * FUNCTIONS);
    }
}
