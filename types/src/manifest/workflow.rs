//! Parsing and checks of `kind: Workflow`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::field::{FieldFault, Metadata, SloText, duration, timeout};
use crate::ids::{FunctionName, NAME_LEN_MAX};
use crate::workflow::{Step, StepTarget, TensorSource, TensorSourceError, WorkflowOutput, WorkflowSpec};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WorkflowText {
    slo: Option<SloText>,
    timeout: Option<String>,
    inputs: Vec<String>,
    steps: Vec<StepText>,
    outputs: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepText {
    name: String,
    function: Option<String>,
    workflow: Option<String>,
    inputs: BTreeMap<String, String>,
    each: Option<String>,
    when: Option<String>,
    deadline: Option<String>,
}

impl WorkflowText {
    pub(super) fn check(self, metadata: Metadata) -> Result<WorkflowSpec, FieldFault> {
        let output = |(name, from): (String, String)| {
            let from = source("spec.outputs", &from)?;
            Ok(WorkflowOutput { name, from })
        };
        let spec = WorkflowSpec {
            key: metadata.key()?,
            labels: metadata.labels,
            slo: self.slo.map(SloText::check).transpose()?,
            timeout: timeout(self.timeout)?,
            inputs: self.inputs,
            steps: self.steps.into_iter().map(StepText::check).collect::<Result<_, FieldFault>>()?,
            outputs: self.outputs.into_iter().map(output).collect::<Result<_, FieldFault>>()?,
        };
        spec.validate().map_err(|error| ("spec", error.to_string()))?;
        Ok(spec)
    }
}

impl StepText {
    fn check(self) -> Result<Step, FieldFault> {
        let run = match (&self.function, &self.workflow) {
            (Some(function), None) => StepTarget::Function(name("function", function)?),
            (None, Some(workflow)) => StepTarget::Workflow(name("workflow", workflow)?),
            (None, None) => {
                let problem = "runs nothing: write function: NAME or workflow: NAME";
                return Err(("spec.steps", format!("step {:?} {problem}", self.name)));
            }
            (Some(_), Some(_)) => {
                let problem = "names a function and a workflow: write one of them, not both";
                return Err(("spec.steps", format!("step {:?} {problem}", self.name)));
            }
        };
        let input = |(input, from): (String, String)| Ok((input, source("spec.steps", &from)?));
        Ok(Step {
            name: name("step", &self.name)?,
            run,
            inputs: self.inputs.into_iter().map(input).collect::<Result<_, FieldFault>>()?,
            each: self.each,
            when: self.when.map(|from| source("spec.steps", &from)).transpose()?,
            deadline: self.deadline.map(|text| duration("spec.steps", &text)).transpose()?,
        })
    }
}

fn source(field: &'static str, text: &str) -> Result<TensorSource, FieldFault> {
    text.parse().map_err(|error: TensorSourceError| (field, error.to_string()))
}

fn name(what: &str, name: &str) -> Result<FunctionName, FieldFault> {
    FunctionName::new(name).map_err(|_| {
        let problem = format!(
            "{what} name {name:?} is not valid: use 1 to {NAME_LEN_MAX} lower-case letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
        );
        ("spec.steps", problem)
    })
}
