//! How alpha follows the share of functions that comply (T20, algorithm 2 of Torpor).

use crate::dispatch::config::AlphaRule;

/// How much alpha changes at once.
const SCALAR: f64 = 2.0;
/// By how much the share has to change.
const THRESHOLD: f64 = 0.04;
/// How alpha creeps up while the share is steady, in the artifact.
const CREEP: f64 = 1.01;

/// Alpha, between a floor and 1. The paper and the artifact have no floor, so that alpha can become
/// so small that no function with anything due is ever prioritised again; with N functions ours is
/// 1/N. Initially 1, and all functions are taken to comply: none has been scored.
#[derive(Debug)]
pub(super) struct Alpha {
    rule: AlphaRule,
    alpha: f64,
    /// The share of the last period, or, in the artifact, at the last adjustment.
    last: f64,
}

impl Alpha {
    pub(super) fn new(rule: AlphaRule) -> Self {
        Self { rule, alpha: 1.0, last: 1.0 }
    }

    pub(super) fn get(&self) -> f64 {
        self.alpha
    }

    /// A period ended in which so many of `functions` complied.
    pub(super) fn adjust(&mut self, compliant: usize, functions: usize) {
        if functions == 0 {
            return;
        }
        let ratio = compliant as f64 / functions as f64;
        let change = match self.rule {
            AlphaRule::Paper => ratio - self.last,
            AlphaRule::Artifact if self.last > 0.0 => (ratio - self.last) / self.last,
            // From nothing to something is more than any threshold.
            AlphaRule::Artifact => ratio * f64::INFINITY,
        };
        // From nothing to nothing is no number, and steady.
        let jumped = change.abs() > THRESHOLD;
        let factor = match (jumped, self.rule) {
            (false, AlphaRule::Paper) => 1.0,
            (false, AlphaRule::Artifact) => CREEP,
            (true, _) if change > 0.0 => SCALAR,
            (true, _) => 1.0 / SCALAR,
        };
        self.alpha = (self.alpha * factor).clamp(1.0 / functions as f64, 1.0);
        if jumped || self.rule == AlphaRule::Paper {
            self.last = ratio;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(rule: AlphaRule, functions: usize, compliant: &[usize]) -> Vec<f64> {
        let mut alpha = Alpha::new(rule);
        let adjust = |&compliant| {
            alpha.adjust(compliant, functions);
            alpha.get()
        };
        compliant.iter().map(adjust).collect()
    }

    /// T20, as in the paper: differences in points from the period before.
    #[test]
    fn the_papers_alpha_follows_a_scripted_series() {
        let alphas = series(AlphaRule::Paper, 100, &[100, 97, 92, 80, 80, 83, 88, 99]);
        assert_eq!(alphas, [1.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.5, 1.0]);
    }

    /// T20, as in the artifact: relative to the last adjustment, with a creep.
    #[test]
    fn the_artifacts_alpha_follows_a_scripted_series() {
        let alphas = series(AlphaRule::Artifact, 100, &[97, 90, 88, 80, 0, 0, 1]);
        let steady = 0.5 * CREEP;
        let expected =
            [1.0, 0.5, steady, steady / 2.0, steady / 4.0, steady / 4.0 * CREEP, steady / 2.0 * CREEP];
        for (alpha, expected) in alphas.iter().zip(expected) {
            assert!((alpha - expected).abs() < 1e-12, "{alphas:?}, not {expected}");
        }
    }

    #[test]
    fn alpha_has_a_floor_of_one_function() {
        let falling: Vec<usize> = (0..9).map(|period| 100 - period * 10).collect();
        for rule in [AlphaRule::Paper, AlphaRule::Artifact] {
            assert_eq!(series(rule, 100, &falling).last(), Some(&0.01), "{rule:?}");
        }
        assert_eq!(series(AlphaRule::Paper, 0, &[0]), [1.0]);
    }
}
