//! Records as the API shows them.

use millrace_cluster_state::{Function, ModelSummary, RevisionRecord, State};
use millrace_proto::admin as api;
use millrace_proto::convert::{function_spec_wire, tensor_spec_wire, timestamp_wire};
use millrace_types::{Bytes, Digest};

use crate::fleet::Workers;
use crate::fleet::readiness::{self, Readiness};

pub(super) fn function(state: &State, function: &Function, workers: &Workers) -> api::Function {
    let ready = readiness::of_revision(function, function.latest(), workers);
    api::Function {
        spec: Some(function_spec_wire(&function.latest().spec)),
        generation: function.generation().get(),
        resource_version: function.resource_version,
        enabled: function.enabled,
        revisions: function.revisions.iter().map(|it| revision(state, it)).collect(),
        conditions: vec![condition(&ready)],
        created_at: Some(timestamp_wire(function.created_at.0)),
        updated_at: Some(timestamp_wire(function.updated_at.0)),
        updated_by: function.updated_by.to_string(),
    }
}

/// The condition "Ready" of the newest revision.
fn condition(ready: &Readiness) -> api::Condition {
    let status = match ready {
        Readiness::Prepared(_) => api::ConditionStatus::True,
        _ => api::ConditionStatus::False,
    };
    api::Condition {
        r#type: "Ready".into(),
        status: status.into(),
        reason: ready.reason().into(),
        message: ready.message(),
    }
}

fn revision(state: &State, revision: &RevisionRecord) -> api::Revision {
    let record = state.artifact(&revision.digest);
    api::Revision {
        number: revision.number.get(),
        artifact: record.map(|record| artifact(record.digest, record.bytes)),
        model: record.map(|record| model(&record.model)),
        created_at: Some(timestamp_wire(revision.created_at.0)),
    }
}

pub(super) fn artifact(digest: Digest, bytes: Bytes) -> api::Artifact {
    api::Artifact { digest: digest.to_string(), bytes: bytes.get() }
}

pub(super) fn model(model: &ModelSummary) -> api::ModelSummary {
    api::ModelSummary {
        weights_bytes: model.weights.get(),
        parameters: model.parameters,
        launches: model.launches,
        inputs: model.inputs.iter().map(tensor_spec_wire).collect(),
        outputs: model.outputs.iter().map(tensor_spec_wire).collect(),
    }
}
