//! What can be said of a workflow without its functions: names, sources, and that its graph has no
//! cycle and nothing in it that leads nowhere.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{INPUT, PORT_LEN_MAX, Run, Source, Step, WorkflowSpec};
use crate::function::{SpecError, TIMEOUT_MAX, beginning, validate_terms};
use crate::ids::FunctionName;
use crate::limits::{PORTS_MAX, STEPS_MAX};

/// Why a workflow was refused, by itself. Each message says what to write instead.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WorkflowError {
    /// Its objective, timeout or labels.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// No steps, inputs or outputs.
    #[error("there are no {0}: name at least one")]
    None(&'static str),
    /// Too many of them.
    #[error("{found} {what}: at most {limit} are taken")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there may be.
        limit: usize,
    },
    /// An input, step or output twice.
    #[error("{what} {name:?} is there twice: rename one of the two")]
    Twice {
        /// What it is.
        what: &'static str,
        /// The name met again.
        name: String,
    },
    /// A name that is empty, or longer than [`PORT_LEN_MAX`].
    #[error("{what} {name:?} has {found} characters in its name: use 1 to {PORT_LEN_MAX}")]
    NameLen {
        /// What it is.
        what: &'static str,
        /// How the name begins.
        name: String,
        /// How long it is.
        found: usize,
    },
    /// A step's name that cannot stand before a dot.
    #[error(
        "step \"{0}\" has a dot in its name, or is called {INPUT:?}: rename it, for sources are written STEP.OUTPUT"
    )]
    StepName(FunctionName),
    /// A step's deadline that nothing can keep, or that is none.
    #[error("the deadline of step \"{step}\" is {deadline:?}: use more than 0 and at most {TIMEOUT_MAX:?}")]
    Deadline {
        /// Which step.
        step: FunctionName,
        /// What it says.
        deadline: Duration,
    },
    /// A source that is not there.
    #[error("{of} takes {source_text}, but there is no {missing}")]
    UnknownSource {
        /// Who takes it.
        of: String,
        /// What it takes, as written.
        source_text: String,
        /// What is missing.
        missing: String,
    },
    /// An output that no step makes.
    #[error("output {output:?} is {from}, which the caller has already: take it from a step")]
    PassedThrough {
        /// Which output.
        output: String,
        /// Where it comes from.
        from: Source,
    },
    /// `each` names what is no input of the step.
    #[error("step \"{step}\" runs for each {each:?}, which is none of its inputs: name one of {known}")]
    Each {
        /// Which step.
        step: FunctionName,
        /// What it names.
        each: String,
        /// What it has.
        known: String,
    },
    /// Steps that wait for each other.
    #[error("steps wait for each other: {}", .0.join(" -> "))]
    Cycle(Vec<String>),
    /// It runs itself.
    #[error("step \"{0}\" runs the workflow it is in: workflows end")]
    RunsItself(FunctionName),
    /// A step that leads to no output.
    #[error("step \"{0}\" leads to no output of the workflow: use what it gives, or take it out")]
    LeadsNowhere(FunctionName),
    /// An input that is no input of any step: nothing says what it is.
    #[error("input {0:?} is taken by no step: use it, or take it out")]
    Unused(String),
}

impl WorkflowSpec {
    /// Checks everything that can be seen without the functions. [`Self::check`] does the rest.
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
                return Err(WorkflowError::NameLen { what, name: beginning(name), found });
            }
        }
        no_repeats("input", self.inputs.iter().map(String::as_str))?;
        no_repeats("step", self.steps.iter().map(|step| step.name.as_str()))?;
        no_repeats("output", self.outputs.iter().map(|output| output.name.as_str()))?;
        for step in &self.steps {
            if step.name.as_str().contains('.') || step.name.as_str() == INPUT {
                return Err(WorkflowError::StepName(step.name.clone()));
            }
            if matches!(&step.run, Run::Workflow(name) if *name == self.key.name) {
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
            if matches!(output.from, Source::Input(_)) {
                let (output, from) = (output.name.clone(), output.from.clone());
                return Err(WorkflowError::PassedThrough { output, from });
            }
        }
        Ok(())
    }

    fn known(&self, source: &Source, of: impl Fn() -> String) -> Result<(), WorkflowError> {
        let missing = match source {
            Source::Input(name) if !self.inputs.contains(name) => format!("input {name:?}"),
            Source::Step { step, .. } if self.step(step).is_none() => format!("step {:?}", step.as_str()),
            Source::Input(_) | Source::Step { .. } => return Ok(()),
        };
        Err(WorkflowError::UnknownSource { of: of(), source_text: source.to_string(), missing })
    }

    /// The steps, each after those that it waits for; those of a cycle or
    /// behind one, or behind a step that is not there, are left out.
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

    /// Steps that wait for each other, from one back to itself.
    fn cycle(&self) -> Option<Vec<String>> {
        let done: BTreeSet<&FunctionName> = self.in_order().into_iter().map(|step| &step.name).collect();
        let stuck = |step: &&Step| !done.contains(&step.name);
        let mut way = vec![self.steps.iter().find(stuck)?];
        // Whoever is stuck waits for somebody who is.
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
        let mut rest: Vec<&Source> = self.outputs.iter().map(|output| &output.from).collect();
        while let Some(source) = rest.pop() {
            if let Source::Step { step, .. } = source
                && used.insert(step)
            {
                rest.extend(self.step(step).into_iter().flat_map(Step::sources));
            }
        }
        if let Some(step) = self.steps.iter().find(|step| !used.contains(&step.name)) {
            return Err(WorkflowError::LeadsNowhere(step.name.clone()));
        }
        let takes = |input: &str, source: &Source| matches!(source, Source::Input(name) if name == input);
        let taken = |input: &&String| {
            self.steps.iter().flat_map(|step| step.inputs.values()).any(|source| takes(input, source))
        };
        match self.inputs.iter().find(|input| !taken(input)) {
            Some(input) => Err(WorkflowError::Unused(input.clone())),
            None => Ok(()),
        }
    }
}

