//! The document of a workflow: its manifest, with a `status` beside it. The printed document can be
//! applied again.

use std::collections::BTreeMap;

use millrace_client::messages as wire;
use millrace_types::manifest::ManifestKind;
use serde::Serialize;

use super::{Condition, ManifestDocument, ModelMetadataDocument, Slo, Tensor, span};
use crate::output::text::moment;

pub(crate) type WorkflowDocument =
    ManifestDocument<ModelMetadataDocument, WorkflowSpecDocument, WorkflowStatusDocument>;

#[derive(Debug, Serialize)]
pub(crate) struct WorkflowSpecDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    slo: Option<Slo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout: Option<String>,
    inputs: Vec<String>,
    steps: Vec<Step>,
    outputs: BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
struct Step {
    name: String,
    #[serde(flatten)]
    run: Option<Run>,
    inputs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    each: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    when: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    deadline: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
enum Run {
    Function(String),
    Workflow(String),
}

#[derive(Debug, Serialize)]
pub(crate) struct WorkflowStatusDocument {
    conditions: Vec<Condition>,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

impl From<wire::Workflow> for WorkflowDocument {
    fn from(workflow: wire::Workflow) -> Self {
        let spec = workflow.spec.unwrap_or_default();
        let metadata = ModelMetadataDocument {
            name: spec.name,
            tenant: spec.tenant,
            labels: spec.labels.into_iter().collect(),
            generation: workflow.generation,
            resource_version: workflow.resource_version,
            created_at: workflow.created_at.and_then(moment),
            updated_at: workflow.updated_at.and_then(moment),
            updated_by: workflow.updated_by,
        };
        let spec = WorkflowSpecDocument {
            slo: spec.slo.map(Slo::from),
            timeout: spec.timeout.and_then(span),
            inputs: spec.inputs,
            steps: spec.steps.into_iter().map(Step::from).collect(),
            outputs: spec.outputs.into_iter().map(|output| (output.name, output.from)).collect(),
        };
        let status = WorkflowStatusDocument {
            conditions: workflow.conditions.into_iter().map(Condition::from).collect(),
            inputs: workflow.inputs.into_iter().map(Tensor::from).collect(),
            outputs: workflow.outputs.into_iter().map(Tensor::from).collect(),
        };
        Self::new(ManifestKind::Workflow, metadata, spec, status)
    }
}

impl From<wire::WorkflowStep> for Step {
    fn from(step: wire::WorkflowStep) -> Self {
        use wire::workflow_step::Run as Wire;
        Self {
            name: step.name,
            run: step.run.map(|run| match run {
                Wire::Function(name) => Run::Function(name),
                Wire::Workflow(name) => Run::Workflow(name),
            }),
            inputs: step.inputs.into_iter().collect(),
            each: step.each,
            when: step.when,
            deadline: step.deadline.and_then(span),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{ListFormat, document};
    use millrace_proto::convert::workflow_spec_wire;
    use millrace_types::manifest::{self, Manifest};

    /// The printed document without the fields that the server adds.
    const MANIFEST: &str = "\
apiVersion: millrace/v1
kind: Workflow
metadata:
  name: traffic
  tenant: team
  labels:
    of: vision
spec:
  slo:
    deadline: 500ms
    percentile: 0.98
  timeout: 1m 10s
  inputs:
  - frame
  steps:
  - name: detect
    function: detector
    inputs:
      image: input.frame
  - name: people
    workflow: person
    inputs:
      crop: detect.crops
      mask: input.frame
    each: crop
    when: detect.found
  outputs:
    people: people.scores
";

    #[test]
    fn a_printed_workflow_can_be_applied_again() {
        let Manifest::Workflow(spec) = manifest::parse(MANIFEST).unwrap().remove(0) else {
            panic!("not a workflow")
        };
        let workflow = wire::Workflow {
            spec: Some(workflow_spec_wire(&spec)),
            generation: 3,
            updated_by: "somebody".into(),
            inputs: vec![wire::TensorSpec {
                name: "frame".into(),
                datatype: "FP32".into(),
                shape: vec![-1, 3],
                ..Default::default()
            }],
            ..Default::default()
        };
        let printed = document(ListFormat::Yaml, &WorkflowDocument::from(workflow)).unwrap().unwrap();
        let (spec, status) = printed.split_once("status:\n").unwrap();
        let added = [
            "  generation: 3\n",
            "  resourceVersion: 0\n",
            "  createdAt: null\n",
            "  updatedAt: null\n",
            "  updatedBy: somebody\n",
        ];
        let written = added.iter().fold(spec.to_owned(), |text, line| text.replace(line, ""));
        assert_eq!(written, MANIFEST);
        assert!(status.contains("inputs:\n  - name: frame\n    datatype: FP32\n"), "{status}");
        assert_eq!(manifest::parse(&printed).unwrap(), manifest::parse(MANIFEST).unwrap());
    }
}
