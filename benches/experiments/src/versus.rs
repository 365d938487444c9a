//! The comparison of `unified` with every other policy of an experiment: ahead, level or behind in each
//! measured quantity, with the seeds paired.

use crate::figures::{SeedValues, Unit};
use crate::seeds::Summaries;

/// The policy that is compared with all others.
const OURS: &str = "unified";
/// The share of the other policy's mean below which a difference counts as level, even if it is significant.
const LEVEL: f64 = 0.001;

/// A compared quantity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantity {
    name: &'static str,
    unit: Unit,
    more_is_better: bool,
    /// Whether the quantity covers answered requests only. A policy may be better in such a quantity
    /// because it answers fewer requests, so only policies that answer as many are compared.
    of_answers: bool,
}

impl Quantity {
    /// The share of functions that met their objectives.
    pub const COMPLIANT: Self = Self::share("functions that comply", true);
    /// The share of functions with at least one answer.
    pub const RUN: Self = Self::share("functions that run", true);
    /// The share of requests that were answered in time.
    pub const IN_TIME: Self = Self::share("requests in time", true);
    /// The share of requests without an answer.
    pub const UNANSWERED: Self = Self::share("unanswered", false);
    /// The share of dispatches to a GPU without the model.
    pub const MISSES: Self = Self::share("misses", false);
    /// The mean latency in milliseconds.
    pub const MEAN: Self = Self::latency("mean latency");
    /// The 98th percentile of latency in milliseconds.
    pub const P98: Self = Self::latency("p98");
    /// The 99th percentile of latency in milliseconds.
    pub const P99: Self = Self::latency("p99");

    const fn share(name: &'static str, more_is_better: bool) -> Self {
        Self { name, unit: Unit::Percent, more_is_better, of_answers: false }
    }

    /// Returns a latency of answers, in milliseconds.
    #[must_use]
    pub const fn latency(name: &'static str) -> Self {
        Self { name, unit: Unit::Millis, more_is_better: false, of_answers: true }
    }
}

/// The values of one quantity of one setup under one policy.
#[derive(Debug, Clone, PartialEq)]
struct Measurement {
    setup: String,
    policy: String,
    quantity: Quantity,
    values: SeedValues,
}

/// The standing of our policy in a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ComparisonResult {
    Ahead,
    Level,
    Behind,
}

/// All measurements by which policies are compared.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyComparison(Vec<Measurement>);

impl PolicyComparison {
    /// Adds the values of a quantity under a policy in a setup, by seed.
    pub fn add(&mut self, setup: &str, policy: &str, quantity: Quantity, values: SeedValues) {
        self.0.push(Measurement { setup: setup.to_owned(), policy: policy.to_owned(), quantity, values });
    }

    /// Adds the quantities of a policy in a setup that clients observe: functions that comply, if functions
    /// have objectives, unanswered requests, and latencies.
    pub fn add_summaries(&mut self, setup: &str, policy: &str, of: &Summaries) {
        if of.0.iter().any(|it| it.with_objective > 0) {
            self.add(setup, policy, Quantity::COMPLIANT, of.spread(millrace_sim::RunSummary::compliance));
        }
        let unanswered = of.spread(|it| it.failed as f64 / it.requests.max(1) as f64);
        self.add(setup, policy, Quantity::UNANSWERED, unanswered);
        self.add(setup, policy, Quantity::MEAN, of.mean_ms());
        self.add(setup, policy, Quantity::P98, of.spread(|it| it.p98.as_secs_f64() * 1e3));
        self.add(setup, policy, Quantity::P99, of.spread(|it| it.p99.as_secs_f64() * 1e3));
    }

    fn of(&self, setup: &str, policy: &str, quantity: Quantity) -> Option<&SeedValues> {
        let is = |it: &&Measurement| it.setup == setup && it.policy == policy && it.quantity == quantity;
        self.0.iter().find(is).map(|it| &it.values)
    }

    /// Returns whether a policy answers as many requests as ours.
    fn answers_as_many(&self, setup: &str, policy: &str) -> bool {
        let of = |policy| self.of(setup, policy, Quantity::UNANSWERED);
        let both = of(OURS).zip(of(policy));
        both.is_none_or(|(ours, theirs)| standing(ours, theirs, false) == ComparisonResult::Level)
    }

