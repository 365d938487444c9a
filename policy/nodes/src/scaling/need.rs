//! Number of nodes needed now, without memory of earlier observations.

use std::collections::BTreeMap;

use super::protocol::{NodeNeedReason, ScalingInputs, ScalingLimits};
use crate::placement::{ClusterSnapshot, DesiredReplicas, GpuLoad, PlacementNode, Unplaced, UnplacedReason};
use millrace_types::{Bytes, Digest, NodeState};

/// Number of nodes needed, with the requirements behind that number.
pub(super) struct Need {
    pub(super) nodes: u32,
    pub(super) nodes_now: u32,
    pub(super) reasons: Vec<NodeNeedReason>,
}

/// Returns the largest of all requirements.
pub(super) fn of(observed: &ScalingInputs<'_>, missed: u32, limits: &ScalingLimits) -> Need {
    let view = observed.view;
    let nodes_now = count(view.nodes.iter().filter(|node| node.state == NodeState::Schedulable));
    let typical = typical(view);
    let claims = [
        replicas(view),
        host_memory(view, &typical, limits),
        gpu_time(view, &typical, limits),
        unplaced(observed, nodes_now),
        objectives(view, missed, nodes_now, limits),
    ];
    let claims: Vec<_> = claims.into_iter().flatten().filter(|(nodes, _)| *nodes > 0).collect();
    let nodes = claims.iter().map(|(nodes, _)| *nodes).max().unwrap_or(0);
    let reasons = claims.into_iter().filter(|(claimed, _)| *claimed == nodes).map(|(_, reason)| reason);
    Need { nodes, nodes_now, reasons: reasons.collect() }
}

/// Number of nodes that a requirement asks for, with its reason.
type Claim = Option<(u32, NodeNeedReason)>;

fn count(items: impl Iterator) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}

fn wanted(function: &DesiredReplicas) -> u32 {
    if function.enabled { function.replicas } else { 0 }
}

/// Mean of the schedulable nodes, or of all known nodes if none is schedulable.
struct Typical {
    /// Bytes of host memory.
    host: u64,
    /// GPUs, in thousandths.
    gpus: u64,
}

fn typical(view: &ClusterSnapshot) -> Option<Typical> {
    let open = || view.nodes.iter().filter(|node| node.state == NodeState::Schedulable);
    mean(open()).or_else(|| mean(view.nodes.iter()))
}

fn mean<'a>(nodes: impl Iterator<Item = &'a PlacementNode> + Clone) -> Option<Typical> {
    let number = u64::try_from(nodes.clone().count()).unwrap_or(u64::MAX);
    let host = nodes.clone().fold(0u64, |sum, node| sum.saturating_add(node.host.0)).checked_div(number)?;
    let gpus = nodes.fold(0u64, |sum, node| sum.saturating_add(u64::from(node.gpus) * 1000)) / number;
    Some(Typical { host, gpus })
}

/// Returns how many nodes hold a total, each up to a share of its capacity.
fn nodes_for(total: u64, each: u64, share: u64) -> Option<u32> {
    let usable = u128::from(each) * u128::from(share) / 1000;
    let nodes = u128::from(total).checked_add(usable.checked_sub(1)?)?.checked_div(usable)?;
    Some(u32::try_from(nodes).unwrap_or(u32::MAX))
}

fn replicas(view: &ClusterSnapshot) -> Claim {
    let replicas = view.functions.iter().map(wanted).max()?;
    Some((replicas, NodeNeedReason::Replicas { replicas }))
}

/// Returns the claim of host memory. A model that several functions share counts once, with the
/// replicas of the function that has most.
fn host_memory(view: &ClusterSnapshot, typical: &Option<Typical>, limits: &ScalingLimits) -> Claim {
    let host = typical.as_ref()?.host;
    let mut models: BTreeMap<Digest, (u64, u32)> = BTreeMap::new();
    for function in &view.functions {
        for model in &function.models {
            let (bytes, copies) = models.entry(model.digest).or_default();
            *bytes = (*bytes).max(model.host.0);
            *copies = (*copies).max(wanted(function));
        }
    }
    let total = models
        .values()
        .fold(0u64, |sum, &(bytes, copies)| sum.saturating_add(bytes.saturating_mul(copies.into())));
    let reason = NodeNeedReason::HostMemory { wanted: Bytes(total), node: Bytes(host) };
    Some((nodes_for(total, host, limits.host_share)?, reason))
}

/// Returns the GPU load in thousandths: the larger of the measured load and the known need of the
/// functions. The measured load lags after nodes join; the known need ignores deleted functions.
fn load(view: &ClusterSnapshot) -> u64 {
    let alive = view.nodes.iter().filter(|node| node.state != NodeState::Lost);
    let busy = alive.fold(0u64, |sum, node| sum.saturating_add(node.busy.0));
    let enabled = view.functions.iter().filter(|function| wanted(function) > 0);
    busy.max(enabled.fold(0u64, |sum, function| sum.saturating_add(function.load.0)))
}

fn gpu_time(view: &ClusterSnapshot, typical: &Option<Typical>, limits: &ScalingLimits) -> Claim {
    let load = load(view);
    let gpus = typical.as_ref()?.gpus;
    let rounded = u32::try_from(gpus.saturating_add(500) / 1000).unwrap_or(u32::MAX);
    let reason = NodeNeedReason::GpuTime { load: GpuLoad(load), gpus: rounded };
    Some((nodes_for(load, gpus, limits.gpu_share)?, reason))
}

/// Returns the claim of functions that a further node of the same kind would take. Only for an
/// empty plan, because pending changes may free capacity.
fn unplaced(observed: &ScalingInputs<'_>, nodes_now: u32) -> Claim {
    if !observed.plan.steps.is_empty() {
        return None;
    }
    let open = || observed.view.nodes.iter().filter(|node| node.state == NodeState::Schedulable);
    let largest = open().map(|node| node.host).max().unwrap_or_default();
    let helped = |it: &&Unplaced| match it.why {
        UnplacedReason::NoNode | UnplacedReason::TooFewNodes { .. } | UnplacedReason::NodesFull { .. } => {
            true
        }
        UnplacedReason::HostMemory { needs, .. } => needs <= largest,
        // Another node of the same kind does not help.
        UnplacedReason::GpuMemory { .. } | UnplacedReason::Failing { .. } => false,
    };
    let functions = count(observed.plan.unplaced.iter().filter(helped));
    (functions > 0).then_some((nodes_now.saturating_add(1), NodeNeedReason::Unplaced { functions }))
}

fn objectives(view: &ClusterSnapshot, missed: u32, nodes_now: u32, limits: &ScalingLimits) -> Claim {
    let alive = view.nodes.iter().filter(|node| node.state != NodeState::Lost);
    let gpus = alive.fold(0u64, |sum, node| sum.saturating_add(node.gpus.into()));
    let busy = load(view) >= gpus.saturating_mul(limits.slo_gpu_share);
    (missed > 0 && busy).then_some((nodes_now.saturating_add(1), NodeNeedReason::Slo { functions: missed }))
}
