//! `describe`: all details of a function, workflow or node, for people.

mod lines;
mod node;
mod workflow;

use std::time::SystemTime;

use millrace_client::messages as wire;
use millrace_types::{FunctionName, Priority};

use crate::clock;
use crate::commands::describe::lines::{condition_line, field, moment, tensor_line};
use crate::failure::CommandFailure;
use crate::output::fields::{labels, objective, readiness, short_digest};
use crate::output::residents::residents;
use crate::output::{ListOutput, document, documents, print, slices, text};
use crate::session::ClusterSession;
use crate::target::{ResourceKind, ResourceTarget};

/// Show all details of a function, workflow or node.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The item to describe, such as function/digits, workflow/traffic or node/n0.
    #[arg(value_name = "TYPE[/NAME]")]
    target: ResourceTarget,
    /// The name, if the type stands alone.
    name: Option<String>,
    #[command(flatten)]
    output: ListOutput,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let kind = args.target.kind;
    let word = match kind {
        ResourceKind::Function => "function",
        ResourceKind::Workflow => "workflow",
        ResourceKind::Node => "node",
        ResourceKind::Gpu
        | ResourceKind::Slice
        | ResourceKind::Profile
        | ResourceKind::Tenant
        | ResourceKind::Policy
        | ResourceKind::Operation
        | ResourceKind::Scaling => {
            return Err(CommandFailure::usage("only functions, workflows and nodes can be described")
                .hint("'millrace get -o yaml' shows everything of the others"));
        }
    };
    let name = args.target.name(args.name)?.ok_or_else(|| {
        CommandFailure::usage(format!("no {word} is named"))
            .hint(format!("name it: millrace describe {word} NAME"))
    })?;
    let format = args.output.output;
    if kind == ResourceKind::Node {
        let node = session.admin.nodes().await?.into_iter().find(|node| node.name == name);
        let node = node.ok_or_else(|| {
            CommandFailure::not_found(format!("there is no node {name:?}"))
                .hint("list the nodes: millrace get nodes")
        })?;
        let text = node::report(&node);
        return print(&document(format, &documents::NodeDocument::from(node))?.unwrap_or(text));
    }
    let name = FunctionName::new(&name).map_err(|error| CommandFailure::usage(error.to_string()))?;
    let key = session.key(&name);
    if kind == ResourceKind::Workflow {
        let workflow = session.admin.workflow_with_traffic(&key).await?;
        let text = workflow::report(&workflow, clock::wall());
        return print(&document(format, &documents::WorkflowDocument::from(workflow))?.unwrap_or(text));
    }
    let (function, nodes) = futures::try_join!(session.admin.function(&key), session.admin.nodes())?;
    let text = report(&function, &nodes, clock::wall());
    print(&document(format, &documents::FunctionDocument::from(function))?.unwrap_or(text))
}

fn report(function: &wire::Function, nodes: &[wire::Node], now: SystemTime) -> String {
    let spec = function.spec.clone().unwrap_or_default();
    let memory = spec.resources.as_ref().map(|asked| text::size(asked.gpu_memory_bytes));
    let mut lines = vec![
        field("Name", &spec.name),
        field("Tenant", &spec.tenant),
        field("Labels", &labels(&spec.labels).join(", ")),
        field("Runtime", &spec.runtime),
        field("Objective", &spec.slo.as_ref().map(objective).unwrap_or_default()),
        field("Timeout", &spec.timeout.and_then(documents::span).unwrap_or_default()),
        field("GPU memory", &memory.unwrap_or_else(|| "as the model needs".to_owned())),
        field("Idempotent", if spec.idempotent { "yes" } else { "no" }),
        field("Replicas", &spec.replicas.max(1).to_string()),
        field("Priority", &priority(spec.priority)),
        field("Residency", &residency(spec.residency.unwrap_or_default())),
        field("Batching", &spec.batching.as_ref().map_or_else(|| "each request alone".to_owned(), batching)),
        field("Sequences", &spec.sequences.as_ref().map_or_else(|| "keeps no state".to_owned(), sequences)),
        field(
            "Slices",
            &spec.slices.as_ref().map_or_else(|| "none: any SMs at any time".to_owned(), slices::asked),
        ),
        field("Enabled", if function.enabled { "yes" } else { "no" }),
        field("Ready", readiness(&function.conditions)),
        field("Created", &moment(function.created_at, now)),
        field("Updated", &moment(function.updated_at, now)),
        field("Updated by", &function.updated_by),
        field("Version", &function.resource_version.to_string()),
    ];
    lines.extend(model_lines(function));
    lines.push("Revisions:".to_owned());
    lines.extend(function.revisions.iter().rev().map(|revision| revision_line(revision, now)));
    lines.push("Conditions:".to_owned());
    lines.extend(function.conditions.iter().map(condition_line));
    lines.push("Resident on:".to_owned());
    lines.extend(resident_lines(function, &spec, nodes));
    lines.join("\n")
}