    /// Returns each comparison: our values, the other policy's values, and our standing.
    fn pairs(&self) -> impl Iterator<Item = (&SeedValues, &Measurement, ComparisonResult)> {
        let others = self.0.iter().filter(|it| {
            it.policy != OURS && (!it.quantity.of_answers || self.answers_as_many(&it.setup, &it.policy))
        });
        others.filter_map(|theirs| {
            let ours = self.of(&theirs.setup, OURS, theirs.quantity)?;
            Some((ours, theirs, standing(ours, &theirs.values, theirs.quantity.more_is_better)))
        })
    }

    /// Returns the numbers of comparisons as a sentence, and the comparisons in which ours is behind as
    /// rows of a table. Returns `None` if our policy or all others were not measured.
    #[must_use]
    pub fn summary(&self) -> Option<(String, Vec<Vec<String>>)> {
        let pairs: Vec<_> = self.pairs().collect();
        let count = |wanted| pairs.iter().filter(|(.., standing)| *standing == wanted).count();
        let sentence = format!(
            "`unified` beside the others: ahead in {}, level in {}, behind in {} of {} comparisons.",
            count(ComparisonResult::Ahead),
            count(ComparisonResult::Level),
            count(ComparisonResult::Behind),
            pairs.len()
        );
        let row = |(ours, theirs, _): &(&SeedValues, &Measurement, _)| {
            let unit = theirs.quantity.unit;
            vec![
                theirs.setup.clone(),
                theirs.quantity.name.to_owned(),
                unit.show(ours.mean()),
                theirs.policy.clone(),
                unit.show(theirs.values.mean()),
            ]
        };
        let behind =
            pairs.iter().filter(|(.., standing)| *standing == ComparisonResult::Behind).map(row).collect();
        (!pairs.is_empty()).then_some((sentence, behind))
    }
}

fn standing(ours: &SeedValues, theirs: &SeedValues, more_is_better: bool) -> ComparisonResult {
    let by = if more_is_better { ours.differences(theirs) } else { theirs.differences(ours) };
    let mean = by.mean();
    let half = by.half_interval();
    match () {
        () if mean.abs() <= theirs.mean().abs() * LEVEL => ComparisonResult::Level,
        () if mean - half > 0.0 => ComparisonResult::Ahead,
        () if mean + half < 0.0 => ComparisonResult::Behind,
        () => ComparisonResult::Level,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(values: &[f64]) -> SeedValues {
        SeedValues(values.to_vec())
    }

    #[test]
    fn standing_is_behind_only_if_the_difference_is_significant_and_over_a_thousandth() {
        let of = |ours: &[f64], theirs: &[f64]| standing(&spread(ours), &spread(theirs), false);
        assert_eq!(of(&[10.0, 11.0, 12.0], &[11.0, 12.0, 13.1]), ComparisonResult::Ahead);
        assert_eq!(of(&[11.0, 12.0, 13.1], &[10.0, 11.0, 12.0]), ComparisonResult::Behind);
        let by_chance = of(&[11.0, 9.0, 13.0], &[10.0, 11.0, 12.0]);
        assert_eq!(by_chance, ComparisonResult::Level, "chance may explain the difference");
        let within_a_thousandth = of(&[10.001, 11.001, 12.001], &[10.0, 11.0, 12.0]);
        assert_eq!(within_a_thousandth, ComparisonResult::Level, "the difference is below a thousandth");
        assert_eq!(standing(&spread(&[0.9]), &spread(&[0.8]), true), ComparisonResult::Ahead);
    }

    #[test]
    fn latencies_are_compared_only_with_policies_that_answer_as_many_requests() {
        let mut versus = PolicyComparison::default();
        for (policy, unanswered, p98) in
            [("unified", 0.1, 50.0), ("native", 0.4, 20.0), ("fifo", 0.1, 40.0), ("lb", 0.0, 70.0)]
        {
            versus.add("500", policy, Quantity::UNANSWERED, spread(&[unanswered]));
            versus.add("500", policy, Quantity::P98, spread(&[p98]));
        }
        let (sentence, behind) = versus.summary().unwrap();
        assert_eq!(
            sentence,
            "`unified` beside the others: ahead in 1, level in 1, behind in 2 of 4 comparisons."
        );
        let rows =
            [["500", "p98", "50.0 ms", "fifo", "40.0 ms"], ["500", "unanswered", "10.0%", "lb", "0.0%"]];
        assert_eq!(behind, rows.map(|row| row.map(String::from)));
        assert_eq!(PolicyComparison::default().summary(), None);
    }
}
