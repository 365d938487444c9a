//! A figure of a paper beside ours, and the verdict on whether the two agree.

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

/// A figure of a paper beside ours.
#[derive(Debug, Clone, PartialEq)]
pub struct PaperFigure {
    /// The measured quantity.
    pub what: String,
    /// The value in the paper, as text.
    pub paper: String,
    /// The values in the simulator.
    pub ours: SeedValues,
    pub unit: Unit,
    /// The values at which our mean agrees with the paper.
    pub band: RangeInclusive<f64>,
    /// The cause of a mean outside the band, if known.
    pub cause: Option<&'static str>,
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

/// The verdict on a figure or an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Our result agrees with the paper.
    Inside,
    /// Our result differs from the paper, with a known cause.
    Explained,
    /// Our result differs from the paper without a known cause.
    Outside,
}

impl PaperFigure {
    /// Returns whether our mean is in the band.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match (self.band.contains(&self.ours.mean()), self.cause) {
            (true, _) => Verdict::Inside,
            (false, Some(_)) => Verdict::Explained,
            (false, None) => Verdict::Outside,
        }
    }
}

/// An order of two systems in a quantity, as in the paper.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyOrder {
    /// The quantity and the order of the systems.
    pub what: String,
    /// The difference in each seed. A positive difference agrees with the paper.
    pub by: SeedValues,
    /// The cause of the opposite order, if known.
    pub cause: Option<&'static str>,
}

impl PolicyOrder {
    /// Returns whether the order agrees with the paper: with the seeds paired, the opposite does not hold
    /// at 95%.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match (self.by.mean() + self.by.half_interval() >= 0.0, self.cause) {
            (true, _) => Verdict::Inside,
            (false, Some(_)) => Verdict::Explained,
            (false, None) => Verdict::Outside,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_follows_students_distribution() {
        let spread = SeedValues(vec![1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(spread.mean(), 3.0);
        assert!((spread.half_interval() - 1.963).abs() < 1e-3, "{}", spread.half_interval());
        assert_eq!(SeedValues(vec![2.0]).half_interval(), 0.0);
    }

    #[test]
    fn an_order_differs_only_if_the_opposite_is_significant() {
        let order =
            |by: &[f64]| PolicyOrder { what: String::new(), by: SeedValues(by.to_vec()), cause: None };
        assert_eq!(order(&[1.0, 2.0, 1.5]).verdict(), Verdict::Inside);
        assert_eq!(order(&[-1.0, 0.8, -0.5]).verdict(), Verdict::Inside, "chance may explain the difference");
        assert_eq!(order(&[-1.0, -1.1, -0.9]).verdict(), Verdict::Outside);
    }

    #[test]
    fn a_figure_outside_its_band_needs_a_cause() {
        let figure = |ours, cause| PaperFigure {
            what: String::new(),
            paper: String::new(),
            ours: SeedValues(vec![ours]),
            unit: Unit::Percent,
            band: 0.8..=1.0,
            cause,
        };
        assert_eq!(figure(0.9, None).verdict(), Verdict::Inside);
        assert_eq!(figure(0.7, Some("because")).verdict(), Verdict::Explained);
        assert_eq!(figure(0.7, None).verdict(), Verdict::Outside);
    }
}
