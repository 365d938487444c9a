//! A test of every target over its corpus, and over random changes of the corpus. `FUZZ_SEED` repeats a run.

use std::io::Write as _;

use millrace_fuzz::{TARGETS, corpus, mutate};

/// The number of changed inputs for each target.
const INPUTS: usize = 500;

/// The file has only this test, because the peak of the heap is that of the whole process.
#[test]
fn no_target_panics_or_exceeds_its_heap_bound() {
    let given = std::env::var("FUZZ_SEED").ok();
    let seed = given.map_or_else(|| fastrand::u64(..), |seed| seed.parse().expect("FUZZ_SEED is a number"));
    // The test harness does not capture this line, because a target that ends the process leaves no other
    // trace of its seed.
    writeln!(std::io::stderr(), "FUZZ_SEED={seed}").expect("the standard error takes a line");
    for target in TARGETS {
        let corpus = corpus::of(target);
        let mut random = fastrand::Rng::with_seed(seed);
        let changed = std::iter::repeat_with(|| mutate::mutated(&corpus, &mut random)).take(INPUTS);
        let mut highest = 0;
        for input in corpus.iter().cloned().chain(changed) {
            highest = highest.max(corpus::run_kept(target, &input));
        }
        println!("{}: {} inputs, {highest} bytes of heap at most", target.name, corpus.len() + INPUTS);
    }
}
