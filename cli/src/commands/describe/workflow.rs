//! `describe workflow`: the details, the inputs and outputs, and the graph of a workflow as text.

use std::time::SystemTime;

use millrace_client::messages as wire;
use millrace_proto::convert::workflow_spec;
use millrace_types::workflow::{Step, StepTarget};
use millrace_types::{Bytes, WorkflowSpec};

use super::lines::{condition_line, field, moment, tensor_line};
use crate::output::documents;
use crate::output::fields::{labels, objective, readiness};

/// The width of a graph's lines in characters, unless a single item is wider.
const WIDTH: usize = 100;
/// The widest column of step names. A longer name shifts the rest of its line.
const STEP_WIDTH: usize = 24;
/// The widest column of the steps' functions and workflows.
const RUN_WIDTH: usize = 32;
/// The number of spaces before a line.
const MARGIN: usize = 2;
/// The number of spaces between columns.
const GAP: usize = 3;

pub(super) fn report(workflow: &wire::Workflow, now: SystemTime) -> String {
    let spec = workflow.spec.clone().unwrap_or_default();
    let mut lines = vec![
        field("Name", &spec.name),
        field("Tenant", &spec.tenant),
        field("Labels", &labels(&spec.labels).join(", ")),
        field("Objective", &spec.slo.as_ref().map(objective).unwrap_or_default()),
        field("Timeout", &spec.timeout.and_then(documents::span).unwrap_or_default()),
        field("Ready", readiness(&workflow.conditions)),
        field("Created", &moment(workflow.created_at, now)),
        field("Updated", &moment(workflow.updated_at, now)),
        field("Updated by", &workflow.updated_by),
        field("Generation", &workflow.generation.to_string()),
        field("Version", &workflow.resource_version.to_string()),
        "Inputs:".to_owned(),
    ];
    lines.extend(workflow.inputs.iter().map(tensor_line));
    lines.push("Outputs:".to_owned());
    lines.extend(workflow.outputs.iter().map(tensor_line));
    lines.push("Conditions:".to_owned());
    lines.extend(workflow.conditions.iter().map(condition_line));
    lines.push("Graph:".to_owned());
    lines.extend(match workflow_spec(spec) {
        Ok(spec) => graph(&spec),
        Err(failure) => vec![format!("  the graph is malformed: {}", failure.message)],
    });
    if let Some(seen) = &workflow.passed {
        lines.push("Passed:".to_owned());
        lines.extend(passed(seen));
    }
    lines.join("\n")
}

/// Describes the traffic between functions in a run, on average.
fn passed(seen: &wire::WorkflowPassed) -> Vec<String> {
    let runs = if seen.runs == 1 { "1 run".to_owned() } else { format!("{} runs", seen.runs) };
    let mut lines = vec![format!("{:MARGIN$}{runs} since its controllers started", "")];
    for wire::PassedPair { from, to, bytes } in &seen.pairs {
        let each = Bytes(bytes / seen.runs.max(1));
        lines.push(format!("{:MARGIN$}{from} -> {to}: {each} a run", ""));
    }
    if seen.uncounted {
        lines.push(format!("{:MARGIN$}more pairs of functions than are counted", ""));
    }
    let missing = |id: &u64| format!("{:MARGIN$}controller {id} did not report its counts", "");
    lines.extend(seen.missing.iter().map(missing));
    lines
}

/// Returns a line for each step, after the steps on which it depends, between the workflow's inputs
/// and outputs.
fn graph(spec: &WorkflowSpec) -> Vec<String> {
    const INPUT: &str = "(input)";
    const OUTPUT: &str = "(output)";
    let steps = spec.in_order();
    let names = steps.iter().map(|step| step.name.as_str()).chain([INPUT, OUTPUT]);
    let names = width(names, STEP_WIDTH);
    let runs: Vec<_> = steps.iter().map(|step| title(&step.run)).collect();
    let runs_width = width(runs.iter().map(String::as_str), RUN_WIDTH);
    let row = |name: &str| format!("{:MARGIN$}{name:<names$}{:GAP$}", "", "");
    let outputs: Vec<_> =
        spec.outputs.iter().map(|output| format!("{} <- {}", output.name, output.from)).collect();

    let mut lines = wrapped(&row(INPUT), row("").len(), &spec.inputs);
    for (step, run) in steps.into_iter().zip(&runs) {
        let start = format!("{}{run:<runs_width$}{:GAP$}", row(step.name.as_str()), "");
        lines.extend(wrapped(&start, row("").len() + runs_width + GAP, &taken(step)));
    }
    lines.extend(wrapped(&row(OUTPUT), row("").len(), &outputs));
    lines
}

fn width<'a>(texts: impl Iterator<Item = &'a str>, limit: usize) -> usize {
    texts.map(str::len).max().unwrap_or(0).min(limit)
}

fn title(run: &StepTarget) -> String {
    match run {
        StepTarget::Function(name) => format!("function/{name}"),
        StepTarget::Workflow(name) => format!("workflow/{name}"),
    }
}

/// Describes the source of each input, and the step's other conditions.
fn taken(step: &Step) -> Vec<String> {
    let from = |(input, source): (&String, _)| match step.each.as_ref() == Some(input) {
        true => format!("{input} <- each row of {source}"),
        false => format!("{input} <- {source}"),
    };
    let when = step.when.as_ref().map(|source| format!("when {source}"));
    let within = step.deadline.map(|deadline| format!("within {deadline:?}"));
    step.inputs.iter().map(from).chain(when).chain(within).collect()
}

