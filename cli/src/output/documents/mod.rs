//! The documents of `-o json|yaml`: the admin API's messages under stable names. Objects with a
//! manifest are printed in its shape ([`ManifestDocument`]).

mod cluster;
mod document;
mod functions;
mod nodes;
mod workflows;

use std::collections::BTreeMap;

use millrace_client::messages as wire;
use serde::Serialize;

pub(crate) use self::cluster::{ClusterStatusDocument, ScalingDocument, role};
pub(crate) use self::document::ManifestDocument;
pub(crate) use self::functions::FunctionDocument;
pub(crate) use self::nodes::{GpuDocument, NodeDocument, ResidentModelDocument};
pub(crate) use self::workflows::WorkflowDocument;

/// The metadata of functions and workflows.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ModelMetadataDocument {
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
struct Slo {
    deadline: Option<String>,
    percentile: f64,
}

#[derive(Debug, Serialize)]
struct Condition {
    r#type: String,
    status: &'static str,
    reason: String,
    message: String,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    datatype: String,
    shape: Vec<i64>,
}

/// Returns the word for a condition's status.
pub(crate) fn status_word(condition: &wire::Condition) -> &'static str {
    match condition.status() {
        wire::ConditionStatus::True => "True",
        wire::ConditionStatus::False => "False",
        wire::ConditionStatus::Unknown | wire::ConditionStatus::Unspecified => "Unknown",
    }
}

/// Formats a duration as manifests write it.
pub(crate) fn span(wire: prost_types::Duration) -> Option<String> {
    let span = std::time::Duration::try_from(wire).ok()?;
    Some(humantime::format_duration(span).to_string())
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
