//! Sets of pods for which a schedule of one window exists: how often the order of tokens meets all requests.

use std::time::Duration;

use anyhow::Result;
use millrace_sim::report::format_percent;
use millrace_sim::workload::random;
use millrace_slices::dry_run;
use millrace_slices::tokens::{Config, QuotaCap, TokenOrder};
use rand::Rng;
use rand::seq::SliceRandom as _;

use super::setup::{SECOND, SKIP, SMS, percentages, terms};
use crate::Effort;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;

const TOKEN: Duration = Duration::from_millis(10);
/// The number of tokens in a window.
const TOKENS: u16 = 100;
const SETS: usize = 250;
/// Shares of the SMs that are near to powers of two.
const ALIGNED: [u16; 5] = [6, 12, 25, 50, 100];
/// The shares of the SMs, and the load in percent of a full schedule.
const SETUPS: [(&str, &[u16], u16); 4] =
    [("paper's", &SMS, 100), ("paper's", &SMS, 95), ("paper's", &SMS, 90), ("aligned", &ALIGNED, 95)];

/// The cause of our rule below its aim.
const ONE_SEED: &str = "the aim is the result of one seed of a reference model (250 sets); with two other seeds that model meets 96% and 98% of 120 sets. At a load of 90% our rule meets 99%";

/// A pod: tokens that it needs in a window, and percent of the SMs.
type Pod = (u16, u16);

/// Returns pods that fill a schedule of random columns, each with random pods side by side.
fn feasible(rng: &mut impl Rng, sizes: &[u16]) -> Vec<Pod> {
    let count = rng.random_range(5..=12);
    let mut pods: Vec<Pod> = (0..count).map(|_| (0, sizes[rng.random_range(0..sizes.len())])).collect();
    let pieces = rng.random_range(3..=6);
    let mut cuts: Vec<u16> = (1..TOKENS).collect();
    cuts.shuffle(rng);
    cuts.truncate(pieces - 1);
    cuts.extend([0, TOKENS]);
    cuts.sort_unstable();
    for piece in cuts.windows(2) {
        let mut order: Vec<usize> = (0..pods.len()).collect();
        order.shuffle(rng);
        let mut used = 0;
        for pod in order {
            if used + pods[pod].1 <= 100 {
                used += pods[pod].1;
                pods[pod].0 += piece[1] - piece[0];
            }
        }
    }
    pods.retain(|pod| pod.0 > 0);
    pods
}

/// Returns whether a rule meets the requests of all pods, at a load in percent.
fn meets(config: Config, pods: &[Pod], load: u16) -> Result<bool> {
    let needs = pods.iter().map(|&(tokens, sm)| (tokens * load / 100 * (1000 / TOKENS), sm));
    let terms = needs.map(|(request, sm)| terms(request, sm)).collect::<Result<Vec<_>>>()?;
    Ok(dry_run::shortfall(config, &terms).is_zero())
}

pub(super) fn tokens(effort: Effort) -> Result<ExperimentReport> {
    let sets = if effort.short { SETS / 10 } else { SETS };
    let window = QuotaCap::Window(SECOND);
    let rules = [
        ("the first misfit stops the line (paper)", percentages(TokenOrder::Head, window, TOKEN)?),
        ("a misfit is skipped, wider first on ties (ours)", percentages(SKIP, window, TOKEN)?),
    ];
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "{sets} sets of 5 to 12 pods for each seed, made so that a schedule of one window of 1 s exists at a load of 100%; at less load each request is that share, rounded down to a token of 10 ms. *Aligned* shares of the SMs are 6, 12, 25, 50 and 100%. All pods always want to run, and all tokens begin together. A set is met if no request is missed at all."
    ));
    let mut rows = Vec::new();
    for (place, (sizes_name, sizes, load)) in SETUPS.into_iter().enumerate() {
        let mut met = [SeedValues::default(), SeedValues::default()];
        for seed in effort.each_seed() {
            let mut rng = random(seed, 40 + place as u64);
            let all: Vec<_> = (0..sets).map(|_| feasible(&mut rng, sizes)).collect();
            for ((_, config), met) in rules.iter().zip(&mut met) {
                let mut count = 0;
                for pods in &all {
                    count += usize::from(meets(*config, pods, load)?);
                }
                met.0.push(count as f64 / sets as f64);
            }
        }
        let setup = format!("{sizes_name} shares, load {load}%");
        for ((rule, _), met) in rules.iter().zip(&met) {
            rows.push(vec![setup.clone(), (*rule).to_owned(), format_percent(met.mean())]);
        }
        let [paper, ours] = met;
        report.orders.push(PolicyOrder {
            what: format!("{setup}: ours meets at least as many sets"),
            by: ours.differences(&paper),
            cause: None,
        });
        if (sizes_name, load) == ("paper's", 95) {
            report.figures.push(figure(
                "the paper's rule",
                Claim::goal("none stated; 53% in a reference model", Bound::About(0.53)),
                paper,
            ));
            let aim = figure(
                "our rule",
                Claim::goal("none stated; our aim is at least 99%", Bound::AtLeast(0.99)),
                ours,
            );
            report.figures.push(Figure { cause: Some(ONE_SEED), ..aim });
        }
    }
    let header = ["sets", "rule", "all requests met"].map(String::from).to_vec();
    report.tables.push(("Sets of which all requests are met:".to_owned(), header, rows));
    Ok(report)
}

fn figure(rule: &str, claim: Claim, ours: SeedValues) -> Figure {
    let what = format!("{rule} at a load of 95%: sets of which all requests are met");
    Figure { what, claim, ours, unit: Unit::Percent, cause: None }
}
