//! The documents of nodes, their GPUs and the models on them.

use std::collections::BTreeMap;

use millrace_client::messages as wire;
use serde::Serialize;

use super::Condition;
use crate::output::residents::is_running;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeDocument {
    name: String,
    epoch: u64,
    address: String,
    connected: bool,
    topology: String,
    host_memory_bytes: u64,
    host_tier_bytes: u64,
    host_budget_bytes: u64,
    cold_starts: u64,
    host_evictions: u64,
    group_bytes: u64,
    queued: u32,
    status: Option<&'static str>,
    scheduling: Option<&'static str>,
    lease: Option<&'static str>,
    placements: u32,
    checkpoint_seq: u64,
    index_entries: u64,
    index_overflow: u64,
    alphas: BTreeMap<u32, f64>,
    conditions: Vec<Condition>,
    gpus: Vec<GpuDocument>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GpuDocument {
    node: String,
    index: u32,
    gpu_type: String,
    health: String,
    memory_bytes: u64,
    used_bytes: u64,
    running: Vec<RunningDocument>,
    executor_pid: u32,
    executor_pids: Vec<u32>,
    restarts: u64,
    swaps: u64,
    peer_swaps: u64,
    evictions: u64,
    busy_seconds: f64,
    sm_violations: u64,
    models: Vec<ResidentModelDocument>,
    models_left_out: u32,
}

/// A running request. Without units, the request has the whole GPU.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RunningDocument {
    function: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_unit: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    units: Option<u32>,
}

impl From<wire::RunningRequest> for RunningDocument {
    fn from(running: wire::RunningRequest) -> Self {
        let wire::RunningRequest { function, first_unit, units } = running;
        let part = units > 0;
        Self { function, first_unit: part.then_some(first_unit), units: part.then_some(units) }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ResidentModelDocument {
    pub(crate) node: String,
    pub(crate) gpu: u32,
    functions: Vec<String>,
    digest: String,
    bytes: u64,
    loaded_bytes: u64,
    idle_seconds: Option<f64>,
    executor_pid: u32,
    pub(crate) running: bool,
}

fn seconds(wire: prost_types::Duration) -> Option<f64> {
    std::time::Duration::try_from(wire).ok().map(|span| span.as_secs_f64())
}

impl From<wire::Node> for NodeDocument {
    fn from(node: wire::Node) -> Self {
        Self {
            status: match node.status() {
                wire::NodeStatus::Unspecified => None,
                wire::NodeStatus::Live => Some("Live"),
                wire::NodeStatus::Lost => Some("Lost"),
            },
            scheduling: match node.scheduling() {
                wire::NodeScheduling::Unspecified => None,
                wire::NodeScheduling::Schedulable => Some("Schedulable"),
                wire::NodeScheduling::Cordoned => Some("Cordoned"),
                wire::NodeScheduling::Draining => Some("Draining"),
            },
            lease: match node.lease() {
                wire::NodeLease::Unspecified => None,
                wire::NodeLease::Believed => Some("Believed"),
                wire::NodeLease::Fenced => Some("Fenced"),
            },
            placements: node.placements,
            checkpoint_seq: node.checkpoint_seq,
            index_entries: node.index_entries,
            index_overflow: node.index_overflow,
            alphas: node.alphas,
            conditions: node.conditions.into_iter().map(Condition::from).collect(),
            gpus: node.gpus.into_iter().map(|gpu| GpuDocument::new(&node.name, gpu)).collect(),
            name: node.name,
            epoch: node.epoch,
            address: node.address,
            connected: node.connected,
            topology: node.topology,
            host_memory_bytes: node.host_memory_bytes,
            host_tier_bytes: node.host_tier_bytes,
            host_budget_bytes: node.host_budget_bytes,
            cold_starts: node.cold_starts,
            host_evictions: node.host_evictions,
            group_bytes: node.group_bytes,
            queued: node.queued,
        }
    }
}

impl GpuDocument {
    pub(crate) fn new(node: &str, gpu: wire::Gpu) -> Self {
        let models =
            gpu.models.iter().map(|model| ResidentModelDocument::new(node, &gpu, model.clone())).collect();
        Self {
            node: node.to_owned(),
            index: gpu.index,
            gpu_type: gpu.gpu_type,
            health: gpu.health,
            memory_bytes: gpu.memory_bytes,
            used_bytes: gpu.used_bytes,
            running: gpu.running.into_iter().map(RunningDocument::from).collect(),
            executor_pid: gpu.executor_pid,
            executor_pids: gpu.executor_pids,
            restarts: gpu.restarts,
            swaps: gpu.swaps,
            peer_swaps: gpu.peer_swaps,
            evictions: gpu.evictions,
            busy_seconds: gpu.busy.and_then(seconds).unwrap_or(0.0),
            sm_violations: gpu.sm_violations,
            models,
            models_left_out: gpu.models_left_out,
        }
    }
}

impl ResidentModelDocument {
    pub(crate) fn new(node: &str, gpu: &wire::Gpu, model: wire::ResidentModel) -> Self {
        Self {
            running: is_running(gpu, &model),
            node: node.to_owned(),
            gpu: gpu.index,
            functions: model.functions,
            digest: model.digest,
            bytes: model.bytes,
            loaded_bytes: model.loaded_bytes,
            idle_seconds: model.idle.and_then(seconds),
            executor_pid: model.executor_pid,
        }
    }
}
