//! Runs targets over random changes of their corpora, without a fuzzer: `millrace-fuzz SECONDS [TARGET…]`,
//! each target for so many seconds.

use std::time::{Duration, Instant};

use millrace_fuzz::{TARGETS, corpus, mutate, target};

#[allow(clippy::disallowed_methods, reason = "how long to run is asked in seconds of the machine")]
fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().and_then(|seconds| seconds.parse().ok()).expect("SECONDS [TARGET…]");
    let named: Vec<_> = arguments.map(|name| target(&name)).collect();
    let targets = if named.is_empty() { TARGETS.to_vec() } else { named };
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    for target in targets {
        let corpus = corpus::of(target);
        let mut random = fastrand::Rng::with_seed(seed);
        let (begun, mut inputs, mut highest) = (Instant::now(), 0_u64, 0);
        while begun.elapsed() < Duration::from_secs(seconds) {
            highest = highest.max(corpus::run_kept(target, &mutate::mutated(&corpus, &mut random)));
            inputs += 1;
        }
        println!("{}: {inputs} inputs, {highest} bytes of heap at most", target.name);
    }
}
