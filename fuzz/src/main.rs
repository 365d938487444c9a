//! Runs targets over random changes of their corpora, without a fuzzer: `millrace-fuzz SECONDS [TARGET…]`
//! runs each target for SECONDS seconds.

use std::time::{Duration, Instant};

use millrace_fuzz::{TARGETS, corpus, mutate, target};

#[allow(clippy::disallowed_methods, reason = "the user gives the time of a run in real seconds")]
fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().and_then(|seconds| seconds.parse().ok());
    let seconds = seconds.expect("usage: millrace-fuzz SECONDS [TARGET…]");
    let named: Vec<_> = arguments.map(|name| target(&name)).collect();
    let targets = if named.is_empty() { TARGETS.to_vec() } else { named };
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    for target in targets {
        let corpus = corpus::of(target);
        let mut random = fastrand::Rng::with_seed(seed);
        let begun = Instant::now();
        let mut inputs = 0_u64;
        let mut highest = 0;
        while begun.elapsed() < Duration::from_secs(seconds) {
            highest = highest.max(corpus::run_kept(target, &mutate::mutated(&corpus, &mut random)));
            inputs += 1;
        }
        println!("{}: {inputs} inputs, {highest} bytes of heap at most", target.name);
    }
}
