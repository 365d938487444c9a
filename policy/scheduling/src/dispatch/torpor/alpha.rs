//! Rule by which alpha follows the share of functions that meet their objective (T20, algorithm 2
//! of Torpor).

use millrace_types::Alpha;

use crate::dispatch::config::AlphaRule;

/// Factor of one adjustment of alpha.
const SCALAR: f64 = 2.0;
/// Least change of the share that adjusts alpha.
const THRESHOLD: f64 = 0.04;
/// Growth factor of alpha while the share is steady, in the artifact.
const CREEP: f64 = 1.01;

/// Alpha, between a floor and 1. The paper and the artifact have no floor, so alpha can become so
/// small that no function with a positive required request count is ever prioritised again. Our
/// floor is 1/N with N functions. Alpha starts at 1 with all functions compliant, because none has
/// a score yet.
#[derive(Debug)]
pub(super) struct PrioritisedShare {
    rule: AlphaRule,
    alpha: f64,
    /// Share of compliant functions in the last period; in the artifact, at the last adjustment.
    /// `None` behind a committed alpha, whose share is unknown: the next period only records its
    /// own.
    last: Option<f64>,
    /// Whether a period has ended.
    adjusted: bool,
}

impl PrioritisedShare {
    pub(super) fn new(rule: AlphaRule) -> Self {
        Self { rule, alpha: 1.0, last: Some(1.0), adjusted: false }
    }

    pub(super) fn get(&self) -> f64 {
        self.alpha
    }

    /// Begins with the alpha of an earlier registration, unless a period has ended here.
    pub(super) fn begin_with(&mut self, alpha: Alpha) {
        if !self.adjusted {
            self.alpha = f64::from(alpha.ppm()) / f64::from(Alpha::ONE.ppm());
            self.last = None;
        }
    }

    /// Adjusts alpha at the end of a period in which `compliant` of `functions` met their
    /// objective.
    pub(super) fn adjust(&mut self, compliant: usize, functions: usize) {
        if functions == 0 {
            return;
        }
        self.adjusted = true;
        let ratio = compliant as f64 / functions as f64;
        let Some(last) = self.last else {
            self.last = Some(ratio);
            return;
        };
        let change = match self.rule {
            AlphaRule::Paper => ratio - last,
            AlphaRule::Artifact if last > 0.0 => (ratio - last) / last,
            // A rise from zero exceeds every threshold.
            AlphaRule::Artifact => ratio * f64::INFINITY,
        };
        // Zero times infinity is not a number, and counts as steady.
        let jumped = change.abs() > THRESHOLD;
        let factor = match (jumped, self.rule) {
            (false, AlphaRule::Paper) => 1.0,
            (false, AlphaRule::Artifact) => CREEP,
            (true, _) if change > 0.0 => SCALAR,
            (true, _) => 1.0 / SCALAR,
        };
        self.alpha = (self.alpha * factor).clamp(1.0 / functions as f64, 1.0);
        if jumped || self.rule == AlphaRule::Paper {
            self.last = Some(ratio);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(rule: AlphaRule, functions: usize, compliant: &[usize]) -> Vec<f64> {
        let mut alpha = PrioritisedShare::new(rule);
        let adjust = |&compliant| {
            alpha.adjust(compliant, functions);
            alpha.get()
        };
        compliant.iter().map(adjust).collect()
    }

    /// T20, as in the paper: differences in percentage points from the period before.
    #[test]
    fn paper_alpha_follows_absolute_differences() {
        let alphas = series(AlphaRule::Paper, 100, &[100, 97, 92, 80, 80, 83, 88, 99]);
        assert_eq!(alphas, [1.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.5, 1.0]);
    }

    /// T20, as in the artifact: differences relative to the last adjustment, with slow growth.
    #[test]
    fn artifact_alpha_follows_relative_differences_and_grows_while_steady() {
        let alphas = series(AlphaRule::Artifact, 100, &[97, 90, 88, 80, 0, 0, 1]);
        let steady = 0.5 * CREEP;
        let expected =
            [1.0, 0.5, steady, steady / 2.0, steady / 4.0, steady / 4.0 * CREEP, steady / 2.0 * CREEP];
        for (alpha, expected) in alphas.iter().zip(expected) {
            assert!((alpha - expected).abs() < 1e-12, "{alphas:?}, not {expected}");
        }
    }

    /// T16, T20: the first period behind a committed alpha only records its share, so that a steady
    /// share leaves the alpha unchanged.
    #[test]
    fn a_committed_alpha_stays_while_the_share_is_steady_and_follows_it_otherwise() {
        let committed = Alpha::from_ppm(250_000).unwrap();
        let mut alpha = PrioritisedShare::new(AlphaRule::Paper);
        alpha.begin_with(committed);
        for (compliant, expected) in [(80, 0.25), (81, 0.25), (86, 0.5), (81, 0.25)] {
            alpha.adjust(compliant, 100);
            assert_eq!(alpha.get(), expected, "{compliant}");
        }
        alpha.begin_with(Alpha::ONE);
        assert_eq!(alpha.get(), 0.25, "an alpha that was adjusted here is newer");
    }

    #[test]
    fn alpha_never_falls_below_one_over_the_number_of_functions() {
        let falling: Vec<usize> = (0..9).map(|period| 100 - period * 10).collect();
        for rule in [AlphaRule::Paper, AlphaRule::Artifact] {
            assert_eq!(series(rule, 100, &falling).last(), Some(&0.01), "{rule:?}");
        }
        assert_eq!(series(AlphaRule::Paper, 0, &[0]), [1.0]);
    }
}
