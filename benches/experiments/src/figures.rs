//! Figures and orders of a paper, goals of our own, and the status of each.
//!
//! One rule gives the band of every figure: 20% of a latency, a throughput or a ratio on either side, 5 points of
//! a share, and nothing for a count. A claim with one end ("over 80%") is judged at that end; "up to 4×" is the
//! value of the greatest. A mean outside the band is not reproduced, also if it is better. A cause explains a status and never changes it.

use std::ops::RangeInclusive;

/// The values of a quantity, one for each seed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SeedValues(pub Vec<f64>);

/// Student's t at 97.5%, by degrees of freedom from 1.
const T: [f64; 15] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
];

impl SeedValues {
    /// Returns the mean of the values.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len().max(1) as f64
    }

    /// Returns half of the mean's 95% confidence interval; zero for one value.
    #[must_use]
    pub fn half_interval(&self) -> f64 {
        let count = self.0.len();
        if count < 2 {
            return 0.0;
        }
        let mean = self.mean();
        let variance = self.0.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
        let t = T.get(count - 2).copied().unwrap_or(1.96);
        t * (variance / count as f64).sqrt()
    }

    /// Returns the differences of the values and the other values of the same seeds.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| a - b).collect())
    }

    /// Returns the ratio of each value to the base value of the same seed.
    #[must_use]
    pub fn ratio_to(&self, base: &Self) -> Self {
        Self(self.0.iter().zip(&base.0).map(|(ours, base)| ours / base).collect())
    }

    /// Returns the share by which each value is below the base value of the same seed.
    #[must_use]
    pub fn reduction_from(&self, base: &Self) -> Self {
        let part = |(ours, base): (&f64, &f64)| if *base == 0.0 { 0.0 } else { 1.0 - ours / base };
        Self(self.0.iter().zip(&base.0).map(part).collect())
    }
}

/// A figure of a paper, or a goal of our own, beside our values.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// The measured quantity.
    pub what: String,
    pub claim: Claim,
    /// The values in the simulator.
    pub ours: SeedValues,
    pub unit: Unit,
    /// The cause of a mean outside the band, if known.
    pub cause: Option<&'static str>,
}

/// The claim with which a figure is compared.
#[derive(Debug, Clone, PartialEq)]
pub struct Claim {
    pub source: ClaimSource,
    /// The claim as its source states it.
    pub text: String,
    pub bound: Bound,
}

impl Claim {
    /// Returns a claim of a paper.
    pub fn paper(text: impl Into<String>, bound: Bound) -> Self {
        Self { source: ClaimSource::Paper, text: text.into(), bound }
    }

    /// Returns a goal of our own.
    pub fn goal(text: impl Into<String>, bound: Bound) -> Self {
        Self { source: ClaimSource::Goal, text: text.into(), bound }
    }

    /// Returns a claim that our figure cannot contradict. `text` has the paper's value, and why ours is not judged.
    pub fn not_judged(text: impl Into<String>) -> Self {
        Self { source: ClaimSource::NotJudged, text: text.into(), bound: Bound::AtLeast(f64::NEG_INFINITY) }
    }
}

/// The source of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimSource {
    Paper,
    /// A goal of our own, or the result of a reference model.
    Goal,
    /// Our figure follows from the setup or was fitted, so it is not judged.
    NotJudged,
}

/// The values with which a claim agrees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// About this value.
    About(f64),
    /// At least this value.
    AtLeast(f64),
    /// At most this value.
    AtMost(f64),
}

/// The unit of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A share, shown in percent.
    Percent,
    /// A time in milliseconds.
    Millis,
    /// A ratio.
    Times,
    /// A count.
    Count,
}

impl Unit {
    /// Returns a value as text.
    #[must_use]
    pub fn show(self, value: f64) -> String {
        match self {
            Self::Percent => format!("{:.1}%", value * 100.0),
            Self::Millis => format!("{value:.1} ms"),
            Self::Times => format!("{value:.2}×"),
            Self::Count => format!("{value:.1}"),
        }
    }
}

/// The part of a latency, a throughput or a ratio by which ours may differ.
const RATIO_SLACK: f64 = 0.2;
/// The part of the whole by which a share may differ: 5 points.
const SHARE_SLACK: f64 = 0.05;

impl Unit {
    /// Returns the distance from a value at which ours still agrees.
    fn slack(self, value: f64) -> f64 {
        match self {
            Self::Percent => SHARE_SLACK,
            Self::Millis | Self::Times => RATIO_SLACK * value,
            Self::Count => 0.0,
        }
    }
}

