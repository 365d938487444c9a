//! Properties that hold for every workflow, order of answers and loss: each action is legal, the
//! run ends once and leaves no tensor behind, and its answer matches the workflow's definition.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::world::{End, World};
use super::*;

/// A step as numbers, each taken modulo the number of choices.
#[derive(Debug, Clone)]
struct Draft {
    inputs: Vec<usize>,
    each: Option<usize>,
    when: Option<usize>,
}

fn draft() -> impl Strategy<Value = Draft> {
    let inputs = prop::collection::vec(0..64usize, 1..4);
    let each = prop::option::weighted(0.4, 0..64usize);
    let when = prop::option::weighted(0.3, 0..64usize);
    (inputs, each, when).prop_map(|(inputs, each, when)| Draft { inputs, each, when })
}

/// Generates steps that take outputs of the two layers before them. Outputs without a consumer are
/// outputs of the workflow.
fn workflow() -> impl Strategy<Value = WorkflowSpec> {
    prop::collection::vec(draft(), 1..10).prop_map(|drafts| {
        let mut sources: Vec<String> = vec!["input.u".into(), "input.v".into()];
        let mut used = BTreeSet::new();
        let mut steps = Vec::new();
        for (at, draft) in drafts.iter().enumerate() {
            let near = &sources[sources.len().saturating_sub(6)..];
            let mut take = |pick: usize| {
                let source = near[pick % near.len()].clone();
                used.insert(source.clone());
                source
            };
            let mut text = format!("s{at}: ");
            let inputs = draft.inputs.iter().enumerate();
            let inputs: Vec<_> = inputs.map(|(n, pick)| format!("i{n}={}", take(*pick))).collect();
            text += &inputs.join(", ");
            if let Some(each) = draft.each {
                text += &format!(" each i{}", each % inputs.len());
            }
            // An input of the workflow cannot be a condition.
            if let Some(when) = draft.when.filter(|_| at > 0) {
                let made = &near[near.iter().take_while(|it| it.starts_with("input")).count()..];
                let source = made[when % made.len()].clone();
                used.insert(source.clone());
                text += &format!(" when {source}");
            }
            steps.push(text);
            sources.extend([format!("s{at}.y"), format!("s{at}.z")]);
        }
        let leads_nowhere = |at: &usize| !["y", "z"].iter().any(|it| used.contains(&format!("s{at}.{it}")));
        let mut outputs: Vec<_> =
            (0..steps.len()).filter(leads_nowhere).map(|at| format!("s{at}.y")).collect();
        outputs.push("s0.z".into());
        let steps: Vec<_> = steps.iter().map(String::as_str).collect();
        let outputs: Vec<_> = outputs.iter().map(String::as_str).collect();
        spec(&steps, &outputs)
    })
}

fn choices() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(any::<u32>(), 0..200)
}

/// Runs to the end, by these choices and then by the first possible step.
fn run(world: &mut World, choices: &[u32], losses_max: u32) {
    let calls_most = 10_000;
    let rest = std::iter::repeat_n(5, calls_most);
    for choice in choices.iter().copied().chain(rest) {
        if !world.go_on(choice, losses_max) {
            return;
        }
    }
    panic!("the run did not end");
}

const STEPS: [&str; 10] = ["f-s0", "f-s1", "f-s2", "f-s3", "f-s4", "f-s5", "f-s6", "f-s7", "f-s8", "f-s9"];

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, ..ProptestConfig::default() })]

    #[test]
    fn a_run_gives_the_result_that_the_workflow_defines(spec in workflow(), seed: u64, choices in choices()) {
        let mut world = World::begin(plan_of(&spec, &STEPS), seed);
        run(&mut world, &choices, 0);
        prop_assert_eq!(world.end, Some(End::Answer));
    }

    #[test]
    fn fewer_losses_than_runs_change_no_answer(spec in workflow(), seed: u64, choices in choices()) {
        let mut world = World::begin(plan_of(&spec, &[]), seed);
        run(&mut world, &choices, RUNS_MAX - 1);
        prop_assert_eq!(world.end, Some(End::Answer));
    }

    #[test]
    fn more_losses_end_in_the_same_answer_or_say_so(
        spec in workflow(),
        seed: u64,
        choices in choices(),
        once in prop::collection::vec(any::<bool>(), 10),
    ) {
        let once: Vec<_> = STEPS.into_iter().zip(once).filter(|(_, once)| *once).map(|(step, _)| step).collect();
        let mut world = World::begin(plan_of(&spec, &once), seed);
        run(&mut world, &choices, 40);
        prop_assert!(matches!(world.end, Some(End::Answer | End::Fail(RunFailureCause::DataLost))), "{:?}", world.end);
        prop_assert!(world.end == Some(End::Answer) || world.losses > 0);
    }

    #[test]
    fn a_run_that_is_cut_short_leaves_nothing(
        spec in workflow(),
        seed: u64,
        choices in choices(),
        at in 0..40usize,
    ) {
        let mut world = World::begin(plan_of(&spec, &[]), seed);
        for choice in choices.iter().take(at) {
            world.go_on(*choice, RUNS_MAX - 1);
        }
        world.fail(at);
        run(&mut world, &[], 0);
        prop_assert!(world.end.is_some());
    }
}
