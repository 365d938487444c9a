//! What a run is likely to ask for after a step (D29).

use super::*;

fn behind(plan: &Plan, step: usize) -> Vec<(&str, Nearness)> {
    let named = |it: Ahead| (plan.step(it.step).name.as_str(), it.nearness);
    plan.ahead(StepIndex(step)).into_iter().map(named).collect()
}

#[test]
fn what_comes_right_after_is_for_a_gpu_and_what_may_not_run_or_comes_later_for_host_memory() {
    use Nearness::{Gpu, Host};
    let steps = ["a: x=input.x", "b: x=a.y", "c: x=a.y when a.z", "d: x=b.y, z=a.y", "e: x=input.x"];
    let plan = plan_of(&spec(&steps, &["c.y", "d.y", "e.y"]), &[]);
    let at = |name: &str| plan.steps().iter().position(|step| step.name.as_str() == name).unwrap();
    assert_eq!(behind(&plan, at("a")), [("b", Gpu), ("c", Host), ("d", Host)]);
    assert_eq!(behind(&plan, at("b")), [("d", Gpu)]);
    assert_eq!(behind(&plan, at("c")), []);
    assert_eq!(behind(&plan, at("e")), [], "it leads to an output alone");
}

#[test]
fn no_more_are_named_than_are_followed() {
    let steps: Vec<_> = (0..20).map(|at| format!("s{at}: x=a.y")).collect();
    let outputs: Vec<_> = (0..20).map(|at| format!("s{at}.y")).collect();
    let steps: Vec<_> = std::iter::once("a: x=input.x").chain(steps.iter().map(String::as_str)).collect();
    let plan = plan_of(&spec(&steps, &outputs.iter().map(String::as_str).collect::<Vec<_>>()), &[]);
    assert_eq!(behind(&plan, 0).len(), AHEAD_MAX);
}
