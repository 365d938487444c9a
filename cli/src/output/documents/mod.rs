//! The documents that `-o json|yaml` prints: the admin API's messages under stable names, a
//! function's and a workflow's in the shape of its manifest with a `status` beside it.

mod cluster;
mod nodes;
mod workflows;

use std::collections::BTreeMap;

use millrace_client::messages as wire;
use millrace_types::manifest::API_VERSION;
use serde::Serialize;

pub(crate) use self::cluster::{ClusterStatus, Scaling, role};
pub(crate) use self::nodes::{Gpu, Node, ResidentModel};
pub(crate) use self::workflows::Workflow;
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
    #[serde(skip_serializing_if = "Option::is_none")]
    sequences: Option<Sequences>,
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
struct Sequences {
    state: Vec<StatePair>,
    idle: Option<String>,
    max: u32,
}

#[derive(Debug, Serialize)]
struct StatePair {
    input: String,
    output: String,
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
                slo: spec.slo.map(Slo::from),
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
                sequences: spec.sequences.map(Sequences::from),
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

impl From<wire::Sequences> for Sequences {
    fn from(wire: wire::Sequences) -> Self {
        let pair = |wire::SequenceState { input, output }| StatePair { input, output };
        let state = wire.state.into_iter().map(pair).collect();
        Self { state, idle: wire.idle.and_then(span), max: wire.max }
    }
}

impl From<wire::Slo> for Slo {
    fn from(slo: wire::Slo) -> Self {
        Self { deadline: slo.deadline.and_then(span), percentile: slo.percentile }
    }
}

impl From<wire::TensorSpec> for Tensor {
    fn from(spec: wire::TensorSpec) -> Self {
        Self { name: spec.name, datatype: spec.datatype, shape: spec.shape }
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
        Self {
            weights_bytes: model.weights_bytes,
            parameters: model.parameters,
            launches: model.launches,
            inputs: model.inputs.into_iter().map(Tensor::from).collect(),
            outputs: model.outputs.into_iter().map(Tensor::from).collect(),
        }
    }
}
