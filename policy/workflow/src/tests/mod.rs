//! Tests of each workflow pattern, each end of a run and each way to lose data, action by action;
//! then random workflows against a model of their result.

mod ahead;
mod losses;
mod objective;
mod patterns;
mod properties;
mod world;

use std::sync::Arc;

use millrace_types::ids::{FunctionKey, FunctionName, TenantName};
use millrace_types::tensor::{DataType, Dim, TensorSpec};
use millrace_types::workflow::{Signature, Step, StepTarget, TensorSource, WorkflowOutput, WorkflowSpec};

use super::state::StepStage;
use super::*;

/// Progress of a run.
#[derive(Debug, PartialEq, Eq)]
struct Progress {
    total: usize,
    /// Steps that ran, for every row.
    done: usize,
    /// Steps that do not run.
    skipped: usize,
    calls_out: usize,
}

impl WorkflowEngine {
    fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    fn progress(&self) -> Progress {
        let count = |is: &dyn Fn(&StepState) -> bool| self.steps.iter().filter(|step| is(step)).count();
        Progress {
            total: self.steps.len(),
            done: count(&|step| step.stage == StepStage::Runs && step.done == step.rows.len()),
            skipped: count(&|step| step.stage == StepStage::Skipped),
            calls_out: self.calls.len(),
        }
    }
}

fn name(name: &str) -> FunctionName {
    FunctionName::new(name).unwrap()
}

/// Parses steps like `"b: x=a.y, z=input.x each x when c.y"` and outputs like `"b.y"`. Each
/// distinct `"input.…"` becomes an input.
fn spec(steps: &[&str], outputs: &[&str]) -> WorkflowSpec {
    let steps: Vec<_> = steps.iter().map(|text| step(text)).collect();
    let mut inputs = Vec::new();
    for source in steps.iter().flat_map(|step| step.inputs.values()) {
        if let TensorSource::Input(input) = source
            && !inputs.contains(input)
        {
            inputs.push(input.clone());
        }
    }
    let output =
        |(at, from): (usize, &&str)| WorkflowOutput { name: format!("o{at}"), from: from.parse().unwrap() };
    let outputs = outputs.iter().enumerate().map(output).collect();
    let spec = WorkflowSpec::new(
        FunctionKey { tenant: TenantName::default(), name: name("w") },
        inputs,
        steps,
        outputs,
    );
    spec.validate().unwrap();
    spec
}

fn step(text: &str) -> Step {
    let (step, rest) = text.split_once(": ").unwrap();
    let (rest, when) = match rest.split_once(" when ") {
        Some((rest, when)) => (rest, Some(when.parse().unwrap())),
        None => (rest, None),
    };
    let (rest, each) = match rest.split_once(" each ") {
        Some((rest, each)) => (rest, Some(each.to_owned())),
        None => (rest, None),
    };
    let input = |text: &str| {
        let (input, from) = text.split_once('=').unwrap();
        (input.to_owned(), from.parse().unwrap())
    };
    let inputs = rest.split(", ").map(input).collect();
    Step {
        name: name(step),
        run: StepTarget::Function(name(&format!("f-{step}"))),
        inputs,
        each,
        when,
        deadline: None,
    }
}

/// Returns the signature of every function here, which has the outputs `y` and `z`.
fn signature() -> Signature {
    let shape = vec![Dim::Symbol("n".into()), Dim::Fixed(4)];
    let tensor =
        |name: &str| TensorSpec { name: name.into(), datatype: DataType::Fp32, shape: shape.clone() };
    Signature { inputs: Vec::new(), outputs: vec![tensor("y"), tensor("z")] }
}

/// Plans a workflow in which the functions named in `once` are not idempotent.
fn plan_of(spec: &WorkflowSpec, once: &[&str]) -> Arc<WorkflowGraph> {
    let signature = signature();
    let is_idempotent = |run: &StepTarget| !once.contains(&run.name().as_str());
    Arc::new(WorkflowGraph::new(spec, |_| Some(&signature), is_idempotent).unwrap())
}

