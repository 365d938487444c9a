//! The advantages of `unified`, on parts of the experiments that are short enough for every build. One seed
//! repeats the results that the experiments show with ten seeds. Small differences are left to the
//! experiments.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use millrace_experiments::lalb::{self, Arrangement, PopularityReading};
use millrace_experiments::{Effort, overload, torpor};
use millrace_memory::eviction::Eviction;
use millrace_sim::run;

const SEED: u64 = 1;

#[test]
fn unified_beats_out_of_order_dispatch_at_the_load_of_lalb() {
    for reading in PopularityReading::ALL {
        let figures = |name: &str| {
            let dispatch = lalb::policy(name).unwrap();
            let one_domain = Arrangement::OneDomain;
            let scenario = lalb::scenario(dispatch, 35, reading, one_domain, SEED, Effort::FULL);
            let summary = run(&scenario).unwrap().summary(&scenario.functions);
            (summary.mean, summary.miss_ratio)
        };
        let (mean, misses) = figures("unified");
        for other in ["lalb", "lalb-o3"] {
            let theirs = figures(other);
            assert!(mean < theirs.0, "{reading:?}: a mean of {mean:?}, {:?} of {other}", theirs.0);
            assert!(misses < theirs.1, "{reading:?}: {misses} misses, {} of {other}", theirs.1);
        }
    }
}

/// The load is half of Torpor's node and half of the 560 functions, of which Torpor keeps four fifths
/// compliant (H09).
#[test]
fn unified_keeps_more_functions_compliant_than_torpor_at_the_load_of_torpor() {
    let compliant = |name| {
        let system = torpor::named(name, Eviction::Torpor).unwrap();
        let scenario = torpor::mixed(&system, 2, 280, SEED, Effort::SHORT);
        run(&scenario).unwrap().compliance(&scenario.functions).0
    };
    let ours = compliant("unified");
    let theirs = compliant("torpor");
    assert!(ours > theirs, "{ours} functions comply, {theirs} with torpor");
}

/// All functions are equal, and the load exceeds the capacity, so a policy can gain only by preferring hits.
#[test]
fn unified_is_no_worse_than_fifo_in_overload_of_equal_functions() {
    for objective in [Some(overload::OBJECTIVE), None] {
        let figures = |name: &str| {
            let dispatch = lalb::policy(name).unwrap();
            let scenario = overload::equal(dispatch, objective, 120, SEED, Duration::from_secs(4));
            let outcome = run(&scenario).unwrap();
            (outcome.summary(&scenario.functions).mean, overload::in_time_of(&outcome))
        };
        let (mean, in_time) = figures("unified");
        let theirs = figures("fifo");
        assert!(mean <= theirs.0, "{objective:?}: a mean of {mean:?}, {:?} of fifo", theirs.0);
        assert!(in_time >= theirs.1, "{objective:?}: {in_time} in time, {} of fifo", theirs.1);
    }
}

/// Torpor's figure 10 (§7.3): 160 functions on four GPUs. Functions that are bound to GPUs for good leave
/// others without service. Functions that are kept alive in turns are all served in the end
/// (docs/experiments.md, H07), but hardly any in time.
#[test]
fn unified_serves_all_functions_in_time_unlike_early_binding() {
    let figures = |name| {
        let system = torpor::named(name, Eviction::Torpor).unwrap();
        let scenario = torpor::mixed(&system, 4, 160, SEED, Effort::SHORT);
        let outcome = run(&scenario).unwrap();
        let mut served = [false; 160];
        let answered = outcome.records.iter().filter(|record| record.answered());
        answered.for_each(|record| served[record.function as usize] = true);
        (served.into_iter().filter(|served| *served).count(), outcome.compliance(&scenario.functions).0)
    };
    let (served, _) = figures("native");
    assert!((50..80).contains(&served), "the paper has 72: {served}");
    let (served, compliant) = figures("infless-ka");
    assert!(served >= 80 && compliant < 20, "the paper has 112 and 7: {served}, {compliant}");
    let (served, compliant) = figures("unified");
    assert!(served == 160 && compliant >= 159, "{served}, {compliant}");
}
