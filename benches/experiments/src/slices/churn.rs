//! GPUs in use while pods arrive and leave, by packing, with and without moves.

use anyhow::Result;
use millrace_sim::workload::random;
use millrace_slices::pack::Packer;
use millrace_slices::rectangles::{RectanglePacker, Restructure};
use millrace_slices::tokens::Config;
use millrace_types::{SliceId, Terms};
use rand::Rng;

use super::setup::{MEMORY, SMS, ours, slice, terms};
use crate::Effort;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;

const STEPS: usize = 1500;
/// Steps before the means begin.
const BEGIN: usize = 200;
const ALIVE_MIN: usize = 40;
/// More GPUs than any packing needs.
const GPUS_MAX: usize = 4096;

/// A packing that is compared.
enum Packing {
    Rectangles(RectanglePacker),
    DryRun(Packer),
}

impl Packing {
    fn place(&mut self, id: u64, terms: Terms) -> Result<()> {
        match self {
            Self::Rectangles(packer) => {
                anyhow::ensure!(
                    packer.place(SliceId(id), terms, |_| true).is_some(),
                    "a pod has no rectangle"
                );
            }
            Self::DryRun(packer) => {
                packer.place(slice(id, terms))?;
            }
        }
        Ok(())
    }

    fn remove(&mut self, id: u64) {
        match self {
            Self::Rectangles(packer) => packer.remove(SliceId(id)),
            Self::DryRun(packer) => packer.remove(SliceId(id)),
        };
    }

    /// Empties a GPU if possible, and returns the number of moves.
    fn empty_one(&mut self) -> usize {
        match self {
            Self::Rectangles(packer) => packer.empty_one(),
            Self::DryRun(packer) => packer.empty_one().len(),
        }
    }

    fn gpus(&self) -> usize {
        match self {
            Self::Rectangles(packer) => packer.gpus().iter().filter(|gpu| !gpu.taken().is_empty()).count(),
            Self::DryRun(packer) => packer.gpus_used(),
        }
    }
}

/// Whether pods are moved after a pod has left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moves {
    None,
    EmptyOne,
}

/// The means of a run: GPUs, living pods, moves a step, and the area of all requests in GPUs.
#[derive(Debug, Clone, Copy, Default)]
struct Means {
    gpus: f64,
    alive: f64,
    moves: f64,
    area: f64,
}

/// Returns a pod of section 5.2's grid; small shares of the SMs are frequent.
fn random_pod(rng: &mut impl Rng) -> (u16, u16) {
    let small = rng.random_bool(0.7);
    let sm = if small { SMS[rng.random_range(0..3)] } else { SMS[rng.random_range(0..SMS.len())] };
    (200 * rng.random_range(1..=5), sm)
}

/// Runs arrivals and leaves with equal chances. `alive_max` bounds the living pods.
fn run(
    mut packing: Packing,
    moves: Moves,
    alive_max: Option<usize>,
    seed: u64,
    steps: usize,
) -> Result<Means> {
    let mut rng = random(seed, 50);
    let mut alive: Vec<(u64, (u16, u16))> = Vec::new();
    let mut sum = Means::default();
    for step in 0..steps {
        let full = alive_max.is_some_and(|max| alive.len() > max);
        if alive.len() < ALIVE_MIN || (rng.random_bool(0.5) && !full) {
            let pod = random_pod(&mut rng);
            packing.place(step as u64, terms(pod.0, pod.1)?)?;
            alive.push((step as u64, pod));
        } else {
            let (id, _) = alive.swap_remove(rng.random_range(0..alive.len()));
            packing.remove(id);
            if moves == Moves::EmptyOne {
                sum.moves += packing.empty_one() as f64 / steps as f64;
            }
        }
        if step > steps * BEGIN / STEPS {
            let part = 1.0 / (steps - 1 - steps * BEGIN / STEPS) as f64;
            let area: f64 = alive.iter().map(|(_, pod)| f64::from(pod.0) * f64::from(pod.1) / 1e5).sum();
            sum.gpus += packing.gpus() as f64 * part;
            sum.alive += alive.len() as f64 * part;
            sum.area += area * part;
        }
    }
    Ok(sum)
}

