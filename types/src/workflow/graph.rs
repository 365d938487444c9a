//! Checks of a workflow without its functions: names, sources, and a graph without cycles and
//! without steps that lead nowhere.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{INPUT, PORT_LEN_MAX, Step, StepTarget, TensorSource, WorkflowSpec};
use crate::function::{SpecError, TIMEOUT_MAX, name_prefix, validate_terms};
use crate::ids::FunctionName;
use crate::limits::{PORTS_MAX, STEPS_MAX};

/// The fault of a workflow that was refused without a look at its functions. Each message names the
/// correction.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WorkflowError {
    /// The objective, the timeout or a label is refused.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The workflow has no steps, inputs or outputs.
    #[error("there are no {0}: name at least one")]
    None(&'static str),
    /// The workflow has too many steps, inputs or outputs.
    #[error("{found} {what}: at most {limit} are allowed")]
    TooMany {
        /// The kind of the items: "steps", "inputs" or "outputs".
        what: &'static str,
        /// The number in the spec.
        found: usize,
        /// The maximum number.
        limit: usize,
    },
    /// Two inputs, steps or outputs have the same name.
    #[error("{what} {name:?} is defined twice: rename one of the two")]
    Twice {
        /// The kind of the item: "input", "step" or "output".
        what: &'static str,
        /// The repeated name.
        name: String,
    },
    /// A name is empty or exceeds [`PORT_LEN_MAX`].
    #[error("{what} {name:?} has {found} characters in its name: use 1 to {PORT_LEN_MAX}")]
    NameLen {
        /// The kind of the name: "input", "output" or "each".
        what: &'static str,
        /// The beginning of the name.
        name: String,
        /// The length of the name, in characters.
        found: usize,
    },
    /// The name of a step cannot stand before a dot in a source.
    #[error(
        "step \"{0}\" has a dot in its name, or is called {INPUT:?}: rename the step, because sources are written STEP.OUTPUT"
    )]
    StepName(FunctionName),
    /// The deadline of a step is zero or exceeds [`TIMEOUT_MAX`].
    #[error("the deadline of step \"{step}\" is {deadline:?}: use more than 0 and at most {TIMEOUT_MAX:?}")]
    Deadline {
        /// The name of the step.
        step: FunctionName,
        /// The refused deadline.
        deadline: Duration,
    },
    /// A source names an input or step that does not exist.
    #[error("{of} reads {source_text}, but there is no {missing}")]
    UnknownSource {
        /// The step or output with the source.
        of: String,
        /// The source as written.
        source_text: String,
        /// The missing input or step.
        missing: String,
    },
    /// The source of an output is an input of the workflow.
    #[error("output {output:?} is {from}, which the caller already has: use an output of a step")]
    PassedThrough {
        /// The name of the output.
        output: String,
        /// The source of the output.
        from: TensorSource,
    },
    /// `each` names a tensor that is not an input of the step.
    #[error("step \"{step}\" runs for each {each:?}, which is not one of its inputs: name one of {known}")]
    Each {
        /// The name of the step.
        step: FunctionName,
        /// The name in `each`.
        each: String,
        /// The inputs of the step.
        known: String,
    },
    /// Steps wait for each other in a cycle.
    #[error("steps wait for each other: {}", .0.join(" -> "))]
    Cycle(Vec<String>),
    /// A step runs the workflow that contains the step.
    #[error("step \"{0}\" runs the workflow that contains it: run another workflow")]
    RunsItself(FunctionName),
    /// No output of the workflow depends on the step.
    #[error("step \"{0}\" leads to no output of the workflow: use an output of the step, or remove the step")]
    LeadsNowhere(FunctionName),
    /// No step reads the input, so its type and shape are unknown.
    #[error("input {0:?} is read by no step: use or remove the input")]
    Unused(String),
}

