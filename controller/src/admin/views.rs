//! Conversion of records into API messages.

use std::sync::Arc;

use millrace_cluster_state::{
    FunctionRecord, ModelSummary, RevisionRecord, SliceRecord, State, WorkflowRecord,
};
use millrace_nodes::placement::UnplacedReason;
use millrace_proto::admin as api;
use millrace_proto::convert::{function_spec_wire, tensor_spec_wire, timestamp_wire, workflow_spec_wire};
use millrace_scheduling::preset::SchedulingPolicy;
use millrace_types::policy::GpuSharingName;
use millrace_types::{Bytes, Digest, PolicySpec};

use super::objective;
use crate::fleet::Workers;
use crate::fleet::readiness::{self, RevisionReadiness};
use crate::leadership::{LeaderStatus, Shortages};

/// Converts a function with the given revisions.
pub(super) fn function(
    state: &State,
    function: &FunctionRecord,
    revisions: &[Arc<RevisionRecord>],
    workers: &Workers,
    outlook: &LeaderStatus,
) -> api::Function {
    let shortages = &outlook.shortages();
    let ready = readiness::of_revision(state, function, function.latest(), workers, shortages);
    let mut conditions = vec![ready_condition(&ready), placed_condition(state, function, shortages)];
    conditions.extend(sliced_condition(state, function, outlook));
    let score = state.score(&function.key);
    let usage = state.usage(&function.key);
    let slo = function.latest().spec.slo.as_ref();
    conditions.extend(slo.map(|slo| objective::condition(slo, score.total, usage, function.generation())));
    api::Function {
        spec: Some(function_spec_wire(&function.latest().spec)),
        generation: function.generation().get(),
        resource_version: function.resource_version,
        enabled: function.enabled,
        revisions: revisions.iter().map(|it| revision(state, it)).collect(),
        conditions,
        created_at: Some(timestamp_wire(function.created_at.0)),
        updated_at: Some(timestamp_wire(function.updated_at.0)),
        updated_by: function.updated_by.to_string(),
    }
}

pub(super) fn workflow(
    state: &State,
    workflow: &WorkflowRecord,
    workers: &Workers,
    shortages: &Shortages,
) -> api::Workflow {
    let (ready, reason, message) = match readiness::of_workflow(state, workflow, workers, shortages) {
        None => (true, "Prepared", "all functions of the workflow are ready".to_owned()),
        Some((name, why)) => (false, why.reason(), format!("function {name}: {}", why.message())),
    };
    api::Workflow {
        spec: Some(workflow_spec_wire(&workflow.spec)),
        generation: workflow.generation.get(),
        resource_version: workflow.resource_version,
        inputs: workflow.signature.inputs.iter().map(tensor_spec_wire).collect(),
        outputs: workflow.signature.outputs.iter().map(tensor_spec_wire).collect(),
        conditions: vec![condition("Ready", ready, reason, message)],
        created_at: Some(timestamp_wire(workflow.created_at.0)),
        updated_at: Some(timestamp_wire(workflow.updated_at.0)),
        updated_by: workflow.updated_by.to_string(),
        passed: None,
    }
}

/// Returns the condition "Ready" of the newest revision.
fn ready_condition(ready: &RevisionReadiness) -> api::Condition {
    condition("Ready", matches!(ready, RevisionReadiness::Prepared(_)), ready.reason(), ready.message())
}

/// Returns the condition "Placed": whether the function has as many placements as the owner requested.
fn placed_condition(state: &State, function: &FunctionRecord, shortages: &Shortages) -> api::Condition {
    let nodes: Vec<_> = state.placements_of(&function.key).map(|it| it.node.to_string()).collect();
    let wanted = function.latest().spec.replicas;
    let on = if nodes.is_empty() { String::new() } else { format!(" (on {})", nodes.join(", ")) };
    let copies = format!("{} of {wanted} copies{on}", nodes.len());
    if !function.enabled {
        return condition("Placed", false, "Disabled", "unloaded: load it to serve".to_owned());
    }
    let is_short = nodes.len() < wanted as usize;
    // This check needs no plan, so the condition holds from the first moment.
    let no_node =
        (is_short && !state.nodes().any(|node| node.takes_functions())).then_some(UnplacedReason::NoNode);
    match no_node.or(shortages.get(&function.key).map(|short| short.why)) {
        Some(short) => condition("Placed", false, reason(&short), format!("{copies}: {short}")),
        None if is_short => condition("Placed", false, "Placing", copies),
        None => condition("Placed", true, "Placed", copies),
    }
}

/// Returns the condition "Sliced": whether each slice that the function asks for has a GPU. `None` for a
/// function that asks for no slices.
fn sliced_condition(
    state: &State,
    function: &FunctionRecord,
    outlook: &LeaderStatus,
) -> Option<api::Condition> {
    let asked = function.latest().spec.slices?;
    let policy = state.policy().map_or(PolicySpec::NONE, |policy| policy.spec.carried_out());
    if SchedulingPolicy::default().with(&policy).gpu_sharing == GpuSharingName::Off {
        let message = "GPUs are not shared, so resources.sm and the quotas have no effect: share them with \
                       'millrace policy set --gpu-sharing slices'";
        return Some(condition("Sliced", false, "NotShared", message.into()));
    }
    let placements = state.placements_of(&function.key);
    let on = placements.flat_map(|placement| {
        let place = |slice: &SliceRecord| format!("{}/{}", placement.node, slice.gpu.0);
        placement.slices.iter().map(place).collect::<Vec<_>>()
    });
    let on: Vec<_> = on.collect();
    let places = if on.is_empty() { String::new() } else { format!(" (on {})", on.join(", ")) };
    let slices = format!("{} of {} slices of {}{places}", on.len(), asked.min, asked.terms);
    let missing = outlook.missing_slices().get(&function.key).map(|missing| missing.why.to_string());
    Some(match missing {
        Some(why) => condition("Sliced", false, "NoRoom", format!("{slices}: {why}")),
        None if on.len() < asked.min as usize => condition("Sliced", false, "Placing", slices),
        None => condition("Sliced", true, "Sliced", slices),
    })
}

/// Returns the reason why a copy cannot be placed, in CamelCase.
fn reason(why: &UnplacedReason) -> &'static str {
    match why {
        UnplacedReason::NoNode => "NoNode",
        UnplacedReason::TooFewNodes { .. } => "TooFewNodes",
        UnplacedReason::NodesFull { .. } => "NodesFull",
        UnplacedReason::GpuMemory { .. } => "GpuMemory",
        UnplacedReason::HostMemory { .. } => "HostMemory",
        UnplacedReason::Failing { .. } => "Failing",
    }
}

pub(super) fn condition(kind: &str, holds: bool, reason: &str, message: String) -> api::Condition {
    let status = if holds { api::ConditionStatus::True } else { api::ConditionStatus::False };
    api::Condition { r#type: kind.into(), status: status.into(), reason: reason.into(), message }
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