/// The compared packings, by name.
const WAYS: [&str; 6] = [
    "maximal rectangles, exact lists",
    "maximal rectangles, kept lists",
    "maximal rectangles, moves",
    "dry run",
    "dry run, moves",
    "dry run in blocks of 16 units, moves",
];

fn way(place: usize) -> Result<(Packing, Moves)> {
    let rectangles = |restructure| Packing::Rectangles(RectanglePacker::new(GPUS_MAX, restructure));
    let dry_run = |config| Packing::DryRun(Packer::new(config, MEMORY, GPUS_MAX));
    Ok(match place {
        0 => (rectangles(Restructure::Always), Moves::None),
        1 => (rectangles(Restructure::Keep), Moves::None),
        2 => (rectangles(Restructure::Always), Moves::EmptyOne),
        3 => (dry_run(ours()?), Moves::None),
        4 => (dry_run(ours()?), Moves::EmptyOne),
        _ => (dry_run(Config::SLICES), Moves::EmptyOne),
    })
}

pub(super) fn churn(effort: Effort) -> Result<ExperimentReport> {
    let steps = if effort.short { STEPS / 10 } else { STEPS };
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "{steps} steps for each seed: a pod arrives or leaves with equal chances, and arrives while fewer than {ALIVE_MIN} are alive. *Held* pods also only leave above {ALIVE_MIN}. Requests are 20 to 100% of the time; shares of the SMs are 6, 12 or 24% for seven pods in ten, and else of the paper's seven. GPUs are counted after the first {} steps.",
        steps * BEGIN / STEPS
    ));
    report.assumed.push(
        "*Moves*: when a pod has left, the GPU with the least used area is emptied if all of its pods fit elsewhere. *Exact lists*: the free rectangles are computed anew at each release; *kept lists*: only when the list is long (F16). Blocks of 16 units round shares up: 60% and 80% take the whole GPU. *Area*: no packing can need fewer GPUs.".to_owned(),
    );
    let mut rows = Vec::new();
    for (population, alive_max) in [("40 or more", None), ("held at 40", Some(ALIVE_MIN))] {
        let mut gpus: Vec<SeedValues> = Vec::new();
        for (place, name) in WAYS.into_iter().enumerate() {
            let mut means = Vec::new();
            for seed in effort.each_seed() {
                let (packing, moves) = way(place)?;
                means.push(run(packing, moves, alive_max, seed, steps)?);
            }
            let of = |value: fn(&Means) -> f64| SeedValues(means.iter().map(value).collect());
            let values = of(|it| it.gpus);
            let moves = of(|it| it.moves);
            rows.push(vec![
                population.to_owned(),
                name.to_owned(),
                format!("{:.2}", values.mean()),
                format!("{:.2}", moves.mean()),
                format!("{:.1}", of(|it| it.alive).mean()),
                format!("{:.2}", of(|it| it.area).mean()),
            ]);
            if place == 4 {
                report.figures.push(saved(population, &values, &gpus[0]));
                report.figures.push(moves_a_step(population, moves));
                report.orders.push(PolicyOrder {
                    what: format!(
                        "{population}: the dry run needs no more GPUs than rectangles, both with moves"
                    ),
                    by: gpus[2].differences(&values),
                    cause: None,
                });
            }
            gpus.push(values);
        }
    }
    let header =
        ["pods", "packing", "GPUs", "moves a step", "alive", "area in GPUs"].map(String::from).to_vec();
    report.tables.push(("Mean GPUs in use:".to_owned(), header, rows));
    Ok(report)
}

fn saved(population: &str, ours: &SeedValues, exact: &SeedValues) -> Figure {
    Figure {
        what: format!("{population}: GPUs saved by dry run and moves, of those of exact rectangles"),
        claim: Claim::goal("none stated; our aim is at least 10%", Bound::AtLeast(0.10)),
        ours: ours.reduction_from(exact),
        unit: Unit::Percent,
        cause: None,
    }
}

fn moves_a_step(population: &str, moves: SeedValues) -> Figure {
    Figure {
        what: format!("{population}: moves for each arrival or leave, in percent"),
        claim: Claim::goal("none stated; our aim is at most 20%", Bound::AtMost(0.20)),
        ours: moves,
        unit: Unit::Percent,
        cause: None,
    }
}