fn priority(level: u32) -> String {
    let level = if level == 0 { Priority::default().get().into() } else { level };
    format!("{level} of {} (1 is served first)", Priority::LAST)
}

fn residency(wire: wire::Residency) -> String {
    let kept = (wire.min_warm > 0).then(|| format!("kept on {} of each node's GPUs", wire.min_warm));
    let pinned = wire.pin.then(|| "evicted last".to_owned());
    let after =
        wire.evict_after.and_then(documents::span).map(|after| format!("evicted after {after} unused"));
    let said: Vec<_> = [kept, pinned, after].into_iter().flatten().collect();
    if said.is_empty() { "evicted when other models need memory".to_owned() } else { said.join(", ") }
}

fn batching(wire: &wire::Batching) -> String {
    let wait = wire.max_wait.and_then(documents::span).unwrap_or_else(|| "0s".to_owned());
    format!("up to {} rows in one run, held back for at most {wait}", wire.max_size)
}

fn sequences(wire: &wire::Sequences) -> String {
    let pairs: Vec<_> = wire.state.iter().map(|pair| format!("{} -> {}", pair.output, pair.input)).collect();
    let idle = wire.idle.and_then(documents::span).unwrap_or_default();
    format!("{} kept for up to {} sequences, each until it is idle for {idle}", pairs.join(", "), wire.max)
}

fn model_lines(function: &wire::Function) -> Vec<String> {
    let latest = function.revisions.iter().max_by_key(|revision| revision.number);
    let Some(model) = latest.and_then(|revision| revision.model.as_ref()) else { return Vec::new() };
    let mut lines = vec![
        field(
            "Model",
            &format!(
                "{} parameters, {} of weights, run in {} launch{}",
                text::count(model.parameters),
                text::size(model.weights_bytes),
                model.launches,
                if model.launches == 1 { "" } else { "es" }
            ),
        ),
        "Inputs:".to_owned(),
    ];
    let state = function.spec.as_ref().and_then(|spec| spec.sequences.as_ref()).map(|kept| &kept.state[..]);
    let state = state.unwrap_or_default();
    let line = |tensor: &wire::TensorSpec, is_state: bool| {
        tensor_line(tensor) + if is_state { "  (state: hidden from clients)" } else { "" }
    };
    let is_read = |name: &str| state.iter().any(|pair| pair.input == name);
    lines.extend(model.inputs.iter().map(|tensor| line(tensor, is_read(&tensor.name))));
    lines.push("Outputs:".to_owned());
    let is_kept = |name: &str| state.iter().any(|pair| pair.output == name);
    lines.extend(model.outputs.iter().map(|tensor| line(tensor, is_kept(&tensor.name))));
    lines
}

fn revision_line(revision: &wire::Revision, now: SystemTime) -> String {
    let artifact = revision.artifact.clone().unwrap_or_default();
    let age = text::age_of(revision.created_at, now);
    format!(
        "  {:<5} {} {:>10} {age}",
        revision.number,
        short_digest(&artifact.digest),
        text::size(artifact.bytes)
    )
}

fn resident_lines(function: &wire::Function, spec: &wire::FunctionSpec, nodes: &[wire::Node]) -> Vec<String> {
    let prefix = format!("{}/{}@", spec.tenant, spec.name);
    let mut lines = Vec::new();
    for (node, gpu, model) in residents(nodes) {
        let loaded = text::size(model.loaded_bytes);
        let held = text::size(model.bytes);
        let revisions = model.functions.iter().filter_map(|function| function.strip_prefix(&prefix));
        lines.extend(revisions.map(|revision| {
            format!("  {node} GPU {}: revision {revision}, {loaded} loaded, {held} of memory", gpu.index)
        }));
    }
    if lines.is_empty() {
        lines.push(match readiness(&function.conditions) {
            "True" if in_host_memory(function, nodes) => {
                "  no GPU: the model is swapped in when a request arrives".to_owned()
            }
            "True" => "  no GPU and no host memory: the model is read from a worker's disk when a request arrives (a cold start)".to_owned(),
            _ => "  no GPU".to_owned(),
        });
    }
    lines
}

