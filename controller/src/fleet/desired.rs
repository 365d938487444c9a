//! What each worker should serve: of every enabled function placed on it the newest revision, and
//! the one before it, which goes on serving until the newest is ready and for clients that name it
//! (`REVISIONS_SERVED`). And what tenants may use of it.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use millrace_cluster_state::{Function, Node, NodeStatus, RevisionRecord, Scheduling, State, Tenant};
use millrace_policy::lease::Member;
use millrace_proto::convert::{duration_wire, placed_sequences_wire, policy_spec_wire, serving_wire};
use millrace_proto::worker as wire;
use millrace_types::{Epoch, NodeName, Runtime, Share, SloBase};

/// What every live node should serve, as the leader of a term sees it.
#[derive(Debug, Default)]
pub(crate) struct Desired {
    term: u64,
    nodes: BTreeMap<NodeName, (Epoch, Arc<wire::DesiredState>)>,
}

impl Desired {
    /// What the state says. Where nothing changed since `last`, it is the same allocation, with the
    /// same stamp: it need not be sent again.
    pub(crate) fn of_state(state: &State, term: u64, last: Option<&Self>) -> Self {
        let last = last.filter(|last| last.term == term);
        let live = state.nodes().filter(|node| node.status == NodeStatus::Live);
        let nodes = live.map(|node| {
            let next = desired_state(state, node, term);
            let known = last.and_then(|last| last.of(&Member { node: node.name.clone(), epoch: node.epoch }));
            let same = known.filter(|known| {
                known.functions == next.functions
                    && known.scheduling == next.scheduling
                    && known.quotas == next.quotas
                    && known.policy == next.policy
            });
            (node.name.clone(), (node.epoch, same.unwrap_or_else(|| Arc::new(next))))
        });
        Self { term, nodes: nodes.collect() }
    }

    /// What a registration of a node should serve.
    pub(crate) fn of(&self, member: &Member) -> Option<Arc<wire::DesiredState>> {
        let (epoch, desired) = self.nodes.get(&member.node)?;
        (*epoch == member.epoch).then(|| desired.clone())
    }
}

fn desired_state(state: &State, node: &Node, term: u64) -> wire::DesiredState {
    let placed = state.placements_on(&node.name).filter_map(|key| state.function(key));
    let functions = placed.filter(|function| function.enabled).flat_map(|function| {
        let base = state.slo_base(&function.key, &node.name);
        function.served().iter().map(move |revision| desired_function(state, function, revision, base))
    });
    wire::DesiredState {
        term,
        index: state.applied_index(),
        functions: functions.collect(),
        scheduling: scheduling(node.scheduling).into(),
        quotas: quotas(state, node),
        policy: state
            .policy()
            .map(|it| wire::Policy { generation: it.generation, spec: Some(policy_spec_wire(&it.spec)) }),
    }
}

/// The caps of those tenants that have a function on the node: in its order, one tenant's follow
/// each other.
fn quotas(state: &State, node: &Node) -> Vec<wire::TenantQuota> {
    let mut tenants: Vec<_> = state.placements_on(&node.name).map(|function| &function.tenant).collect();
    tenants.dedup();
    let capped = tenants.into_iter().filter_map(|tenant| state.tenant(tenant));
    let quota = |tenant: &Arc<Tenant>| wire::TenantQuota {
        tenant: tenant.name.to_string(),
        gpus_max: tenant.quota.gpus_max.map_or(0, NonZeroU32::get),
        gpu_share_ppm: tenant.quota.gpu_share.map_or(0, Share::ppm),
        memory_share_ppm: tenant.quota.memory_share.map_or(0, Share::ppm),
    };
    capped.map(quota).collect()
}

fn scheduling(scheduling: Scheduling) -> wire::NodeScheduling {
    match scheduling {
        Scheduling::Schedulable => wire::NodeScheduling::Schedulable,
        Scheduling::Cordoned => wire::NodeScheduling::Cordoned,
        Scheduling::Draining => wire::NodeScheduling::Draining,
    }
}

fn desired_function(
    state: &State,
    function: &Function,
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
