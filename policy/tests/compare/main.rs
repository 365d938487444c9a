//! Every policy against the others on workloads like the papers'.
//!
//! `cargo test --release -p millrace-policy --test compare -- --ignored --nocapture` prints the
//! whole table.

mod workloads;
mod world;

use millrace_policy::dispatch::POLICIES;

use self::workloads::{Reading, equal, lalb, torpor};
use self::world::{Outcome, Scenario, run};

/// The mean of each figure over seeds.
fn mean(outcomes: &[Outcome], of: impl Fn(&Outcome) -> f64) -> f64 {
    outcomes.iter().map(of).sum::<f64>() / outcomes.len() as f64
}

fn table(name: &str, scenario: impl Fn(u64) -> Scenario, seeds: u64) {
    println!("\n{name}");
    println!(
        "{:<12} {:>11} {:>11} {:>7} {:>8} {:>10} {:>10} {:>8} {:>7}",
        "policy", "mean ms", "p99 ms", "miss %", "in time", "compliant", "overtaken", "error %", "served"
    );
    let only = std::env::var("POLICY").ok();
    for (name, policy) in POLICIES {
        if only.as_ref().is_some_and(|only| !only.split(',').any(|only| only == name)) {
            continue;
        }
        let outcomes: Vec<_> = (1..=seeds).map(|seed| run(&scenario(seed), policy)).collect();
        let overtaken = outcomes.iter().map(|outcome| outcome.stats.overtaken_max).max().unwrap_or(0);
        let error = |outcome: &Outcome| {
            let (sum, count) = outcome.stats.errors.iter().fold((0.0, 0), |(sum, count), error| {
                (sum + error.percent * error.predictions as f64, count + error.predictions)
            });
            sum / count.max(1) as f64
        };
        println!(
            "{name:<12} {:>11.1} {:>11.1} {:>7.2} {:>8.4} {:>10.4} {overtaken:>10} {:>8.1} {:>7.0}",
            mean(&outcomes, |outcome| outcome.mean_ms),
            mean(&outcomes, |outcome| outcome.p99_ms),
            mean(&outcomes, |outcome| outcome.miss_ratio * 100.0),
            mean(&outcomes, |outcome| outcome.in_time),
            mean(&outcomes, |outcome| outcome.compliant),
            mean(&outcomes, error),
            mean(&outcomes, |outcome| outcome.served as f64),
        );
    }
}

#[test]
#[ignore = "prints the whole table, for minutes"]
fn all_policies_on_all_workloads() {
    let wanted = |name: &str| std::env::var("ONLY").map_or(true, |only| name.contains(&only));
    let seeds = std::env::var("SEEDS").map_or(3, |seeds| seeds.parse().unwrap());
    for reading in [Reading::Steep, Reading::Flat] {
        for kept in [15, 25, 35] {
            for per_minute in [200, 325, 450] {
                let name = format!("lalb: {kept} models, {reading:?}, {per_minute} a minute");
                if wanted(&name) {
                    table(&name, |seed| lalb(kept, reading, per_minute, seed), seeds);
                }
            }
        }
    }
    for (functions, rates) in
        [(160, (5, 30)), (480, (5, 15)), (560, (5, 15)), (480, (5, 30)), (560, (5, 30)), (640, (10, 30))]
    {
        let name = format!("torpor: {functions} functions, {rates:?} a minute");
        if wanted(&name) {
            table(&name, |seed| torpor(functions, rates, 300, seed), seeds);
        }
    }
    for held in [true, false] {
        for (functions, percent) in [(40, 90), (40, 110), (40, 150), (600, 70), (600, 110), (600, 150)] {
            let name = format!("equal: {functions} functions, {percent}% offered, objective {held}");
            if wanted(&name) {
                table(&name, |seed| equal(functions, percent, held, 60, seed), seeds);
            }
        }
    }
}

fn named(name: &str) -> millrace_policy::dispatch::PolicyConfig {
    name.parse().expect("it is one of POLICIES")
}

/// On the mean of a few seeds, what `of` says of unified is no more than what it says of each other
/// policy. Small differences are for the whole table and more seeds.
fn unified_is_best(scenario: impl Fn(u64) -> Scenario, others: &[&str], of: impl Fn(&Outcome) -> f64) {
    let scenarios: Vec<_> = (1..=3).map(scenario).collect();
    let figure = |name: &str| {
        let outcomes: Vec<_> = scenarios.iter().map(|scenario| run(scenario, named(name))).collect();
        mean(&outcomes, &of)
    };
    let ours = figure("unified");
    for other in others {
        let theirs = figure(other);
        assert!(ours <= theirs, "{ours} and {theirs} of {other}");
    }
}

/// The LALB paper's workload, on both readings.
#[test]
fn at_lalbs_load_unified_beats_out_of_order_dispatch() {
    for reading in [Reading::Steep, Reading::Flat] {
        let scenario = |seed| lalb(35, reading, 325, seed);
        let others = ["lalb", "lalb-o3"];
        unified_is_best(scenario, &others, |outcome| outcome.mean_ms);
        unified_is_best(scenario, &others, |outcome| outcome.miss_ratio);
    }
}

#[test]
fn at_torpors_load_unified_keeps_more_functions_compliant() {
    let late = |outcome: &Outcome| 1.0 - outcome.compliant;
    unified_is_best(|seed| torpor(560, (5, 15), 60, seed), &["fifo", "torpor", "lalb-o3"], late);
}

/// All functions equal and more offered than can be served: nothing to choose but hits.
#[test]
fn in_homogeneous_overload_unified_is_no_worse_than_fifo() {
    for held in [true, false] {
        let scenario = |seed| equal(40, 120, held, 6, seed);
        unified_is_best(scenario, &["fifo"], |outcome| outcome.mean_ms);
        unified_is_best(scenario, &["fifo"], |outcome| 1.0 - outcome.in_time);
    }
}

/// Torpor's figure 10 (§7.3): 160 functions on four GPUs.
#[test]
fn what_binds_early_serves_part_of_the_functions_that_late_binding_serves() {
    let scenario = torpor(160, (5, 30), 60, 1);
    let figures = |name: &str| {
        let outcome = run(&scenario, named(name));
        (outcome.served, (outcome.compliant * 160.0).round() as usize)
    };
    let (served, _) = figures("native");
    assert!((60..=80).contains(&served), "the paper has 72: {served}");
    let (served, compliant) = figures("infless-ka");
    assert!(served > 80 && compliant < 20, "the paper has 112 and 7: {served} and {compliant}");
    let (served, compliant) = figures("unified");
    assert!(served == 160 && compliant >= 155, "{served} and {compliant}");
}

#[test]
fn the_same_scenario_ends_the_same() {
    let outcome = || {
        let outcome = run(&torpor(80, (5, 30), 20, 3), named("unified"));
        (outcome.mean_ms.to_bits(), outcome.p99_ms.to_bits(), outcome.stats)
    };
    assert_eq!(outcome(), outcome());
}
