//! The documents that `-o json|yaml` prints: the admin API's messages under stable names, a
//! function's in the shape of its manifest with a `status` beside it.

use std::collections::BTreeMap;

use millrace_client::messages as wire;
use millrace_types::manifest::API_VERSION;
use serde::Serialize;

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
    queued: u32,
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
    restarts: u64,
    swaps: u64,
    evictions: u64,
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
    pub(crate) running: bool,
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
            },
            status: Status {
                enabled: function.enabled,
                conditions: function.conditions.into_iter().map(Condition::from).collect(),
                revisions: function.revisions.into_iter().map(Revision::from).collect(),
            },
        }
    }
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

impl From<wire::Node> for Node {
    fn from(node: wire::Node) -> Self {
        Self {
            gpus: node.gpus.into_iter().map(|gpu| Gpu::new(&node.name, gpu)).collect(),
            name: node.name,
            epoch: node.epoch,
            address: node.address,
            connected: node.connected,
            topology: node.topology,
            host_memory_bytes: node.host_memory_bytes,
            host_tier_bytes: node.host_tier_bytes,
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
            restarts: gpu.restarts,
            swaps: gpu.swaps,
            evictions: gpu.evictions,
            busy_seconds: gpu.busy.and_then(seconds).unwrap_or(0.0),
            models,
        }
    }
}

impl ResidentModel {
    pub(crate) fn new(node: &str, gpu: &wire::Gpu, model: wire::ResidentModel) -> Self {
        Self {
            running: !gpu.running.is_empty() && model.functions.contains(&gpu.running),
            node: node.to_owned(),
            gpu: gpu.index,
            functions: model.functions,
            digest: model.digest,
            bytes: model.bytes,
            loaded_bytes: model.loaded_bytes,
            idle_seconds: model.idle.and_then(seconds),
        }
    }
}