fn rows(rows: u64) -> TensorFacts {
    TensorFacts { rows, is_empty: rows == 0, holds: Some(rows > 0) }
}

fn zeros(rows: u64) -> TensorFacts {
    TensorFacts { rows, is_empty: rows == 0, holds: Some(false) }
}

/// A run with actions rendered as text: `call 1 b[2] y`, `release a.y`, `answer b.y`.
struct TextRun {
    plan: Arc<WorkflowGraph>,
    engine: WorkflowEngine,
}

impl TextRun {
    fn new(steps: &[&str], outputs: &[&str]) -> Self {
        Self::once(steps, outputs, &[])
    }

    fn once(steps: &[&str], outputs: &[&str], once: &[&str]) -> Self {
        let plan = plan_of(&spec(steps, outputs), once);
        Self { engine: WorkflowEngine::new(plan.clone()), plan }
    }

    fn tell(&mut self, event: Event) -> Vec<String> {
        let mut actions = Vec::new();
        self.engine.on_event(Timestamp::ZERO, event, &mut actions);
        actions.iter().map(|action| self.text(action)).collect()
    }

    fn begin(&mut self, inputs: &[TensorFacts]) -> Vec<String> {
        self.tell(Event::Begin { inputs: inputs.to_vec() })
    }

    fn done(&mut self, call: u64, outputs: &[TensorFacts]) -> Vec<String> {
        self.tell(Event::Done { call: CallId(call), outputs: outputs.to_vec() })
    }

    fn failed(&mut self, call: u64, lost: &[&str]) -> Vec<String> {
        let lost = lost.iter().map(|text| self.loss(text)).collect();
        self.tell(Event::Failed { call: CallId(call), lost })
    }

    fn lost(&mut self, lost: &[&str]) -> Vec<String> {
        let lost = lost.iter().map(|text| self.loss(text)).collect();
        self.tell(Event::Lost { lost })
    }

    /// Parses `a.y` or `a.y[2]`.
    fn loss(&self, text: &str) -> TensorLoss {
        let (source, row) = match text.split_once('[') {
            Some((source, row)) => (source, Some(row.trim_end_matches(']').parse().unwrap())),
            None => (text, None),
        };
        let source: TensorSource = source.parse().unwrap();
        let slot = self.plan.slots().iter().position(|slot| slot.source == source).unwrap();
        TensorLoss { slot: TensorIndex(slot), row }
    }

    fn slots(&self, slots: &[TensorIndex]) -> String {
        slots.iter().map(|slot| self.plan.slot(*slot).source.to_string()).collect::<Vec<_>>().join(" ")
    }

    fn text(&self, action: &Action) -> String {
        let step = |step: &StepIndex, row: &Option<u64>| {
            let name = self.plan.step(*step).name.as_str();
            row.map_or_else(|| name.to_owned(), |row| format!("{name}[{row}]"))
        };
        match action {
            Action::Call { call, step: of, row, inputs, outputs } => {
                assert_eq!(
                    *inputs,
                    self.plan.step(*of).inputs.iter().map(|(_, slot)| *slot).collect::<Vec<_>>()
                );
                format!("call {} {} for {}", call.0, step(of, row), self.slots(outputs))
            }
            Action::Empty { slot } => format!("empty {}", self.slots(&[*slot])),
            Action::Release { slot } => format!("release {}", self.slots(&[*slot])),
            Action::Abandon { call } => format!("abandon {}", call.0),
            Action::Answer { outputs } => format!("answer {}", self.slots(outputs)),
            Action::Fail { step: of, row, cause } => format!("fail {}: {cause}", step(of, row)),
        }
    }
}

