//! The recorded status of each figure and order, in `figures.json` beside this crate's manifest, and the
//! comparison of a run with the records.

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};

use crate::effort::Effort;
use crate::figures::{ClaimSource, Figure, PolicyOrder, SeedValues, Status};
use crate::report::ExperimentReport;

/// The fewest seeds by which a status is judged.
pub const JUDGED_SEEDS: u64 = 5;

/// A figure or an order as in `figures.json`, and as `--json` writes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusRecord {
    /// The experiment that has the figure.
    pub experiment: String,
    /// The measured quantity, unique in its experiment.
    pub figure: String,
    /// `paper`, `goal` or `order`.
    pub source: String,
    /// The claim as its source states it; empty for an order.
    pub claim: String,
    /// Our mean with its unit.
    pub shown: String,
    /// The mean over the seeds: a share of 1, milliseconds, a ratio or a count.
    pub mean: f64,
    /// Half of the mean's 95% interval, in the mean's unit.
    pub half_interval: f64,
    /// The least mean that agrees with the claim, if the claim has one.
    pub least: Option<f64>,
    /// The greatest mean that agrees with the claim, if the claim has one.
    pub most: Option<f64>,
    /// [`Status::name`].
    pub status: String,
    pub first_seed: u64,
    pub seeds: u64,
}

/// Rounds a value so that records of equal runs have equal text.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

impl StatusRecord {
    fn of_figure(experiment: &str, figure: &Figure, effort: Effort) -> Self {
        let band = figure.band();
        let end = |value: f64| value.is_finite().then(|| rounded(value));
        Self {
            source: match figure.claim.source {
                ClaimSource::Paper | ClaimSource::NotJudged => "paper",
                ClaimSource::Goal => "goal",
            }
            .to_owned(),
            claim: figure.claim.text.clone(),
            shown: figure.shown(),
            least: end(*band.start()),
            most: end(*band.end()),
            ..Self::of(experiment, &figure.what, &figure.ours, figure.status(), effort)
        }
    }

    fn of_order(experiment: &str, order: &PolicyOrder, effort: Effort) -> Self {
        Self { least: Some(0.0), ..Self::of(experiment, &order.what, &order.by, order.status(), effort) }
    }

    fn of(experiment: &str, what: &str, values: &SeedValues, status: Status, effort: Effort) -> Self {
        Self {
            experiment: experiment.to_owned(),
            figure: what.to_owned(),
            source: "order".to_owned(),
            claim: String::new(),
            shown: String::new(),
            mean: rounded(values.mean()),
            half_interval: rounded(values.half_interval()),
            least: None,
            most: None,
            status: status.name().to_owned(),
            first_seed: effort.first_seed,
            seeds: effort.seeds,
        }
    }
}

/// Returns the records of a run of one experiment.
#[must_use]
pub fn records(experiment: &str, report: &ExperimentReport, effort: Effort) -> Vec<StatusRecord> {
    let figures = report.figures.iter().map(|it| StatusRecord::of_figure(experiment, it, effort));
    let orders = report.orders.iter().map(|it| StatusRecord::of_order(experiment, it, effort));
    figures.chain(orders).collect()
}

/// Returns the committed records.
///
/// # Errors
/// Returns an error if `figures.json` cannot be read.
pub fn committed() -> Result<Vec<StatusRecord>> {
    parse(include_str!("../figures.json"))
}

/// Returns the records in a text of JSON.
///
/// # Errors
/// Returns an error if the text is not a list of records.
pub fn parse(text: &str) -> Result<Vec<StatusRecord>> {
    serde_json::from_str(text).context("not a list of figures as --json writes it")
}

/// Returns records as JSON, one to a line.
///
/// # Errors
/// Returns an error if a value cannot be written as JSON.
pub fn text(records: &[StatusRecord]) -> Result<String> {
    let lines = records.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
    Ok(format!("[\n{}\n]\n", lines.join(",\n")))
}

/// Replaces the records of the experiments in `new`, and keeps all others.
pub fn replace(records: &mut Vec<StatusRecord>, new: &[StatusRecord]) {
    records.retain(|old| new.iter().all(|it| it.experiment != old.experiment));
    records.extend_from_slice(new);
}