/// Returns whether a node may have a model of the function in host memory. A node that did not
/// report, or reported only some of its models, may have it.
fn in_host_memory(function: &wire::Function, nodes: &[wire::Node]) -> bool {
    let of_function = |digest: &String| {
        let mut artifacts = function.revisions.iter().filter_map(|revision| revision.artifact.as_ref());
        artifacts.any(|artifact| artifact.digest == *digest)
    };
    let may_have = |node: &wire::Node| !node.connected || node.host_models_left_out > 0;
    nodes.iter().any(|node| may_have(node) || node.host_models.iter().any(of_function))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_whether_the_model_waits_in_host_memory_or_on_disk() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        let artifact = Some(wire::Artifact { digest: digest.clone(), bytes: 1 });
        let function = wire::Function {
            revisions: vec![wire::Revision { number: 1, artifact, ..Default::default() }],
            conditions: vec![wire::Condition {
                r#type: "Ready".into(),
                status: wire::ConditionStatus::True.into(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let waits = |host_models: Vec<String>, connected| {
            let node = wire::Node { name: "n0".into(), connected, host_models, ..Default::default() };
            resident_lines(&function, &wire::FunctionSpec::default(), &[node]).concat()
        };
        assert!(waits(vec![digest], true).contains("swapped in"));
        assert!(waits(vec![], false).contains("swapped in"), "the node did not report");
        assert!(waits(vec!["sha256:00".into()], true).contains("a cold start"));
    }

    #[test]
    fn a_report_marks_tensors_that_are_hidden_from_clients() {
        let tensor = |name: &str| wire::TensorSpec { name: name.into(), ..Default::default() };
        let inputs = vec![tensor("x"), tensor("h")];
        let outputs = vec![tensor("y"), tensor("g")];
        let model = Some(wire::ModelSummary { inputs, outputs, ..Default::default() });
        let pair = wire::SequenceState { input: "h".into(), output: "g".into() };
        let sequences = Some(wire::Sequences { state: vec![pair], ..Default::default() });
        let function = wire::Function {
            spec: Some(wire::FunctionSpec { sequences, ..Default::default() }),
            revisions: vec![wire::Revision { model, ..Default::default() }],
            ..Default::default()
        };
        let lines = model_lines(&function);
        let hidden: Vec<_> = lines.iter().filter(|line| line.contains("(state")).collect();
        assert!(matches!(hidden[..], [h, g] if h.starts_with("  h ") && g.starts_with("  g ")), "{lines:?}");
    }

    #[test]
    fn a_function_report_shows_its_spec_model_and_residency() {
        let tensor = |name: &str, shape| wire::TensorSpec {
            name: name.into(),
            datatype: "FP32".into(),
            shape,
            ..Default::default()
        };
        let model = wire::ModelSummary {
            weights_bytes: 33_280,
            parameters: 8_320,
            launches: 2,
            inputs: vec![tensor("x", vec![-1, 64])],
            outputs: vec![tensor("y", vec![-1, 10])],
        };
        let artifact = wire::Artifact { digest: format!("sha256:{}", "ab".repeat(32)), bytes: 34_000 };
        let created_at = Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 });
        let function = wire::Function {
            spec: Some(wire::FunctionSpec {
                tenant: "default".into(),
                name: "mlp".into(),
                runtime: "onnx".into(),
                idempotent: true,
                ..Default::default()
            }),
            enabled: true,
            revisions: vec![wire::Revision {
                number: 1,
                artifact: Some(artifact),
                model: Some(model),
                created_at,
            }],
            conditions: vec![wire::Condition {
                r#type: "Ready".into(),
                status: wire::ConditionStatus::True.into(),
                reason: "Prepared".into(),
                message: String::new(),
            }],
            created_at,
            ..Default::default()
        };
        let resident = wire::ResidentModel {
            functions: vec!["default/mlp@1".into(), "default/mlp-2@1".into()],
            bytes: 2 << 20,
            loaded_bytes: 33_280,
            ..Default::default()
        };
        let gpus = vec![wire::Gpu { index: 1, models: vec![resident], ..Default::default() }];
        let nodes = [wire::Node { name: "n0".into(), gpus, ..Default::default() }];
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_060);
        let expected = "\
Name:        mlp
Tenant:      default
Labels:      -
Runtime:     onnx
Objective:   -
Timeout:     -
GPU memory:  as the model needs
Idempotent:  yes
Replicas:    1
Priority:    4 of 8 (1 is served first)
Residency:   evicted when other models need memory
Batching:    each request alone
Sequences:   keeps no state
Slices:      none: any SMs at any time
Enabled:     yes
Ready:       True
Created:     2023-11-14T22:13:20Z (60s ago)
Updated:     -
Updated by:  -
Version:     0
Model:       8,320 parameters, 32.5 KiB of weights, run in 2 launches
Inputs:
  x                    FP32   [N, 64]
Outputs:
  y                    FP32   [N, 10]
Revisions:
  1     abababababab   33.2 KiB 60s
Conditions:
  Ready      True     Prepared
Resident on:
  n0 GPU 1: revision 1, 32.5 KiB loaded, 2.0 MiB of memory";
        assert_eq!(report(&function, &nodes, now), expected);
    }
}