/// Returns the items after a start, wrapped to as many lines as necessary.
fn wrapped(start: &str, indent: usize, items: &[String]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = start.to_owned();
    let mut first = true;
    for (index, item) in items.iter().enumerate() {
        let comma = if index + 1 < items.len() { "," } else { "" };
        if !first && line.chars().count() + 1 + item.chars().count() + comma.len() > WIDTH {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
            first = true;
        }
        let space = if first { "" } else { " " };
        line += &format!("{space}{item}{comma}");
        first = false;
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_proto::convert::workflow_spec_wire;
    use millrace_types::manifest::{self, Manifest};

    fn read(manifest: &str) -> WorkflowSpec {
        match manifest::parse(manifest).unwrap().remove(0) {
            Manifest::Workflow(spec) => spec,
            _ => panic!("not a workflow"),
        }
    }

    #[test]
    fn a_workflow_report_shows_its_spec_and_its_graph() {
        // The manifest lists the steps in another order than they run.
        let spec = read(
            "\
apiVersion: millrace/v1
kind: Workflow
metadata: {name: traffic, tenant: city, labels: {of: vision}}
spec:
  slo: {deadline: 500ms}
  timeout: 10s
  inputs: [frame, limit]
  steps:
    - name: count
      function: count-by-class
      inputs: {cars: cars.scores, people: people.scores}
    - name: people
      workflow: person
      inputs: {crop: detect.crops, limit: input.limit}
      each: crop
      when: detect.found
      deadline: 40ms
    - {name: cars, function: car, inputs: {crop: detect.crops}, each: crop}
    - {name: detect, function: detector, inputs: {image: input.frame}}
  outputs: {total: count.total, people: people.scores}
",
        );
        let tensor = |name: &str, shape| wire::TensorSpec {
            name: name.into(),
            datatype: "FP32".into(),
            shape,
            ..Default::default()
        };
        let workflow = wire::Workflow {
            spec: Some(workflow_spec_wire(&spec)),
            generation: 3,
            resource_version: 7,
            inputs: vec![tensor("frame", vec![1, 3, 64, 64]), tensor("limit", vec![1])],
            outputs: vec![tensor("people", vec![-1, 10]), tensor("total", vec![1])],
            conditions: vec![wire::Condition {
                r#type: "Ready".into(),
                status: wire::ConditionStatus::False.into(),
                reason: "Preparing".into(),
                message: "function car is not ready".into(),
            }],
            created_at: Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 }),
            ..Default::default()
        };
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_060);
        let expected = "\
Name:        traffic
Tenant:      city
Labels:      of=vision
Objective:   p98 500ms
Timeout:     10s
Ready:       False
Created:     2023-11-14T22:13:20Z (60s ago)
Updated:     -
Updated by:  -
Generation:  3
Version:     7
Inputs:
  frame                FP32   [1, 3, 64, 64]
  limit                FP32   [1]
Outputs:
  people               FP32   [N, 10]
  total                FP32   [1]
Conditions:
  Ready      False    Preparing      function car is not ready
Graph:
  (input)    frame, limit
  detect     function/detector         image <- input.frame
  people     workflow/person           crop <- each row of detect.crops, limit <- input.limit,
                                       when detect.found, within 40ms
  cars       function/car              crop <- each row of detect.crops
  count      function/count-by-class   cars <- cars.scores, people <- people.scores
  (output)   people <- people.scores, total <- count.total";
        assert_eq!(report(&workflow, now), expected);
    }

    #[test]
    fn traffic_between_functions_is_averaged_over_runs() {
        let pair = |from: &str, to: &str, bytes| wire::PassedPair { from: from.into(), to: to.into(), bytes };
        let pairs = vec![pair("detector", "car", 4 << 20), pair("car", "count", 7)];
        let seen = wire::WorkflowPassed { runs: 2, pairs, missing: vec![3], uncounted: false };
        let expected = [
            "  2 runs since its controllers started",
            "  detector -> car: 2.0 MiB a run",
            "  car -> count: 3 B a run",
            "  controller 3 did not report its counts",
        ];
        assert_eq!(passed(&seen), expected);
        let none = wire::WorkflowPassed::default();
        assert_eq!(passed(&none), ["  0 runs since its controllers started"]);
        let many = wire::WorkflowPassed { runs: 3, uncounted: true, ..none };
        let expected =
            ["  3 runs since its controllers started", "  more pairs of functions than are counted"];
        assert_eq!(passed(&many), expected);
    }

    #[test]
    fn many_inputs_of_long_names_stay_within_the_width() {
        let long = "a-step-of-a-rather-long-name-that-nobody-would-choose";
        let inputs: Vec<_> = (0..6).map(|index| format!("an-input-{index}: input.frame")).collect();
        let spec = read(&format!(
            "apiVersion: millrace/v1\nkind: Workflow\nmetadata: {{name: w}}\nspec:\n  inputs: [frame]\n  steps:\n    - {{name: a, function: {long}, inputs: {{{}}}}}\n    - {{name: {long}, function: b, inputs: {{x: a.y}}}}\n  outputs: {{y: {long}.y}}\n",
            inputs.join(", ")
        ));
        let lines = graph(&spec);
        let indent = MARGIN + STEP_WIDTH + GAP + RUN_WIDTH + GAP;
        assert_eq!(lines[2], format!("{:indent$}an-input-1 <- input.frame,", ""));
        assert_eq!(lines.last().unwrap().trim_start(), format!("(output)                   y <- {long}.y"));
        let too_wide = lines[2..7].iter().filter(|line| line.chars().count() > WIDTH);
        assert_eq!(too_wide.count(), 0, "{lines:#?}");
    }

    #[test]
    fn a_malformed_graph_is_reported_with_its_fault() {
        let workflow = wire::Workflow::default();
        let last = report(&workflow, SystemTime::UNIX_EPOCH).lines().last().unwrap().to_owned();
        assert!(last.starts_with("  the graph is malformed: "), "{last}");
    }
}