/// The steps that a step waits for.
fn before(step: &Step) -> impl Iterator<Item = &FunctionName> {
    step.sources().filter_map(|source| match source {
        Source::Step { step, .. } => Some(step),
        Source::Input(_) => None,
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

    use super::super::Output;
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
            run: Run::Function(name("f")),
            inputs,
            each: None,
            when: None,
            deadline: None,
        }
    }

    /// input.x -> a -> b, c -> d.
    fn diamond() -> WorkflowSpec {
        let key = FunctionKey { tenant: TenantName::default(), name: name("w") };
        let steps = vec![
            step("a", &[("x", "input.x")]),
            step("b", &[("x", "a.y")]),
            step("c", &[("x", "a.y")]),
            step("d", &[("l", "b.y"), ("r", "c.y")]),
        ];
        let outputs = vec![Output { name: "y".into(), from: "d.y".parse().unwrap() }];
        WorkflowSpec::new(key, vec!["x".into()], steps, outputs)
    }

    fn refused(change: impl FnOnce(&mut WorkflowSpec)) -> String {
        let mut spec = diamond();
        change(&mut spec);
        spec.validate().unwrap_err().to_string()
    }

    #[test]
    fn a_diamond_is_a_workflow() {
        assert_eq!(diamond().validate(), Ok(()));
    }

    #[test]
    fn sources_read_as_they_print() {
        for text in ["input.x", "detect.boxes", "a.output/Conv:0", "a.b.c"] {
            assert_eq!(text.parse::<Source>().unwrap().to_string(), text);
        }
        assert_eq!("input.b.c".parse::<Source>(), Ok(Source::Input("b.c".into())));
        for bad in ["", "x", "x.", ".x", "A.x"] {
            assert!(bad.parse::<Source>().is_err(), "{bad}");
        }
    }

    #[test]
    fn each_refusal_names_what_is_wrong() {
        let source = |text: &str| text.parse::<Source>().unwrap();
        let checks: &[(&str, Change<'_>)] = &[
            ("steps wait for each other: a -> d -> b -> a", &|it| {
                it.steps[0].when = Some(source("d.y"));
            }),
            ("steps wait for each other: b -> b", &|it| it.steps[1].when = Some(source("b.y"))),
            ("step \"c\" takes e.y, but there is no step \"e\"", &|it| {
                it.steps[2].inputs.insert("x".into(), source("e.y"));
            }),
            ("output \"y\" takes input.z, but there is no input \"z\"", &|it| {
                it.outputs[0].from = source("input.z");
            }),
            ("step \"c\" leads to no output", &|it| it.outputs[0].from = source("b.y")),
            ("input \"z\" is taken by no step", &|it| it.inputs.push("z".into())),
            ("output \"y\" is input.x", &|it| it.outputs[0].from = source("input.x")),
            ("step \"a\" is there twice", &|it| it.steps[1].name = name("a")),
            ("there are no outputs", &|it| it.outputs.clear()),
            ("65 steps: at most 64", &|it| it.steps = (0..65).map(|n| step(&format!("s{n}"), &[])).collect()),
            ("none of its inputs: name one of l, r", &|it| it.steps[3].each = Some("x".into())),
            ("input \"\" has 0 characters", &|it| it.inputs.push(String::new())),
            ("xx\" has 257 characters in its name: use 1 to 256", &|it| it.inputs.push("x".repeat(257))),
            ("output \"\" has 0 characters", &|it| it.outputs[0].name.clear()),
            ("output \"yyy", &|it| it.outputs[0].name = "y".repeat(257)),
            ("each \"\" has 0 characters", &|it| it.steps[3].each = Some(String::new())),
            ("label \"\" is not valid", &|it| {
                it.labels.insert(String::new(), "v".into());
            }),
            ("step \"a.b\" has a dot", &|it| it.steps[0].name = name("a.b")),
            ("step \"b\" runs the workflow it is in", &|it| it.steps[1].run = Run::Workflow(name("w"))),
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