impl WorkflowSpec {
    /// Checks the spec without the functions. [`Self::check`] checks the edges against the
    /// functions.
    ///
    /// # Errors
    /// The first [`WorkflowError`] found.
    pub fn validate(&self) -> Result<(), WorkflowError> {
        self.validate_limits()?;
        self.validate_names()?;
        self.validate_sources()?;
        if let Some(cycle) = self.cycle() {
            return Err(WorkflowError::Cycle(cycle));
        }
        self.validate_uses()
    }

    fn validate_limits(&self) -> Result<(), WorkflowError> {
        validate_terms(self.slo, self.timeout, &self.labels)?;
        let counts = [
            ("inputs", self.inputs.len(), PORTS_MAX),
            ("steps", self.steps.len(), STEPS_MAX),
            ("outputs", self.outputs.len(), PORTS_MAX),
        ];
        for (what, found, limit) in counts {
            if found == 0 {
                return Err(WorkflowError::None(what));
            }
            if found > limit {
                return Err(WorkflowError::TooMany { what, found, limit });
            }
        }
        for step in &self.steps {
            if let Some(deadline) = step.deadline.filter(|it| it.is_zero() || *it > TIMEOUT_MAX) {
                return Err(WorkflowError::Deadline { step: step.name.clone(), deadline });
            }
        }
        Ok(())
    }

    fn validate_names(&self) -> Result<(), WorkflowError> {
        let inputs = self.inputs.iter().map(|name| ("input", name));
        let outputs = self.outputs.iter().map(|output| ("output", &output.name));
        let each = self.steps.iter().filter_map(|step| Some(("each", step.each.as_ref()?)));
        for (what, name) in inputs.chain(outputs).chain(each) {
            let found = name.chars().count();
            if !(1..=PORT_LEN_MAX).contains(&found) {
                return Err(WorkflowError::NameLen { what, name: name_prefix(name), found });
            }
        }
        no_repeats("input", self.inputs.iter().map(String::as_str))?;
        no_repeats("step", self.steps.iter().map(|step| step.name.as_str()))?;
        no_repeats("output", self.outputs.iter().map(|output| output.name.as_str()))?;
        for step in &self.steps {
            if step.name.as_str().contains('.') || step.name.as_str() == INPUT {
                return Err(WorkflowError::StepName(step.name.clone()));
            }
            if matches!(&step.run, StepTarget::Workflow(name) if *name == self.key.name) {
                return Err(WorkflowError::RunsItself(step.name.clone()));
            }
            if let Some(each) = step.each.as_ref().filter(|each| !step.inputs.contains_key(*each)) {
                let known = step.inputs.keys().cloned().collect::<Vec<_>>().join(", ");
                return Err(WorkflowError::Each { step: step.name.clone(), each: each.clone(), known });
            }
        }
        Ok(())
    }

    fn validate_sources(&self) -> Result<(), WorkflowError> {
        for step in &self.steps {
            for source in step.sources() {
                self.known(source, || format!("step {:?}", step.name.as_str()))?;
            }
        }
        for output in &self.outputs {
            self.known(&output.from, || format!("output {:?}", output.name))?;
            if matches!(output.from, TensorSource::Input(_)) {
                return Err(WorkflowError::PassedThrough {
                    output: output.name.clone(),
                    from: output.from.clone(),
                });
            }
        }
        Ok(())
    }

    fn known(&self, source: &TensorSource, of: impl Fn() -> String) -> Result<(), WorkflowError> {
        let missing = match source {
            TensorSource::Input(name) if !self.inputs.contains(name) => format!("input {name:?}"),
            TensorSource::Step { step, .. } if self.step(step).is_none() => {
                format!("step {:?}", step.as_str())
            }
            TensorSource::Input(_) | TensorSource::Step { .. } => return Ok(()),
        };
        Err(WorkflowError::UnknownSource { of: of(), source_text: source.to_string(), missing })
    }

