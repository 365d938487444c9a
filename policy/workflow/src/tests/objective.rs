//! Division of an objective among steps.

use std::time::Duration;

use proptest::prelude::*;

use super::super::{ObjectiveShares, StepIndex};
use super::{plan_of, spec};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A diamond: `a`, then `b` and `c`, then `d`.
const DIAMOND: [&str; 4] = ["a: x=input.x", "b: x=a.y", "c: x=a.y", "d: x=b.y, z=c.y"];

#[test]
fn the_longest_path_divides_the_time_left_by_its_steps_durations() {
    let plan = plan_of(&spec(&DIAMOND, &["d.y"]), &[]);
    // `b` takes three times as long as `c`, so the path over `b` is longer.
    let shares = ObjectiveShares::of(&plan, &[Some(ms(10)), Some(ms(30)), Some(ms(10)), Some(ms(10))]);
    let within = |step, left| shares.within(&plan, StepIndex(step), Some(ms(left))).unwrap();
    let step = |name: &str| plan.steps().iter().position(|it| it.name.as_str() == name).unwrap();
    assert_eq!(within(step("a"), 100), ms(20), "10 of 50");
    assert_eq!(within(step("b"), 80), ms(60), "30 of 40");
    assert_eq!(within(step("c"), 80), ms(40), "10 of 20, which delays no other step");
    assert_eq!(within(step("d"), 20), ms(20), "the last step has all time left");
}

#[test]
fn a_step_that_never_ran_counts_as_the_mean_and_keeps_its_own_deadline() {
    let mut spec = spec(&["a: x=input.x", "b: x=a.y"], &["b.y"]);
    spec.steps[1].deadline = Some(ms(5));
    let plan = plan_of(&spec, &[]);
    let nothing = ObjectiveShares::of(&plan, &[None, None]);
    assert_eq!(nothing.within(&plan, StepIndex(0), Some(ms(100))), Some(ms(50)));
    assert_eq!(nothing.within(&plan, StepIndex(1), Some(ms(100))), Some(ms(5)));
    assert_eq!(
        nothing.within(&plan, StepIndex(1), Some(ms(2))),
        Some(ms(2)),
        "the time left is less than the deadline"
    );
    assert_eq!(nothing.within(&plan, StepIndex(1), None), Some(ms(5)));
    assert_eq!(nothing.within(&plan, StepIndex(0), None), None);
    let one = ObjectiveShares::of(&plan, &[Some(ms(7)), None]);
    assert_eq!(one, nothing, "the other step counts as equally long");
}

proptest! {
    /// A run whose steps take exactly their shares meets the deadline, whichever path is the
    /// longest.
    #[test]
    fn steps_that_keep_to_their_shares_meet_the_deadline(took in prop::collection::vec(prop::option::of(0u64..50), 4)) {
        let plan = plan_of(&spec(&DIAMOND, &["d.y"]), &[]);
        let took: Vec<_> = took.into_iter().map(|took| took.map(ms)).collect();
        let shares = ObjectiveShares::of(&plan, &took);
        let objective = Duration::from_secs(1);
        let mut ends = vec![Duration::ZERO; plan.steps().len()];
        for (at, step) in plan.steps().iter().enumerate() {
            let before = |it: usize| plan.steps()[it].outputs.iter().any(|slot| {
                step.inputs.iter().any(|(_, taken)| taken == slot)
            });
            let begin = (0..at).filter(|&it| before(it)).map(|it| ends[it]).max().unwrap_or_default();
            let left = objective.checked_sub(begin).unwrap_or_default();
            ends[at] = begin + shares.within(&plan, StepIndex(at), Some(left)).unwrap();
        }
        prop_assert!(ends.iter().all(|end| *end <= objective + Duration::from_micros(1)), "{ends:?}");
    }
}