/// Returns a sentence for each status of a run that differs from the committed one. With the seeds of the
/// record the statuses must be equal. With others a status differs only if the run's 95% interval excludes it.
///
/// # Errors
/// Returns an error if the run has too few seeds to be judged.
pub fn differences(
    experiment: &str,
    report: &ExperimentReport,
    effort: Effort,
    committed: &[StatusRecord],
) -> Result<Vec<String>> {
    if effort.short || effort.seeds < JUDGED_SEEDS {
        bail!("statuses need at least {JUDGED_SEEDS} seeds of the whole workload");
    }
    let figures = report.figures.iter().map(|it| (&it.what, it.status(), Judged::Figure(it)));
    let orders = report.orders.iter().map(|it| (&it.what, it.status(), Judged::Order(it)));
    let mut differences = Vec::new();
    let mut known = 0;
    for (what, status, judged) in figures.chain(orders) {
        let is = |it: &&StatusRecord| it.experiment == experiment && it.figure == *what;
        let Some(record) = committed.iter().find(is) else {
            differences.push(format!("{experiment}: {what:?} is {:?} and has no record", status.name()));
            continue;
        };
        known += 1;
        let recorded = Status::named(&record.status)
            .with_context(|| format!("figures.json: {:?} is no status of {what:?}", record.status))?;
        let same_seeds = (record.first_seed, record.seeds) == (effort.first_seed, effort.seeds);
        if status != recorded && (same_seeds || !judged.allows(recorded)) {
            differences.push(format!(
                "{experiment}: {what:?} is {:?}, recorded as {:?}",
                status.name(),
                record.status
            ));
        }
    }
    let all = committed.iter().filter(|it| it.experiment == experiment).count();
    if known < all {
        differences.push(format!("{experiment}: {} recorded figures are not in the run", all - known));
    }
    Ok(differences)
}

enum Judged<'a> {
    Figure(&'a Figure),
    Order(&'a PolicyOrder),
}

impl Judged<'_> {
    fn allows(&self, recorded: Status) -> bool {
        match self {
            Self::Figure(figure) => figure.allows(recorded),
            Self::Order(order) => order.allows(recorded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::{Bound, Claim, Unit};

    fn report(ours: &[f64]) -> ExperimentReport {
        let ours = SeedValues(ours.to_vec());
        let claim = Claim::paper("1×", Bound::About(1.0));
        let what = "ratio".to_owned();
        let figures = vec![Figure { what, claim, ours: ours.clone(), unit: Unit::Times, cause: None }];
        let orders = vec![PolicyOrder { what: "above 0".to_owned(), by: ours, cause: None }];
        ExperimentReport { figures, orders, ..ExperimentReport::default() }
    }

    const FIVE: Effort = Effort { seeds: 5, ..Effort::FULL };

    #[test]
    fn a_run_with_the_recorded_seeds_must_have_the_recorded_statuses() {
        let committed = records("X", &report(&[1.1; 5]), FIVE);
        let of = |ours: [f64; 5], effort| differences("X", &report(&ours), effort, &committed).unwrap();
        assert_eq!(of([1.15; 5], FIVE), Vec::<String>::new());
        let near = [1.0, 1.1, 1.2, 1.3, 1.5];
        assert_eq!(of(near, FIVE), ["X: \"ratio\" is \"not reproduced\", recorded as \"reproduced\""]);
        let others = Effort { first_seed: 101, ..FIVE };
        assert_eq!(
            of(near, others),
            Vec::<String>::new(),
            "the interval of other seeds reaches into the band"
        );
        assert_eq!(of([1.5; 5], others).len(), 1);
    }

    #[test]
    fn figures_without_a_record_and_records_without_a_figure_are_differences() {
        let committed = records("X", &report(&[1.0; 5]), FIVE);
        let mut other = report(&[1.0; 5]);
        other.figures[0].what = "renamed".to_owned();
        let found = differences("X", &other, FIVE, &committed).unwrap();
        assert_eq!(
            found,
            [
                "X: \"renamed\" is \"reproduced\" and has no record",
                "X: 1 recorded figures are not in the run"
            ]
        );
    }

    #[test]
    fn fewer_than_five_seeds_judge_nothing() {
        let few = Effort { seeds: 4, ..Effort::FULL };
        differences("X", &report(&[1.0; 4]), few, &[]).unwrap_err();
        differences("X", &report(&[1.0; 5]), Effort::SHORT, &[]).unwrap_err();
    }

    #[test]
    fn records_survive_their_text_and_are_replaced_by_experiment() {
        let mut all = records("X", &report(&[1.0; 5]), FIVE);
        all.extend(records("Y", &report(&[2.0; 5]), FIVE));
        assert_eq!(parse(&text(&all).unwrap()).unwrap(), all);
        replace(&mut all, &records("X", &report(&[3.0; 5]), FIVE));
        let means: Vec<_> = all.iter().map(|it| (it.experiment.as_str(), it.mean)).collect();
        assert_eq!(means, [("Y", 2.0), ("Y", 2.0), ("X", 3.0), ("X", 3.0)]);
    }
}