    /// Returns the steps in topological order. Steps in a cycle, behind a cycle, or behind a
    /// missing step are left out.
    #[must_use]
    pub fn in_order(&self) -> Vec<&Step> {
        let places: BTreeMap<&FunctionName, usize> =
            self.steps.iter().enumerate().map(|(at, step)| (&step.name, at)).collect();
        let mut followers = vec![Vec::new(); self.steps.len()];
        let mut waits_for = vec![0usize; self.steps.len()];
        for (at, step) in self.steps.iter().enumerate() {
            for name in before(step) {
                waits_for[at] += 1;
                if let Some(before) = places.get(name) {
                    followers[*before].push(at);
                }
            }
        }
        let mut order: Vec<usize> = (0..self.steps.len()).filter(|at| waits_for[*at] == 0).collect();
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            next += 1;
            for &follower in &followers[at] {
                waits_for[follower] -= 1;
                if waits_for[follower] == 0 {
                    order.push(follower);
                }
            }
        }
        order.into_iter().map(|at| &self.steps[at]).collect()
    }

    /// Returns steps that wait for each other, from a step back to itself.
    fn cycle(&self) -> Option<Vec<String>> {
        let done: BTreeSet<&FunctionName> = self.in_order().into_iter().map(|step| &step.name).collect();
        let stuck = |step: &&Step| !done.contains(&step.name);
        let mut way = vec![self.steps.iter().find(stuck)?];
        // Every stuck step waits for another stuck step, so the walk returns to a step that it has
        // seen.
        loop {
            let next = before(way[way.len() - 1]).filter_map(|name| self.step(name)).find(stuck)?;
            if let Some(place) = way.iter().position(|step| step.name == next.name) {
                let mut names: Vec<_> = way[place..].iter().map(|step| step.name.to_string()).collect();
                names.push(next.name.to_string());
                return Some(names);
            }
            way.push(next);
        }
    }

    fn validate_uses(&self) -> Result<(), WorkflowError> {
        let mut used: BTreeSet<&FunctionName> = BTreeSet::new();
        let mut rest: Vec<&TensorSource> = self.outputs.iter().map(|output| &output.from).collect();
        while let Some(source) = rest.pop() {
            if let TensorSource::Step { step, .. } = source
                && used.insert(step)
            {
                rest.extend(self.step(step).into_iter().flat_map(Step::sources));
            }
        }
        if let Some(step) = self.steps.iter().find(|step| !used.contains(&step.name)) {
            return Err(WorkflowError::LeadsNowhere(step.name.clone()));
        }
        let takes =
            |input: &str, source: &TensorSource| matches!(source, TensorSource::Input(name) if name == input);
        let taken = |input: &&String| {
            self.steps.iter().flat_map(|step| step.inputs.values()).any(|source| takes(input, source))
        };
        match self.inputs.iter().find(|input| !taken(input)) {
            Some(input) => Err(WorkflowError::Unused(input.clone())),
            None => Ok(()),
        }
    }
}

/// Returns the steps that a step waits for.
fn before(step: &Step) -> impl Iterator<Item = &FunctionName> {
    step.sources().filter_map(|source| match source {
        TensorSource::Step { step, .. } => Some(step),
        TensorSource::Input(_) => None,
    })
}

