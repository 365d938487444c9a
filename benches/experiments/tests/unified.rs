//! What `unified` is for, on parts of the experiments that are short enough for every build: one seed
//! repeats what the experiments show with ten. Small differences are for those.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use millrace_experiments::lalb::{self, Arrangement, Reading};
use millrace_experiments::{Effort, ours, torpor};
use millrace_policy::gpu::Eviction;
use millrace_sim::run;

const SEED: u64 = 1;

#[test]
fn at_lalbs_load_it_beats_out_of_order_dispatch() {
    for reading in Reading::ALL {
        let figures = |name: &str| {
            let (dispatch, run_of) = (lalb::policy(name).unwrap(), (SEED, Effort::FULL));
            let scenario = lalb::scenario(dispatch, 35, reading, Arrangement::OneDomain, run_of);
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

/// Half of Torpor's node and of the 560 functions of which it serves four fifths in time (H09).
#[test]
fn at_torpors_load_it_keeps_more_functions_compliant_than_torpor() {
    let compliant = |name| {
        let system = torpor::named(name, Eviction::Torpor).unwrap();
        let scenario = torpor::mixed(&system, (2, 280), (SEED, Effort::SHORT));
        run(&scenario).unwrap().compliance(&scenario.functions).0
    };
    let (ours, theirs) = (compliant("unified"), compliant("torpor"));
    assert!(ours > theirs, "{ours} functions comply, {theirs} with torpor");
}

/// All functions equal and more offered than can be served: nothing to choose but hits.
#[test]
fn in_homogeneous_overload_it_is_no_worse_than_fifo() {
    for objective in [Some(ours::OBJECTIVE), None] {
        let figures = |name: &str| {
            let dispatch = lalb::policy(name).unwrap();
            let scenario = ours::equal(dispatch, objective, 120, (SEED, Duration::from_secs(4)));
            let outcome = run(&scenario).unwrap();
            (outcome.summary(&scenario.functions).mean, ours::in_time_of(&outcome))
        };
        let ((mean, in_time), theirs) = (figures("unified"), figures("fifo"));
        assert!(mean <= theirs.0, "{objective:?}: a mean of {mean:?}, {:?} of fifo", theirs.0);
        assert!(in_time >= theirs.1, "{objective:?}: {in_time} in time, {} of fifo", theirs.1);
    }
}

/// Torpor's figure 10 (§7.3): 160 functions on four GPUs. Bound for good, only some are ever served;
/// kept alive by turns, all are in the end (docs/experiments.md, H07), and hardly one in time.
#[test]
fn it_serves_all_functions_in_time_where_early_binding_serves_a_part_or_late() {
    let figures = |name| {
        let system = torpor::named(name, Eviction::Torpor).unwrap();
        let scenario = torpor::mixed(&system, (4, 160), (SEED, Effort::SHORT));
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
