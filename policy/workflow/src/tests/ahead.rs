//! Prewarming hints of a run (D29).

use std::cell::Cell;

use PrewarmTarget::{Gpu, Host};

use super::super::prewarm::{FollowingStep, LOOKED_INTO_MAX};
use super::*;

fn behind(plan: &WorkflowGraph, step: usize) -> Vec<(&str, PrewarmTarget)> {
    let named = |it: FollowingStep| (plan.step(it.step).name.as_str(), it.nearness);
    plan.next(StepIndex(step)).into_iter().map(named).collect()
}

/// Plans a workflow in which the steps of these names run workflows.
fn nested(steps: &[&str], outputs: &[&str], inner: &[&str]) -> Arc<WorkflowGraph> {
    let mut spec = spec(steps, outputs);
    for step in spec.steps.iter_mut().filter(|step| inner.contains(&step.name.as_str())) {
        step.run = StepTarget::Workflow(step.name.clone());
    }
    plan_of(&spec, &[])
}

fn at(plan: &WorkflowGraph, name: &str) -> StepIndex {
    StepIndex(plan.steps().iter().position(|step| step.name.as_str() == name).unwrap())
}

fn ahead(function: &str, nearness: PrewarmTarget) -> PrewarmHint {
    PrewarmHint { function: name(&format!("f-{function}")), nearness }
}

#[test]
fn sure_next_steps_belong_on_a_gpu_and_later_or_conditional_steps_in_host_memory() {
    let steps = ["a: x=input.x", "b: x=a.y", "c: x=a.y when a.z", "d: x=b.y, z=a.y", "e: x=input.x"];
    let plan = plan_of(&spec(&steps, &["c.y", "d.y", "e.y"]), &[]);
    let at = |name: &str| at(&plan, name).0;
    assert_eq!(behind(&plan, at("a")), [("b", Gpu), ("c", Host), ("d", Host)]);
    assert_eq!(behind(&plan, at("b")), [("d", Gpu)]);
    assert_eq!(behind(&plan, at("c")), []);
    assert_eq!(behind(&plan, at("e")), [], "e leads only to an output");
}

#[test]
fn hints_are_limited_to_the_maximum_number() {
    let steps: Vec<_> = (0..20).map(|at| format!("s{at}: x=a.y")).collect();
    let outputs: Vec<_> = (0..20).map(|at| format!("s{at}.y")).collect();
    let steps: Vec<_> = std::iter::once("a: x=input.x").chain(steps.iter().map(String::as_str)).collect();
    let plan = plan_of(&spec(&steps, &outputs.iter().map(String::as_str).collect::<Vec<_>>()), &[]);
    assert_eq!(behind(&plan, 0).len(), AHEAD_MAX);
    assert_eq!(plan.prewarm_hints(StepIndex(0), &[ahead("late", Host)], |_| None).len(), AHEAD_MAX);
}

#[test]
fn first_steps_of_the_next_workflow_count_as_next_and_its_other_steps_as_later() {
    let inside = plan_of(&spec(&["p: x=input.x", "q: x=p.y", "r: x=input.x when p.z"], &["q.y", "r.y"]), &[]);
    let inner = |of: &FunctionName| Some(inside.clone()).filter(|_| of.as_str() != "gone");
    let of = |steps: &[&str], outputs: &[&str]| {
        let plan = nested(steps, outputs, &["w", "gone"]);
        plan.prewarm_hints(at(&plan, "a"), &[], inner)
    };
    let all = [ahead("p", Gpu), ahead("q", Host), ahead("r", Host)];
    assert_eq!(of(&["a: x=input.x", "w: x=a.y"], &["w.y"]), all);
    assert_eq!(
        of(&["a: x=input.x", "w: x=a.y when a.z"], &["w.y"]),
        all.map(|it| PrewarmHint { nearness: Host, ..it })
    );
    assert_eq!(of(&["a: x=input.x", "gone: x=a.y", "b: x=gone.y"], &["b.y"]), [ahead("b", Host)]);
}

#[test]
fn steps_after_a_workflow_follow_the_step_that_makes_its_output() {
    let outer = nested(&["w: x=input.x", "b: x=w.y", "c: x=b.y"], &["c.y"], &["w"]);
    let after = outer.prewarm_hints(at(&outer, "w"), &[], |_| None);
    assert_eq!(after, [ahead("b", Gpu), ahead("c", Host)]);
    let inside = plan_of(&spec(&["p: x=input.x", "q: x=p.y", "b: x=input.x"], &["q.y", "b.y"]), &[]);
    let of = |step: &str| inside.prewarm_hints(at(&inside, step), &after, |_| None);
    assert_eq!(of("p"), [ahead("q", Gpu), ahead("b", Host), ahead("c", Host)]);
    assert_eq!(of("q"), after);
    assert_eq!(of("b"), [ahead("c", Host)], "the step's own model is present");
}

#[test]
fn nested_workflows_are_examined_up_to_a_bound() {
    let behind: Vec<_> = (0..AHEAD_MAX).map(|at| format!("s{at}: x=a.y")).collect();
    let steps: Vec<_> = std::iter::once("a: x=input.x").chain(behind.iter().map(String::as_str)).collect();
    let names: Vec<_> = (0..AHEAD_MAX).map(|at| format!("s{at}")).collect();
    let outputs: Vec<_> = names.iter().map(|name| format!("{name}.y")).collect();
    let [names, outputs] = [&names, &outputs].map(|it| it.iter().map(String::as_str).collect::<Vec<_>>());
    let plan = nested(&steps, &outputs, &names);
    let looked_into = Cell::new(0);
    // Each nested workflow runs the outer workflow again, without end.
    let inner = |_: &FunctionName| {
        looked_into.set(looked_into.get() + 1);
        Some(plan.clone())
    };
    assert_eq!(plan.prewarm_hints(StepIndex(0), &[], inner), []);
    assert_eq!(looked_into.get(), LOOKED_INTO_MAX);
}