/// The status of a figure or an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The mean is in the band of the paper's figure.
    Reproduced,
    /// The mean is outside the band, on either side.
    NotReproduced,
    /// The mean meets a goal of our own.
    Met,
    /// The mean misses a goal of our own.
    Missed,
    /// The paired seeds show the order.
    Shown,
    /// The paired seeds show neither the order nor its opposite.
    NotShown,
    /// The paired seeds show the opposite order.
    Opposite,
    /// Our figure follows from the setup or was fitted.
    NotJudged,
}

impl Status {
    const ALL: [Self; 8] = [
        Self::Reproduced,
        Self::NotReproduced,
        Self::Met,
        Self::Missed,
        Self::Shown,
        Self::NotShown,
        Self::Opposite,
        Self::NotJudged,
    ];

    /// Returns the status as text.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reproduced => "reproduced",
            Self::NotReproduced => "not reproduced",
            Self::Met => "met",
            Self::Missed => "missed",
            Self::Shown => "shown",
            Self::NotShown => "not shown",
            Self::Opposite => "opposite",
            Self::NotJudged => "not judged",
        }
    }

    /// Returns the status with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.name() == name)
    }
}

/// The distance within which a mean counts as at the end of its band. Shares of seeds are sums of fractions.
const ROUNDING: f64 = 1e-9;

impl Figure {
    /// Returns the lowest and the highest mean that agree with the claim.
    #[must_use]
    pub fn band(&self) -> RangeInclusive<f64> {
        match self.claim.bound {
            Bound::About(value) => {
                let slack = self.unit.slack(value);
                value - slack..=value + slack
            }
            Bound::AtLeast(value) => value..=f64::INFINITY,
            Bound::AtMost(value) => f64::NEG_INFINITY..=value,
        }
    }

    /// Returns our mean, with half of its 95% interval if there are several values.
    #[must_use]
    pub fn shown(&self) -> String {
        let mean = self.unit.show(self.ours.mean());
        if self.ours.0.len() < 2 {
            return mean;
        }
        format!("{mean} ± {}", self.unit.show(self.ours.half_interval()))
    }

    /// Returns the band as text.
    #[must_use]
    pub fn band_text(&self) -> String {
        let show = |value: f64| self.unit.show(value);
        match (self.claim.source, self.claim.bound) {
            (ClaimSource::NotJudged, _) => "-".to_owned(),
            (_, Bound::AtLeast(value)) => format!("at least {}", show(value)),
            (_, Bound::AtMost(value)) => format!("at most {}", show(value)),
            (_, Bound::About(value)) => {
                let slack = self.unit.slack(value);
                format!("{} to {}", show(value - slack), show(value + slack))
            }
        }
    }

    /// Returns the status of a mean.
    fn status_of(&self, mean: f64) -> Status {
        let band = self.band();
        let inside = (*band.start() - ROUNDING..=*band.end() + ROUNDING).contains(&mean);
        match (self.claim.source, inside) {
            (ClaimSource::NotJudged, _) => Status::NotJudged,
            (ClaimSource::Paper, true) => Status::Reproduced,
            (ClaimSource::Paper, false) => Status::NotReproduced,
            (ClaimSource::Goal, true) => Status::Met,
            (ClaimSource::Goal, false) => Status::Missed,
        }
    }

    /// Returns the status of our mean.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status_of(self.ours.mean())
    }

    /// Returns whether our values, of other seeds than those of a recorded status, allow that status: whether a
    /// mean with that status lies in the 95% interval.
    #[must_use]
    pub fn allows(&self, recorded: Status) -> bool {
        let mean = self.ours.mean();
        let half = self.ours.half_interval();
        // Each status covers one or two half-lines or one range, so the ends of the interval and of the band suffice.
        let ends = [mean - half, mean, mean + half, *self.band().start(), *self.band().end()];
        let in_interval = ends.into_iter().filter(|end| (mean - half..=mean + half).contains(end));
        in_interval.into_iter().any(|value| self.status_of(value) == recorded)
    }
}

/// An order of two systems in a quantity.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyOrder {
    /// The quantity and the order of the systems.
    pub what: String,
    /// The difference in each seed. A positive difference agrees with the order.
    pub by: SeedValues,
    /// The cause of the opposite order, if known.
    pub cause: Option<&'static str>,
}

impl PolicyOrder {
    /// Returns whether the paired seeds show the order at 95%.
    #[must_use]
    pub fn status(&self) -> Status {
        let mean = self.by.mean();
        let half = self.by.half_interval();
        match () {
            () if mean - half > 0.0 => Status::Shown,
            () if mean + half < 0.0 => Status::Opposite,
            () => Status::NotShown,
        }
    }