fn no_repeats<'a>(what: &'static str, names: impl Iterator<Item = &'a str>) -> Result<(), WorkflowError> {
    let mut seen = BTreeSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(WorkflowError::Twice { what, name: name.to_owned() });
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use super::super::WorkflowOutput;
    use super::*;
    use crate::ids::{FunctionKey, TenantName};

    type Change<'a> = &'a dyn Fn(&mut WorkflowSpec);

    fn name(name: &str) -> FunctionName {
        FunctionName::new(name).unwrap()
    }

    fn step(step: &str, inputs: &[(&str, &str)]) -> Step {
        let inputs: BTreeMap<_, _> =
            inputs.iter().map(|(input, from)| ((*input).to_owned(), from.parse().unwrap())).collect();
        Step {
            name: name(step),
            run: StepTarget::Function(name("f")),
            inputs,
            each: None,
            when: None,
            deadline: None,
        }
    }

    /// Edges: input.x -> a, a -> b and c, b and c -> d.
    fn diamond() -> WorkflowSpec {
        let key = FunctionKey { tenant: TenantName::default(), name: name("w") };
        let steps = vec![
            step("a", &[("x", "input.x")]),
            step("b", &[("x", "a.y")]),
            step("c", &[("x", "a.y")]),
            step("d", &[("l", "b.y"), ("r", "c.y")]),
        ];
        let outputs = vec![WorkflowOutput { name: "y".into(), from: "d.y".parse().unwrap() }];
        WorkflowSpec::new(key, vec!["x".into()], steps, outputs)
    }

    fn refused(change: impl FnOnce(&mut WorkflowSpec)) -> String {
        let mut spec = diamond();
        change(&mut spec);
        spec.validate().unwrap_err().to_string()
    }

    #[test]
    fn a_diamond_is_a_valid_workflow() {
        assert_eq!(diamond().validate(), Ok(()));
    }

    #[test]
    fn displayed_sources_parse_to_the_same_values() {
        for text in ["input.x", "detect.boxes", "a.output/Conv:0", "a.b.c"] {
            assert_eq!(text.parse::<TensorSource>().unwrap().to_string(), text);
        }
        assert_eq!("input.b.c".parse::<TensorSource>(), Ok(TensorSource::Input("b.c".into())));
        for bad in ["", "x", "x.", ".x", "A.x"] {
            assert!(bad.parse::<TensorSource>().is_err(), "{bad}");
        }
    }

    #[test]
    fn each_refusal_names_the_fault() {
        let source = |text: &str| text.parse::<TensorSource>().unwrap();
        let checks: &[(&str, Change<'_>)] = &[
            ("steps wait for each other: a -> d -> b -> a", &|it| {
                it.steps[0].when = Some(source("d.y"));
            }),
            ("steps wait for each other: b -> b", &|it| it.steps[1].when = Some(source("b.y"))),
            ("step \"c\" reads e.y, but there is no step \"e\"", &|it| {
                it.steps[2].inputs.insert("x".into(), source("e.y"));
            }),
            ("output \"y\" reads input.z, but there is no input \"z\"", &|it| {
                it.outputs[0].from = source("input.z");
            }),
            ("step \"c\" leads to no output", &|it| it.outputs[0].from = source("b.y")),
            ("input \"z\" is read by no step", &|it| it.inputs.push("z".into())),
            ("output \"y\" is input.x", &|it| it.outputs[0].from = source("input.x")),
            ("step \"a\" is defined twice", &|it| it.steps[1].name = name("a")),
            ("there are no outputs", &|it| it.outputs.clear()),
            ("65 steps: at most 64", &|it| it.steps = (0..65).map(|n| step(&format!("s{n}"), &[])).collect()),
            ("not one of its inputs: name one of l, r", &|it| it.steps[3].each = Some("x".into())),
            ("input \"\" has 0 characters", &|it| it.inputs.push(String::new())),
            ("xx\" has 257 characters in its name: use 1 to 256", &|it| it.inputs.push("x".repeat(257))),
            ("output \"\" has 0 characters", &|it| it.outputs[0].name.clear()),
            ("output \"yyy", &|it| it.outputs[0].name = "y".repeat(257)),
            ("each \"\" has 0 characters", &|it| it.steps[3].each = Some(String::new())),
            ("label \"\" is not valid", &|it| {
                it.labels.insert(String::new(), "v".into());
            }),
            ("step \"a.b\" has a dot", &|it| it.steps[0].name = name("a.b")),
            ("step \"b\" runs the workflow that contains it", &|it| {
                it.steps[1].run = StepTarget::Workflow(name("w"))
            }),
        ];
        for (says, change) in checks {
            let message = refused(change);
            assert!(message.contains(says), "{says:?}: {message}");
        }
        let mut longest = diamond();
        longest.outputs[0].name = "\u{fc}".repeat(256);
        assert_eq!(longest.validate(), Ok(()));
        assert!(refused(|it| it.timeout = Duration::ZERO).contains("timeout is zero"));
    }
}