/// A table of events and the actions that follow from each.
macro_rules! follows {
    ($($event:expr => [$($action:literal),*];)*) => {
        $(assert_eq!($event, [$($action),*] as [&str; follows!(@count $($action)*)], "{}", stringify!($event));)*
    };
    (@count $($action:literal)*) => { <[&str]>::len(&[$($action),*]) };
}
use follows;

#[test]
fn a_plan_lists_the_consumers_of_each_tensor() {
    let spec = spec(&["b: x=a.y, w=input.v each x when a.z", "a: x=input.u"], &["b.y"]);
    let plan = plan_of(&spec, &["f-b"]);
    let sources: Vec<_> = plan.slots().iter().map(|slot| slot.source.to_string()).collect();
    assert_eq!(sources, ["input.v", "input.u", "a.y", "a.z", "b.y"]);
    assert_eq!(plan.steps().iter().map(|step| step.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(plan.step(StepIndex(0)).outputs, [TensorIndex(2), TensorIndex(3)]);
    assert_eq!(plan.step(StepIndex(1)).outputs, [TensorIndex(4)]);
    assert_eq!(plan.step(StepIndex(1)).each_slot(), Some(TensorIndex(2)));
    assert_eq!(
        (plan.slot(TensorIndex(2)).takers.as_slice(), plan.slot(TensorIndex(2)).conditions.len()),
        (&[StepIndex(1)][..], 0)
    );
    assert_eq!(
        (plan.slot(TensorIndex(3)).conditions.as_slice(), plan.slot(TensorIndex(3)).takers.len()),
        (&[StepIndex(1)][..], 0)
    );
    let of =
        |is: &dyn Fn(TensorIndex) -> bool| (0..5).filter(|slot| is(TensorIndex(*slot))).collect::<Vec<_>>();
    assert_eq!(of(&|slot| plan.slot(slot).is_output), [4]);
    assert_eq!(of(&|slot| plan.is_condition(slot)), [3]);
    assert_eq!(of(&|slot| plan.is_input(slot)), [0, 1]);
    assert_eq!(plan.steps().iter().map(|step| step.is_idempotent).collect::<Vec<_>>(), [true, false]);
    assert_eq!(plan.outputs(), [TensorIndex(4)]);
}

#[test]
fn a_plan_refuses_a_workflow_that_no_longer_fits() {
    let good = spec(&["a: x=input.x", "b: x=a.y"], &["b.y"]);
    type Change<'a> = &'a dyn Fn(&mut WorkflowSpec);
    let checks: [(&str, Change<'_>); 5] = [
        (
            "step \"a\" runs function \"gone\", which does not exist: apply it first, or change the step",
            &|it| {
                it.steps[0].run = StepTarget::Function(name("gone"));
            },
        ),
        (
            "step \"b\" takes a.q, which does not exist: name an input of the workflow or an output of a step",
            &|it| {
                it.steps[1].inputs.insert("x".into(), "a.q".parse().unwrap());
            },
        ),
        (
            "output \"o0\" takes b.q, which does not exist: name an input of the workflow or an output of a step",
            &|it| {
                it.outputs[0].from = "b.q".parse().unwrap();
            },
        ),
        (
            "step \"b\" runs for each \"q\", which is not an input of the step: name one of its inputs",
            &|it| {
                it.steps[1].each = Some("q".into());
            },
        ),
        (
            "step \"b\" waits for a step that never runs: remove the cycle, or name a step that exists",
            &|it| it.steps[1].when = Some("c.y".parse().unwrap()),
        ),
    ];
    let signature = signature();
    let known = |run: &StepTarget| (run.name().as_str() != "gone").then_some(&signature);
    for (says, change) in checks {
        let mut spec = good.clone();
        change(&mut spec);
        assert_eq!(WorkflowGraph::new(&spec, known, |_| true).unwrap_err().to_string(), says);
    }
    assert_eq!(WorkflowGraph::new(&good, known, |_| true).map(|plan| plan.steps().len()), Ok(2));
}
