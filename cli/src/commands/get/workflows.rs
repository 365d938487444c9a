//! `get workflows`.

use std::time::SystemTime;

use millrace_client::messages as wire;

use crate::output::fields::{labels, objective, readiness};
use crate::output::table::{TextTable, col, wide};
use crate::output::{documents, text};

pub(super) fn table(workflows: &[wire::Workflow], now: SystemTime) -> TextTable {
    let mut table = TextTable::new([
        wide("TENANT"),
        col("NAME"),
        col("READY"),
        col("STEPS"),
        col("SLO"),
        wide("TIMEOUT"),
        wide("INPUTS"),
        wide("OUTPUTS"),
        wide("FUNCTIONS"),
        wide("LABELS"),
        wide("GENERATION"),
        col("AGE"),
    ]);
    for workflow in workflows {
        let spec = workflow.spec.clone().unwrap_or_default();
        let outputs: Vec<_> = spec.outputs.iter().map(|output| output.name.as_str()).collect();
        table.row([
            spec.tenant.clone(),
            spec.name.clone(),
            readiness(&workflow.conditions).to_owned(),
            spec.steps.len().to_string(),
            spec.slo.as_ref().map(objective).unwrap_or_default(),
            spec.timeout.and_then(documents::span).unwrap_or_default(),
            spec.inputs.join(","),
            outputs.join(","),
            runs(&spec.steps).join(","),
            labels(&spec.labels).join(","),
            workflow.generation.to_string(),
            text::age_of(workflow.created_at, now),
        ]);
    }
    table
}

/// Returns the functions and workflows that the steps run, each once, in order. A workflow is
/// `workflow/NAME`.
fn runs(steps: &[wire::WorkflowStep]) -> Vec<String> {
    let mut runs = Vec::new();
    for step in steps {
        let run = match &step.run {
            Some(wire::workflow_step::Run::Function(name)) => name.clone(),
            Some(wire::workflow_step::Run::Workflow(name)) => format!("workflow/{name}"),
            None => continue,
        };
        if !runs.contains(&run) {
            runs.push(run);
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ListFormat;
    use wire::workflow_step::Run;

    fn step(run: Run) -> wire::WorkflowStep {
        wire::WorkflowStep { run: Some(run), ..Default::default() }
    }

    #[test]
    fn workflows_are_listed_with_their_functions_and_objective() {
        let output = wire::WorkflowOutput { name: "people".into(), from: "people.scores".into() };
        let classify = || step(Run::Function("classify".into()));
        let spec = wire::WorkflowSpec {
            tenant: "team".into(),
            name: "traffic".into(),
            slo: Some(wire::Slo {
                deadline: Some(prost_types::Duration { seconds: 0, nanos: 500_000_000 }),
                percentile: 0.98,
            }),
            inputs: vec!["frame".into(), "mask".into()],
            steps: vec![classify(), step(Run::Workflow("person".into())), classify()],
            outputs: vec![output],
            ..Default::default()
        };
        let created_at = Some(prost_types::Timestamp { seconds: 60, nanos: 0 });
        let ready = wire::Condition {
            r#type: "Ready".into(),
            status: wire::ConditionStatus::True.into(),
            ..Default::default()
        };
        let workflow = wire::Workflow {
            spec: Some(spec),
            generation: 3,
            conditions: vec![ready],
            created_at,
            ..Default::default()
        };
        let table = table(&[workflow], SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(100));
        let narrow = "\
NAME      READY   STEPS   SLO         AGE
traffic   True    3       p98 500ms   40s
";
        assert_eq!(table.render(ListFormat::Table), narrow);
        let wide = "\
TENANT   NAME      READY   STEPS   SLO         TIMEOUT   INPUTS       OUTPUTS   FUNCTIONS                  LABELS   GENERATION   AGE
team     traffic   True    3       p98 500ms   -         frame,mask   people    classify,workflow/person   -        3            40s
";
        assert_eq!(table.render(ListFormat::Wide), wide);
    }
}
