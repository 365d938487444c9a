//! The documents that `-o json|yaml` prints: the admin API's messages under stable names, a
//! function's in the shape of its manifest with a `status` beside it.

use std::collections::BTreeMap;

use millrace_client::messages as wire;
use millrace_types::manifest::API_VERSION;
use serde::Serialize;

use crate::output::residents::is_running;
use crate::output::text::moment;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Function {
    api_version: &'static str,
    kind: &'static str,
    metadata: Metadata,
    spec: Spec,
    status: Status,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    tenant: String,
    labels: BTreeMap<String, String>,
    generation: u64,
    resource_version: u64,
    created_at: Option<String>,
    updated_at: Option<String>,
    updated_by: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    runtime: String,
    slo: Option<Slo>,
    timeout: Option<String>,
    resources: Resources,
    idempotent: bool,
    replicas: u32,
    priority: u32,
    residency: Residency,
    #[serde(skip_serializing_if = "Option::is_none")]
    batching: Option<Batching>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Residency {
    pin: bool,
    min_warm: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    evict_after: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Batching {
    max_size: u32,
    max_wait: Option<String>,
}

#[derive(Debug, Serialize)]
struct Slo {
    deadline: Option<String>,
    percentile: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Resources {
    gpu_memory: Option<u64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    enabled: bool,
    conditions: Vec<Condition>,
    revisions: Vec<Revision>,
}

#[derive(Debug, Serialize)]
struct Condition {
    r#type: String,
    status: &'static str,
    reason: String,
    message: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Revision {
    number: u64,
    digest: String,
    bytes: u64,
    created_at: Option<String>,
    model: Option<Model>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Model {
    weights_bytes: u64,
    parameters: u64,
    launches: u32,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    datatype: String,
    shape: Vec<i64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Node {
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
    gpus: Vec<Gpu>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Gpu {
    node: String,
    index: u32,
    gpu_type: String,
    health: String,
    memory_bytes: u64,
    used_bytes: u64,
    running: Option<String>,
    executor_pid: u32,
    executor_pids: Vec<u32>,
    restarts: u64,
    swaps: u64,
    peer_swaps: u64,
    evictions: u64,
    moved_bytes: u64,
    busy_seconds: f64,
    models: Vec<ResidentModel>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ResidentModel {
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

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClusterStatus {
    cluster_id: String,
    cluster_version: u64,
    answered_by: u64,
    leader: Option<u64>,
    term: u64,
    quorum: bool,
    changing: bool,
    warnings: Vec<String>,
    controllers: Vec<Controller>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Controller {
    id: u64,
    role: Option<&'static str>,
    voter: bool,
    reachable: bool,
    unreachable_reason: Option<String>,
    client_address: Option<String>,
    internal_address: String,
    build: Option<String>,
    term: Option<u64>,
    last_log_index: Option<u64>,
    last_applied_index: Option<u64>,
    snapshot_index: Option<u64>,
    matched_index: Option<u64>,
    lag: Option<u64>,
    directory: String,
}

/// The word of a controller's role; `None` when it did not say.
pub(crate) fn role(controller: &wire::Controller) -> Option<&'static str> {
    match controller.role() {
        wire::ControllerRole::Unspecified => None,
        wire::ControllerRole::Leader => Some("Leader"),
        wire::ControllerRole::Follower => Some("Follower"),
        wire::ControllerRole::Candidate => Some("Candidate"),
        wire::ControllerRole::Learner => Some("Learner"),
    }
}

/// The word of a condition's status.
pub(crate) fn status_word(condition: &wire::Condition) -> &'static str {
    match condition.status() {
        wire::ConditionStatus::True => "True",
        wire::ConditionStatus::False => "False",
        wire::ConditionStatus::Unknown | wire::ConditionStatus::Unspecified => "Unknown",
    }
}

/// A duration of the wire as manifests write it.
pub(crate) fn span(wire: prost_types::Duration) -> Option<String> {
    let span = std::time::Duration::try_from(wire).ok()?;
    Some(humantime::format_duration(span).to_string())
}

fn seconds(wire: prost_types::Duration) -> Option<f64> {
    std::time::Duration::try_from(wire).ok().map(|span| span.as_secs_f64())
}

impl From<wire::Function> for Function {
    fn from(function: wire::Function) -> Self {
        let spec = function.spec.unwrap_or_default();
        Self {
            api_version: API_VERSION,
            kind: "Function",
            metadata: Metadata {
                name: spec.name,
                tenant: spec.tenant,
                labels: spec.labels.into_iter().collect(),
                generation: function.generation,
                resource_version: function.resource_version,
                created_at: function.created_at.and_then(moment),
                updated_at: function.updated_at.and_then(moment),
                updated_by: function.updated_by,
            },
            spec: Spec {
                runtime: spec.runtime,
                slo: spec
                    .slo
                    .map(|slo| Slo { deadline: slo.deadline.and_then(span), percentile: slo.percentile }),
                timeout: spec.timeout.and_then(span),
                resources: Resources { gpu_memory: spec.resources.map(|asked| asked.gpu_memory_bytes) },
                idempotent: spec.idempotent,
                replicas: spec.replicas,
                priority: spec.priority,
                residency: residency(spec.residency.unwrap_or_default()),
                batching: spec.batching.map(|batching| Batching {
                    max_size: batching.max_size,
                    max_wait: batching.max_wait.and_then(span),
                }),
            },
            status: Status {
                enabled: function.enabled,
                conditions: function.conditions.into_iter().map(Condition::from).collect(),
                revisions: function.revisions.into_iter().map(Revision::from).collect(),
            },
        }
    }
}

fn residency(wire: wire::Residency) -> Residency {
    let wire::Residency { pin, min_warm, evict_after } = wire;
    Residency { pin, min_warm, evict_after: evict_after.and_then(span) }
}

impl From<wire::Condition> for Condition {
    fn from(condition: wire::Condition) -> Self {
        let status = status_word(&condition);
        Self { r#type: condition.r#type, status, reason: condition.reason, message: condition.message }
    }
}

impl From<wire::Revision> for Revision {
    fn from(revision: wire::Revision) -> Self {
        let artifact = revision.artifact.unwrap_or_default();
        Self {
            number: revision.number,
            digest: artifact.digest,
            bytes: artifact.bytes,
            created_at: revision.created_at.and_then(moment),
            model: revision.model.map(Model::from),
        }
    }
}

impl From<wire::ModelSummary> for Model {
    fn from(model: wire::ModelSummary) -> Self {
        let tensor =
            |spec: wire::TensorSpec| Tensor { name: spec.name, datatype: spec.datatype, shape: spec.shape };
        Self {
            weights_bytes: model.weights_bytes,
            parameters: model.parameters,
            launches: model.launches,
            inputs: model.inputs.into_iter().map(tensor).collect(),
            outputs: model.outputs.into_iter().map(tensor).collect(),
        }
    }
}

/// How many nodes are needed, and why.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Scaling {
    nodes_needed: u32,
    nodes_now: u32,
    reasons: Vec<ScalingReason>,
}

#[derive(Debug, Serialize)]
struct ScalingReason {
    reason: String,
    message: String,
}

impl From<wire::ScalingSignal> for Scaling {
    fn from(signal: wire::ScalingSignal) -> Self {
        let reason = |it: wire::ScalingReason| ScalingReason { reason: it.reason, message: it.message };
        Self {
            nodes_needed: signal.nodes_needed,
            nodes_now: signal.nodes_now,
            reasons: signal.reasons.into_iter().map(reason).collect(),
        }
    }
}

impl From<wire::ClusterStatus> for ClusterStatus {
    fn from(status: wire::ClusterStatus) -> Self {
        Self {
            cluster_id: status.cluster_id,
            cluster_version: status.cluster_version,
            answered_by: status.answered_by,
            leader: Some(status.leader).filter(|&leader| leader > 0),
            term: status.term,
            quorum: status.quorum,
            changing: status.changing,
            warnings: status.warnings,
            controllers: status.controllers.into_iter().map(Controller::from).collect(),
        }
    }
}

impl From<wire::Controller> for Controller {
    fn from(controller: wire::Controller) -> Self {
        let role = role(&controller);
        let said = |number: u64| controller.reachable.then_some(number);
        let text = |text: String| Some(text).filter(|text| !text.is_empty());
        Self {
            id: controller.id,
            role,
            voter: controller.voter,
            reachable: controller.reachable,
            term: said(controller.term),
            last_log_index: said(controller.last_log_index),
            last_applied_index: said(controller.last_applied_index),
            snapshot_index: said(controller.snapshot_index),
            unreachable_reason: text(controller.unreachable_reason),
            client_address: text(controller.client_address),
            internal_address: controller.internal_address,
            build: text(controller.build),
            matched_index: controller.matched_index,
            lag: controller.lag,
            directory: controller.directory,
        }
    }
}

impl From<wire::Node> for Node {
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
            gpus: node.gpus.into_iter().map(|gpu| Gpu::new(&node.name, gpu)).collect(),
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

impl Gpu {
    pub(crate) fn new(node: &str, gpu: wire::Gpu) -> Self {
        let models = gpu.models.iter().map(|model| ResidentModel::new(node, &gpu, model.clone())).collect();
        Self {
            node: node.to_owned(),
            index: gpu.index,
            gpu_type: gpu.gpu_type,
            health: gpu.health,
            memory_bytes: gpu.memory_bytes,
            used_bytes: gpu.used_bytes,
            running: Some(gpu.running).filter(|function| !function.is_empty()),
            executor_pid: gpu.executor_pid,
            executor_pids: gpu.executor_pids,
            restarts: gpu.restarts,
            swaps: gpu.swaps,
            peer_swaps: gpu.peer_swaps,
            evictions: gpu.evictions,
            moved_bytes: gpu.moved_bytes,
            busy_seconds: gpu.busy.and_then(seconds).unwrap_or(0.0),
            models,
        }
    }
}

impl ResidentModel {
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
