//! A figure of a paper beside ours, and whether the two agree.

use std::ops::RangeInclusive;

/// Values of one quantity, one for each seed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Spread(pub Vec<f64>);

/// Student's t at 97.5%, by degrees of freedom from 1.
const T: [f64; 15] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
];

impl Spread {
    /// The mean.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len().max(1) as f64
    }

    /// Half of the mean's 95% confidence interval; zero with one value.
    #[must_use]
    pub fn half(&self) -> f64 {
        let count = self.0.len();
        if count < 2 {
            return 0.0;
        }
        let mean = self.mean();
        let variance = self.0.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
        let t = T.get(count - 2).copied().unwrap_or(1.96);
        t * (variance / count as f64).sqrt()
    }

    /// Each value less another's of the same seed.
    #[must_use]
    pub fn less(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(a, b)| a - b).collect())
    }

    /// By how much each value is below another's of the same seed, as a share of that.
    #[must_use]
    pub fn reduction_from(&self, base: &Self) -> Self {
        let part = |(ours, base): (&f64, &f64)| if *base == 0.0 { 0.0 } else { 1.0 - ours / base };
        Self(self.0.iter().zip(&base.0).map(part).collect())
    }
}

/// A figure of a paper beside ours.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// What is measured.
    pub what: String,
    /// What the paper says.
    pub paper: String,
    /// What the twin says.
    pub ours: Spread,
    /// How ours is written.
    pub unit: Unit,
    /// Where ours may be.
    pub band: RangeInclusive<f64>,
    /// Why ours is elsewhere, where that is known.
    pub cause: Option<&'static str>,
}

/// How a figure is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A share, in percent.
    Percent,
    /// Milliseconds.
    Millis,
    /// Times.
    Times,
    /// A count.
    Count,
}

impl Unit {
    /// A value as text.
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

/// Whether a figure agrees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is in its band.
    Inside,
    /// It is not, and it is known why.
    Explained,
    /// It is not.
    Outside,
}

impl Figure {
    /// Whether it agrees.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match (self.band.contains(&self.ours.mean()), self.cause) {
            (true, _) => Verdict::Inside,
            (false, Some(_)) => Verdict::Explained,
            (false, None) => Verdict::Outside,
        }
    }
}

/// An order of baselines that the paper found.
#[derive(Debug, Clone, PartialEq)]
pub struct Order {
    /// Who is before whom in what.
    pub what: String,
    /// In each seed: by how much. Positive agrees with the paper.
    pub by: Spread,
    /// Why it is not so here, where that is known.
    pub cause: Option<&'static str>,
}

impl Order {
    /// Whether it is the paper's: with the seeds paired, nothing speaks against it at 95%.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match (self.by.mean() + self.by.half() >= 0.0, self.cause) {
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
    fn the_interval_is_students() {
        let spread = Spread(vec![1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(spread.mean(), 3.0);
        assert!((spread.half() - 1.963).abs() < 1e-3, "{}", spread.half());
        assert_eq!(Spread(vec![2.0]).half(), 0.0);
    }

    #[test]
    fn an_order_is_against_the_paper_only_if_that_is_no_chance() {
        let order = |by: &[f64]| Order { what: String::new(), by: Spread(by.to_vec()), cause: None };
        assert_eq!(order(&[1.0, 2.0, 1.5]).verdict(), Verdict::Inside);
        assert_eq!(order(&[-1.0, 0.8, -0.5]).verdict(), Verdict::Inside, "it may be chance");
        assert_eq!(order(&[-1.0, -1.1, -0.9]).verdict(), Verdict::Outside);
    }

    #[test]
    fn a_figure_outside_its_band_needs_a_cause() {
        let figure = |ours, cause| Figure {
            what: String::new(),
            paper: String::new(),
            ours: Spread(vec![ours]),
            unit: Unit::Percent,
            band: 0.8..=1.0,
            cause,
        };
        assert_eq!(figure(0.9, None).verdict(), Verdict::Inside);
        assert_eq!(figure(0.7, Some("because")).verdict(), Verdict::Explained);
        assert_eq!(figure(0.7, None).verdict(), Verdict::Outside);
    }
}