    /// Returns whether our values, of other seeds than those of a recorded status, allow that status.
    #[must_use]
    pub fn allows(&self, recorded: Status) -> bool {
        !matches!(
            (recorded, self.status()),
            (Status::Shown, Status::Opposite) | (Status::Opposite, Status::Shown)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(claim: Claim, unit: Unit, ours: &[f64]) -> Figure {
        Figure { what: String::new(), claim, ours: SeedValues(ours.to_vec()), unit, cause: Some("because") }
    }

    #[test]
    fn half_follows_students_distribution() {
        let spread = SeedValues(vec![1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(spread.mean(), 3.0);
        assert!((spread.half_interval() - 1.963).abs() < 1e-3, "{}", spread.half_interval());
        assert_eq!(SeedValues(vec![2.0]).half_interval(), 0.0);
    }

    #[test]
    fn an_order_is_shown_only_if_significant() {
        let order = |by: &[f64]| {
            PolicyOrder { what: String::new(), by: SeedValues(by.to_vec()), cause: None }.status()
        };
        assert_eq!(order(&[1.0, 2.0, 1.5]), Status::Shown);
        assert_eq!(order(&[-1.0, 0.8, 0.5]), Status::NotShown, "chance may explain the difference");
        assert_eq!(order(&[0.0, 0.0, 0.0]), Status::NotShown, "a tie");
        assert_eq!(order(&[-1.0, -1.1, -0.9]), Status::Opposite);
    }

    #[test]
    fn each_unit_has_the_slack_of_its_rule() {
        let status = |bound, unit, ours| figure(Claim::paper("", bound), unit, &[ours]).status();
        assert_eq!(status(Bound::About(0.4), Unit::Percent, 0.45), Status::Reproduced);
        assert_eq!(status(Bound::About(0.4), Unit::Percent, 0.451), Status::NotReproduced);
        assert_eq!(status(Bound::About(100.0), Unit::Millis, 80.0), Status::Reproduced);
        assert_eq!(status(Bound::About(100.0), Unit::Millis, 79.0), Status::NotReproduced);
        assert_eq!(status(Bound::About(72.0), Unit::Count, 71.0), Status::NotReproduced);
        assert_eq!(status(Bound::About(72.0), Unit::Count, 72.0), Status::Reproduced);
        assert_eq!(status(Bound::AtLeast(0.8), Unit::Percent, 0.79), Status::NotReproduced);
        assert_eq!(status(Bound::AtLeast(0.8), Unit::Percent, 1.0), Status::Reproduced);
        assert_eq!(status(Bound::AtMost(50.0), Unit::Millis, 51.0), Status::NotReproduced);
    }

    #[test]
    fn a_mean_outside_the_band_on_either_side_is_not_reproduced_whatever_the_cause() {
        let paper = |ours| figure(Claim::paper("", Bound::About(0.8)), Unit::Percent, &[ours]).status();
        assert_eq!(paper(0.9), Status::NotReproduced, "the figure has a cause");
        assert_eq!(paper(0.82), Status::Reproduced);
        assert_eq!(paper(0.7), Status::NotReproduced);
        let goal = |ours| figure(Claim::goal("", Bound::AtLeast(0.8)), Unit::Percent, &[ours]).status();
        assert_eq!((goal(0.9), goal(0.7)), (Status::Met, Status::Missed));
        assert_eq!(figure(Claim::not_judged(""), Unit::Times, &[9.0]).status(), Status::NotJudged);
    }

    #[test]
    fn other_seeds_contradict_a_status_only_with_their_whole_interval() {
        let of = |ours: &[f64]| figure(Claim::paper("", Bound::About(1.0)), Unit::Times, ours);
        let near = of(&[1.1, 1.2, 1.5, 1.3, 1.2]);
        assert_eq!(near.status(), Status::NotReproduced);
        assert!(near.allows(Status::Reproduced) && near.allows(Status::NotReproduced));
        let far = of(&[1.5, 1.6, 1.5, 1.6, 1.5]);
        assert!(!far.allows(Status::Reproduced) && far.allows(Status::NotReproduced));
        let around = of(&[-4.0, 6.0, 1.0, -3.0, 5.0]);
        assert!(around.allows(Status::Reproduced), "the band lies in the interval");
    }

    #[test]
    fn a_status_is_found_by_its_name() {
        for status in Status::ALL {
            assert_eq!(Status::named(status.name()), Some(status));
        }
        assert_eq!(Status::named("agrees"), None);
    }
}
